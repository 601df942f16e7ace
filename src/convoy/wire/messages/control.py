"""The messages between members: one closed set, with one frame type each.

The byte layout is in docs/protocol.md; the codec is `wire.codec`, the header `wire.frame`. Messages are
plain values: the receiver checks that an index fits a pool, or a span a model.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec

from convoy.config import table
from convoy.config.kernels import AUTO
from convoy.config.table import MAX_RANKS, MAX_STEP_TOKENS


class FrameType(enum.IntEnum):
    """Number the frame types. Only handshake frames travel unsealed (inside TLS)."""

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
    SAMPLED = 0x23
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
    UNLOAD = 0x33
    BYE = 0x3F


# The size of one tag in `Row.tag`, `Row.tags` and `BlockGrant.shared`.
PREFIX_TAG_BYTES = 16

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,64}\Z")]
HubCommitName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}@[0-9a-f]{40}"
        r"(:[A-Za-z0-9][A-Za-z0-9._+/-]{0,199})?)?\Z"
    ),
]
# The longest roster file, and so the longest roster in a frame.
MAX_ROSTER_BYTES = 1024 * 1024
# No member has this much memory, so a larger offer is malformed.
MAX_OFFER_BYTES = 16 << 40
# Sequences in one step.
MAX_BATCH = 256
# In all sample requests of a step: MAX_BATCH sequences and 64 guesses, with 1,024 biases each.
MAX_STEP_BIASES = 320 * 1024
# In all grants of a step: 32 shared prompts of 524,288 tokens in blocks of 16.
MAX_STEP_BLOCKS = 1024 * 1024
# The most steps that a stage lets wait, and that a link's inbox holds.
MAX_IN_FLIGHT = table.MAX_IN_FLIGHT
# Steps of which a stage remembers the times.
MAX_MARKED_STEPS = 16
MicrosecondsAgo = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
# What a peer does before it can answer HELLO: it loads PyTorch, and it examines its own kernels.
StartPhase = Literal["import", "examine"]
# One number for each cache group.
Groups = Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]
Entries = msgspec.Meta(max_length=MAX_STEP_TOKENS)
Released = Annotated[list[int], msgspec.Meta(max_length=64 * 1024)]
Biases = Annotated[list[tuple[int, float]], msgspec.Meta(max_length=1024)]
# 1,024 token ids as little-endian uint32.
TokenIds = Annotated[bytes, msgspec.Meta(max_length=4 * 1024)]
# One bit for each token of a vocabulary of at most 524,288, lowest first, in words of 32 bits.
MAX_MASK_BYTES = 64 * 1024
TokenMask = Annotated[bytes, msgspec.Meta(max_length=MAX_MASK_BYTES)]
Alternatives = Annotated[list[tuple[int, float]], msgspec.Meta(max_length=20)]


class Sender(enum.Flag):
    """Name the members that may send a frame, as the receiving end of the link sees them."""

    # A head, to each of its peers.
    HEAD = enum.auto()
    # A peer, to its head.
    PEER = enum.auto()
    # The member of the stage before, in the ring.
    PREDECESSOR = enum.auto()
    # Rank 0 of a stage, to its other ranks.
    LEADER = enum.auto()
    # Another rank of a stage, to its rank 0.
    FOLLOWER = enum.auto()
    # The rank before, in the ring of the ranks of one stage.
    RANK = enum.auto()
    # Either end of any link. `transport.link` handles these frames itself.
    LINK = enum.auto()


class FrameRow(NamedTuple):
    """Hold the facts of one type of sealed frame: its number, its limit and its senders.

    ``max_bytes`` bounds the payload before sealing. ``prose`` has the fields with text for people, and the
    number of characters that are kept of each.
    """

    type: FrameType
    max_bytes: int
    senders: Sender
    prose: Mapping[str, int] = MappingProxyType({})


# What an object and a number take in CPython, with the lists around them.
OBJECT_BYTES = 256
NUMBER_BYTES = 40


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Serve as the base of all messages. A message is encoded as a msgpack array in field order.

    Each class sets ``frame``, its row. Nothing else names its frame type, its limit or its senders.
    """

    frame: ClassVar[FrameRow]

    def names(self) -> list[str]:
        """Return the names in this message, each of which must be printable; see `wire.text`."""
        return []

    def weight(self) -> int:
        """Estimate the bytes of memory that this message holds: many times its bytes on the wire."""
        return 16 * OBJECT_BYTES


