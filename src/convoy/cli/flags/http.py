"""Flags for the HTTP server of a head: keys, TLS, and who may call it by which name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.show.output import print_note

HostFlag = Annotated[str | None, typer.Option(help="HTTP address.  [default: 127.0.0.1]")]
PortFlag = Annotated[int | None, typer.Option(help="HTTP port; 0 lets the system choose.  [default: 8765]")]
ServerKeysFlag = Annotated[
    Path | None, typer.Option(help="File with the API key, or with several: see `convoy keys`.")
]
ServerCertificateFlag = Annotated[Path | None, typer.Option(help="PEM: answer https, with --tls-key.")]
ServerTlsKeyFlag = Annotated[Path | None, typer.Option(help="PEM: the certificate's key.")]
AllowedHostFlag = Annotated[
    list[str] | None, typer.Option(help="A further name that it is called by; may be given again.")
]
AllowedOriginFlag = Annotated[
    list[str] | None, typer.Option(help="A site whose pages may call it; may be given again.")
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
    """Return the keys of [serve] that these flags stand for; lists become what the file has."""
    lists = {"allowed_host": "allowed_hosts", "allowed_origin": "allowed_origins"}
    return {lists.get(name, name): tuple(value) if name in lists else value for name, value in given.items()}


def warn_in_clear(host: str) -> None:
    """Say that keys and prompts cross a network in clear text."""
    print_note(
        f"warning: {host} has no TLS: keys and prompts cross the network in clear text "
        "(give --tls-certificate and --tls-key, or put a TLS proxy before it)"
    )
