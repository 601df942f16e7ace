"""By which names a provider may have dialled a coordinator."""

from __future__ import annotations

import pytest

from convoy.fleet.coordinator.authority import LOOPBACK_NAMES, authorities_of

NAMES = ("coordinator.example", "*.fleet.example")


@pytest.mark.parametrize(
    ("host", "tls", "found"),
    [
        ("coordinator.example", True, "coordinator.example:443"),
        ("coordinator.example", False, "coordinator.example:80"),
        ("Coordinator.Example:8443", True, "coordinator.example:8443"),
        ("a.fleet.example", True, "a.fleet.example:443"),
    ],
)
def test_a_name_of_ours_counts_with_the_port_of_its_scheme(host: str, tls: bool, found: str) -> None:
    assert authorities_of((), NAMES, host, tls=tls) == (found,)


@pytest.mark.parametrize(
    "host",
    ["evil.example:1", "b.a.fleet.example", "fleet.example", "", ":443", "[::1", "coordinator.example:x"],
)
def test_a_name_that_is_not_ours_counts_for_nothing(host: str) -> None:
    assert authorities_of((), NAMES, host, tls=True) == ()


def test_loopback_has_its_names_and_what_is_stated_counts_alone() -> None:
    assert authorities_of((), LOOPBACK_NAMES, "[::1]:8780", tls=False) == ("[::1]:8780",)
    assert authorities_of(("a:1",), LOOPBACK_NAMES, "localhost:8780", tls=False) == ("a:1",)
