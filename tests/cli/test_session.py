"""A turn of `convoy session` without processes: what it says, and where it stops."""

from __future__ import annotations

from typing import cast

from convoy.cli.session import Turn, _answer
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.scheduler import SchedulerLimits
from convoy.engine.session import Session
from convoy.engine.session_format import SessionModel
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
