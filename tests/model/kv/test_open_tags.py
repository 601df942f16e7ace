"""Rows of a token that the head does not know yet: their tags stay open until the next row has them."""

from __future__ import annotations

import pytest

from convoy.engine.kv.prefix import PrefixTags
from convoy.errors import StepError
from convoy.model.kv.pools import BlockTables, GroupBlocks
from convoy.wire.messages.control import OPEN_TAG, BlockGrant, Row, Step

TAGS = PrefixTags(4, key=bytes(32))
TOKENS = [5, 6, 7, 8, 9]


def tables_with(num_tokens: int, *groups: GroupBlocks) -> BlockTables:
    """Return tables of a sequence whose first ``num_tokens`` tokens are known."""
    tables = BlockTables(groups or (GroupBlocks(8),), block_size=4, max_context=64)
    grants = [BlockGrant.append(0, group, [1, 2]) for group in range(max(1, len(groups)))]
    take(tables, row(0, num_tokens), grants)
    return tables


def row(start: int, end: int, tokens: list[int] = TOKENS) -> Row:
    return Row(0, start, end - start, 1, *TAGS.of_row([TAGS.root(b"")], tokens, start, end, 1))


def fed(num_known: int) -> Row:
    return Row(0, num_known, 1, 1, *TAGS.of_fed([TAGS.root(b"")], TOKENS[:num_known]))


def take(tables: BlockTables, one: Row, grants: list[BlockGrant] | None = None) -> None:
    tables.commit(tables.stage(Step(0, [], grants or [], [one], b"")))


@pytest.mark.parametrize("num_known", [2, 3, 4])
def test_the_next_row_has_the_tag_that_was_left_open_or_begins_again(num_known: int) -> None:
    for again in (False, True):
        tables = tables_with(num_known)
        take(tables, fed(num_known))
        start = num_known if again else num_known + 1
        take(tables, row(start, start + 1, [*TOKENS, 1]))


def test_a_block_is_shared_by_its_tag_only_once_a_row_has_named_it() -> None:
    tables = tables_with(3)
    take(tables, fed(3))
    chain = [TAGS.root(b"")]
    TAGS.extend(chain, TOKENS, 1)
    for tag in (chain[1], OPEN_TAG):
        with pytest.raises(StepError, match="holds another prefix"):
            tables.stage(Step(1, [], [BlockGrant(1, 0, [1], tag, -1)], [], b""))
    take(tables, fed(4))
    tables.stage(Step(2, [], [BlockGrant(1, 0, [1], chain[1], -1)], [], b""))


def test_only_a_lone_token_behind_others_may_leave_its_tag_open() -> None:
    tables = tables_with(3)
    first = Row(0, 0, 1, 1, TAGS.root(b""), OPEN_TAG)
    several = Row(0, 3, 2, 1, row(3, 4).tag, 2 * OPEN_TAG)
    for wrong in (first, several):
        with pytest.raises(StepError, match="leaves its tags open"):
            tables.stage(Step(1, [], [], [wrong], b""))
    with pytest.raises(StepError, match="leaves its tags open"):
        tables_with(3, GroupBlocks(8, window=8)).stage(Step(1, [], [], [fed(3)], b""))
