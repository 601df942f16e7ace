"""Wheels for other platforms, built here by zig's compiler: the library's format and functions. None runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from convoy.model.kernels.native.build import own_sets
from support.recorded import FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
# A Mach-O file of 64 bits for ARM, and an ELF file of 64 bits, whose machine is at byte 18.
MACOS = bytes.fromhex("cffaedfe0c000001")
LINUX = bytes.fromhex("7f454c46020101")
AARCH64 = 183


def built(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "WHEEL_TARGET": target},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="pip could not install ziglang")
@pytest.mark.parametrize(
    ("target", "tag"), [("linux-aarch64", "linux_aarch64"), ("macos-arm64", "macosx_11_0_arm64")]
)
def test_a_wheel_for_arm_has_the_library_of_each_instruction_set(
    target: str, tag: str, tmp_path: Path
) -> None:
    done = built(tmp_path, target)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob(f"*-py3-none-{tag}.whl")
    archive = zipfile.ZipFile(wheel)
    kernels = {Path(name).name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    assert set(kernels) == {one.prebuilt.name for one in own_sets("arm64")}
    for library in kernels.values():
        if tag.startswith("macosx"):
            assert library.startswith(MACOS)
        else:
            assert library.startswith(LINUX)
            assert library[18] == AARCH64
        assert all(f"convoy_{name}\0".encode() in library for name in FUNCTIONS)


def test_an_unknown_target_is_refused_by_name(tmp_path: Path) -> None:
    done = built(tmp_path, "windows-arm64")
    assert done.returncode != 0
    assert "expected one of linux-x86_64, linux-aarch64, macos-arm64" in done.stderr
