"""The cluster as one picture: which member holds what, behind which link, and whether tokens pass."""

from __future__ import annotations

import msgspec


class StageStatus(msgspec.Struct, frozen=True):
    """A member with a stage, and the head's link to it; the head's own stage has no link.

    Where several hold a stage together there is one of these for each, in the order of their ranks.
    """

    member: str
    start: int
    end: int
    embed: bool
    output: bool
    weight_bytes: int
    can_read_prompts: str  # from what: "tokens" or "activations"
    address: str
    round_trip_s: float | None = None
    cipher: str | None = None
    sealed_bytes_sent: int = 0
    sealed_bytes_received: int = 0
    level: str = "none"  # what was proved of the member: none, self_signed or hardware
    link_id: str | None = None  # hex; None once the link is over
    head: bool = False  # the one that answers: it has no link to itself
    device: str = "cpu"  # on what it computes, such as "cuda:0 (NVIDIA H200)"
    kernel: str = ""
    rank: int = 0  # of this stage's world_size, each with its slice of every layer
    world_size: int = 1
    weight_share: float = 1.0  # of the stage's weights, what this rank has
    weights_from: dict[str, int] = {}  # bytes that it got since the head began, by "head", "hub" and peers


class ParallelStatus(msgspec.Struct, frozen=True):
    """How members share the model now: ``mode`` single, pipeline or tensor; ``reason``: why, for people."""

    mode: str
    reason: str


class VerdictStatus(msgspec.Struct, frozen=True):
    """What was proved of one member; ``reasons``: why not more. ``excluded``: below the minimum, no stage."""

    member: str
    level: str
    reasons: list[str]
    excluded: bool = False


class StandbyStatus(msgspec.Struct, frozen=True):
    """A member that waits for the loss of another. ``layers``: what it holds for that, such as "4-7"."""

    name: str
    layers: str | None = None  # None: nothing yet, or it has not the memory


class IdleStatus(msgspec.Struct, frozen=True):
    """A member that is here without layers although it is no standby; ``since_unix_s`` is Unix time."""

    name: str
    since_unix_s: float


class ClusterStatus(msgspec.Struct, frozen=True):
    """What `GET /status` and `convoy status` show."""

    model: str
    ready: bool
    reason: str
    route: str
    kernel: str
    generation: int
    stages: list[StageStatus]
    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    ring_s: float | None
    recoveries: int = 0  # how often other stages took over after a loss
    drafted_tokens: int = 0  # guesses that were run, and those of them that were right
    accepted_tokens: int = 0
    session_tokens: int = 0  # that sessions asked to be run, those that were run again included
    near_ties: int = 0  # tokens after a loss where a text may differ from what it would have been
    other_bits: list[str] = []  # members whose exact kernels give other bits than the head's
    guesses: int = 0  # at once, at most; also 0 under a kernel where they may change a text, unless asked for
    level: str = "none"  # the weakest of all members'
    minimum_level: str = "none"  # what the policy demands of a peer
    verdicts: list[VerdictStatus] = []
    standbys: list[StandbyStatus] = []
    parallel: ParallelStatus = ParallelStatus("", "")
    why_kernel: str = ""  # why not a better kernel, where that showed as the model was loaded
    absent: list[str] = []  # whom the roster lists and who is not here
    idle: list[IdleStatus] = []  # who is here, holds no layers and is no standby
