"""What the ranks of one stage say to each other: that they mean the same plan, and what to run together.

Parts of sums are PARTIAL tensors and carry no message.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.wire.messages.control import MAX_RANKS, MAX_STEP_TOKENS, Digest, Message, Step


class Agree(Message, frozen=True):
    """Rank to rank of a stage, before its first step: what this collective is for, as the sender sees it."""

    generation: Annotated[int, msgspec.Meta(ge=0)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    plan_digest: Annotated[bytes, msgspec.Meta(max_length=32)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    manifest: Digest


class RankStep(Message, frozen=True):
    """Rank 0 to the other ranks of its stage: run this with me. Without draws; they are rank 0's.

    ``hidden``: a HIDDEN tensor follows, which came from the predecessor. ``output``: its rows for the output
    go through this stage's part of it at once, as for a `RankOutput` that says so.
    """

    step: Step
    hidden: bool
    output: bool


class RankOutput(Message, frozen=True):
    """Rank 0 to the other ranks of a stage that owns the output: run your part of it on these rows.

    ``hidden``: they follow as a HIDDEN tensor; otherwise they are those of the step with this number.
    """

    number: int
    num_rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP_TOKENS)]
    hidden: bool
