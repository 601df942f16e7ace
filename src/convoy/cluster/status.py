"""The cluster as one picture: the layers and the link of each member, and whether tokens pass."""

from __future__ import annotations

import msgspec


class StageStatus(msgspec.Struct, frozen=True):
    """Describe a member with a stage, and the head's link to it. The head's own stage has no link.

    If several ranks hold a stage there is one of these for each, in the order of their ranks.
    """

    member: str
    start: int
    end: int
    embed: bool
    output: bool
    weight_bytes: int
    # The source from which it could read prompts: "tokens" or "activations".
    can_read_prompts: str
    address: str
    round_trip_s: float | None = None
    cipher: str | None = None
    sealed_bytes_sent: int = 0
    sealed_bytes_received: int = 0
    # The proved level of the member: none, self_signed or hardware.
    level: str = "none"
    # Hex; None once the link is over.
    link_id: str | None = None
    # The member that answers requests. It has no link to itself.
    head: bool = False
    # The device that computes, such as "cuda:0 (NVIDIA H200)".
    device: str = "cpu"
    kernel: str = ""
    # The rank among the stage's world_size. Each rank has its slice of every layer.
    rank: int = 0
    world_size: int = 1
    # This rank's share of the stage's weights.
    weight_share: float = 1.0
    # Bytes that it got since the head began, by "head", "hub" and peers.
    weights_from: dict[str, int] = {}
    # Whether it takes more than in the form of the file, because it has no compiled code.
    unpacks: bool = False
    # The SHA-256 of the identity key in the roster, in hex; empty for a removed member.
    fingerprint: str = ""
    # What the plan's K/V blocks take here, and the memory that the member offers for weights and K/V.
    kv_bytes: int = 0
    memory_bytes: int = 0
    platform: str = ""
    # When the link's present keys were agreed, in Unix time.
    keyed_unix_s: float | None = None


class StepPart(msgspec.Struct, frozen=True):
    """Hold the seconds that one step spent at a member, and on its way there from the member before it.

    ``wire_s`` has the opening of the frame and the network. ``wait_s`` is spent behind other steps. The head
    has two parts if it begins and ends the step.
    """

    member: str
    wire_s: float
    wait_s: float
    compute_s: float
    seal_s: float


class StepPath(msgspec.Struct, frozen=True):
    """Hold where one step spent its time, in the order of its way. The head measured ``step_s``."""

    number: int
    step_s: float
    parts: list[StepPart]


class PlanForecast(msgspec.Struct, frozen=True):
    """Describe a plan that the planner would choose. If none fits, ``refused`` has the reason alone."""

    # By member, or by members that share layers as ranks, in the order of the layers: "layers 0-11".
    layers: dict[str, str] = {}
    # Of one request alone, and what limits it. None if no speed was measured.
    tokens_per_s: float | None = None
    limit: str = ""
    # The longest sequence that fits beside the weights.
    max_kv_tokens: int = 0
    refused: str = ""


class LossForecast(msgspec.Struct, frozen=True):
    """Describe the plan after the loss of ``member``."""

    member: str
    plan: PlanForecast


class Forecast(msgspec.Struct, frozen=True):
    """Hold what the planner predicts for the plan that runs, and for other members."""

    # Tokens that a request has when its rate is predicted.
    context: int
    running: PlanForecast
    # Of every member with a stage but the head, in the order of the layers.
    losses: list[LossForecast]
    # With one more machine as the head, that offers so many bytes.
    added_bytes: int
    added: PlanForecast
    # What the rates take for granted, in words.
    assumed: list[str] = []


class ParallelStatus(msgspec.Struct, frozen=True):
    """Describe how members share the model now.

    ``mode`` is single, pipeline or tensor; ``reason`` says why, for people.
    """

    mode: str
    reason: str


class VerdictStatus(msgspec.Struct, frozen=True):
    """Describe the verdict on one member. ``reasons`` say why its level is no higher.

    ``excluded`` marks a member below the minimum, which has no stage.
    """

    member: str
    level: str
    reasons: list[str]
    excluded: bool = False


