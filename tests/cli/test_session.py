"""A turn of `convoy session` without processes: what it says, and where it stops."""

from __future__ import annotations

from typing import cast

from convoy.cli.session import Turn, _answer
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.scheduler import SchedulerLimits
from convoy.engine.session import Session
from convoy.engine.session_format import SessionModel
from convoy.model.params import SamplingParams
from convoy.model.text import Tokenizer
from support.fake_executor import VOCAB, FakeExecutor
from support.fake_tokenizer import FakeTokenizer

CONTEXT = 20


class NoEnd(FakeTokenizer):
    """An answer that goes on as long as it may."""

    eos_ids = frozenset()


def test_a_full_context_ends_the_answer_and_leaves_the_session_whole() -> None:
    tokenizer = cast(Tokenizer, NoEnd())
    limits = SchedulerLimits(num_blocks=16, block_size=4)
    engine = Engine(FakeExecutor(), tokenizer, limits, EngineOptions(max_context=CONTEXT, probe_s=3600.0))
    engine.start()
    model = SessionModel("fake", "f" * 64, "exact-f32", 2, 1, 1, VOCAB, CONTEXT, keeps_kv=True)
    turn = Turn("hello", None, None, 256, None, None, raw=True, quiet=True)
    with Session(engine, model) as talk:
        talk.sync(range(5))
        text, reason = _answer(turn, tokenizer, talk)
        assert reason == "length"
        assert len(text) == CONTEXT - 5
        assert talk.position == CONTEXT
    engine.close()


def test_flags_change_what_was_saved_and_nothing_beside_it() -> None:
    saved = SamplingParams(temperature=0.5, top_p=0.9, seed=3)

    def params(temperature: float | None, seed: int | None) -> SamplingParams:
        return Turn(None, None, None, 256, temperature, seed, raw=True, quiet=True).params(saved)

    assert params(None, None) == saved
    assert params(0.0, None) == SamplingParams(temperature=0.0, top_p=0.9, seed=3)
    assert params(None, 0) == SamplingParams(temperature=0.5, top_p=0.9, seed=0)
    assert params(1.0, 7) == SamplingParams(temperature=1.0, top_p=0.9, seed=7)
