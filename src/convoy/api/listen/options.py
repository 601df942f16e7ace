"""Hold the HTTP server's options: address, admission, limits and timeouts."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.http_limits import HttpLimits
from convoy.api.listen.tls import TlsFiles, check_certificate
from convoy.api.traces import NO_TRACES, Traces
from convoy.config.clear_text import is_loopback
from convoy.config.table import SERVE
from convoy.errors import ConfigError

_NOT_IN_NAMES = frozenset("/:@?#[]")
_IMPLIED = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """Hold the bounds of kept streams, of all keys together and of each key.

    A stream is kept for ``deadline_s`` after its last connection. ``sleep`` waits for that.
    """

    deadline_s: float = 60.0
    max_streams: int = 256
    max_streams_each: int = 32
    max_bytes: int = 64 * 1024 * 1024
    max_bytes_each: int = 16 * 1024 * 1024
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Hold the options of the page. ``tokens`` is the folder in which ``convoy open`` leaves its tokens.

    ``invitations`` is the folder in which ``convoy invite`` asks whether a machine may come in. The page has
    the questions of the cluster with ``operator_key``, in hex. ``behind_tls_proxy`` says that browsers speak
    TLS with a proxy in front. ``clock`` measures the life of sessions, and ``now`` is the time of files, both
    in seconds.
    """

    tokens: Path | None = None
    invitations: Path | None = None
    operator_key: str = ""
    behind_tls_proxy: bool = False
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Hold the options, resolved once by the command line.

    With ``port`` 0 the system chooses one. ``allowed_hosts`` are further names of the server;
    ``*.example.org`` stands for each name directly below. Pages of ``allowed_origins`` may call the server.
    ``allow_unauthenticated`` lets a server off loopback run without ``keys``. ``tls`` names the files of a
    certificate and its key, in PEM.
    """

    host: str = SERVE.host
    port: int = SERVE.port
    keys: KeyRing | None = field(default=None, repr=False)
    allow_unauthenticated: bool = SERVE.allow_unauthenticated
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    # An upper bound: `intake` derives a lower one from a small context.
    max_body_bytes: int = 8 * 1024 * 1024
    # The messages of a chat; the parts of their contents, all together, have the same bound.
    max_messages: int = 4096
    # The field ``n``.
    max_choices: int = 16
    # Prompts in one request to /v1/completions.
    max_prompts: int = 128
    # For the whole body to arrive.
    body_timeout_s: float = 60.0
    # A long body keeps other long bodies waiting. So after its grace it must arrive at a least rate.
    body_grace_s: float = 10.0
    min_body_bytes_per_s: int = 64 * 1024
    # For a client to read the bytes that were written.
    write_timeout_s: float = 60.0
    # A silent stream sends an event or a comment this often.
    heartbeat_s: float = 5.0
    drain_s: float = SERVE.drain_s
    # Whether clients of the Responses API may continue and read their latest responses.
    store_responses: bool = SERVE.store_responses
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    access_log: bool = False
    # For connections without an admitted request.
    limits: HttpLimits = field(default_factory=HttpLimits)
    traces: Traces = NO_TRACES
    # None: the server has no page.
    page: PageOptions | None = None

    def check(self) -> None:
        """Raise `ConfigError` for options that cannot be served or should not be."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"port {self.port} is out of range, expected 0 to 65535",
                hint="--port 0 lets the system choose one",
            )
        if self.tls is not None:
            check_certificate(self.tls)
        for host in self.allowed_hosts:
            _check_host(host)
        for origin in self.allowed_origins:
            check_origin(origin)
        if self.keys is None and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without an api key: anyone who can reach it could use it",
                hint="--api-key-file FILE asks for a key (`convoy keys new FILE` makes one), --host "
                "127.0.0.1 listens on this machine alone, and allow_unauthenticated = true under [serve] in "
                "convoy.toml admits every caller",
            )

    @property
    def in_clear(self) -> bool:
        """Return whether keys and prompts cross a network without TLS."""
        return self.tls is None and not is_loopback(self.host)


def _check_host(text: str) -> None:
    """Raise `ConfigError` for text that no Host header can match."""
    name = text.removeprefix("*.")
    try:
        ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        usable = name not in {"", "*"} and not any(char in _NOT_IN_NAMES or char.isspace() for char in name)
    else:
        usable = True
    if not usable:
        raise ConfigError(
            f"the allowed host {text[:80]!r} is no name",
            hint="use --allowed-host chat.example, without a scheme, a port or a path; *.chat.example stands "
            "for all names directly below",
        )


def check_origin(text: str) -> str:
    """Return an origin in the form that browsers send. Raises `ConfigError` for text that is no origin."""
    parts = urlsplit(text.removesuffix("/").lower())
    try:
        usable = parts.scheme in _IMPLIED and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(
            f"the origin {text[:80]!r} is not valid", hint="use --allowed-origin https://chat.example"
        )
    return f"{parts.scheme}://{parts.netloc.removesuffix(_IMPLIED[parts.scheme])}"
