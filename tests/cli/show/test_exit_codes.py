"""Every error has the exit code that says whether a retry helps."""

from __future__ import annotations

import errno

import pytest

from convoy.cli.show.exit_codes import exit_code
from convoy.errors import (
    AttestationError,
    ConfigError,
    ConvoyError,
    Draining,
    HandshakeError,
    HandshakeLate,
    HubUnreachable,
    IdentityError,
    LinkBroken,
    ModelError,
    NotReady,
    PeerBusy,
    PeerUnreachable,
    PlanError,
    QueueFull,
    RosterError,
    SpanError,
    StageLost,
    UsageError,
)
from convoy.sdk.endpoint import ServerBusy


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (UsageError, 2),
        (ConfigError, 78),
        (IdentityError, 78),
        (RosterError, 78),
        (SpanError, 78),
        (ModelError, 78),
        (PeerUnreachable, 75),
        (PeerBusy, 75),
        (HandshakeLate, 75),
        (LinkBroken, 75),
        (HubUnreachable, 75),
        (QueueFull, 75),
        (NotReady, 75),
        (Draining, 75),
        (StageLost, 75),
        (ServerBusy, 75),
        (PlanError, 1),
        (HandshakeError, 1),
        (AttestationError, 1),
        (ConvoyError, 1),
    ],
)
def test_an_errors_class_decides_the_exit_code(kind: type[ConvoyError], code: int) -> None:
    assert exit_code(kind("told")) == code


def test_a_port_that_another_process_has_may_be_free_later() -> None:
    def listen() -> None:
        try:
            raise OSError(errno.EADDRINUSE, "address already in use")
        except OSError as error:
            raise ConfigError("port 7777 is taken") from error

    with pytest.raises(ConfigError) as raised:
        listen()
    assert exit_code(raised.value) == 75
