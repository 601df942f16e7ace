"""Ports that are chosen for programs which start later."""

from __future__ import annotations

import socket

import pytest

from convoy.transport.ports import free_port, free_ports

pytestmark = pytest.mark.outside


def test_ports_differ_and_are_never_offered_twice() -> None:
    chosen = free_ports(50) + [free_port() for _ in range(50)]
    assert len(set(chosen)) == 100


def test_a_port_lies_below_those_of_outgoing_connections_and_can_be_listened_on() -> None:
    port = free_port()
    assert 10_240 <= port < 32_768
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_that_is_taken_is_passed_over() -> None:
    following = free_port() + 1
    with socket.create_server(("127.0.0.1", following)):
        assert free_port() != following
