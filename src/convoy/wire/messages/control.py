"""What members say to each other: one closed set of messages, one frame type each.

The byte layout is in docs/protocol.md; the codec is `wire.codec`, the header `wire.frame`. Messages are plain
values: that an index fits a pool, or a span a model, is checked by whoever receives one.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec


class FrameType(enum.IntEnum):
    """The type byte of a frame. Handshake frames alone travel unsealed (inside TLS)."""

    HANDSHAKE_1 = 0x01
    HANDSHAKE_2 = 0x02
    HANDSHAKE_3 = 0x03
    OPENING = 0x04
    HANDSHAKE_END = 0x0F
    HELLO = 0x10
    PLAN = 0x11
    PROGRESS = 0x12
    READY = 0x13
    REFUSE = 0x14
    ACTIVATE = 0x15
    ACTIVATED = 0x16
    HOLDING = 0x17
    ROSTER = 0x18
    CHALLENGE = 0x19
    EVIDENCE = 0x1A
    FETCH = 0x1B
    PIECE = 0x1C
    PREPARE = 0x1D
    PREPARED = 0x1E
    HELD = 0x1F
    STEP = 0x20
    HIDDEN = 0x21
    STEP_FAILED = 0x22
    DRAWN = 0x23
    READ_BLOCKS = 0x24
    WRITE_BLOCKS = 0x25
    BLOCKS = 0x26
    BLOCKS_DONE = 0x27
    INQUIRE = 0x28
    REACHED = 0x29
    PARTIAL = 0x2A
    AGREE = 0x2B
    RANK_STEP = 0x2C
    RANK_OUTPUT = 0x2D
    VOUCH = 0x2E
    VOUCHED = 0x2F
    PING = 0x30
    PONG = 0x31
    SWITCH = 0x32
    BYE = 0x3F


# they carry no message
TENSOR_TYPES = frozenset({FrameType.HIDDEN, FrameType.BLOCKS, FrameType.PARTIAL})
MAX_RANKS = 16  # of a stage
PREFIX_TAG_BYTES = 16  # each of `Row.tag`, `Row.tags` and `BlockGrant.shared`

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,64}\Z")]
HubCommitName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}@[0-9a-f]{40})?\Z"
    ),
]
Register = Annotated[int, msgspec.Meta(ge=0, le=23)]
MAX_OFFER_BYTES = 16 << 40  # a member has less memory: a larger offer is malformed
Part = Annotated[bytes, msgspec.Meta(max_length=4096)]
# An empty entry has a few bytes on the wire, and a hundred or two in memory; so lists are bounded by what a
# step can need, not by what a frame can hold. Each row, draw and answer of a step has a token of its own.
MAX_STEP_TOKENS = 16 * 1024
MAX_BATCH = 256  # sequences
MAX_STEP_BIASES = 320 * 1024  # as many as MAX_BATCH sequences and 64 guesses may have, in all draws of a step
MAX_STEP_BLOCKS = 1024 * 1024  # in all grants of a step: 32 shared prompts of 524,288 tokens in blocks of 16
Groups = Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]  # a number for each cache group
Entries = msgspec.Meta(max_length=MAX_STEP_TOKENS)
Released = Annotated[list[int], msgspec.Meta(max_length=64 * 1024)]
Biases = Annotated[list[tuple[int, float]], msgspec.Meta(max_length=1024)]
TokenIds = Annotated[bytes, msgspec.Meta(max_length=4 * 1024)]  # 1,024 ids
Alternatives = Annotated[list[tuple[int, float]], msgspec.Meta(max_length=20)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: encoded as a msgpack array in field order."""


class Hello(Message, frozen=True):
    """First sealed message of each side: what this member can do."""

    software: str
    dtypes: list[str]  # activation dtypes it accepts: "float32", "bfloat16"
    kernels: list[str]  # kernels it can run, best first: "exact-f32", "plain-f32"; or "cuda-bf16"
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFER_BYTES)]  # it offers for weights and K/V
    num_threads: int
    platform: str
    standby: bool = False  # holds nothing until another member is lost
    bits: Digest = ""  # of a fixed computation in exact mode (`checks.bits`); empty: not in exact mode
    device: str = "cpu"  # for people; the kernels say what it can run


