"""Which frames each kind of neighbour may send; anything else ends its link before it is looked at."""

from __future__ import annotations

from convoy.wire.messages import FrameType

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
        FrameType.PIECE,
        FrameType.PREPARE,
    }
)
FROM_PREDECESSOR = frozenset({FrameType.HIDDEN})
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
        FrameType.BLOCKS,
        FrameType.BLOCKS_DONE,
        FrameType.CHALLENGE,
        FrameType.EVIDENCE,
        FrameType.FETCH,
        FrameType.PREPARED,
    }
)
