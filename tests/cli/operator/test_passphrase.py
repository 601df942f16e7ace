"""The operator key's passphrase on the command line: from a file, on a terminal, and without either."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.cli.operator.passphrase import Passphrase, read_passphrase
from convoy.cli.running.invite import InviteFlags
from convoy.cli.show.exit_codes import EXIT_CONFIG
from convoy.crypto.identity import OperatorKey, has_passphrase
from convoy.errors import IdentityError, UsageError
from support.examined import derive_quickly

SOURCE = str(Path(__file__).resolve().parents[3] / "src")


@pytest.fixture(autouse=True)
def quick_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    derive_quickly(monkeypatch)


def word_file(folder: Path, text: str | bytes = "word\n", name: str = "word", mode: int = 0o600) -> str:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return name


class Terminal:
    """Answer prompts in order, and keep the prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("getpass.getpass", self._answer)

    def _answer(self, prompt: str) -> str:
        self.asked.append(prompt)
        if not self._answers:
            raise EOFError
        return self._answers.pop(0)


def test_a_roster_is_signed_with_an_encrypted_key_and_the_passphrase_is_removed_again(tmp_path: Path) -> None:
    word = word_file(tmp_path)
    assert run_here(["identity", "new", "alpha"], tmp_path).returncode == 0
    new = ["roster", "new", "home", "alpha.card.toml", "--head", "alpha", "--passphrase-file", word]
    assert run_here(new, tmp_path).returncode == 0
    operator = tmp_path / ".convoy/operator"
    assert has_passphrase(operator)

    done = run_here(["roster", "sign"], tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert "operator.key: the key has a passphrase, and there is no terminal to ask for it" in done.stderr
    assert "hint: --passphrase-file FILE reads it from a file with mode 0600" in done.stderr

    wrong = word_file(tmp_path, "other", "wrong")
    done = run_here(["roster", "sign", "--passphrase-file", wrong], tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert (
        "error: .convoy/operator/operator.key: the passphrase is wrong, or the file was changed"
        in done.stderr
    )
    assert "other" not in done.stderr

    done = run_here(["identity", "passphrase", "--passphrase-file", word, "--remove", "--json"], tmp_path)
    assert json.loads(done.stdout)["passphrase"] is False
    assert not has_passphrase(operator)
    assert run_here(["roster", "sign"], tmp_path).returncode == 0


def test_a_passphrase_is_set_on_an_existing_key(tmp_path: Path) -> None:
    key = OperatorKey.generate()
    key.save(tmp_path / "op")
    done = run_here(["identity", "passphrase", "op"], tmp_path)
    assert done.returncode == 2
    assert "--new-passphrase-file FILE sets one" in done.stderr
    both = ["--remove", "--new-passphrase-file", "word"]
    assert run_here(["identity", "passphrase", "op", *both], tmp_path).returncode == 2
    done = run_here(["identity", "passphrase", "op", "--new-passphrase-file", word_file(tmp_path)], tmp_path)
    assert done.returncode == 0
    assert key.public_key.hex() in done.stdout
    assert "backups" in done.stderr
    assert Passphrase(tmp_path / "word").load(tmp_path / "op").public_key == key.public_key


def test_a_handover_reads_a_passphrase_for_each_key(tmp_path: Path) -> None:
    run_here(["identity", "new", "alpha"], tmp_path)
    run_here(["roster", "new", "home", "alpha.card.toml", "--head", "alpha"], tmp_path)
    flags = ["--new-operator", "new", "--new-passphrase-file", word_file(tmp_path)]
    assert run_here(["roster", "sign", *flags], tmp_path).returncode == 0
    assert has_passphrase(tmp_path / "new")


def test_a_new_key_without_a_terminal_has_no_passphrase_and_nothing_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Passphrase().make(tmp_path / "op")
    assert not has_passphrase(tmp_path / "op")
    assert "only the mode of its file (0600) protects it" in capsys.readouterr().err


def test_a_new_key_on_a_terminal_gets_the_passphrase_that_was_typed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal(monkeypatch, "word", "wrod", "word", "word", "word")
    made = Passphrase().make(tmp_path / "op")
    assert "the two are not equal" in capsys.readouterr().err
    assert Passphrase().load(tmp_path / "op").public_key == made.public_key
    assert len(terminal.asked) == 5
    assert "Enter alone: none" in terminal.asked[0]


def test_an_empty_answer_is_no_passphrase_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Terminal(monkeypatch, "")
    Passphrase().make(tmp_path / "op")
    assert not has_passphrase(tmp_path / "op")
    assert f"convoy identity passphrase {tmp_path / 'op'}" in capsys.readouterr().err


def test_a_terminal_that_ends_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Terminal(monkeypatch)
    with pytest.raises(UsageError, match="no passphrase was given"):
        Passphrase().make(tmp_path / "op")
    assert not (tmp_path / "op").exists()


@pytest.mark.parametrize("text", [b"", b"\n", b"a\nb\n", b"x" * 1025, b"a\0b", b"\xff"])
def test_a_file_that_is_no_passphrase_is_named(tmp_path: Path, text: bytes) -> None:
    word_file(tmp_path, text)
    with pytest.raises(IdentityError, match="word") as caught:
        read_passphrase(tmp_path / "word")
    assert "xxx" not in str(caught.value)


def test_a_passphrase_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    word_file(tmp_path, mode=0o640)
    with pytest.raises(IdentityError, match="mode 0640, expected 0600") as caught:
        read_passphrase(tmp_path / "word")
    assert caught.value.hint == f"chmod 600 {tmp_path / 'word'}"
    with pytest.raises(IdentityError, match="cannot read"):
        read_passphrase(tmp_path / "nothing")


def test_white_space_belongs_to_a_passphrase_and_the_line_end_does_not(tmp_path: Path) -> None:
    for text in (" a word ", " a word \n", " a word \r\n"):
        word_file(tmp_path, text)
        assert read_passphrase(tmp_path / "word") == " a word "


def read_until(master: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        seen += os.read(master, 4096)
    return seen


TYPED = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal becomes this session's own
from convoy.cli.main import main
main(["identity", "passphrase", "op"])
"""


def test_a_passphrase_is_typed_on_a_real_terminal_without_being_shown(tmp_path: Path) -> None:
    OperatorKey.generate().save(tmp_path / "op")
    master, terminal = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-c", TYPED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    try:
        seen = read_until(master, b"new passphrase for the operator key in op: ")
        os.write(master, b"typed word\n")
        seen += read_until(master, b"the same once more: ")
        os.write(master, b"typed word\n")
        seen += read_until(master, b"may still hold the key as it was before")
        assert command.wait(60) == 0
    finally:
        command.kill()
        command.wait()
        os.close(terminal)
        os.close(master)
    assert b"typed word" not in seen
    assert has_passphrase(tmp_path / "op")


def test_serve_invite_passes_the_file_on_and_says_where_the_key_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        Passphrase(tmp_path / "word").make(tmp_path / "operator")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", run)
    word_file(tmp_path)
    flags = InviteFlags(None, tmp_path, False, None, None, None, tmp_path / "word")
    assert flags.let_in("demo-mini", as_json=True) == tmp_path / "convoy.toml"
    assert ran[0][ran[0].index("--passphrase-file") + 1] == str(tmp_path / "word")
    said = capsys.readouterr().err
    assert f"the operator key lies on this machine, in {tmp_path / 'operator'}, with a passphrase" in said
    assert "convoy invite --operator FOLDER" in said
