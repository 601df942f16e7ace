"""`convoy service`: the units that it writes, the arguments that it refuses, and the managers' commands."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.cli.machine.managers import Launchd, Systemd, manager_here, run_command
from convoy.cli.machine.units import ServiceUnit
from convoy.errors import ConfigError, UsageError
from convoy.sdk.local_cluster import LocalCluster, LocalOptions

SYSTEMD_ANALYZE = shutil.which("systemd-analyze") or ""
UNIT = ServiceUnit("alpha", ("serve", "demo", "--dir", "/srv/convoy"), Path("/srv"))


def lines_of(unit: ServiceUnit, version: int = 255) -> list[str]:
    return unit.systemd(version).decode().splitlines()


def test_a_unit_restarts_after_a_failure_but_not_after_a_fault_that_a_person_mends() -> None:
    lines = lines_of(UNIT)
    assert "Restart=on-failure" in lines
    assert "RestartPreventExitStatus=2 78" in lines
    assert "RestartMaxDelaySec=120" in lines
    assert "Type=notify" in lines


def test_an_older_systemd_gets_no_words_that_it_does_not_know() -> None:
    assert not [line for line in lines_of(UNIT, 252) if line.startswith(("RestartSteps", "RestartMaxDelay"))]


def test_a_service_of_the_system_runs_as_the_owner_of_the_folder() -> None:
    lines = lines_of(ServiceUnit("alpha", ("join",), Path("/srv"), "ada"))
    assert "User=ada" in lines
    assert "WantedBy=multi-user.target" in lines
    assert "ProtectSystem=full" in lines


@pytest.mark.parametrize("user", [None, "root"])
@pytest.mark.skipif(not SYSTEMD_ANALYZE, reason="no systemd-analyze (package systemd)")
def test_systemd_finds_no_fault_in_a_unit(tmp_path: Path, user: str | None) -> None:
    words = ("join", "--dir", '/srv/a "quoted" $HOME, 100% name;')
    file = tmp_path / "convoy-alpha.service"
    file.write_bytes(ServiceUnit("alpha", words, tmp_path, user).systemd(Systemd().version()))
    done = subprocess.run(
        [SYSTEMD_ANALYZE, "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if file.name in line]) == (0, [])


@pytest.mark.parametrize(
    "unit",
    [
        ServiceUnit("alpha", ("serve", "demo\nExecStartPost=/bin/false"), Path("/srv")),
        ServiceUnit("alpha", ("serve", "demo"), Path("/srv\nUser=root")),
    ],
)
def test_a_word_that_would_add_a_line_to_a_unit_is_refused(unit: ServiceUnit) -> None:
    with pytest.raises(UsageError, match="cannot stand in the unit"):
        unit.systemd(255)


def test_a_file_in_the_folder_takes_the_place_of_no_module(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit(1)")
    command = ServiceUnit("alpha", ("--version",), tmp_path).command
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_property_list_has_the_command_and_restarts_after_a_failure_only() -> None:
    found = plistlib.loads(Launchd().text(UNIT))
    assert found["ProgramArguments"] == UNIT.command
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["WorkingDirectory"] == "/srv"
    assert found["StandardErrorPath"].endswith("/Library/Logs/convoy-alpha.log")


def test_macos_has_launchd_and_others_systemd() -> None:
    assert isinstance(manager_here(system=False, platform="darwin"), Launchd)
    assert isinstance(manager_here(system=True, platform="linux"), Systemd)


def test_a_peers_service_joins_and_a_heads_serves(tmp_path: Path) -> None:
    with LocalCluster(LocalOptions(num_members=2)) as local:
        for name, words in (("alpha", ["demo"]), ("beta", [])):
            home = tmp_path / name
            home.mkdir()
            shutil.copy(local.config_file(name), home / "convoy.toml")
            done = run_here(["service", "install", "--print", "--dir", str(home), *words], tmp_path)
            verb = "serve demo" if name == "alpha" else "join"
            assert done.returncode == 0, done.stderr
            assert f"Description=Convoy {verb.split(maxsplit=1)[0]} ({name})" in done.stdout
            assert f" -P -m convoy {verb} --dir {home}\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "error: no model was named for the head"),
        (["--", "demo", "--prot", "80"], "error: no such option: --prot"),
        (["--", "demo", "--invite"], "error: a service takes no invitation: it works once, and a service "),
    ],
)
def test_arguments_that_would_stop_it_at_every_boot_are_refused(
    tmp_path: Path, words: list[str], said: str
) -> None:
    done = run_here(["service", "install", "--print", *words], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(said)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a systemctl first on the PATH that writes its arguments down."""
    tools = tmp_path / "tools"
    tools.mkdir()
    tool = tools / "systemctl"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n'
        'case "$*" in *show*) printf "ActiveState=active\\nSubState=running\\nStatusText=serves demo\\n"\n'
        'echo NRestarts=3;; --version) echo "systemd 255 (255)";; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("sys.platform", "linux")
    return tmp_path / "log"


def test_a_service_is_installed_shown_and_removed(tmp_path: Path, commands: Path) -> None:
    done = run_here(["service", "install", "demo"], tmp_path)
    assert done.returncode == 0, done.stderr
    # The command needs an administrator: it is named, and not run.
    assert "loginctl enable-linger" in done.stderr
    assert commands.read_text().splitlines() == [
        "--version",
        "--user daemon-reload",
        "--user enable --now --no-block convoy-alone.service",
    ]
    again = run_here(["service", "install", "demo"], tmp_path)
    assert again.returncode == 78
    assert "hint: convoy service uninstall alone" in again.stderr
    state = run_here(["service", "status"], tmp_path)
    assert "alone    user   active (running)         3  serves demo" in state.stdout
    gone = run_here(["service", "uninstall"], tmp_path)
    assert gone.returncode == 0, gone.stderr
    assert commands.read_text().splitlines()[-1] == "--user disable --now convoy-alone.service"
    assert not list((tmp_path / "config").rglob("*.service"))


def test_a_manager_that_does_not_answer_is_an_error_and_no_traceback() -> None:
    with pytest.raises(ConfigError, match=r"`sleep 60` failed: it took more than 0\.1 s"):
        run_command(["sleep", "60"], timeout_s=0.1)
    assert run_command(["sleep", "60"], check=False, timeout_s=0.1) == ""
