"""`convoy serve` as the person at its terminal sees it: real processes of the smallest model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.transcript import run_here
from convoy.cli.serve import with_layers
from convoy.cli.show.exit_codes import EXIT_CONFIG
from convoy.cli.show.progress import LoadLines, StartLines, VerifyLines
from convoy.crypto.identity import OperatorKey
from convoy.errors import SpanError, UsageError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.library import heavy_rooms
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.wire.messages.control import Progress
from support.fake_service import serving

WAIT_S = 90.0
CLOCK = r"\d\d:\d\d:\d\d "
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"),
}


class Shown:
    """Run a command and keep its output so far, of both streams."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "convoy", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first line that matches, as soon as it is there."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.fullmatch(pattern, line) for line in self.lines)), None)

        with self._more:
            assert self._more.wait_for(found, WAIT_S), f"{pattern} is not in\n" + "\n".join(self.lines)
            match = found()
        assert match is not None
        return match

    def end(self) -> list[str]:
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return self.lines


@contextmanager
def shown(*arguments: str) -> Iterator[Shown]:
    command = Shown(*arguments)
    try:
        yield command
    finally:
        command.process.kill()
        command.end()


def taken_port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_a_port_in_use_is_named_with_the_flag_that_mends_it(tmp_path: Path) -> None:
    with taken_port() as taken:
        port = taken.getsockname()[1]
        done = run_here(["serve", "demo-mini", "--port", str(port)], tmp_path)
    assert done.returncode == 75
    assert done.stderr.splitlines() == [
        f"error: port {port} on 127.0.0.1 is taken",
        f"hint: use --port {port + 1}, or stop the program that listens there",
    ]


def test_a_port_of_a_running_head_is_told_with_the_command_that_shows_it(tmp_path: Path) -> None:
    with serving() as head:
        port = head.url.rpartition(":")[2]
        done = run_here(["serve", "demo-mini", "--port", port], tmp_path)
    assert done.returncode == 75
    assert done.stderr.splitlines()[-2:] == [
        f"error: port {port} on 127.0.0.1 is taken by a head of Convoy, which runs already",
        f"hint: `convoy status --url {head.url}` shows it; stop it first. The head of another cluster needs "
        "another --port",
    ]


