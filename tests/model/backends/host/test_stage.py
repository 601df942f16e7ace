"""Steps that make no sense are refused with StepError, and change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import pytest
import torch

from convoy.errors import HiddenError, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.kv.pool import KvPool
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step
from support.tiny_models import Models, Prompt

NUM_BLOCKS = 8


@pytest.fixture
def stage(models: Models) -> HostStage:
    """Load the whole model; sequence 1 has blocks 0 and 1, and 20 positions."""
    stage: HostStage = models.chain("odd").stages[0]
    stage.make_pools(NUM_BLOCKS)
    stage.run(step(rows=[Row(1, 0, 20, 0)], grants=[BlockGrant.append(1, 0, [0, 1])]), None, torch.arange(20))
    return stage


def step(
    *, released: Sequence[int] = (), grants: Sequence[BlockGrant] = (), rows: Sequence[Row] = ()
) -> Step:
    return Step(7, list(released), list(grants), list(rows), b"")


HOSTILE = {
    "an unknown sequence": step(rows=[Row(2, 0, 1, 1)]),
    "a released sequence": step(released=[1], rows=[Row(1, 0, 1, 1)]),
    "a release of the unknown": step(released=[2]),
    "two releases of one": step(released=[1, 1]),
    "a hole": step(rows=[Row(1, 21, 1, 1)]),
    "a negative start": step(rows=[Row(1, -1, 1, 1)]),
    "no tokens": step(rows=[Row(1, 20, 0, 0)]),
    "negative tokens": step(rows=[Row(1, 20, -4, 0)]),
    "more outputs than tokens": step(rows=[Row(1, 20, 1, 2)]),
    "negative outputs": step(rows=[Row(1, 20, 1, -1)]),
    "rows beyond the blocks": step(rows=[Row(1, 20, 13, 1)]),
    "a block out of range": step(grants=[BlockGrant.append(1, 0, [NUM_BLOCKS])]),
    "a negative block": step(grants=[BlockGrant.append(1, 0, [-1])]),
    "an unknown group": step(grants=[BlockGrant.append(1, 1, [2])]),
    "a negative group": step(grants=[BlockGrant.append(1, -1, [2])]),
    "a block it has": step(grants=[BlockGrant.append(1, 0, [1])]),
    "a block twice in a grant": step(grants=[BlockGrant.append(3, 0, [2, 2])]),
    "a sequence twice": step(rows=[Row(1, 20, 1, 1), Row(1, 21, 1, 1)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_step_is_refused_and_changes_nothing(stage: HostStage, prompt: Prompt, name: str) -> None:
    hostile = HOSTILE[name]
    # honest changes before the hostile part must not stay either
    mixed = Step(
        7,
        hostile.released,
        [BlockGrant.append(9, 0, [5]), *hostile.grants],
        [Row(9, 0, 1, 1), *hostile.rows],
        b"",
    )
    num_tokens = max(0, sum(row.num_tokens for row in mixed.rows))
    with pytest.raises(StepError):
        stage.run(mixed, None, torch.zeros(num_tokens, dtype=torch.int64))
    with pytest.raises(StepError):
        stage.apply(mixed)
    with pytest.raises(StepError, match="sequence 9"):
        stage.apply(step(released=[9]))
    stage.run(step(rows=[Row(1, 20, 12, 12)]), None, torch.arange(12))


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([105]),
        torch.tensor([-1]),
        torch.tensor([2**32 - 1]),
    ],
)
def test_tokens_that_do_not_fit_are_refused_and_change_nothing(
    stage: HostStage, tokens: torch.Tensor | None
) -> None:
    grant = step(grants=[BlockGrant.append(2, 0, [3])], rows=[Row(2, 0, 1, 1)])
    with pytest.raises(StepError):
        stage.run(grant, None, tokens)
    with pytest.raises(StepError, match="sequence 2"):
        stage.apply(step(released=[2]))


@pytest.mark.parametrize(
    "hidden",
    [None, torch.zeros(2, 40), torch.zeros(1, 39), torch.zeros(40), torch.zeros(1, 40, dtype=torch.float16)],
)
def test_a_hidden_state_that_does_not_fit_is_refused(models: Models, hidden: torch.Tensor | None) -> None:
    stage = models.chain("odd", 2).stages[1]
    grant = step(grants=[BlockGrant.append(2, 0, [3])], rows=[Row(2, 0, 1, 1)])
    with pytest.raises(HiddenError):
        stage.run(grant, hidden, None)
    with pytest.raises(StepError, match="sequence 2"):
        stage.apply(step(released=[2]))


def test_a_row_beyond_the_context_is_refused(models: Models) -> None:
    (stage,) = models.chain("odd").stages
    stage.make_pools(70)
    stage.apply(step(grants=[BlockGrant.append(1, 0, list(range(70)))], rows=[Row(1, 0, 1024, 0)]))
    with pytest.raises(StepError, match="1024"):
        stage.apply(step(rows=[Row(1, 1024, 1, 1)]))


def test_a_block_that_a_sequence_holds_is_not_given_away(stage: HostStage) -> None:
    with pytest.raises(StepError, match="gives away block 0"):
        stage.apply(step(grants=[BlockGrant.append(2, 0, [0, 3])]))
    stage.apply(step(released=[1], grants=[BlockGrant.append(2, 0, [0, 3])]))


def test_a_row_that_names_no_prefix_is_refused(models: Models) -> None:
    stage = HostStage.load(models.source("odd"), StageAssignment("a", 0, 1, True, False), StageOptions())
    stage.make_pools(NUM_BLOCKS)
    with pytest.raises(StepError, match="sequence 1 does not name the prefix before it"):
        stage.apply(step(rows=[Row(1, 0, 3, 0)], grants=[BlockGrant.append(1, 0, [0])]))


def test_a_step_before_the_pools_is_refused(models: Models) -> None:
    stage = HostStage.load(models.source("odd"), StageAssignment("a", 1, 2, False, False), StageOptions())
    with pytest.raises(StepError, match="pools"):
        stage.apply(step())
    with pytest.raises(StepError):
        stage.make_pools(0)


def test_an_empty_step_passes(stage: HostStage, models: Models) -> None:
    probe = step()
    hidden = stage.run(probe, None, torch.zeros(0, dtype=torch.int64))
    assert hidden.shape == (0, 40)
    assert stage.output(stage.select(probe, hidden)).shape == (0, 105)
    later = models.chain("odd", 2).stages[1]
    assert later.run(probe, torch.zeros(0, 40), None).shape == (0, 40)


def test_select_takes_each_rows_trailing_positions_in_order(stage: HostStage) -> None:
    chosen = step(rows=[Row(1, 0, 3, 1), Row(2, 0, 2, 0), Row(3, 0, 4, 2)])
    hidden = torch.arange(9.0)[:, None].expand(9, 40)
    assert stage.select(chosen, hidden)[:, 0].tolist() == [2.0, 7.0, 8.0]
    with pytest.raises(StepError):
        stage.select(chosen, hidden[:8])


def test_output_of_a_stage_without_one_is_refused(models: Models) -> None:
    first, last = models.chain("odd", 2).stages
    with pytest.raises(StepError, match="does not own the output"):
        first.output(torch.zeros(1, 40))
    assert last.output(torch.zeros(1, 40)).shape == (1, 105)
    with pytest.raises(StepError):
        last.output(torch.zeros(1, 41))


def test_releasing_and_granting_again_in_one_step_starts_anew(stage: HostStage) -> None:
    stage.apply(step(released=[1], grants=[BlockGrant.append(1, 0, [4])]))
    with pytest.raises(StepError, match="0 positions are known"):
        stage.apply(step(rows=[Row(1, 1, 1, 1)]))


def test_block_bytes_are_what_a_block_takes(models: Models) -> None:
    stage = models.chain("odd", 2).stages[0]
    assert stage.block_bytes == (16 * 2 * 2 * 2 * 8 * 4,)  # tokens, layers, K and V, heads, head_dim, bytes


def test_a_pool_takes_memory_only_where_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    pool = KvPool(num_blocks=65536, num_kv_heads=1, block_size=16, head_dim=128)  # 1 GiB
    pool.write(torch.tensor([5]), torch.ones(1, 128))
    keys, values = pool.gather(torch.tensor([0, 70000]), 16)
    assert (int(keys.sum()), int(values.sum())) == (128, 0)
    assert psutil.Process().memory_info().rss - before < 64 << 20
