"""Free TCP ports for programs that are started later on this machine."""

from __future__ import annotations

import itertools
import random
import socket
from contextlib import ExitStack

# Linux takes ports from 32768 for outgoing connections, macOS and Windows from 49152. A port below them
# cannot become another program's outgoing port before the program that it is chosen for listens on it.
_FIRST = 10_240
_COUNT = 32_768 - _FIRST

# Two processes that choose ports at the same time begin at different places, and no process offers one twice.
_candidates = itertools.count(random.SystemRandom().randrange(_COUNT))


def free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports of 127.0.0.1 on which nothing listens now."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port = _FIRST + next(_candidates) % _COUNT
            try:
                # All are held at once, and on every address: some programs listen on more than loopback.
                stack.enter_context(socket.create_server(("0.0.0.0", port)))  # noqa: S104
            except OSError:
                continue
            ports.append(port)
    return ports


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nothing listens now."""
    return free_ports(1)[0]
