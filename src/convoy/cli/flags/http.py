"""Flags for the HTTP server of a head: keys, TLS, host names and origins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.show.output import print_note

HostFlag = Annotated[str | None, typer.Option(help="HTTP address.  [default: 127.0.0.1]")]
PortFlag = Annotated[int | None, typer.Option(help="HTTP port; 0 lets the system choose.  [default: 8765]")]
ServerKeysFlag = Annotated[
    Path | None, typer.Option(help="File with one or more API keys: see `convoy keys`.")
]
ServerCertificateFlag = Annotated[
    Path | None, typer.Option(help="PEM certificate: answer https, with --tls-key.")
]
ServerTlsKeyFlag = Annotated[Path | None, typer.Option(help="PEM key of the certificate.")]
AllowedHostFlag = Annotated[
    list[str] | None, typer.Option(help="A further host name of this server; repeatable.")
]
AllowedOriginFlag = Annotated[
    list[str] | None, typer.Option(help="A site with pages that may call this server; repeatable.")
]
HTTP_FLAGS: dict[str, Any] = {
    "host": HostFlag,
    "port": PortFlag,
    "api_key_file": ServerKeysFlag,
    "tls_certificate": ServerCertificateFlag,
    "tls_key": ServerTlsKeyFlag,
    "allowed_host": AllowedHostFlag,
    "allowed_origin": AllowedOriginFlag,
}


def serve_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of [serve] for these flags. Lists become tuples, as the file has them."""
    lists = {"allowed_host": "allowed_hosts", "allowed_origin": "allowed_origins"}
    return {lists.get(name, name): tuple(value) if name in lists else value for name, value in given.items()}


def warn_in_clear(host: str) -> None:
    """Warn that keys and prompts cross a network in clear text."""
    print_note(
        f"warning: {host} has no TLS: keys and prompts cross the network in clear text "
        "(give --tls-certificate and --tls-key, or put a TLS proxy before it)"
    )
