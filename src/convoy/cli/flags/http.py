"""Flags for the HTTP server of a head: keys, TLS, host names and origins."""

from __future__ import annotations

from typing import Any

from convoy.cli.flags.table import flag
from convoy.cli.show.output import print_note
from convoy.config.durations import DURATION_FORMS, duration_s
from convoy.errors import UsageError

_LISTS = {"allowed_host": "allowed_hosts", "allowed_origin": "allowed_origins", "also": "also"}
_KEYS = (
    *("host", "port", "api_key_file", "tls_certificate", "tls_key", "store_responses", *_LISTS),
    *("served_model_name", "keep_alive", "http_process"),
)
# By parameter. A flag that may be repeated has a name for one value, and the file's key one for all.
HTTP_FLAGS: dict[str, Any] = {name: flag("serve", _LISTS.get(name, name)) for name in _KEYS}


def serve_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of [serve] for these flags. Lists become tuples, as the file has them.

    Raises UsageError for a `--keep-alive` that is no duration.
    """
    kept = given.get("keep_alive")
    if kept is not None and duration_s(kept) is None:
        raise UsageError(f"--keep-alive is {kept[:40]!r}, expected {DURATION_FORMS}", hint="--keep-alive 5m")
    return {
        _LISTS.get(name, name): tuple(value) if name in _LISTS else value for name, value in given.items()
    }


def warn_in_clear(host: str) -> None:
    """Warn that keys and prompts cross a network in clear text."""
    print_note(
        f"warning: {host} has no TLS: keys and prompts cross the network in clear text "
        "(give --tls-certificate and --tls-key, or put a TLS proxy before it)"
    )
