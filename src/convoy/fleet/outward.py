"""Connections that leave this machine: verified, and as this says, whatever the environment says."""

from __future__ import annotations

import ssl
from pathlib import Path

from convoy.errors import ConfigError


def verified_tls() -> ssl.SSLContext:
    """The system's authorities, and nothing of the environment, where the default one logs its secrets.

    Raises `ConfigError` where the system has none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # not `load_default_certs`, which lets SSL_CERT_FILE replace them
    paths = ssl.get_default_verify_paths()
    file, folder = Path(paths.openssl_cafile), Path(paths.openssl_capath)
    if not file.is_file() and not folder.is_dir():
        raise ConfigError(
            f"there are no certificates of authorities at {file} or in {folder}",
            hint="install the system's, for example the package ca-certificates",
        )
    context.load_verify_locations(
        str(file) if file.is_file() else None, str(folder) if folder.is_dir() else None
    )
    return context
