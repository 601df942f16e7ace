"""A stage begins a sequence behind a prefix only with blocks that hold it, in every cache group."""

from __future__ import annotations

import pytest

from convoy.errors import StepError
from convoy.model.kv.pools import BlockTables, GroupBlocks, StagedStep
from convoy.wire.messages.control import PREFIX_TAG_BYTES, BlockGrant, Row, Step

SIZE, WINDOW = 4, 6


def tag(position: int, prefix: str = "p") -> bytes:
    """Stand in for the head's tag of a prefix."""
    return f"{prefix}{position}".encode().ljust(PREFIX_TAG_BYTES, b".")


def ends(start: int, end: int, prefix: str = "p") -> bytes:
    """Return the tags at the block ends in (start, end]."""
    return b"".join(tag(p, prefix) for p in range(start + 1, end + 1) if p % SIZE == 0)


def row(sequence: int, start: int, end: int) -> Row:
    return Row(sequence, start, end - start, 0, tag(start), ends(start, end) + tag(end))


class Stage:
    """Hold tables of a full group, a window of 6 in a ring of 4 blocks, and a state. Blocks have 4 tokens."""

    def __init__(self) -> None:
        groups = [GroupBlocks(16), GroupBlocks(12, window=WINDOW), GroupBlocks(4, recurrent=True)]
        self.tables = BlockTables(groups, block_size=SIZE, max_context=64)
        self.take(
            [
                BlockGrant.append(1, 0, list(range(8))),
                BlockGrant.append(1, 1, [0, 1, 2, 3]),
                BlockGrant.append(1, 2, [0]),
            ]
        )
        for start in range(0, 24, 8):
            self.take([], row(1, start, start + 8))

    def stage(self, grants: list[BlockGrant], *rows: Row, released: list[int] | None = None) -> StagedStep:
        return self.tables.stage(Step(0, released or [], grants, list(rows), b""))

    def take(self, grants: list[BlockGrant], *rows: Row, released: list[int] | None = None) -> StagedStep:
        staged = self.stage(grants, *rows, released=released)
        self.tables.commit(staged)
        return staged


# Sequence 1 has 24 positions: its ring holds runs 4, 5, 2 and 3, and its state stands at 24.
FULL = BlockGrant.append(2, 0, list(range(6)), ends(0, 24))
RING = BlockGrant(2, 1, [0, 1, 8, 9], ends(16, 24), 4)
STATE = BlockGrant(2, 2, [0], tag(24), 5)
COPY = BlockGrant(2, 2, [1], b"", 0)
MORE = BlockGrant.append(2, 0, [9])


def test_a_sequence_begins_behind_the_prefix_of_another_with_a_copy_of_its_state() -> None:
    made = Stage()
    staged = made.take([FULL, RING, STATE, COPY, MORE], row(2, 24, 27))
    assert staged.copies == [(2, 0, 1)]
    (_, table) = staged.rows[0]
    assert table.blocks == [[0, 1, 2, 3, 4, 5, 9], [0, 1, 8, 9], [1]]
    made.take([], row(2, 27, 28))
    made.take([BlockGrant(2, 1, [10], b"", 8)], row(1, 24, 28), released=[])


def test_both_go_on_over_blocks_of_their_own() -> None:
    made = Stage()
    made.take([FULL, RING, STATE, COPY, BlockGrant.append(2, 0, [9, 10])], row(2, 24, 32))
    with pytest.raises(StepError, match="writes to block 0, which another shares"):
        made.stage([BlockGrant.append(2, 0, [11])], row(2, 32, 36))
    made.take([BlockGrant.append(2, 0, [11]), BlockGrant(2, 1, [10], b"", 8)], row(2, 32, 36))
    staged = made.stage([], row(1, 24, 28))
    assert staged.rows[0][1].blocks[1] == [0, 1, 2, 3]


def test_a_state_that_another_has_is_not_written() -> None:
    made = Stage()
    with pytest.raises(StepError, match="writes to block 0, which another shares"):
        made.stage([FULL, RING, STATE, MORE], row(2, 24, 27))


def test_a_state_that_went_on_is_no_longer_there() -> None:
    made = Stage()
    made.take([], row(1, 24, 25))
    with pytest.raises(StepError, match="shares block 0, which holds another prefix"):
        made.stage([FULL, RING, STATE, COPY, MORE], row(2, 24, 27))


