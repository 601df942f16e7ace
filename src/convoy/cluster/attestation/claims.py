"""The claims of this process about its own software: the digest of its files, versions, platform."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

import convoy
from convoy import __version__
from convoy.wire.messages.claims import Claims

_PACKAGES = ("torch", "transformers", "cryptography")
_CHUNK_BYTES = 1 << 20


@functools.cache
def own_claims() -> Claims:
    """Return the claims. The first call makes them: at the start, the files are those that are loaded."""
    return Claims(
        package=package_digest(Path(convoy.__file__).resolve().parent),
        versions={
            "convoy": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        platform=f"{platform.system()} {platform.release()} {platform.machine()}"[:255],
        model="",
        layers=[],
    )


def package_digest(folder: Path) -> str:
    """Return the hex SHA-256 over a line of path and SHA-256 for each file below ``folder``, sorted by path.

    Compiled bytecode is left out: it contains the time of its compilation, and Python makes it from the
    files again.
    """
    total = hashlib.sha256()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            total.update(f"{name}\0{_digest(path)}\n".encode())
    return total.hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
