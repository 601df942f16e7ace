"""Put compiled kernels into the wheel, for Linux on x86-64. Hatchling runs this as it builds one.

The wheel then has a platform. Without a C compiler, or elsewhere, it has neither kernels nor a platform.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).resolve().parents[1]
_TAG = "py3-none-linux_x86_64"


class WheelKernels(BuildHookInterface[Any]):
    """Compile the kernels for each instruction set, and name the files by the digest of their sources."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to the wheel. An editable install gets none: its sources may change."""
        if version == "editable" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        # The environment of a build has no other package of the project's.
        sys.path.insert(0, str(_ROOT / "src"))
        from convoy.model.kernels.native.build import INSTRUCTION_SETS, PREBUILT, compile_to, find_compiler

        compiler = find_compiler()
        if compiler is None:
            self.app.display_warning("no C compiler was found: the wheel has no compiled kernels")
            return
        self._folder = tempfile.TemporaryDirectory()
        for one in INSTRUCTION_SETS:
            place = Path(self._folder.name) / one.prebuilt.name
            compile_to(place, compiler, one)
            build_data["force_include"][str(place)] = str(PREBUILT.relative_to(_ROOT / "src") / place.name)
        build_data["pure_python"], build_data["tag"] = False, _TAG

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Delete what was compiled."""
        if self._folder is not None:
            self._folder.cleanup()