def test_a_copied_state_stays_for_others_when_the_sequence_goes_on() -> None:
    made = Stage()
    staged = made.take([BlockGrant(1, 2, [3], b"", 0)], row(1, 24, 25))
    assert staged.copies == [(2, 0, 3)]
    made.take([FULL, RING, STATE, COPY, MORE], row(2, 24, 27))


REFUSED: dict[str, tuple[list[BlockGrant], str]] = {
    "no state": ([FULL, RING, MORE], "does not share one prefix in every cache group"),
    "no ring": ([FULL, STATE, COPY, MORE], "does not share one prefix in every cache group"),
    "another end": (
        [BlockGrant.append(2, 0, list(range(5)), ends(0, 20)), RING, STATE, COPY],
        "does not share one prefix in every cache group",
    ),
    "less than a window": (
        [FULL, BlockGrant(2, 1, [1, 8, 9, 10], ends(20, 24), 5), STATE, COPY, MORE],
        "shares too little of a prefix in group 1",
    ),
    "another prefix": (
        [FULL, BlockGrant(2, 1, [0, 1, 8, 9], ends(16, 24, "q"), 4), STATE, COPY, MORE],
        "shares block 0, which holds another prefix",
    ),
    "a run that the ring wrote over": (
        [
            BlockGrant.append(2, 0, list(range(4)), ends(0, 16)),
            BlockGrant(2, 1, [2, 3, 8, 9], ends(8, 16), 2),
        ],
        "does not share one prefix in every cache group",
    ),
    "a state of another position": (
        [FULL, RING, BlockGrant(2, 2, [0], tag(20), 4), COPY, MORE],
        "shares block 0, which holds another prefix",
    ),
    "a prefix beyond the context": (
        [BlockGrant(2, 2, [0], tag(24), 1 << 19), FULL, RING],
        "beyond the context of 64",
    ),
    "a beginning that is left out": (
        [BlockGrant(2, 0, [4, 5], ends(16, 24), 4), RING, STATE],
        "shares too little of a prefix in group 0",
    ),
    "a full group's block replaced": (
        [BlockGrant(1, 0, [9], b"", 0)],
        "replaces a block that it may still need",
    ),
    "a run that is still looked back on": (
        [BlockGrant(1, 1, [9], b"", 4)],
        "replaces a block that it may still need",
    ),
    "a ring that is not there": ([BlockGrant(3, 1, [9], b"", 4)], "replaces a block that it may still need"),
    "a state that is not there": ([BlockGrant(3, 2, [3], b"", 0)], "no one block to copy its state from"),
    "two copies of a state": ([BlockGrant(1, 2, [2, 3], b"", 0)], "no one block to copy its state from"),
    "a block of another in place of its own": (
        [FULL, RING, STATE, BlockGrant(2, 2, [0], b"", 0), MORE],
        "gives away block 0, which a sequence holds",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_prefix_that_is_not_there_is_refused_and_changes_nothing(name: str) -> None:
    grants, told = REFUSED[name]
    made = Stage()
    with pytest.raises(StepError, match=told):
        made.stage(grants, row(2, 24, 27))
    made.take([FULL, RING, STATE, COPY, MORE], row(2, 24, 27))


def test_a_row_behind_a_shared_prefix_may_not_go_back_into_it() -> None:
    made = Stage()
    made.tables = BlockTables([GroupBlocks(12, window=WINDOW)], block_size=SIZE, max_context=64)
    made.take([BlockGrant.append(1, 0, [0, 1, 2, 3])], row(1, 0, 8))
    made.take([], row(1, 8, 16))
    made.take([BlockGrant(2, 0, [2, 3, 8, 9], ends(8, 16), 2)], row(2, 16, 18))
    with pytest.raises(StepError, match="looks back behind 8, where its ring begins"):
        made.stage([], row(2, 12, 14))
    made.take([], row(2, 18, 20))


def test_a_run_that_was_replaced_is_not_looked_back_on_after_a_rewind() -> None:
    made = Stage()
    made.tables = BlockTables([GroupBlocks(12, window=WINDOW)], block_size=SIZE, max_context=64)
    made.take([BlockGrant.append(1, 0, [0, 1, 2])], row(1, 0, 4))
    made.take([], row(1, 4, 8))
    made.take([], row(1, 8, 10))
    made.take([], Row(1, 10, 2, 1, tag(10), ends(10, 12) + tag(12)))
    made.take([BlockGrant(1, 0, [7], b"", 3)], Row(1, 12, 2, 2, tag(12), tag(13) + tag(14)))
    with pytest.raises(StepError, match="looks back behind 4, where its ring begins"):
        made.stage([], row(1, 8, 10))
