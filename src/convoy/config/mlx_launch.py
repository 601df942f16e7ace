"""Tell whether MLX's own launcher started this process."""

from __future__ import annotations

import os

# What the launcher sets for its processes, by backend: all, ring, JACCL, NCCL.
_VARIABLES = ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_WORLD_SIZE")


def launcher_variable() -> str | None:
    """Return a variable that the launcher has set for this process, or None."""
    return next((name for name in _VARIABLES if name in os.environ), None)
