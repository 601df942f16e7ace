"""How a member gets the parts of a model that it lacks: it asks its head for pieces, and the head answers.

Either when a plan comes, or before, when the head says which plan is to come. What the head lacks itself it
asks of a peer that has it, in the same words.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.wire.messages.control import Message, Plan

MAX_PIECE_BYTES = 1024 * 1024
MAX_HELD_BYTES = 32 * 1024
SUPERSEDED = "another plan came first"  # the error of a `Prepared` that the head may ask for again
MAX_HELD_TENSORS = 8 * MAX_HELD_BYTES  # a bit for each

WholeDigest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Fetch(Message, frozen=True):
    """Peer to head: send ``num_bytes`` from ``start`` on of a part of the model with this manifest.

    ``part`` is the digest of a tensor or file in it, or the manifest's own; from a head it is a tensor's.
    ``wrong``: whose bytes of it, as the pieces said, came to another digest, and shall not come again.
    Answered by `Piece`, in order.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    manifest: WholeDigest
    part: WholeDigest
    start: Annotated[int, msgspec.Meta(ge=0)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECE_BYTES)]
    wrong: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Piece(Message, frozen=True):
    """Answer to the `Fetch` with this number. ``error``: it cannot be had, and why.

    ``source``: the peer that a head has the bytes from; empty where they are the sender's own.
    """

    number: int
    total_bytes: int  # of the whole part
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_PIECE_BYTES)]
    error: str
    source: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def __repr__(self) -> str:
        return f"Piece(number={self.number}, {len(self.data)} of {self.total_bytes} bytes)"


class Holding(Message, frozen=True):
    """Head to peer: which tensors of the model with this manifest, your plan's, have you?"""

    manifest: WholeDigest


class Held(Message, frozen=True):
    """Answer to `Holding`: a bit for each tensor of the manifest, by name, the lowest of a byte first.

    ``error``: why there are none.
    """

    manifest: WholeDigest
    tensors: Annotated[bytes, msgspec.Meta(max_length=MAX_HELD_BYTES)]
    error: str

    def __repr__(self) -> str:
        return f"Held({self.manifest[:12]}, {len(self.tensors)} bytes)"


class Prepare(Message, frozen=True):
    """Head to peer, also while another plan runs: get what your stage of this one needs, and load nothing."""

    plan: Plan


class Prepared(Message, frozen=True):
    """Answer to `Prepare`: the weights are here and right, or ``error`` says why not."""

    generation: int
    error: str
