"""Verify the connections that leave this machine, whatever the environment says."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

from convoy.errors import ConfigError


def why_unreachable(error: BaseException) -> str:
    """Return the reason of a connection error in words, for the exceptions of any library."""
    causes = [error]
    while (deeper := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 10:
        causes.append(deeper)
    # The system's own error is the deepest.
    for one in reversed(causes):
        if isinstance(one, TimeoutError):
            return "it did not answer in time"
        if isinstance(one, ssl.SSLError):
            return f"TLS: {(getattr(one, 'reason', '') or 'failed').lower().replace('_', ' ')}"
        if isinstance(one, socket.gaierror):
            return "its name is not known"
        if isinstance(one, OSError) and one.errno:
            return os.strerror(one.errno).lower()
    name = type(error).__name__
    return "it did not answer in time" if "Timeout" in name else "the connection ended"


def verified_tls() -> ssl.SSLContext:
    """Return a context with the system's authorities, and nothing of the environment.

    The default context writes its secrets to the file that SSLKEYLOGFILE names. Raises `ConfigError` if the
    system has no authorities.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # `load_default_certs` would let SSL_CERT_FILE replace them.
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
