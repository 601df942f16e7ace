"""``--metrics``: the address for scrapes of a program without another HTTP server. None by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.cluster.metrics.families import Source


def _checked(text: str | None) -> str | None:
    """Return ``text``. Raise `UsageError` for a wrong address before anything is started."""
    if text is not None:
        _parsed(text)
    return text


MetricsFlag = Annotated[
    str | None,
    typer.Option(
        callback=_checked, help="HOST:PORT where Prometheus may scrape this process.  [default: nowhere]"
    ),
]


MetricsKeyFlag = Annotated[
    Path | None, typer.Option(help="With --metrics: file with the key that a scrape must send.")
]


@contextmanager
def serving_metrics(
    text: str | None, key_file: Path | None, source: Source, tell: Callable[[str, str], None]
) -> Iterator[None]:
    """Serve metrics at HOST:PORT while the block runs; nothing for None.

    ``tell`` gets the address, and a note if it needs no key off loopback. Raises `ConfigError` if the address
    is not available, or the key file is wrong.
    """
    if text is None and key_file is not None:
        raise UsageError("--metrics-key-file is for --metrics", hint="--metrics 127.0.0.1:9464")
    if text is None:
        yield
        return
    from convoy.cluster.metrics.server import metrics_server
    from convoy.config.clear_text import is_loopback

    host, port = _parsed(text)
    here = is_loopback(host)
    hosts = frozenset({"localhost", "127.0.0.1", "[::1]", host}) if here else None
    admits = None if key_file is None else _key_check(key_file)
    with metrics_server([source], (host, port), hosts, admits) as url:
        tell("metrics", url if here or admits is not None else f"{url}, without a key")
        yield


def _key_check(file: Path) -> Callable[[dict[str, str]], bool]:
    """Return a function that tells whether a request's headers carry a key of ``file``."""
    from convoy.api.keys.keys import KeyRing, key_of
    from convoy.api.refusals import Unauthenticated

    ring = KeyRing.open(file)

    def admits(headers: dict[str, str]) -> bool:
        try:
            ring.find(key_of(headers))
        except Unauthenticated:
            return False
        return True

    return admits


def _parsed(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise UsageError(f"--metrics is {text[:80]!r}, expected HOST:PORT", hint="--metrics 127.0.0.1:9464")
    return host.strip("[]"), int(port)
