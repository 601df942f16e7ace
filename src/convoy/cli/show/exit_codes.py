"""Exit codes tell a script or a supervisor how to treat an error. The numbers are those of `sysexits.h`."""

from __future__ import annotations

import errno

from convoy.errors import (
    ConfigError,
    ConvoyError,
    HandshakeLate,
    HubUnreachable,
    IdentityError,
    LinkBroken,
    ModelError,
    PeerUnreachable,
    QueueFull,
    RosterError,
    SpanError,
    Unavailable,
    UsageError,
)

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_RETRY = 75
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130

# The nearest class of an error decides. Any other error is EXIT_FAILURE.
_BY_CLASS: dict[type[BaseException], int] = {
    UsageError: EXIT_USAGE,
    ConfigError: EXIT_CONFIG,
    IdentityError: EXIT_CONFIG,
    RosterError: EXIT_CONFIG,
    SpanError: EXIT_CONFIG,
    ModelError: EXIT_CONFIG,
    HubUnreachable: EXIT_RETRY,
    QueueFull: EXIT_RETRY,
    PeerUnreachable: EXIT_RETRY,
    HandshakeLate: EXIT_RETRY,
    LinkBroken: EXIT_RETRY,
    Unavailable: EXIT_RETRY,
}


def exit_code(error: ConvoyError) -> int:
    """Return the exit code for an error that ends a command."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
        # Another process has the port. It may be about to end.
        return EXIT_RETRY
    return next((_BY_CLASS[kind] for kind in type(error).__mro__ if kind in _BY_CLASS), EXIT_FAILURE)
