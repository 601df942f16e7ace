"""``convoy launch`` with a fake agent that writes down its arguments, its environment and its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.transcript import run_convoy, run_here
from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.cli.agents.settings import AGENTS, AgentServer
from convoy.cli.show.exit_codes import EXIT_CONFIG, EXIT_RETRY, EXIT_USAGE
from support.fake_service import FakeEngine, Running, serving
from support.waiting import wait_until

KEY = "the-secret-key-of-ann"
FAKE = """#!{python}
import json, os, pathlib, sys, time
folders = [value for value in os.environ.values() if "convoy-agent-" in value]
folder = next((pathlib.Path(one) for one in folders), None)
folder = folder.parent if folder is not None and folder.is_file() else folder
record = {{
    "pid": os.getpid(),
    "arguments": sys.argv[1:],
    "environment": dict(os.environ),
    "folder": folder and str(folder),
    "mode": folder and oct(folder.stat().st_mode & 0o777),
    "files": {{one.name: one.read_text() for one in folder.iterdir()}} if folder else {{}},
}}
where = pathlib.Path(os.environ["RECORD"])
where.with_suffix(".part").write_text(json.dumps(record))
where.with_suffix(".part").rename(where)
while "--wait" in sys.argv:
    time.sleep(0.02)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(f'[[keys]]\nname = "ann"\nkey = "{KEY}"\n')
    with serving(FakeEngine(), ServeOptions(port=0, keys=KeyRing.open(file)), max_context=32768) as running:
        yield running


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for agent in AGENTS.values():
        program = programs / agent.program
        program.write_text(FAKE.format(python=sys.executable))
        program.chmod(0o755)
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record.json"),
        "CONVOY_API_KEY": KEY,
        "ANTHROPIC_API_KEY": "of-the-user",
        "CODEX_API_KEY": "of-the-user",
    }