def test_a_peer_that_serves_learns_its_role_before_its_port_and_its_model(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        made = run_here(["identity", "new", name, "--address", f"{name}.test:7777"], tmp_path)
        assert made.returncode == 0
    new = ["roster", "new", "home", "alpha.card.toml", "beta.card.toml", "--head", "alpha"]
    assert run_here(new, tmp_path).returncode == 0
    operator = OperatorKey.load(tmp_path / ".convoy/operator").public_key.hex()
    (tmp_path / "beta.toml").write_text(
        '[cluster]\nname = "beta"\nidentity = ".convoy/beta"\nroster = "roster.toml"\n'
        f'operator_key = "{operator}"\n'
    )
    with taken_port() as taken:
        flags = ["--config", "beta.toml", "--port", str(taken.getsockname()[1])]
        done = run_here(["serve", "nosuch", *flags], tmp_path)
    assert "error: beta may not be the head; the roster allows alpha" in done.stderr


def test_a_model_that_is_not_there_is_said_before_who_has_the_port(tmp_path: Path) -> None:
    with taken_port() as taken:
        done = run_here(["serve", "nosuch", "--port", str(taken.getsockname()[1])], tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.startswith("error: no model at nosuch\n")


def test_a_folder_without_a_cluster_is_named_once_the_head_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.cli.serve.serve_cluster", lambda *given, **_: given[2].on_ready())
    done = run_here(["serve", "demo-mini"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"no cluster in {tmp_path / '.convoy'}: this machine serves alone" in done.stderr
    assert "no cluster" not in run_here(["serve", "demo-mini", "--json"], tmp_path).stderr


def ask_at_length(url: str, ended: list[str]) -> None:
    body = {"model": "demo-mini", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=WAIT_S) as response:
        ended.extend(line for line in response.iter_lines() if line)


@pytest.mark.long
def test_an_interrupt_with_answers_under_way_says_at_once_what_is_waited_for(
    tmp_path: Path,
) -> None:
    with shown("serve", "demo-mini", "--port", "0") as head:
        url = head.wait_for(r"serving demo-mini at (\S+)")[1]
        assert head.lines[0] == "loading PyTorch ..."
        head.wait_for(r"demo-mini on this machine alone: context 2048 tokens, room for \d+ tokens in all")
        head.wait_for(rf"try: convoy chat --url {url.removesuffix('/v1')}")
        ended: list[str] = []
        asking = threading.Thread(target=ask_at_length, args=(url, ended), daemon=True)
        asking.start()
        until(lambda: ended or httpx.get(url.removesuffix("/v1") + "/status").json()["running"])
        head.process.send_signal(signal.SIGINT)
        head.wait_for(r"finishing 1 answer, at most 30 s; Ctrl-C again to stop now")
        head.process.send_signal(signal.SIGINT)
        assert head.end()[-1] == "ended: 1 answer was cut off, and its client told"
        asking.join(WAIT_S)


def until(condition: Callable[[], Any]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)  # a server says this by no event


@pytest.mark.long
def test_who_comes_and_who_is_lost_are_a_line_each_with_the_time() -> None:
    with LocalCluster(LocalOptions(num_members=3, num_threads=1)) as local:
        file = local.config_file("alpha")
        file.write_text(file.read_text() + "\n[plan]\nwait_s = 2.0\n")
        peer = local.start_peer("beta", "demo-mini")
        until(lambda: "listening: " in local.log_file("beta").read_text())
        flags = ("--layers", "0:1,output", "--layers", "beta=2:3", "--port", "0", "--verbose")
        with shown("serve", "demo-mini", "--config", str(file), *flags) as head:
            head.wait_for(r"waiting for beta, gamma, at most 2 s \(--wait\)")
            head.wait_for(r"beta is here; waiting for gamma, at most [012] s")
            head.wait_for(CLOCK + r"gamma at \S+ did not answer within 2 s; the cluster starts without it.*")
            head.wait_for(r" +1  beta    2-3 .*")
            head.wait_for(r"absent: gamma \(not seen since this head started\); the head keeps dialling it")
            head.wait_for(r"serving demo-mini at (\S+)")
            peer.kill()
            head.wait_for(CLOCK + r"lost: beta, which held layers 2-3: .+")
            head.wait_for(CLOCK + r"recovered: alpha 0:output, .+ s after the loss .*")
            peer.wait()
            local.start_peer("beta", "demo-mini")
            head.wait_for(CLOCK + r"joined: beta is here again")
            head.wait_for(CLOCK + r"in use: alpha 0:1,output -> beta 2:3 -> alpha, after .* s .*")
            head.process.send_signal(signal.SIGTERM)
            assert head.end()[-1] == "ended: every request was answered"


@pytest.mark.long
def test_a_head_that_is_interrupted_while_it_starts_says_that_it_ended(two: LocalCluster) -> None:
    flags = ("--config", str(two.config_file("alpha")), "--port", "0", "--wait", "77")
    with shown("serve", "demo-mini", *flags) as head:
        head.wait_for(r"waiting for beta, at most 77 s \(--wait\)")
        head.process.send_signal(signal.SIGINT)
        assert head.end()[-1] == "ended: while starting; nothing was served"
        assert head.process.returncode == 130


@pytest.fixture
def two() -> Iterator[LocalCluster]:
    with LocalCluster(LocalOptions(num_members=2)) as local:
        yield local


def test_the_layers_of_the_command_line_come_before_the_files(two: LocalCluster) -> None:
    spec = ModelSource.resolve("demo-mini").spec
    config = two.config("alpha")
    assert with_layers(config, None, spec) is config
    given = with_layers(config, ["0:0,output", "1:3"], spec)
    assert given.plan.layers == {"alpha": "0:0,output", "beta": "1:3"}
    assert with_layers(config, ["0:output"], spec).plan.layers == {"alpha": "0:output"}
    with pytest.raises(SpanError, match="no member owns the output"):
        with_layers(config, ["0:0", "1:3"], spec)
    with pytest.raises(UsageError, match="expected a member: alpha, beta"):
        with_layers(config, ["gamma=0:0"], spec)


def test_what_takes_long_is_said_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)
        patched.delitem(sys.modules, "torch")
        with heavy_rooms(said.append):
            assert said == ["loading PyTorch ..."]
    with heavy_rooms(said.append):
        assert ("torch" in sys.modules) == (len(said) == 1)


def test_a_load_that_nobody_watches_on_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    lines = LoadLines(lambda: now_s)
    for second in range(13):
        now_s = float(second)
        lines.on_load("alpha", second, 12)
        lines.on_load("beta", second, 24)
    assert capsys.readouterr().err.splitlines() == [
        "loading: alpha 42%, beta 17%",
        "loading: alpha 83%, beta 38%",
    ]


def test_a_check_that_nobody_watches_on_a_terminal_is_a_line_at_once_and_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    lines = VerifyLines("layouts", lambda: now_s)
    for second in range(8):
        now_s = float(second)
        lines.on_progress(second, 7, f"0:{second}" if second < 7 else "")
    assert capsys.readouterr().err.splitlines() == [
        "verifying: 0/7 layouts, 0:0",
        "verifying: 5/7 layouts, 0:5",
    ]


def test_a_member_that_starts_is_told_at_once_and_then_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    lines = StartLines(lambda: now_s)
    for second in range(1, 9):
        now_s = second
        lines.on_start("beta", Progress(0, second, 0, "import" if second < 3 else "examine"))
    lines.on_start("beta", Progress(7, 1, 2, "fetch"))
    assert capsys.readouterr().err.splitlines() == [
        "beta loads PyTorch: 1 s so far",
        "beta examines its kernels: 3 s so far",
        "beta examines its kernels: 8 s so far",
    ]


def test_serve_is_the_head_of_the_home_folder_as_join_is_its_member(tmp_path: Path) -> None:
    (tmp_path / ".convoy").mkdir()
    (tmp_path / ".convoy/convoy.toml").write_text("[engine]\nmax_model_len = 4\nmax_batch = 0\n")
    done = run_here(["serve", "demo-mini"], tmp_path)
    assert done.returncode == 78
    assert done.stderr.startswith("error: .convoy/convoy.toml: [engine] max_batch is 0")
    elsewhere = run_here(["serve", "nosuch", "--dir", "elsewhere"], tmp_path)
    assert elsewhere.stderr.startswith("error: no model at nosuch\n")


@pytest.mark.parametrize("also", ["=demo", "small="])
def test_a_further_model_without_a_name_or_a_model_is_refused(tmp_path: Path, also: str) -> None:
    done = run_here(["run", "demo-mini", "--port", "0", "--also", also], tmp_path)
    assert done.returncode == 78
    assert f"error: also is {also!r}, expected MODEL or NAME=MODEL" in done.stderr.splitlines()


@pytest.mark.parametrize("flags", [["--also", "a\x1b[31mx=demo"], ["--served-model-name", "a\x1b[31mx"]])
def test_a_name_that_could_draw_on_a_terminal_is_refused(tmp_path: Path, flags: list[str]) -> None:
    done = run_here(["run", "demo-mini", "--port", "0", *flags], tmp_path)
    assert done.returncode == 78
    told = "error: 'a\\x1b[31mx' cannot name a model: it has unprintable characters"
    assert told in done.stderr.splitlines()
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("more", [["--also", "small=demo"], ["--keep-alive", "5m"]])
def test_one_prompt_and_several_models_do_not_go_together(tmp_path: Path, more: list[str]) -> None:
    done = run_here(["run", "demo-mini", "--prompt", "2+2", *more], tmp_path)
    assert done.returncode == 2
    assert "error: --prompt came with --also or --keep-alive" in done.stderr


def test_a_keep_alive_that_is_no_duration_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run_here(["serve", "demo-mini", "--keep-alive", "soon"], tmp_path)
    assert done.returncode == 2
    assert "error: --keep-alive is 'soon', expected seconds, a duration such as 5m" in done.stderr


@pytest.mark.parametrize("verb", ["serve", "run"])
def test_a_longer_context_than_the_models_is_refused_before_anything_starts(
    tmp_path: Path, verb: str
) -> None:
    context = ModelSource.resolve("demo-mini").spec.max_context
    done = run_here([verb, "demo-mini", "--port", "0", "--max-model-len", str(context + 1)], tmp_path)
    assert done.returncode == 78
    told = f"error: max_model_len is {context + 1} tokens, and the model's context has {context}"
    assert done.stderr.splitlines()[-2:] == [
        told,
        f"hint: max_model_len under [engine], or --max-model-len: {context} or less",
    ]