class Challenge(Message, frozen=True):
    """Verifier to attester, either side of a head's link: prove what you are, now and on this link."""

    nonce: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # random, never used twice
    pcrs: Annotated[list[Register], msgspec.Meta(max_length=24)]  # to quote: ascending, SHA-256 bank


class Evidence(Message, frozen=True):
    """Answer to `Challenge`. ``claims`` encodes `Claims`; ``kind`` names the hardware, or is
    empty.
    """

    claims: Annotated[bytes, msgspec.Meta(max_length=32 * 1024)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]  # by the identity key, over all
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    parts: Annotated[list[Part], msgspec.Meta(max_length=32)]  # what hardware of that kind says, in its order


class StageAssignment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Layers [start, end) and what else a member owns in a plan.

    ``ranks``: who holds a slice of each of these layers, ``member`` first; empty: that one, whole.
    """

    member: str
    start: int
    end: int
    embed: bool
    output: bool
    ranks: Annotated[list[str], msgspec.Meta(max_length=MAX_RANKS)] = []

    @property
    def world_size(self) -> int:
        """How many members hold these layers together."""
        return max(1, len(self.ranks))

    @property
    def holders(self) -> list[str]:
        """Who they are, in the order of their ranks."""
        return list(self.ranks) or [self.member]


class Plan(Message, frozen=True):
    """Head to peer: load your stage of this. Nothing runs before `Activate`."""

    generation: int
    model: str  # the head's name for it, also a bundled model's name
    model_digest: str  # hex SHA-256 over config and tensor headers
    stages: list[StageAssignment]  # in route order; the head's own entries included
    kernel: str  # that all stages run, or "mixed"
    activation_dtype: str
    block_size: int  # tokens per K/V block
    max_context: int  # tokens
    manifest: Digest = (
        ""  # digest of `model.checkpoints.manifest.Manifest`, which covers all weights and files
    )
    kernels: Annotated[list[str], msgspec.Meta(max_length=256)] = []  # by stage; empty: all run ``kernel``
    hub: HubCommitName = ""  # org/name@commit on a hub that has these weights; empty: the head alone has them
    own_hub: bool = False  # not the public one: who was told of none asks none, which would learn the name

    def kernel_of(self, position: int) -> str:
        """What the stage at ``position`` runs."""
        return self.kernels[position] if self.kernels else self.kernel


class Progress(Message, frozen=True):
    """Peer to head while it loads, or before that gets or checks what it is to load."""

    generation: int
    loaded_bytes: int
    total_bytes: int
    stage: Literal["", "check", "fetch", "hub"] = ""  # what is counted; empty: what is loaded


class Ready(Message, frozen=True):
    """Peer to head: loaded, with so much room left for K/V."""

    generation: int
    weight_bytes: int
    room_bytes: int
    block_bytes: Groups  # what a block takes of it, by cache group


class Refuse(Message, frozen=True):
    """Peer to head: no, and why. Ends that plan at this peer.

    ``kernel``: the one that does not hold there for the plan's model, where that is why.
    """

    generation: int
    reason: str
    hint: str
    kernel: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Activate(Message, frozen=True):
    """Head to peer: the plan with this digest runs from now on, with pools of this many blocks."""

    generation: int
    plan_digest: bytes
    num_blocks: Groups


class Activated(Message, frozen=True):
    """Peer to head: pools made, successor linked."""

    generation: int


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run of tokens of one sequence: a prefill chunk, a decode, a check of drafts or a replay alike."""

    sequence: int  # chosen by the head, never used twice within a generation
    start: int  # position of the first token
    num_tokens: int
    num_outputs: int  # how many trailing positions go on to the output (0 for an inner chunk)
    tag: bytes = b""  # of the prefix that it starts behind; empty: not tagged
    tags: bytes = b""  # 16 bytes each: at the block ends in (start, end], after the last max(1, num_outputs)


class BlockGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks appended to a sequence's table of one cache group.

    The first of a new table may be full already: then ``shared`` has the tags of their ends, 16 bytes each.
    """

    sequence: int
    group: int
    blocks: Annotated[list[int], msgspec.Meta(max_length=MAX_STEP_BLOCKS)]
    shared: bytes = b""


class SampleRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a peer that owns the output does with the logits of one position: draw a token, or score one."""

    position: int  # of the token to be drawn
    choice: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Biases
    logprobs: int  # alternatives to report; -1: no log-probability at all
    score: int  # the token to score; -1: draw one
    wants_logits: bool
    prompt: bytes  # little-endian uint32 per token; empty where no penalty looks back
    generated: bytes
    allowed: TokenIds  # little-endian uint32 per token: only these are drawn; empty: all may be
    banned: TokenIds  # the same: none of these is drawn

    def __repr__(self) -> str:  # no token, whoever formats this
        return f"DrawRequest(position={self.position}, {len(self.logit_bias)} biases)"


class SampleReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What came of a `SampleRequest`; where ``error`` says something, nothing else counts."""

    token_id: int
    logprob: float
    top: Alternatives
    logits: bytes  # little-endian float32 per token of the vocabulary; empty unless asked for
    error: str
    rank: int  # of a token that was scored, from 1; otherwise 0

    def __repr__(self) -> str:  # no token, whoever formats this
        return f"DrawAnswer({len(self.top)} alternatives, {len(self.logits)} bytes of logits)"


class Step(Message, frozen=True):
    """Head to every stage: release, then grant, then run the rows in order. No rows: a probe of the ring.

    ``draws`` has one entry per output of the rows, for a peer that owns the output; otherwise it is empty.
    All grants together have at most `MAX_STEP_BLOCKS`, and all draws `MAX_STEP_BIASES`.
    """

    number: int
    released: Released  # sequences whose tables end
    grants: Annotated[list[BlockGrant], Entries]
    rows: Annotated[list[Row], Entries]
    # little-endian uint32 per token of all rows for the owner of the embedding, otherwise empty
    tokens: bytes
    draws: Annotated[list[SampleRequest], Entries] = []

    def __repr__(self) -> str:  # no token, whoever formats this
        return (
            f"Step(number={self.number}, {len(self.released)} released, {len(self.grants)} grants, "
            f"{len(self.rows)} rows, {len(self.tokens)} bytes of tokens, {len(self.draws)} draws)"
        )


class SampleReplies(Message, frozen=True):
    """Owner of the output to head: this step passed every stage, with this for each of its outputs."""

    number: int
    answers: Annotated[list[SampleReply], Entries]

    def __repr__(self) -> str:  # no token, whoever formats this
        return f"Drawn(number={self.number}, {len(self.answers)} answers)"


Blocks = Annotated[list[int], msgspec.Meta(min_length=1, max_length=1024)]


class ReadBlocks(Message, frozen=True):
    """Head to peer, while no step is in flight: send the K/V of these blocks in layers [start, end).

    Answered by a BLOCKS tensor, or by `BlocksDone` with what is wrong.
    """

    number: int  # of this exchange, also the step in its frames' headers
    model_digest: str
    start: int
    end: int
    blocks: Blocks


class WriteBlocks(Message, frozen=True):
    """Head to peer, as `ReadBlocks`: a BLOCKS tensor follows, with their K/V in layers from its boundary on.

    Nobody may have them. With your last layer they are full, with these tags at their ends. Answered by
    `BlocksDone`.
    """

    number: int
    model_digest: str
    blocks: Blocks
    tags: Annotated[bytes, msgspec.Meta(max_length=1024 * 16)]


class BlocksDone(Message, frozen=True):
    """Peer to head: done, or what is wrong."""

    number: int
    error: str


class StepFailed(Message, frozen=True):
    """Peer to head: this step could not be run.

    ``about``: the neighbour whose link ended, or whose hidden state fits no step; empty: the sender itself.
    """

    number: int
    reason: str
    about: str = ""


class Inquire(Message, frozen=True):
    """Head to peer, when a step is late: how far are you? Answered at once, also while a step runs there."""

    generation: int


class Reached(Message, frozen=True):
    """Answer to `Inquire`: the last step of this generation that was run here and sent on, -1 for none."""

    generation: int
    step: int


class RosterUpdate(Message, frozen=True):
    """The sender holds this newer roster: the operator's file, byte for byte. Verified before it is read."""

    signed: bytes


class Ping(Message, frozen=True):
    """Answered at once by `Pong` with the same token."""

    token: int


class Pong(Message, frozen=True):
    """Answer to `Ping`."""

    token: int


class Switch(Message, frozen=True):
    """The last frame on a connection: all later ones of this direction take the connection of ``link_id``.

    Also the first frame of a listener on new connections: it keeps them for the link that they are to carry.
    """

    link_id: bytes


class Bye(Message, frozen=True):
    """The sender is about to end the link on purpose."""

    reason: str
