"""What every `Stage` must do, whatever computes it: a subclass in a test module gives the stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from convoy.errors import ConvoyError, StepError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.output_rows import GREEDY
from convoy.model.stage import LoadedStage, Stage
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

SOURCE = ModelSource.resolve("demo-mini")
NUM_LAYERS = SOURCE.spec.num_layers
WHOLE = StageAssignment("alpha", 0, NUM_LAYERS, embed=True, output=True)
BLOCK_SIZE = 16
NUM_BLOCKS = 8
PROMPT = tuple(range(5, 30))
# The blocks that hold the prompt.
BLOCKS = [2, 5]


def step(
    number: int = 1, *, sequence: int = 0, start: int = 0, end: int = len(PROMPT), num_outputs: int = 1
) -> Step:
    """Return a step of one row of the prompt.

    A sequence's first step takes the blocks, from the sequence before if there was one.
    """
    released = [sequence - 1] if sequence and not start else []
    grants = [] if start else [BlockGrant.append(sequence, 0, BLOCKS)]
    row = Row(sequence, start, end - start, num_outputs)
    return Step(number, released, grants, [row], ids_of(start, end))


def ids_of(start: int, end: int) -> bytes:
    return torch.tensor(PROMPT[start:end], dtype=torch.int32).numpy().tobytes()


def tokens_of(start: int = 0, end: int = len(PROMPT)) -> torch.Tensor:
    return torch.tensor(PROMPT[start:end])


def begin(stage: Stage) -> None:
    """Give the stage fresh pools. They need memory that the stage has."""
    stage.make_pools(NUM_BLOCKS)


class StageConformance:
    """Test the members of `Stage`. A subclass has the fixture ``stage``: the whole model of `SOURCE`."""

    def test_a_stage_says_what_it_is(self, stage: Stage) -> None:
        spec = SOURCE.spec
        assert (stage.assignment, stage.model_digest) == (WHOLE, SOURCE.digest)
        assert (stage.hidden_size, stage.vocab_size) == (spec.hidden_size, spec.vocab_size)
        assert stage.token_id_layers == spec.token_id_layers
        assert stage.takes_tokens
        assert stage.num_devices >= 1
        assert stage.overlaps in {True, False}

    def test_a_stage_says_what_it_takes(self, stage: Stage) -> None:
        assert stage.weight_bytes > 0
        assert stage.bytes_read >= 0
        assert len(stage.block_bytes) == len(SOURCE.spec.cache_groups)
        assert min(stage.block_bytes) > 0
        rooms = [stage.room_bytes(offered) for offered in (1 << 28, 1 << 29)]
        assert rooms[0] <= rooms[1] <= 1 << 29

    def test_the_selected_rows_are_those_of_the_outputs(self, stage: Stage) -> None:
        begin(stage)
        asked = step(num_outputs=3)
        hidden = stage.run(asked, None, tokens_of())
        assert hidden.shape == (len(PROMPT), stage.hidden_size)
        assert torch.equal(stage.select(asked, hidden), hidden[-3:])

    def test_a_started_step_gives_the_rows_of_a_run(self, stage: Stage) -> None:
        begin(stage)
        asked = step(num_outputs=2)
        expected = stage.output(stage.select(asked, stage.run(asked, None, tokens_of())))
        again = step(2, sequence=1, num_outputs=2)
        rows = stage.start(again, None, tokens_of(), selects=True).wait()
        assert rows.shape == (2, stage.hidden_size)
        tokens = [one.sampled.token_id for one in stage.sample(rows, [GREEDY] * 2).outcomes()]
        assert tokens == expected.argmax(-1).tolist()

    def test_steps_that_were_prepared_ahead_give_the_rows_of_a_run(self, stage: Stage) -> None:
        begin(stage)
        stage.run(step(end=16, num_outputs=0), None, tokens_of(0, 16))
        expected = stage.run(step(2, start=16), None, tokens_of(16))
        first, second = step(3, sequence=1, end=16, num_outputs=0), step(4, sequence=1, start=16)
        # Both are known before the inputs of the first are here.
        stage.prepare(first)
        stage.prepare(second)
        stage.run(first, None, tokens_of(0, 16))
        assert torch.equal(stage.start(second, None, tokens_of(16)).wait().cpu(), expected.cpu())

    def test_logits_are_float32_over_the_whole_vocabulary(self, stage: Stage) -> None:
        begin(stage)
        hidden = stage.run(step(), None, tokens_of())
        logits = stage.output(stage.select(step(), hidden))
        assert (logits.shape, logits.dtype) == ((1, stage.vocab_size), torch.float32)

    def test_a_final_state_is_as_wide_as_the_model_and_comes_beside_samples(self, stage: Stage) -> None:
        begin(stage)
        assert stage.output_size == SOURCE.spec.hidden_size
        hidden = stage.run(step(num_outputs=3), None, tokens_of())[-3:]
        states = stage.final_state(hidden)
        assert (states.shape, states.dtype) == ((3, stage.output_size), torch.float32)
        wanted = replace(GREEDY, wants_state=True)
        found = stage.sample(hidden, [GREEDY, wanted, wanted]).outcomes()
        alone = stage.sample(hidden, [GREEDY] * 3).outcomes()
        assert found[0].sampled.token_id == alone[0].sampled.token_id
        assert found[0].state is None
        for row in (1, 2):
            state = found[row].state
            assert state is not None
            assert torch.allclose(torch.from_numpy(state), states[row], rtol=0.01, atol=0.01)

    def test_a_prompt_in_two_steps_ends_as_in_one(self, stage: Stage) -> None:
        begin(stage)
        (whole,) = stage.output(stage.run(step(), None, tokens_of())[-1:])
        stage.run(step(2, sequence=1, end=16, num_outputs=0), None, tokens_of(0, 16))
        last = stage.run(step(3, sequence=1, start=16), None, tokens_of(16))
        (found,) = stage.output(last[-1:])
        # A backend may round in another way for another number of rows.
        assert whole.max() - whole[found.argmax()] <= 0.1 * whole.std()

    def test_blocks_have_the_announced_shape_and_are_read_as_written(self, stage: Stage) -> None:
        begin(stage)
        stage.run(step(), None, tokens_of())
        kv = stage.read_blocks(0, NUM_LAYERS, BLOCKS[:1])
        assert tuple(kv.shape) == stage.kv_shape(NUM_LAYERS, 1)
        assert math.prod(kv.shape[:3]) == NUM_LAYERS * 2 * BLOCK_SIZE
        assert kv.dtype == torch.float32
        assert bool(kv.abs().sum() > 0)
        stage.write_blocks(0, [7], [bytes(16)], kv)
        assert torch.equal(stage.read_blocks(0, NUM_LAYERS, [7]), kv)

    def test_a_stage_without_pools_runs_nothing(self, stage: Stage) -> None:
        begin(stage)
        stage.forget()
        with pytest.raises(ConvoyError):
            stage.run(step(), None, tokens_of())


class LoadedStageConformance(StageConformance):
    """Test the members of `LoadedStage` too, and that a refusal ends nothing."""

    def test_a_loaded_stage_has_its_layers_by_their_number(self, stage: LoadedStage) -> None:
        assert sorted(stage.layers) == list(range(NUM_LAYERS))
        assert stage.block_size == BLOCK_SIZE

    @pytest.mark.parametrize("rows", [[Row(9, 5, 1, 1)], [Row(0, 0, 99, 1)]], ids=["unknown", "too long"])
    def test_a_refused_step_changes_nothing(self, stage: LoadedStage, rows: Sequence[Row]) -> None:
        begin(stage)
        expected = stage.run(step(), None, tokens_of())
        refused = Step(2, [], [], list(rows), b"")
        num_tokens = sum(row.num_tokens for row in rows)
        with pytest.raises(StepError):
            stage.run(refused, None, torch.zeros(num_tokens, dtype=torch.int64))
        assert torch.equal(stage.run(step(3, sequence=1), None, tokens_of()), expected)

    def test_jobs_that_are_not_as_many_as_rows_are_refused(self, stage: LoadedStage) -> None:
        begin(stage)
        hidden = stage.run(step(), None, tokens_of())
        with pytest.raises(StepError):
            stage.sample(hidden[-1:], [GREEDY] * 2)

    def test_a_step_may_be_applied_without_a_run(self, stage: LoadedStage) -> None:
        begin(stage)
        stage.apply(step(end=16, num_outputs=0))
        assert stage.run(step(2, start=16), None, tokens_of(16)).shape[0] == len(PROMPT) - 16

    def test_blocks_that_do_not_exist_are_refused(self, stage: LoadedStage) -> None:
        begin(stage)
        with pytest.raises(StepError):
            stage.read_blocks(0, NUM_LAYERS, [NUM_BLOCKS])
        with pytest.raises(StepError):
            stage.read_blocks(0, NUM_LAYERS + 1, [0])
