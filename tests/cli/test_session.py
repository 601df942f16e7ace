"""A turn of `convoy session` without processes: what it says, and where it stops."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from convoy.cli.session import Turn, _answer, session_key
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.scheduler import GroupLimits, SchedulerLimits
from convoy.engine.session import Session
from convoy.engine.session_format import SessionModel
from convoy.errors import RequestError, SessionError
from convoy.model.params import SamplingParams
from convoy.model.source import ModelSource
from convoy.model.text import Tokenizer
from support.fake_executor import VOCAB, FakeExecutor
from support.fake_tokenizer import FakeTokenizer

CONTEXT = 20


class NoEnd(FakeTokenizer):
    """An answer that goes on as long as it may."""

    eos_ids = frozenset()


def test_a_full_context_ends_the_answer_and_leaves_the_session_whole() -> None:
    tokenizer = cast(Tokenizer, NoEnd())
    limits = SchedulerLimits(groups=(GroupLimits(16),), block_size=4)
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


@pytest.mark.parametrize(
    ("mode", "data", "error", "hint"),
    [
        (0o644, bytes(32), "has mode 0644, expected 0600", "chmod 600 {key}; who could read it can open"),
        (0o600, b"short", "{key} has 5 bytes, expected a key of 32", "name the file that `convoy session"),
        (None, b"", "the session's key: cannot read {key}", "name the key that the session was saved with"),
    ],
)
def test_a_sessions_key_that_is_no_good_is_told_what_helps(
    tmp_path: Path, mode: int | None, data: bytes, error: str, hint: str
) -> None:
    key = tmp_path / "key"
    if mode is not None:
        key.write_bytes(data)
        key.chmod(mode)
    with pytest.raises(SessionError) as caught:
        session_key(key, make=False)
    assert error.format(key=key) in caught.value.message
    assert (caught.value.hint or "").startswith(hint.format(key=key))


def test_a_model_without_a_chat_template_is_said_before_anything_starts(tmp_path: Path) -> None:
    shutil.copytree(ModelSource.resolve("demo-mini").path, tmp_path / "plain")
    settings = tmp_path / "plain" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    plain, demo = ModelSource.resolve(str(tmp_path / "plain")), ModelSource.resolve("demo-mini")
    turn = Turn("hello", None, None, 8, None, None, raw=False, quiet=True)
    turn.check_model(demo)
    replace(turn, raw=True).check_model(plain)
    replace(turn, prompt=None).check_model(plain)
    with pytest.raises(RequestError, match="plain has no chat template") as caught:
        turn.check_model(plain)
    assert (caught.value.hint or "").startswith("--raw ")


def test_flags_change_what_was_saved_and_nothing_beside_it() -> None:
    saved = SamplingParams(temperature=0.5, top_p=0.9, seed=3)

    def params(temperature: float | None, seed: int | None) -> SamplingParams:
        return Turn(None, None, None, 256, temperature, seed, raw=True, quiet=True).params(saved)

    assert params(None, None) == saved
    assert params(0.0, None) == SamplingParams(temperature=0.0, top_p=0.9, seed=3)
    assert params(None, 0) == SamplingParams(temperature=0.5, top_p=0.9, seed=0)
    assert params(1.0, 7) == SamplingParams(temperature=1.0, top_p=0.9, seed=7)
