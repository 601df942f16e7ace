"""What this machine can do, said to the others in `Hello`."""

from __future__ import annotations

import os
import platform

import psutil

from convoy import __version__
from convoy.cluster.options import MemberOptions
from convoy.errors import Incompatible
from convoy.model.selfcheck import available_kernels
from convoy.wire.messages import Hello

# Left to the operating system and to the buffers of a step.
_MEMORY_SHARE = 0.8


def make_hello(options: MemberOptions) -> Hello:
    """Look at this machine once. The kernels are those whose self-check passed here, best first."""
    return Hello(
        software=__version__,
        dtypes=[options.activation_dtype],
        kernels=available_kernels(options.kernel, num_threads=options.num_threads),
        memory_bytes=_memory_bytes(options.memory_bytes),
        num_threads=options.num_threads or os.cpu_count() or 1,
        platform=f"{platform.system()}-{platform.machine()}",
    )


def _memory_bytes(granted: int) -> int:
    """What the operator granted, at most what the machine has; 0 is most of what is free."""
    memory = psutil.virtual_memory()
    return min(granted, int(memory.total)) if granted else int(memory.available * _MEMORY_SHARE)


def agree_kernel(hellos: dict[str, Hello], head: str) -> str:
    """The head's best kernel that every member can run. Raises `Incompatible`, naming who lacks it."""
    for kernel in hellos[head].kernels:
        if all(kernel in hello.kernels for hello in hellos.values()):
            return kernel
    kernel = hellos[head].kernels[0]
    lacking = next(name for name, hello in hellos.items() if kernel not in hello.kernels)
    raise Incompatible(
        f"{head} asks for the kernel {kernel}, but {lacking} can run {', '.join(hellos[lacking].kernels)}",
        hint='set kernel = "auto" in the [model] section on every member',
    )


def check_dtype(hellos: dict[str, Hello], head: str) -> str:
    """The activation dtype that all members share. Raises `Incompatible` naming both."""
    wanted = hellos[head].dtypes[0]
    for name, hello in hellos.items():
        if wanted not in hello.dtypes:
            raise Incompatible(
                f"{head} sends activations as {wanted}, but {name} takes {', '.join(hello.dtypes)}",
                hint="set the same activation_dtype in the [model] section on every member",
            )
    return wanted
