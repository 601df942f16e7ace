"""The frames that each kind of neighbour may send. Any other frame ends its link before it is decoded."""

from __future__ import annotations

from convoy.wire.messages.control import FrameType

FROM_HEAD = frozenset(
    {
        FrameType.HELLO,
        FrameType.PLAN,
        FrameType.ACTIVATE,
        FrameType.STEP,
        FrameType.INQUIRE,
        FrameType.HIDDEN,
        FrameType.READ_BLOCKS,
        FrameType.WRITE_BLOCKS,
        FrameType.BLOCKS,
        FrameType.CHALLENGE,
        FrameType.EVIDENCE,
        FrameType.VOUCH,
        FrameType.PIECE,
        FrameType.PREPARE,
        FrameType.AGREE,
        FrameType.PARTIAL,
        FrameType.RANK_STEP,
        FrameType.RANK_OUTPUT,
        FrameType.FETCH,
        FrameType.HOLDING,
    }
)
FROM_PREDECESSOR = frozenset({FrameType.HIDDEN})
# Another rank of the same stage.
FROM_RANK = frozenset({FrameType.AGREE, FrameType.PARTIAL})
FROM_LEADER = FROM_RANK | {
    FrameType.RANK_STEP,
    FrameType.RANK_OUTPUT,
    FrameType.HIDDEN,
    FrameType.READ_BLOCKS,
    FrameType.WRITE_BLOCKS,
    FrameType.BLOCKS,
}
FROM_FOLLOWER = FROM_RANK | {FrameType.STEP_FAILED, FrameType.BLOCKS, FrameType.BLOCKS_DONE}
# A dialler that is no head. The plan says whether it is the predecessor or rank 0.
FROM_DIALLER = FROM_PREDECESSOR | FROM_LEADER
FROM_PEER = frozenset(
    {
        FrameType.HELLO,
        FrameType.PROGRESS,
        FrameType.READY,
        FrameType.REFUSE,
        FrameType.ACTIVATED,
        FrameType.HIDDEN,
        FrameType.STEP_FAILED,
        FrameType.DRAWN,
        FrameType.REACHED,
        FrameType.AGREE,
        FrameType.PARTIAL,
        FrameType.BLOCKS,
        FrameType.BLOCKS_DONE,
        FrameType.CHALLENGE,
        FrameType.EVIDENCE,
        FrameType.VOUCHED,
        FrameType.FETCH,
        FrameType.PREPARED,
        FrameType.PIECE,
        FrameType.HELD,
    }
)
