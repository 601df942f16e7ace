"""A turn of `convoy session` without processes: what it says, and where it stops."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from convoy.cli.operator.session_key import KeyFile, session_key
from convoy.cli.session import SessionKeys, SessionTurn, answer_turn
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.scheduler import GroupLimits, SchedulerLimits
from convoy.engine.sessions.file import SessionWriter
from convoy.engine.sessions.format import SessionModel
from convoy.engine.sessions.session import Session
from convoy.errors import RequestError, SessionError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from support.fake_executor import VOCAB, FakeExecutor
from support.fake_tokenizer import FakeTokenizer

CONTEXT = 20


class NoEnd(FakeTokenizer):
    """Answer as long as it may."""

    eos_ids = frozenset()


def test_a_full_context_ends_the_answer_and_leaves_the_session_whole() -> None:
    tokenizer = cast(Tokenizer, NoEnd())
    limits = SchedulerLimits(groups=(GroupLimits(16),), block_size=4)
    engine = Engine(FakeExecutor(), tokenizer, limits, EngineOptions(max_context=CONTEXT, probe_s=3600.0))
    engine.start()
    model = SessionModel("fake", "f" * 64, "exact-f32", 2, 1, 1, VOCAB, CONTEXT, keeps_kv=True)
    turn = SessionTurn("hello", None, None, 256, None, None, raw=True, quiet=True)
    with Session(engine, model) as talk:
        talk.sync(range(5))
        text, reason = answer_turn(turn, tokenizer, talk)
        assert reason == "length"
        assert len(text) == CONTEXT - 5
        assert talk.position == CONTEXT
    engine.close()


@pytest.mark.parametrize(
    ("mode", "data", "error", "hint"),
    [
        (
            0o644,
            bytes(32),
            "has mode 0644, expected 0600",
            "chmod 600 {key}; anyone with a copy of the key can open",
        ),
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
    turn = SessionTurn("hello", None, None, 8, None, None, raw=False, quiet=True)
    turn.check_model(demo)
    replace(turn, raw=True).check_model(plain)
    replace(turn, prompt=None).check_model(plain)
    with pytest.raises(RequestError, match="plain has no chat template") as caught:
        turn.check_model(plain)
    assert (caught.value.hint or "").startswith("--raw ")


def test_flags_change_what_was_saved_and_nothing_beside_it() -> None:
    saved = SamplingParams(temperature=0.5, top_p=0.9, seed=3)

    def params(temperature: float | None, seed: int | None) -> SamplingParams:
        return SessionTurn(None, None, None, 256, temperature, seed, raw=True, quiet=True).params(saved)

    assert params(None, None) == saved
    assert params(0.0, None) == SamplingParams(temperature=0.0, top_p=0.9, seed=3)
    assert params(None, 0) == SamplingParams(temperature=0.5, top_p=0.9, seed=0)
    assert params(1.0, 7) == SamplingParams(temperature=1.0, top_p=0.9, seed=7)


def write_session(file: Path, key: bytes | None) -> Path:
    with SessionWriter(file, key) as writer:
        writer.write(b"a session")
    return file


def turn(load: Path | None = None, save: Path | None = None) -> SessionTurn:
    return SessionTurn("hello", load, save, 8, None, None, raw=True, quiet=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_session_is_sealed_without_a_word_under_a_key_beside_the_identity(here: Path) -> None:
    keys = SessionKeys.of(turn(save=here / "chat"), KeyFile.of(None, None, plain=False))
    made = here / ".convoy/identity/session.key"
    assert keys.save == made.read_bytes()
    assert len(made.read_bytes()) == 32
    assert made.stat().st_mode & 0o777 == 0o600
    assert made.parent.stat().st_mode & 0o777 == 0o700
    file = write_session(here / "chat", keys.save)
    assert b"a session" not in file.read_bytes()
    again = SessionKeys.of(turn(load=file, save=here / "next"), KeyFile.of(None, None, plain=False))
    assert again == SessionKeys(keys.save, keys.save)


def test_the_key_is_beside_the_identity_that_a_config_names(here: Path) -> None:
    (here / "convoy.toml").write_text('[cluster]\nname = "alpha"\nidentity = "keys"\n')
    SessionKeys.of(turn(save=here / "chat"), KeyFile.of(None, here / "convoy.toml", plain=False))
    assert (here / "keys/session.key").exists()


def test_a_session_is_not_saved_over_another_one(here: Path) -> None:
    write_session(here / "chat", None)
    with pytest.raises(SessionError, match="chat exists already"):
        turn(save=here / "chat").check_files(None)
    turn(load=here / "chat", save=here / "chat").check_files(None)


def test_plain_is_asked_for_to_save_and_to_load(here: Path) -> None:
    plain = KeyFile.of(None, None, plain=True)
    assert SessionKeys.of(turn(save=here / "chat"), plain) == SessionKeys(None, None)
    assert not (here / ".convoy").exists()
    file = write_session(here / "chat", None)
    assert SessionKeys.of(turn(load=file), plain) == SessionKeys(None, None)
    with pytest.raises(SessionError, match="chat is not sealed") as caught:
        SessionKeys.of(turn(load=file), KeyFile.of(None, None, plain=False))
    assert (caught.value.hint or "").startswith("--plain loads it")


def test_a_file_of_another_machine_says_which_key_it_needs(here: Path) -> None:
    file = write_session(here / "chat", bytes(32))
    own = KeyFile.of(None, None, plain=False)
    with pytest.raises(SessionError, match=r"has no session key at \.convoy/identity") as caught:
        SessionKeys.of(turn(load=file), own)
    assert "--key FILE: session.key beside the identity of the machine" in str(caught.value.hint)
    own.to_save()
    with pytest.raises(SessionError, match="does not open") as caught:
        SessionKeys.of(turn(load=file), own)
    assert "needs that machine's session.key: --key FILE" in str(caught.value.hint)
    (here / "theirs").write_bytes(bytes(32))
    (here / "theirs").chmod(0o600)
    assert SessionKeys.of(turn(load=file), KeyFile.of(here / "theirs", None, plain=False)).load == bytes(32)


def test_no_key_is_made_where_the_files_are_wrong(here: Path) -> None:
    with pytest.raises(SessionError, match="there is no directory"):
        SessionKeys.of(turn(save=here / "nowhere/chat"), KeyFile.of(None, None, plain=False))
    assert not (here / ".convoy").exists()
