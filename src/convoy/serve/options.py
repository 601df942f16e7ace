"""How the HTTP server listens, whom it lets in and how much it takes."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from convoy.errors import ConfigError
from convoy.serve.traces import NO_TRACES, Traces


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Resolved once, by the command line.

    ``port`` 0 lets the system choose. ``allowed_hosts`` are further names a loopback server may be called by.
    ``allow_unauthenticated`` lets a server off loopback run without ``api_key``.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    api_key: str | None = field(default=None, repr=False)
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024
    max_choices: int = 16  # n
    max_prompts: int = 128  # prompts in one /v1/completions
    body_timeout_s: float = 60.0  # for the whole body to arrive
    write_timeout_s: float = 60.0  # for a client to take what was written
    heartbeat_s: float = 15.0  # a stream says at least a comment this often
    drain_s: float = 30.0
    access_log: bool = False
    traces: Traces = NO_TRACES

    def check(self) -> None:
        """Raises `ConfigError` for options that cannot be served or should not be."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is out of range, expected 0 to 65535")
        if self.api_key is not None and not _is_sendable(self.api_key):
            raise ConfigError(
                "the api key is empty or has characters that no HTTP header carries",
                hint="use printable ASCII without spaces",
            )
        if self.api_key is None and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without an api key: anyone who can reach it could use it",
                hint="name a file with a key (api_key_file under [serve] in convoy.toml), listen on "
                "127.0.0.1, or let everybody in (allow_unauthenticated = true there)",
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``; a name other than localhost counts as reachable by
    others.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_sendable(key: str) -> bool:
    return bool(key) and key.isascii() and key.isprintable() and " " not in key