class Hello(Message, frozen=True):
    """State what this member can do: the first sealed message of each side."""

    frame = FrameRow(
        FrameType.HELLO,
        4 * 1024,
        Sender.HEAD | Sender.PEER,
        prose={"software": 100, "platform": 200, "device": 200},
    )

    software: str
    # The activation dtypes that it accepts: "float32", "bfloat16".
    dtypes: list[str]
    # The kernels that it can run, best first: "exact-f32", "plain-f32"; or "cuda-bf16".
    kernels: list[str]
    # The memory that it offers for weights and K/V.
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFER_BYTES)]
    num_threads: int
    platform: str
    # A standby holds nothing until another member is lost.
    standby: bool = False
    # The digest of a fixed computation in exact mode (`checks.bits`); empty outside exact mode.
    bits: Digest = ""
    # For people to read; ``kernels`` decides what the member can run.
    device: str = "cpu"
    # Whether it has no compiled code for the forms of files, and unpacks them to float32 in exact mode.
    unpacks: bool = False

    def names(self) -> list[str]:
        return [*self.dtypes, *self.kernels]


class StageAssignment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Assign layers [start, end), and the embedding or output, to a member of a plan.

    ``ranks`` names the members that hold a slice of each of these layers, ``member`` first. It is empty
    if ``member`` holds them whole.
    """

    member: str
    start: int
    end: int
    embed: bool
    output: bool
    ranks: Annotated[list[str], msgspec.Meta(max_length=MAX_RANKS)] = []

    @property
    def world_size(self) -> int:
        """Return how many members hold these layers together."""
        return max(1, len(self.ranks))

    @property
    def holders(self) -> list[str]:
        """Return the members that hold these layers, in the order of their ranks."""
        return list(self.ranks) or [self.member]


class Plan(Message, frozen=True):
    """Tell a peer to load its stage of this plan (head to peer). Nothing runs before `Activate`."""

    frame = FrameRow(FrameType.PLAN, 1024 * 1024, Sender.HEAD)

    plan_id: int
    # The head's name for the model; for a bundled model, its name.
    model: str
    # Hex SHA-256 over config and tensor headers.
    model_digest: str
    # In route order, the head's own entries included.
    stages: list[StageAssignment]
    # The kernel that all stages run, or "mixed".
    kernel: str
    activation_dtype: str
    # Tokens per K/V block.
    block_size: int
    # Tokens.
    max_context: int
    # The digest of `model.checkpoints.manifest.Manifest`, which covers all weights and files.
    manifest: Digest = ""
    # One kernel per stage; empty if all run ``kernel``.
    kernels: Annotated[list[str], msgspec.Meta(max_length=256)] = []
    # org/name@commit on a hub that has these weights, or org/name@commit:FILE of a GGUF model; empty if only
    # the head has them.
    hub: HubCommitName = ""
    # True for a private hub. A member without a configured hub then asks no hub at all: the public one would
    # learn the model's name.
    own_hub: bool = False
    # The dtype of K/V on every stage, a word of `config.kernels.KV_FORMS`; "auto": that of each kernel.
    kv_dtype: Annotated[str, msgspec.Meta(max_length=16)] = AUTO

    def kernel_of(self, position: int) -> str:
        """Return the kernel that the stage at ``position`` runs."""
        return self.kernels[position] if self.kernels else self.kernel

    def names(self) -> list[str]:
        stages = [name for stage in self.stages for name in (stage.member, *stage.ranks)]
        own = [self.model, self.model_digest, self.kernel, self.activation_dtype, self.kv_dtype]
        return [*own, *self.kernels, *stages]

    def weight(self) -> int:
        return (1 + len(self.stages) + sum(len(stage.ranks) for stage in self.stages)) * OBJECT_BYTES


class Progress(Message, frozen=True):
    """Report how far a peer is with its start, with fetching or checking weights, or with loading (peer to
    head).
    """

    frame = FrameRow(FrameType.PROGRESS, 256, Sender.PEER)

    plan_id: int
    loaded_bytes: int
    total_bytes: int
    # The bytes are those of this phase; empty while loading. A phase of the start comes before HELLO, and its
    # ``loaded_bytes`` are the seconds that it has lasted.
    stage: Literal["", "check", "fetch", "hub", "import", "examine"] = ""


class Ready(Message, frozen=True):
    """Report that the stage is loaded, and how much room is left for K/V (peer to head)."""

    frame = FrameRow(FrameType.READY, 256, Sender.PEER)

    plan_id: int
    weight_bytes: int
    room_bytes: int
    # The bytes of one block, by cache group.
    block_bytes: Groups


class Refuse(Message, frozen=True):
    """Refuse a plan and say why (peer to head). That plan ends at this peer.

    ``kernel`` names the kernel that does not pass the peer's check for the plan's model, if that is the
    reason. ``memory_bytes`` is what the peer can offer now, if it has too little memory for the plan.
    """

    frame = FrameRow(FrameType.REFUSE, 16 * 1024, Sender.PEER, prose={"reason": 500, "hint": 500})

    plan_id: int
    reason: str
    hint: str
    kernel: Annotated[str, msgspec.Meta(max_length=64)] = ""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFER_BYTES)] | None = None


class Activate(Message, frozen=True):
    """Start the plan with this digest, with pools of this many blocks (head to peer)."""

    frame = FrameRow(FrameType.ACTIVATE, 1024, Sender.HEAD)

    plan_id: int
    plan_digest: bytes
    num_blocks: Groups


class Activated(Message, frozen=True):
    """Report that the pools are made and the successor is linked (peer to head)."""

    frame = FrameRow(FrameType.ACTIVATED, 256, Sender.PEER)

    plan_id: int


# In place of a token's id: the token that the step before samples for the same sequence. It crosses no wire.
FED = 0xFFFF_FFFF
# In place of the tags behind a token that the head does not know yet. The sequence's next row has them.
OPEN_TAG = bytes(PREFIX_TAG_BYTES)


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describe a run of tokens of one sequence: a prefill chunk, a decode, a check of drafts or a replay
    alike.
    """

    # Chosen by the head, never used twice within a plan.
    sequence: int
    # The position of the first token.
    start: int
    num_tokens: int
    # How many trailing positions go on to the output (0 for an inner chunk).
    num_outputs: int
    # The tag of the prefix before ``start``; empty if the row is not tagged.
    tag: bytes = b""
    # 16 bytes each: at the block ends in (start, end], after the last max(1, num_outputs)
    tags: bytes = b""


class BlockGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Append blocks to a sequence's table of one cache group, or replace some of them.

    The first blocks of a new table may be full already. Then ``shared`` has the tags of their ends, 16
    bytes each.

    ``first`` is the number of the run of positions that ``blocks`` begins with, in a table that is a ring or
    holds a state. A new table then begins there, with the ``shared`` blocks before its first row. Without
    ``shared``, the blocks replace those of the runs that left the ring, or hold a copy of the state. With -1
    the blocks are appended.
    """

    sequence: int
    group: int
    blocks: Annotated[list[int], msgspec.Meta(max_length=MAX_STEP_BLOCKS)]
    shared: bytes
    first: Annotated[int, msgspec.Meta(ge=-1, le=MAX_STEP_BLOCKS)]

    @classmethod
    def append(cls, sequence: int, group: int, blocks: list[int], shared: bytes = b"") -> BlockGrant:
        """Return the grant that appends ``blocks`` to a table."""
        return cls(sequence, group, blocks, shared, -1)


class SampleRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tell a peer that owns the output to sample a token from the logits of one position, or to score one."""

    # The position of the token to be sampled.
    position: int
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
    # How many alternatives to report; -1 for no log-probability at all.
    logprobs: int
    # The token to score; -1 to sample one.
    score: int
    wants_logits: bool
    # Little-endian uint32 per token; empty where no penalty looks back.
    prompt: bytes
    generated: bytes
    # Only these may be sampled; empty allows all.
    allowed: TokenIds
    # None of these may be sampled.
    banned: TokenIds
    # Only tokens with a 1 may be sampled; empty allows all.
    mask: TokenMask = b""
    # Sample nothing, and return the state behind the final norm.
    wants_state: bool = False

    def weight(self) -> int:
        """Estimate the bytes of memory that this request holds."""
        num_bytes = len(self.prompt) + len(self.generated) + len(self.allowed) + len(self.banned)
        return (1 + len(self.logit_bias)) * OBJECT_BYTES + num_bytes + len(self.mask)

    # Tokens must not reach logs or error texts, so the text form leaves them out.
    def __repr__(self) -> str:
        return f"SampleRequest(position={self.position}, {len(self.logit_bias)} biases)"


class SampleReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Return the result of a `SampleRequest`. If ``error`` is not empty, no other field counts."""

    token_id: int
    logprob: float
    top: Alternatives
    # Little-endian float32 per token of the vocabulary; empty unless asked for.
    logits: bytes
    error: str
    # The rank of a scored token, from 1; otherwise 0.
    rank: int
    # Little-endian float32 per value of the final state; empty unless asked for.
    state: bytes = b""

    # Tokens must not reach logs or error texts, so the text form leaves them out.
    def __repr__(self) -> str:
        return f"SampleReply({len(self.top)} alternatives, {len(self.logits)} bytes of logits)"


class Step(Message, frozen=True):
    """Tell every stage to release, then grant, then run the rows in order (head to stages).

    A step without rows probes the ring. ``samples`` has one entry per output of the rows for a peer that
    owns the output, and is empty for other peers. All grants together have at most `MAX_STEP_BLOCKS`
    blocks, and all sample requests `MAX_STEP_BIASES` biases.
    """

    # A step is largest through the tokens that its sample requests look back on. A head has by default 32
    # sequences and 64 guesses in a step, each with 131,072 tokens of 4 bytes: 48 MiB. Beside that,
    # `MAX_STEP_BIASES` of 15 bytes are 4.7 MiB, 320 sample requests with 1,024 restricted tokens are 1.3 MiB,
    # 96 masks of 262,144 tokens are 3 MiB, and 32 shared prompts of that length in blocks of 16 (5 bytes and
    # a tag of 16) are 5.3 MiB.
    frame = FrameRow(FrameType.STEP, 64 * 1024 * 1024, Sender.HEAD)

    number: int
    # The sequences that end, with their block tables.
    released: Released
    grants: Annotated[list[BlockGrant], Entries]
    rows: Annotated[list[Row], Entries]
    # Little-endian uint32 per token of all rows, for the owner of the embedding; otherwise empty.
    tokens: bytes
    samples: Annotated[list[SampleRequest], Entries] = []

    def weight(self) -> int:
        num_objects = 1 + len(self.rows) + len(self.grants)
        num_numbers = len(self.released) + sum(len(grant.blocks) for grant in self.grants)
        num_bytes = sum(len(row.tags) for row in self.rows) + sum(len(one.shared) for one in self.grants)
        num_bytes += len(self.tokens) + sum(sample.weight() for sample in self.samples)
        return num_objects * OBJECT_BYTES + num_numbers * NUMBER_BYTES + num_bytes

    # Tokens must not reach logs or error texts, so the text form leaves them out.
    def __repr__(self) -> str:
        return (
            f"Step(number={self.number}, {len(self.released)} released, {len(self.grants)} grants, "
            f"{len(self.rows)} rows, {len(self.tokens)} bytes of tokens, {len(self.samples)} samples)"
        )


class SampleReplies(Message, frozen=True):
    """Report that a step passed every stage, with a reply for each of its outputs (owner of the output to
    head).
    """

    # The largest has the logits of 32 sessions over a vocabulary of 262,144, which are 32 MiB, and 20
    # alternatives of 15 bytes for each of `MAX_STEP_TOKENS` answers, which are 4.7 MiB.
    frame = FrameRow(FrameType.SAMPLED, 40 * 1024 * 1024, Sender.PEER)

    number: int
    answers: Annotated[list[SampleReply], Entries]

    def weight(self) -> int:
        num_objects = 1 + sum(1 + len(answer.top) for answer in self.answers)
        num_bytes = sum(len(answer.logits) + len(answer.state) for answer in self.answers)
        return num_objects * OBJECT_BYTES + num_bytes

    # Tokens must not reach logs or error texts, so the text form leaves them out.
    def __repr__(self) -> str:
        return f"SampleReplies(number={self.number}, {len(self.answers)} answers)"


Blocks = Annotated[list[int], msgspec.Meta(min_length=1, max_length=1024)]


class ReadBlocks(Message, frozen=True):
    """Ask for the K/V of these blocks in layers [start, end), while no step is in flight (head to peer).

    The answer is a BLOCKS tensor, or `BlocksDone` with the error.
    """

    frame = FrameRow(FrameType.READ_BLOCKS, 8 * 1024, Sender.HEAD | Sender.LEADER)

    # Numbers this exchange; its frames' headers have it as the step.
    number: int
    model_digest: str
    start: int
    end: int
    blocks: Blocks

    def weight(self) -> int:
        return 16 * OBJECT_BYTES + len(self.blocks) * NUMBER_BYTES


class WriteBlocks(Message, frozen=True):
    """Announce a BLOCKS tensor with the K/V of these blocks in layers from its boundary on (head to
    peer).

    It comes while no step is in flight. No sequence may hold the blocks. Once the peer's last layer is
    written they are full, with these tags at their ends. The answer is `BlocksDone`.
    """

    frame = FrameRow(FrameType.WRITE_BLOCKS, 32 * 1024, Sender.HEAD | Sender.LEADER)

    number: int
    model_digest: str
    blocks: Blocks
    tags: Annotated[bytes, msgspec.Meta(max_length=1024 * 16)]

    def weight(self) -> int:
        return 16 * OBJECT_BYTES + len(self.blocks) * NUMBER_BYTES


class BlocksDone(Message, frozen=True):
    """Report that blocks were written, or the error (peer to head)."""

    frame = FrameRow(FrameType.BLOCKS_DONE, 4 * 1024, Sender.PEER | Sender.FOLLOWER, prose={"error": 500})

    number: int
    error: str


class StepFailed(Message, frozen=True):
    """Report that this step could not be run (peer to head).

    ``about`` names the neighbour at fault: its link ended, or its hidden state fits no step. It is empty
    if the fault is the sender's own.
    """

    frame = FrameRow(FrameType.STEP_FAILED, 16 * 1024, Sender.PEER | Sender.FOLLOWER, prose={"reason": 500})

    number: int
    reason: str
    about: str = ""

    def names(self) -> list[str]:
        return [self.about] if self.about else []


class Inquire(Message, frozen=True):
    """Ask a peer how far it is, when a step is late or the status is asked for (head to peer).

    It answers at once, even while a step runs there.
    """

    frame = FrameRow(FrameType.INQUIRE, 64, Sender.HEAD)

    plan_id: int


class StageMarks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Say when one step arrived, began, was computed and was sent on at a stage.

    Each is in microseconds before the answer that carries it, so that no two clocks have to agree.
    """

    number: int
    arrived_us: MicrosecondsAgo
    began_us: MicrosecondsAgo
    computed_us: MicrosecondsAgo
    sent_us: MicrosecondsAgo


class Reached(Message, frozen=True):
    """Answer `Inquire` with the last step of this plan that was run here and sent on, -1 for none.

    ``marks`` are those of the last steps with rows, the oldest first.
    """

    frame = FrameRow(FrameType.REACHED, 1024, Sender.PEER)

    plan_id: int
    step: int
    marks: Annotated[list[StageMarks], msgspec.Meta(max_length=MAX_MARKED_STEPS)] = []

    def weight(self) -> int:
        return 16 * OBJECT_BYTES + len(self.marks) * 5 * NUMBER_BYTES
