"""The picture of a cluster or a fleet in a terminal: machines, links, the time of a step, and rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.api.service import Service
from convoy.cli.running.process import announced
from convoy.cli.show.exit_codes import EXIT_CONFIG
from convoy.cli.top import Moment
from convoy.cluster.status import (
    AbsentStatus,
    ClusterStatus,
    Forecast,
    PlanForecast,
    StageStatus,
    StepPart,
    StepPath,
)
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.sdk.endpoint import Endpoint
from support.fake_service import serving_of
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server


def stage(name: str, *, head: bool) -> StageStatus:
    return StageStatus(
        member=name,
        start=0,
        end=4,
        embed=head,
        output=head,
        weight_bytes=2_000_000,
        can_read_prompts="activations",
        address="127.0.0.1:1",
        cipher=None if head else "AES-256-GCM",
        round_trip_s=None if head else 0.002,
        head=head,
        memory_bytes=5_000_000,
        kv_bytes=1_000_000,
    )


BUSY = ["programs use 90% of this machine's cores: figures may be too low"]
STATUS = ClusterStatus(
    model="demo [red]",
    ready=True,
    reason="a token passes every stage",
    route="",
    kernel="exact",
    generation=1,
    stages=[stage("alpha", head=True), stage("beta", head=False)],
    running=2,
    waiting=1,
    num_blocks=10,
    free_blocks=5,
    steps=1,
    prompt_tokens=100,
    generated_tokens=50,
    ring_s=0.004,
    absent=[AbsentStatus("gamma")],
    forecast=Forecast(512, PlanForecast(), [], 24 * 10**9, PlanForecast(refused="it has no disk"), BUSY),
    step_path=StepPath(
        1, 0.01, [StepPart("alpha", 0.0, 0.0, 0.004, 0.001), StepPart("beta", 0.005, 0, 0, 0)]
    ),
)


def test_one_picture_is_printed_where_the_output_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with serving_of(Service((), lambda: (True, ""), lambda: STATUS)) as (url, _):
        said = run_here(["top", "--url", url], tmp_path, environment={"COLUMNS": "200"}).stdout
        event = next(Endpoint.of(url).watch("/status"))
    assert event["model"] == "demo [red]"
    assert "demo [red]  ready: a token passes every stage" in said, "a model's name is no markup"
    assert "2 running, 1 waiting" in said
    assert "K/V 50 % in use" in said
    beta = next(line for line in said.splitlines() if line.startswith("beta"))
    assert beta.split("  ")[0] == "beta"
    assert "2.0 MB" in beta
    assert "AES-256-GCM" in beta
    assert "last step 10.00 ms: wire 50 %, wait 0 %, compute 40 %, seal 10 %" in said
    assert "absent: gamma (not seen since this head started); the head keeps dialling it" in said
    assert "with one more machine of 24.0 GB: the model does not fit: it has no disk\n" in said


def test_a_narrow_terminal_gets_the_columns_that_fit_and_every_member(tmp_path: Path) -> None:
    with serving_of(Service((), lambda: (True, ""), lambda: STATUS)) as (url, _):
        said = run_here(["top", "--url", url], tmp_path, environment={"COLUMNS": "80"}).stdout
    lines = said.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("member"))
    table = lines[first : next(number for number, line in enumerate(lines) if line.startswith("last step"))]
    assert {"member", "alpha", "beta"} <= {line.split(" ")[0] for line in table}
    assert max(map(len, table)) <= 80
    assert "round trip" in table[0]
    assert "AES-256-GCM" not in said
    assert "assumed: programs use 90% of this machine's cores: figures may be too low" in said.replace(
        "\n", " "
    )


def test_a_fleet_is_shown_to_its_user_without_a_key_and_an_account_sees_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The coordinator's folder of tokens is that of the commands of its user.
    folder = tmp_path / "convoy"
    folder.mkdir(mode=0o700)
    mine = {"COLUMNS": "160", "XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "ann.key").touch(mode=0o600)
    fleet = FleetUnderTest(folder, CoordinatorOptions())
    try:
        with engine_server(FakeEngine()) as url:
            fleet.add("alpha", url)
            fleet.add("new", url, approved=False)
            fleet.wait_event("waiting for approval")
            watch = ["top", "--url", fleet.url]
            unknown = run_here(watch, tmp_path, environment=mine)
            with announced("coordinator", "coordinator", tmp_path) as here:
                here.ready("routes requests", fleet.url)
                whole = run_here(watch, tmp_path, environment=mine).stdout
            (tmp_path / "ann.key").write_text(fleet.key)
            part = run_here([*watch, "--api-key-file", "ann.key"], tmp_path, environment=mine).stdout
            stranger = run_here(watch, tmp_path, environment={"XDG_CACHE_HOME": str(tmp_path / "other")})
    finally:
        fleet.close()
    assert "fleet  ready: 1 provider\n" in whole
    assert any(line.split()[:5] == ["alpha", MODEL, "0", "of", "4"] for line in whole.splitlines())
    assert f"--approve {fleet.identities[1].hex()} NAME" in whole
    assert "0 running, 0 waiting; 0.0 tokens/s generated" in part
    assert MODEL in part
    assert "alpha" not in part
    for refused in (unknown, stranger):
        assert (refused.returncode, refused.stdout) == (EXIT_CONFIG, "")
    assert (
        "hint: give the key's file with --api-key-file, or run this as the server's user" in stranger.stderr
    )


def test_rates_are_those_between_two_moments_and_zero_after_a_new_start() -> None:
    def at(generated: int, when_s: float) -> Moment:
        found = {name: getattr(STATUS, name) for name in STATUS.__struct_fields__}
        return Moment(ClusterStatus(**(found | {"generated_tokens": generated})), when_s)

    assert at(50, 12.0).rates(at(30, 10.0)) == (10.0, 0.0)
    assert at(5, 12.0).rates(at(30, 10.0)) == (0.0, 0.0)
