"""The process as a whole: help that loads little and fits, interrupts, readers that go, internal errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from cli.transcript import run_convoy, run_here
from convoy import __main__ as entry
from convoy.cli import main
from convoy.cli.show.help import PROVE, RUN, SET_UP, SHARE
from convoy.errors import RequestError

SCREEN = (80, 48)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
GROUPS = ["attest", "audit", "bench", "coordinator", "identity", "keys", "manifest", "roster", "service"]
HEAVY = ("torch", "transformers", "cryptography", "numpy", "starlette", "uvicorn", "rich", "asyncio")


def test_help_fits_a_screen(tmp_path: Path) -> None:
    done = run_convoy(["--help"], tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert len(lines) < SCREEN[1]
    assert max(map(len, lines)) <= SCREEN[0]
    assert [line for line in lines[1:] if line.endswith("...")] == [], "a verb's line is cut off"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run", "demo", "--members", "two"], "'two' for '--members': expected a whole number"),
        (["chat", "--temperature", "9", "hi"], "'9' for '--temperature': expected at most 2"),
        (["serve", "demo", "--max-batch", "0"], "'0' for '--max-batch': expected at least 1"),
        (["chat", "--temperature", "x", "hi"], "'x' for '--temperature': expected a number"),
        (
            ["--log-level", "nope", "status"],
            "'nope' for '--log-level': expected debug, info, warning, error",
        ),
        # A prompt or a key in the place of a number is not repeated.
        (["chat", "--temperature", "hi there"], "for '--temperature': expected a number"),
        (["chat", "--temperature", "convoy-" + 32 * "0"], "for '--temperature': expected a number"),
    ],
)
def test_a_bad_number_is_refused_in_our_words(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: invalid value {reason}\nhint: see `convoy ")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--members", "99"], "--members is 99, expected 1 to 64"),
        (["--kernel", "nope"], "--kernel is nope, expected auto, "),
        (["--port", "PORT"], "port PORT on 127.0.0.1 is taken"),
    ],
)
def test_wrong_flags_of_run_are_told_before_the_model_is_looked_for(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [port if word == "PORT" else word for word in flags]
        assert main.run(["run", "no/such-model", *given]) != 0
    assert capsys.readouterr().err.startswith(f"error: {reason.replace('PORT', port)}")


@pytest.mark.parametrize("group", GROUPS)
def test_no_sentence_of_a_groups_help_is_cut_off(tmp_path: Path, group: str) -> None:
    done = run_here([group, "--help"], tmp_path)
    lines = done.stdout.splitlines()
    listed = lines[lines.index("Commands:") + 1 :]
    assert done.returncode == 0
    assert max(map(len, lines)) <= SCREEN[0]
    assert [line for line in listed if line.endswith("...")] == []


def test_every_group_is_among_those_whose_help_is_looked_at() -> None:
    command = typer.main.get_command(main.app)
    assert isinstance(command, TyperGroup)
    groups = {name for name, verb in command.commands.items() if isinstance(verb, TyperGroup)}
    assert sorted(groups) == GROUPS


def test_the_verbs_are_listed_in_groups(tmp_path: Path) -> None:
    done = run_here(["--help"], tmp_path)
    headings = [line for line in done.stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [f"{group}:" for group in (RUN, SET_UP, SHARE, PROVE)]
    command = typer.main.get_command(main.app)
    assert isinstance(command, TyperGroup)
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert command.commands.keys() <= listed


@pytest.mark.parametrize("verb", ["serve", "run", "join"])
def test_the_options_of_a_verb_with_many_are_listed_in_groups(tmp_path: Path, verb: str) -> None:
    done = run_here([verb, "--help"], tmp_path)
    headings = [line for line in done.stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert len(headings) >= 4
    assert "Cluster:" in headings
    command = typer.main.get_command(main.app).commands[verb]  # type: ignore[attr-defined]
    for parameter in command.params:
        assert parameter.opts[0] in done.stdout


def commands_below(command: Any) -> Iterator[Any]:
    yield command
    for verb in getattr(command, "commands", {}).values():
        yield from commands_below(verb)


def test_no_option_says_its_default_twice() -> None:
    for command in commands_below(typer.main.get_command(main.app)):
        context = command.context_class(command)
        for parameter in command.params:
            record = parameter.get_help_record(context)
            assert record is None or record[1].count("[default:") <= 1, (command.name, record)


def test_windows_itself_is_refused_before_anything_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main("win32")
    assert ended.value.code == 78
    assert capsys.readouterr().err.splitlines() == [
        "error: Convoy does not run on Windows itself",
        "hint: run it in WSL2: `wsl --install`, then install Convoy inside that Linux",
    ]


def test_the_entry_imports_no_module_that_windows_lacks() -> None:
    code = (
        "import sys\n"
        "for name in ('fcntl', 'termios', 'pwd', 'resource', 'grp', 'tty', 'pty'): sys.modules[name] = None\n"
        "from convoy.__main__ import main\n"
        "main('win32')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, check=False)
    assert done.returncode == 78, done.stderr


def test_the_command_raises_its_limit_of_open_files() -> None:
    code = (
        "import resource\n"
        "from convoy.__main__ import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "try: main()\n"
        "finally: print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], env=ENVIRONMENT, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-1] == b"300 300"


@pytest.mark.parametrize("stderr", ["open", "closed"])
def test_a_crash_in_native_code_names_the_functions_that_ran(stderr: str) -> None:
    crash = (
        "import os, signal, sys, typer\n"
        "from convoy.cli import main\n"
        "if sys.argv[1] == 'closed': os.close(2); sys.stderr = None\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def crashing() -> None: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "main.main(sys.argv[1:1], app)\n"
    )
    done = subprocess.run([sys.executable, "-c", crash, stderr], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert ("in crashing" in done.stderr) is (stderr == "open")


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, convoy.cli.main; print([name for name in sys.argv[1:] if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, *HEAVY], env=ENVIRONMENT, capture_output=True, check=True
    )
    assert done.stdout.strip() == b"[]"


def test_every_verb_has_help_and_json(tmp_path: Path) -> None:
    for verb in (["plan"], ["status"], ["chat"], ["identity", "new"], ["roster", "verify"]):
        done = run_here([*verb, "--help"], tmp_path)
        assert done.returncode == 0
        assert "--json" in done.stdout


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_interrupt_exits_with_130_and_alarms_nobody(tmp_path: Path, flags: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "convoy", "status", "--url", f"http://127.0.0.1:{port}", *flags],
            env=ENVIRONMENT,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        silent.settimeout(30)
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)  # it has asked, and now waits for an answer that never comes
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors == b""
    assert (json.loads(said)["error"]["type"] if flags else said) == ("Interrupted" if flags else b"")


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "convoy", "--help"],
        env=ENVIRONMENT,
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 1


def test_a_missing_module_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(**_: object) -> int:
        import convoy_needs_this_module  # type: ignore[import-not-found]  # noqa: F401

        return 0

    monkeypatch.setattr(main, "app", lacking)
    assert main.run(["status"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: the Python module convoy_needs_this_module is not installed"
    assert "make setup" in lines[1]


def test_an_internal_error_is_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: object) -> int:
        raise ZeroDivisionError("with a secret in its text")

    monkeypatch.setattr(main, "app", broken)
    assert main.run(["status"]) == 1
    errors = capsys.readouterr().err
    assert errors.splitlines()[0] == "error: internal error: ZeroDivisionError"
    assert "--debug" in errors
    assert "secret" not in errors
    assert main.run(["--debug", "status"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_json_carries_the_parameter_that_a_request_error_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: object) -> int:
        raise RequestError("max_tokens is 0, expected 1 or more", param="max_tokens", hint="ask for\nmore")

    monkeypatch.setattr(main, "app", refused)
    assert main.run(["run", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["param"] == "max_tokens"
    assert captured.err.splitlines() == ["error: max_tokens is 0, expected 1 or more", "hint: ask for more"]


@pytest.mark.parametrize("arguments", [["chat", "--", "--json"], ["chat"]])
def test_json_after_a_double_dash_is_not_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    def refused(**_: object) -> int:
        raise RequestError("no")

    monkeypatch.setattr(main, "app", refused)
    main.run(arguments)
    assert capsys.readouterr().out == ""
