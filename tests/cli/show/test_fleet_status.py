"""The picture of a fleet in a terminal: what each provider has room for, and who is gone or waits."""

from __future__ import annotations

import time

from rich.console import Console

from convoy.cli.show.fleet_status import fleet_picture
from convoy.fleet.capacity import Places
from convoy.fleet.status import (
    ConnectedProvider,
    FleetRecord,
    FleetStatus,
    GoneProvider,
    OfferedModel,
    RefusedProviders,
)

DEMO = OfferedModel("demo", 1, {"self_signed": 1}, 3, 2048, 2)


def provider(name: str, **changes: object) -> ConnectedProvider:
    made: dict[str, object] = dict.fromkeys(("why", "software"), "convoy")
    made |= {
        "identity": "01" * 32,
        "level": "self_signed",
        "members": {},
        "absent": (),
        "models": {"demo": 1},
    }
    made |= {"draining": False, "template_tokens": {}, "unbilled_tokens": 0, "failed_proofs": 0}
    made |= {"since_unix_s": time.time() - 7200, "answers": 7, "failures": 1}
    made |= {"places": {"demo": Places(4, 1, 12.5, 2048, on_trial=True)}}
    return ConnectedProvider(name, **(made | changes))  # type: ignore[arg-type]


def record(providers: list[ConnectedProvider], num_providers: int, unapproved: list[str]) -> FleetRecord:
    now_s = time.time()
    return FleetRecord(
        coordinator_key="02" * 32,
        num_providers=num_providers,
        providers=providers,
        gone=[GoneProvider("beta", "03" * 32, "none", "its socket ended", now_s - 120, "lost")],
        unapproved=unapproved,
        refusals=[RefusedProviders("a \x1b[2Jhello", 2, now_s)],
        num_lost=1,
        num_removed=2,
        outcomes={"complete": 5, "queue_full": 1},
        retries=4,
        sealed=3,
    )


def drawn(status: FleetStatus, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as found:
        console.print(fleet_picture(status, (10.0, 2.5), width))
    return found.get()


def status(found: FleetRecord | None, offered: list[OfferedModel] | None = None) -> FleetStatus:
    return FleetStatus(True, "1 provider", 1, 3, 50, 100, offered or [DEMO], found)


def test_providers_models_and_requests_are_told_and_no_text_of_theirs_draws() -> None:
    keys = [f"{number:064x}" for number in range(9)]
    said = drawn(status(record([provider("alpha [red]")], 1, keys)))
    lines = [line.rstrip() for line in said.splitlines()]
    assert lines[0] == "fleet  ready: 1 provider"
    assert lines[1] == "1 running, 3 waiting; 2 of 4 places taken; 10.0 tokens/s generated, 2.5 of prompts"
    assert lines[2] == (
        "5 complete, 1 ended otherwise, 4 tried again, 3 came sealed; providers lost 1, removed 2"
    )
    assert f"waits for approval: convoy coordinator providers --approve {keys[7]} NAME" in lines
    assert keys[8] not in said
    assert "and 1 more" in lines
    assert "beta is lost since 2 min: its socket ended" in lines
    assert any(line.startswith("refused 2 times, last 0 s ago: a ") for line in lines)
    assert "\x1b" not in said
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert " ".join(rows["alpha"]) == "[red] demo 2 of 4 self_signed 12.5 tokens/s 7 1 2 h on trial"
    assert " ".join(rows["demo"]) == "1 (1 self_signed) 2 3 2048"


def test_an_account_is_shown_no_provider_and_a_long_list_is_cut() -> None:
    models = [OfferedModel(f"m{number:03}", 0, {}, 0, 0, None) for number in range(103)]
    said = drawn(status(None, models), 80)
    assert "an API key sees the models, and the requests of its own account" in said
    assert "place" not in said
    assert "m099" in said
    assert "m100" not in said
    assert "and 3 more" in said
    many = [provider(f"p{number:03}", models={}, places={}) for number in range(102)]
    said = drawn(status(record(many, 2000, [])), 80)
    assert "and 1,900 more" in said
    assert max(map(len, said.splitlines())) <= 80
