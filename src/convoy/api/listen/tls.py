"""Load the server's certificate from PEM files, and check it before the server starts."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from convoy.api.keys.key_file import check_private
from convoy.errors import ConfigError

TlsFiles = tuple[str, str]
_NO_PASSPHRASE = ""


def load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Give ``context`` the certificate and key in ``files``. Raises `ConfigError`, naming the file."""
    certificate, key = files
    for file in files:
        try:
            with open(file, "rb") as opened:
                # Only the key is secret; a certificate may be readable by all.
                if file == key:
                    check_private(os.fstat(opened.fileno()), Path(key), "the TLS key")
        except OSError as error:
            reason = (error.strerror or "unreadable").lower()
            raise ConfigError(
                f"cannot read {file}: {reason}", hint="check the files of --tls-certificate and --tls-key"
            ) from None
    try:
        # Without a passphrase argument the library would ask for one on the terminal.
        context.load_cert_chain(certificate, key, _NO_PASSPHRASE)
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"{certificate} and {key} are no certificate and its key",
            hint="give --tls-certificate and --tls-key files in PEM, with a key that has no passphrase",
        ) from None


def check_certificate(files: TlsFiles) -> None:
    """Raise `ConfigError` if the server cannot use the files."""
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