def launched(
    name: str, server: Running, environment: dict[str, str], tmp_path: Path, *arguments: str
) -> dict[str, Any]:
    done = run_here(["launch", name, "--url", server.url, *arguments], tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (7, "")
    found: dict[str, Any] = json.loads(Path(environment["RECORD"]).read_text())
    return found


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_its_arguments_and_its_exit_code_comes_back(
    name: str, server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    found = launched(name, server, environment, tmp_path, "--", "-p", "say done", "--json")
    assert found["arguments"][-3:] == ["-p", "say done", "--json"]
    assert KEY not in " ".join(found["arguments"])
    reached = json.dumps([found["environment"], found["files"], found["arguments"]])
    assert server.url in reached
    assert "fake" in reached


@pytest.mark.parametrize("name", ["codex", "cline"])
def test_the_folder_of_a_run_is_private_and_is_gone_afterwards(
    name: str, server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    found = launched(name, server, environment, tmp_path)
    assert found["mode"] == "0o700"
    assert found["files"]
    assert not Path(found["folder"]).exists()


def test_codex_reads_one_provider_and_no_switch_is_on(
    server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    found = launched("codex", server, environment, tmp_path)
    config = tomllib.loads(found["files"]["config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (f"{server.url}/v1", "responses")
    assert found["environment"][provider["env_key"]] == KEY
    assert (config["model"], config["model_context_window"]) == ("fake", 32768)
    assert not any((config["analytics"]["enabled"], config["feedback"]["enabled"]))
    assert not any((config["check_for_update_on_startup"], *config["features"].values()))
    assert set(config["otel"].values()) == {"none"}
    assert found["environment"]["CODEX_HOME"] == found["folder"]
    assert "CODEX_API_KEY" not in found["environment"]


def test_claude_gets_variables_alone(server: Running, environment: dict[str, str], tmp_path: Path) -> None:
    variables = launched("claude", server, environment, tmp_path)["environment"]
    assert variables["ANTHROPIC_BASE_URL"] == server.url
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY
    models = {value for name, value in variables.items() if name.endswith("_MODEL")}
    assert models == {"fake"}
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4096"
    for switch in ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY"):
        assert variables[switch] == "1"
    assert "ANTHROPIC_API_KEY" not in variables


def test_opencode_gets_its_configuration_in_a_variable(
    server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    variables = launched("opencode", server, environment, tmp_path)["environment"]
    assert KEY not in variables["OPENCODE_CONFIG_CONTENT"]
    config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == "convoy/fake"
    provider = config["provider"]["convoy"]
    assert provider["options"] == {"baseURL": f"{server.url}/v1", "apiKey": "{env:CONVOY_API_KEY}"}
    assert provider["models"]["fake"]["limit"] == {"context": 32768, "output": 4096}
    assert (config["autoupdate"], config["share"]) == (False, "disabled")


def test_cline_leaves_no_daemon_and_sends_no_telemetry(
    server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    found = launched("cline", server, environment, tmp_path)
    providers = json.loads(found["files"]["providers.json"])
    settings = providers["providers"][providers["lastUsedProvider"]]["settings"]
    assert (settings["baseUrl"], settings["apiKey"]) == (f"{server.url}/v1", KEY)
    switches = json.loads(found["files"]["global-settings.json"])
    assert switches == {"telemetryOptOut": True, "autoUpdateEnabled": False}
    assert found["environment"]["CLINE_SESSION_BACKEND_MODE"] == "local"
    assert found["arguments"] == ["-P", "openai-compatible", "-m", "fake"]


@pytest.mark.parametrize("name", AGENTS)
def test_print_shows_the_settings_without_the_key_and_starts_nothing(
    name: str, server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    line = ["launch", name, "--url", server.url, "--print"]
    shown = run_here([*line, "--", "hello"], tmp_path, environment=environment)
    as_json = run_here([*line, "--json", "--", "hello"], tmp_path, environment=environment)
    for done in (shown, as_json):
        assert (done.returncode, done.stderr) == (0, "")
        assert KEY not in done.stdout
        assert server.url in done.stdout
    found = json.loads(as_json.stdout)
    assert list(found) == ["command", "environment", "removed", "files"]
    assert (found["command"][0], found["command"][-1]) == (AGENTS[name].program, "hello")
    assert shown.stdout.splitlines()[0].endswith(" hello")
    assert not Path(environment["RECORD"]).exists()


def test_an_agent_that_is_not_installed_is_told_with_its_package(
    server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    empty = {**environment, "PATH": str(tmp_path / "none")}
    done = run_here(["launch", "opencode", "--url", server.url], tmp_path, environment=empty)
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.splitlines() == [
        "error: opencode is not installed: no program opencode on the PATH",
        "hint: npm install -g opencode-ai",
    ]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (
            ["launch", "emacs"],
            EXIT_USAGE,
            "no agent 'emacs', expected one of: codex, claude, opencode, cline",
        ),
        (["launch", "codex", "--json"], EXIT_USAGE, "--json needs --print"),
        (["launch", "codex", "--url", "http://127.0.0.1:9"], EXIT_RETRY, "127.0.0.1:9"),
    ],
)
def test_a_line_that_cannot_start_an_agent_is_an_error(
    line: list[str], code: int, said: str, environment: dict[str, str], tmp_path: Path
) -> None:
    done = run_here(line, tmp_path, environment=environment)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert not Path(environment["RECORD"]).exists()


@pytest.mark.parametrize("name", ["{env:HOME}", "{file:~/.ssh/id_ed25519}", "a\nb", "a\x1b[2J"])
def test_a_models_name_that_an_agent_would_expand_is_refused(
    name: str, server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    line = ["launch", "opencode", "--url", server.url, "--model", name]
    done = run_here(line, tmp_path, environment=environment)
    assert done.returncode == EXIT_CONFIG
    assert "agents take none with braces or unprintable characters" in done.stderr
    assert not Path(environment["RECORD"]).exists()


def test_a_model_that_is_not_served_is_refused_with_those_that_are(
    server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    line = ["launch", "codex", "--url", server.url, "--model", "nope"]
    done = run_here(line, tmp_path, environment=environment)
    assert done.returncode == EXIT_USAGE
    assert done.stderr.splitlines() == [
        f"error: the model 'nope' is not served at {server.url}, expected one of: fake",
        "hint: --model names one",
    ]
    assert not Path(environment["RECORD"]).exists()


def test_a_small_context_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    with serving(FakeEngine(), max_context=2048) as running:
        line = ["launch", "claude", "--url", running.url]
        done = run_convoy(line, tmp_path, environment=environment)
        shown = run_here([*line, "--print"], tmp_path, environment=environment)
    assert (done.returncode, shown.returncode) == (7, 0)
    note = "note: fake takes 2048 tokens a request; agents begin with 6,000 to 21,000\n"
    assert (done.stderr, shown.stderr) == (note, note)


def test_a_terminated_launch_ends_its_agent_and_removes_its_folder(
    server: Running, environment: dict[str, str], tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "convoy", "launch", "codex", "--url", server.url, "--", "--wait"]
    process = subprocess.Popen(line, env={**os.environ, **environment}, cwd=tmp_path)
    record = Path(environment["RECORD"])
    try:
        wait_until(record.exists)
        found = json.loads(record.read_text())
        process.send_signal(signal.SIGINT)
        os.kill(found["pid"], 0)
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(found["pid"], 0)
    assert not Path(found["folder"]).exists()


def test_settings_show_no_key_in_their_text() -> None:
    assert KEY not in repr(AgentServer("http://127.0.0.1:8765", "demo", api_key=KEY))
