"""A file system that is full after 128 KiB, to test messages about a full disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_small_disk(folder: Path) -> Iterator[Path]:
    """Mount it at the new ``folder`` until the block ends. Skip the test if mounting is not allowed."""
    folder.mkdir()
    mount = [shutil.which("mount") or "/bin/mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs root, and may not be had in a container")
    try:
        yield folder
    finally:
        subprocess.run([shutil.which("umount") or "/bin/umount", str(folder)], check=True)