class StandbyStatus(msgspec.Struct, frozen=True):
    """Describe a member that waits for the loss of another. ``layers`` are those it loaded, such as "4-7"."""

    name: str
    # None: none yet, or it lacks the memory.
    layers: str | None = None


class IdleStatus(msgspec.Struct, frozen=True):
    """Describe a connected member without layers that is no standby. ``since_unix_s`` is Unix time."""

    name: str
    since_unix_s: float


class AbsentStatus(msgspec.Struct, frozen=True):
    """Describe a member of the roster that is not connected.

    ``since_unix_s`` is the Unix time at which its last link ended, or None if it has had none since the
    head's start.
    """

    name: str
    since_unix_s: float | None = None


class ModelStatus(msgspec.Struct, frozen=True):
    """Describe a model that the head may run. ``state`` is loaded, loading or unloaded."""

    name: str
    state: str
    # While it is loaded: done and all bytes by member, or by "member: what it does".
    progress: dict[str, tuple[int, int]] = {}


class PullStatus(msgspec.Struct, frozen=True):
    """Describe the last pull of a model. ``state`` is pulling, stopping, pulled, stopped or failed."""

    name: str
    state: str
    # Done and all bytes of what each member does, by member. All bytes are 0 until a member has begun.
    progress: dict[str, tuple[int, int]] = {}
    error: str = ""
    hint: str = ""
    # The name of a class of `convoy.errors`, or empty.
    error_type: str = ""


class ClusterStatus(msgspec.Struct, frozen=True):
    """Hold the answer of `GET /status` and `convoy status`."""

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
    # How often other stages took over after a loss.
    recoveries: int = 0
    # Guesses that were run, and below those of them that were right.
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # Tokens that sessions asked to be run, repeated ones included.
    session_tokens: int = 0
    # Tokens after a loss at which a text may differ from the undisturbed one.
    near_ties: int = 0
    # Members with exact kernels that give other bits than the head's.
    other_bits: list[str] = []
    # The most guesses at once. Also 0 under a kernel where guesses may change a text, unless asked for.
    guesses: int = 0
    # The weakest level of all members.
    level: str = "none"
    # The level that the policy demands of a peer.
    minimum_level: str = "none"
    verdicts: list[VerdictStatus] = []
    standbys: list[StandbyStatus] = []
    parallel: ParallelStatus = ParallelStatus("", "")
    # Why a better kernel is not used, if loading the model showed that.
    why_kernel: str = ""
    # The dtype of K/V on every stage; "auto" if kernels differ, and with them their dtypes.
    kv_dtype: str = ""
    # Members of the roster that are not connected. The head keeps dialling them.
    absent: list[AbsentStatus] = []
    # Members that are connected, hold no layers and are no standbys.
    idle: list[IdleStatus] = []
    # The roster that counts now, and the Unix time at which it expires.
    cluster: str = ""
    roster_epoch: int = 0
    roster_expires_unix_s: float = 0.0
    # Tokens looked up in the prefix cache at first admissions, and those that it had.
    queried_tokens: int = 0
    hit_tokens: int = 0
    max_context: int = 0
    # The version of Convoy of each connected member.
    versions: dict[str, str] = {}
    # Where the last step with rows spent its time. None before the first, and if one member or ranks run it.
    step_path: StepPath | None = None
    # The middle time of the last steps with one token of one request. None before the first.
    lone_step_s: float | None = None
    # None until it is computed, while a stage is missing, and where nothing asks for it.
    forecast: Forecast | None = None
    # Every model that requests may name. One at most is loaded.
    models: list[ModelStatus] = []
    # None before the first pull since the head's start.
    pull: PullStatus | None = None


def without_measurements(status: ClusterStatus) -> ClusterStatus:
    """Return ``status`` without times and bytes of links and steps, which change while nothing happens."""
    stages = [
        msgspec.structs.replace(stage, round_trip_s=None, sealed_bytes_sent=0, sealed_bytes_received=0)
        for stage in status.stages
    ]
    return msgspec.structs.replace(status, stages=stages, step_path=None, ring_s=None)
