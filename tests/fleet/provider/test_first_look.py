"""What a provider does if another server answers at the URL of its coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from convoy.api.service import Service
from convoy.errors import ConfigError
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.provider.first_look import check_coordinator
from convoy.fleet.provider.provide import ProvideOptions
from support.fake_service import serving_of
from support.fleet import FakeEngine, FleetUnderTest, engine_server


def look(url: str) -> None:
    asyncio.run(check_coordinator(ProvideOptions(url.replace("http", "ws", 1), {})))


def test_a_head_in_the_place_of_a_coordinator_is_named_with_what_to_do() -> None:
    service = Service((), lambda: (False, "a stage was lost"), dict, level=lambda: "none")
    with serving_of(service) as (url, _), pytest.raises(ConfigError) as caught:
        look(f"{url}/")
    place = url.replace("http", "ws", 1)
    assert caught.value.message == f"a head of Convoy answers at {place}/, expected a coordinator"
    assert "`convoy coordinator` prints its url" in (caught.value.hint or "")
    assert "--upstream" in (caught.value.hint or "")


def test_a_coordinator_says_that_it_is_one(tmp_path: Path) -> None:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(instance="test"))
    try:
        with fleet.client() as client:
            assert client.get("/health").json()["server"] == "coordinator"
            look(str(client.base_url))
    finally:
        fleet.close()


def test_a_server_that_may_stand_before_a_coordinator_or_be_away_is_no_error() -> None:
    with engine_server(FakeEngine()) as url:
        look(url)
    look(url)
