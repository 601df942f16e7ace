"""Messages with which a member gets the missing parts of a model, and `Unload`, which frees them.

It asks when a plan comes, or before, when the head announces a plan. For parts that the head lacks, the
head asks a peer that has them, with the same messages.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.wire.messages.control import OBJECT_BYTES, FrameRow, FrameType, Message, Plan, Sender

MAX_PIECE_BYTES = 1024 * 1024
# As members ask for them: a hidden state of a running plan waits no longer than one of these takes.
PIECE_BYTES = 512 * 1024
MAX_HELD_BYTES = 32 * 1024
# With this error in a `Prepared`, the head may ask again.
SUPERSEDED = "another plan came first"
# `Held` has one bit for each tensor.
MAX_HELD_TENSORS = 8 * MAX_HELD_BYTES

WholeDigest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Fetch(Message, frozen=True):
    """Ask for ``num_bytes`` from ``start`` on of a part of the model with this manifest (peer to head).

    ``part`` is the digest of a tensor or file in it, or the manifest's own; a head asks only for tensors.
    ``wrong`` names the source of an earlier copy of this part that had another digest. That source shall
    not be used again. The answers are `Piece` messages, in order.
    """

    frame = FrameRow(FrameType.FETCH, 256, Sender.HEAD | Sender.PEER)

    number: Annotated[int, msgspec.Meta(ge=0)]
    manifest: WholeDigest
    part: WholeDigest
    start: Annotated[int, msgspec.Meta(ge=0)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECE_BYTES)]
    wrong: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def names(self) -> list[str]:
        return [self.wrong] if self.wrong else []


class Piece(Message, frozen=True):
    """Answer the `Fetch` with this number. ``error`` says why the bytes are not available.

    ``source`` names the peer that a head has the bytes from. It is empty for the sender's own bytes.
    """

    frame = FrameRow(
        FrameType.PIECE, MAX_PIECE_BYTES + 4 * 1024, Sender.HEAD | Sender.PEER, prose={"error": 500}
    )

    number: int
    # The size of the whole part.
    total_bytes: int
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_PIECE_BYTES)]
    error: str
    source: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def weight(self) -> int:
        return OBJECT_BYTES + len(self.data)

    def __repr__(self) -> str:
        return f"Piece(number={self.number}, {len(self.data)} of {self.total_bytes} bytes)"

    def names(self) -> list[str]:
        return [self.source] if self.source else []


class Holding(Message, frozen=True):
    """Ask a peer which tensors it has of its plan's model, the model with this manifest (head to peer)."""

    frame = FrameRow(FrameType.HOLDING, 128, Sender.HEAD)

    manifest: WholeDigest


class Held(Message, frozen=True):
    """Answer `Holding` with a bit for each tensor of the manifest, by name, the lowest bit of a byte
    first.

    ``error`` says why there are none.
    """

    frame = FrameRow(FrameType.HELD, MAX_HELD_BYTES + 1024, Sender.PEER, prose={"error": 500})

    manifest: WholeDigest
    tensors: Annotated[bytes, msgspec.Meta(max_length=MAX_HELD_BYTES)]
    error: str

    def weight(self) -> int:
        return OBJECT_BYTES + len(self.tensors)

    def __repr__(self) -> str:
        return f"Held({self.manifest[:12]}, {len(self.tensors)} bytes)"


class Prepare(Message, frozen=True):
    """Tell a peer to fetch the weights of its stage of this plan, and load nothing (head to peer).

    It may come while another plan runs. Without a plan, the peer stops what it fetches for a later one.
    """

    frame = FrameRow(FrameType.PREPARE, 1024 * 1024, Sender.HEAD)

    plan: Plan | None = None

    def names(self) -> list[str]:
        return [] if self.plan is None else self.plan.names()

    def weight(self) -> int:
        return OBJECT_BYTES if self.plan is None else self.plan.weight()


class Unload(Message, frozen=True):
    """Tell a peer to free the stage of its plan, weights and K/V (head to peer).

    The head has no plan until its next one, which may be of another model.
    """

    frame = FrameRow(FrameType.UNLOAD, 1024, Sender.HEAD, prose={"why": 200})

    why: str


class Prepared(Message, frozen=True):
    """Answer `Prepare`: the weights are here and correct, or ``error`` says why not."""

    frame = FrameRow(FrameType.PREPARED, 4 * 1024, Sender.PEER, prose={"error": 500})

    plan_id: int
    error: str
