"""Tell whether MLX's own launcher started this process."""

from __future__ import annotations

import os

# What the launcher sets for its processes: all backends but MPI, then ring, JACCL and NCCL.
_OF_MLX = ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_WORLD_SIZE")
# What Open MPI, MPICH and Intel's MPI set for theirs.
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def launcher_variable() -> str | None:
    """Return a variable that the launcher, or MPI's, has set for this process, or None."""
    return next((name for name in (*_OF_MLX, *_OF_MPI) if name in os.environ), None)
