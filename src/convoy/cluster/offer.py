"""What this machine can do, said to the others in `Hello`."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import psutil

from convoy import __version__
from convoy.cluster.options import MemberOptions
from convoy.errors import Incompatible
from convoy.model.bits import bits_digest
from convoy.model.selfcheck import EXACT, available_kernels
from convoy.wire.messages import Hello

# Left to the operating system and to the buffers of a step.
_MEMORY_SHARE = 0.8


def make_hello(options: MemberOptions) -> Hello:
    """Look at this machine once. The kernels are those whose self-check passed here, best first."""
    kernels = available_kernels(options.kernel, num_threads=options.num_threads)
    return Hello(
        software=__version__,
        dtypes=[options.activation_dtype],
        kernels=kernels,
        memory_bytes=_memory_bytes(options.memory_bytes),
        num_threads=options.num_threads or os.cpu_count() or 1,
        platform=f"{platform.system()}-{platform.machine()}",
        bits=bits_digest() if EXACT in kernels else "",
    )


def other_bits(hellos: Mapping[str, Hello], head: str, kernel: str) -> list[str]:
    """Who computes other bits than the head, by name: a text may change when layers move to them or away.

    Nobody where ``kernel`` is not exact: nothing is promised to the bit there.
    """
    if kernel != EXACT or head not in hellos:
        return []
    return sorted(name for name, hello in hellos.items() if hello.bits != hellos[head].bits)


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
