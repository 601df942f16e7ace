"""The flags of commands that call a running head over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from convoy.errors import ConfigError
from convoy.sdk.endpoint import KEY_VARIABLE

UrlFlag = Annotated[str, typer.Option("--url", help="The head's HTTP address.")]
ApiKeyFlag = Annotated[
    Path | None, typer.Option("--api-key-file", help="File with the API key.  [default: CONVOY_API_KEY]")
]
CaFlag = Annotated[
    Path | None, typer.Option("--ca", help="PEM: for https, trust these certificates and no others.")
]


def client_key(api_key_file: Path | None) -> str | None:
    """Return the key in a file, otherwise the environment's, otherwise None.

    Raises ConfigError for a key that no HTTP header can carry.
    """
    if api_key_file is not None:
        from convoy.api.keys.key_file import read_client_key

        return read_client_key(api_key_file)
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"the key in {KEY_VARIABLE} has characters that no HTTP header carries",
            hint="`convoy keys new FILE` makes a key that fits",
        )
    return key or None
