"""Put compiled kernels into the wheel. Hatchling runs this as it builds one.

The wheel then has a platform: this machine's, or the one of `TARGETS` that `WHEEL_TARGET` names in the
environment. For another platform than this machine's, the compiler is that of the package ziglang. Without
a C compiler, or on a machine that is none of them, the wheel has neither kernels nor a platform.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).resolve().parents[1]


class Target(NamedTuple):
    """Describe a platform: what Python calls it, the end of a wheel's name, and what zig calls it."""

    system: str
    machine: str
    tag: str
    zig: str


TARGETS = {
    "linux-x86_64": Target("linux", "x86_64", "py3-none-linux_x86_64", "x86_64-linux-gnu.2.28"),
    "linux-aarch64": Target("linux", "aarch64", "py3-none-linux_aarch64", "aarch64-linux-gnu.2.28"),
    "macos-arm64": Target("darwin", "arm64", "py3-none-macosx_11_0_arm64", "aarch64-macos.11.0"),
}
# Architectures by the names of gcc and clang, and by zig's.
_ZIGS = {
    "-march=armv8.2-a+dotprod+i8mm": "-mcpu=generic+dotprod+i8mm",
    "-march=armv8.2-a+dotprod": "-mcpu=generic+dotprod",
    "-march=armv8-a": "-mcpu=generic",
}


class WheelKernels(BuildHookInterface[Any]):
    """Compile the kernels for each instruction set, and name the files by the digest of their sources."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to the wheel. An editable install gets none: its sources may change."""
        target = _target()
        if version == "editable" or target is None:
            return
        # The environment of a build has no other package of the project's.
        sys.path.insert(0, str(_ROOT / "src"))
        from convoy.errors import SelfCheckError
        from convoy.model.kernels.native.build import PREBUILT, compile_to, own_sets

        compiler = _compiler(target)
        if compiler is None:
            self.app.display_warning("no C compiler was found: the wheel has no compiled kernels")
            return
        self._folder = tempfile.TemporaryDirectory()
        refused: SelfCheckError | None = None
        for one in own_sets(target.machine):
            place = Path(self._folder.name) / one.prebuilt.name
            own = one if _is_own(target) else replace(one, architecture=_ZIGS.get(one.architecture, ""))
            try:
                compile_to(place, compiler, own)
            except SelfCheckError as error:
                # An old compiler of this machine may not know the newest instructions. zig knows all.
                if not _is_own(target):
                    raise
                self.app.display_warning(f"the wheel has no kernels for {one.name}: {error.message}")
                refused = error
                continue
            build_data["force_include"][str(place)] = str(PREBUILT.relative_to(_ROOT / "src") / place.name)
        if refused is not None and not build_data["force_include"]:
            raise refused
        build_data["pure_python"], build_data["tag"] = False, target.tag

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Delete what was compiled."""
        if self._folder is not None:
            self._folder.cleanup()


def _target() -> Target | None:
    """Return the platform of the wheel, or None for a wheel of every platform. Raises ValueError."""
    named = os.environ.get("WHEEL_TARGET")
    if named is None:
        return next((one for one in TARGETS.values() if _is_own(one)), None)
    if named not in TARGETS:
        raise ValueError(f"WHEEL_TARGET is {named!r}, expected one of {', '.join(TARGETS)}")
    return TARGETS[named]


def _is_own(target: Target) -> bool:
    return (target.system, target.machine) == (sys.platform, platform.machine())


def _compiler(target: Target) -> list[str] | None:
    """Return the command of a compiler for a platform, or None without one. Raises ValueError."""
    from convoy.model.kernels.native.build import find_compiler

    if _is_own(target):
        own = find_compiler()
        return None if own is None else [own]
    if importlib.util.find_spec("ziglang") is None:
        raise ValueError(f"a wheel for {target.zig} needs the package ziglang: pip install ziglang")
    # zig's own choice would be to stop at what C leaves undefined.
    return [sys.executable, "-m", "ziglang", "cc", "-target", target.zig, "-fno-sanitize=undefined"]
