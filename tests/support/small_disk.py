"""A file system that is full after 128 KiB: for what is said where a disk fills up."""

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
    """At ``folder``, which is made. Skips the test where nobody may mount."""
    folder.mkdir()
    mount = [shutil.which("mount") or "/bin/mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs root, and may not be had in a container")
    try:
        yield folder
    finally:
        subprocess.run([shutil.which("umount") or "/bin/umount", str(folder)], check=True)
