"""Messages between the ranks of one stage: agreement on the plan, and the steps to run together.

Parts of sums are PARTIAL tensors and carry no message.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.config.table import MAX_RANKS, MAX_STEP_TOKENS
from convoy.wire.messages.control import Digest, FrameRow, FrameType, Message, Sender, Step


class Agree(Message, frozen=True):
    """State which plan and rank this collective is for, before its first step (rank to rank of a stage)."""

    frame = FrameRow(
        FrameType.AGREE, 256, Sender.HEAD | Sender.PEER | Sender.LEADER | Sender.FOLLOWER | Sender.RANK
    )

    plan_id: Annotated[int, msgspec.Meta(ge=0)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    plan_digest: Annotated[bytes, msgspec.Meta(max_length=32)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    manifest: Digest

    def names(self) -> list[str]:
        return [self.dtype] if self.dtype else []


class RankStep(Message, frozen=True):
    """Tell the other ranks of the stage to run this step with rank 0. It has no samples; they are rank 0's.

    ``hidden``: a HIDDEN tensor follows, which came from the predecessor. ``output``: the step's output
    rows go through this stage's part of the output at once, as a `RankOutput` would order.
    """

    # The limit is that of a `Step` without sample requests.
    frame = FrameRow(FrameType.RANK_STEP, 16 * 1024 * 1024, Sender.HEAD | Sender.LEADER)

    step: Step
    hidden: bool
    output: bool

    def weight(self) -> int:
        return self.step.weight()


class RankOutput(Message, frozen=True):
    """Tell the other ranks of a stage that owns the output to run their part of it on these rows (from
    rank 0).

    ``hidden``: the rows follow as a HIDDEN tensor. Otherwise they are those of the step with this number.
    """

    frame = FrameRow(FrameType.RANK_OUTPUT, 64, Sender.HEAD | Sender.LEADER)

    number: int
    num_rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP_TOKENS)]
    hidden: bool
