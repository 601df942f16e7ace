"""The abilities of this machine, told to the others in `Hello`."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping

import msgspec

from convoy import __version__
from convoy.cluster.options import MemberOptions
from convoy.config.kernels import (
    AUTO,
    CUDA_KERNEL,
    EXACT,
    EXACT_KERNELS,
    KERNELS,
    MLX_KERNELS,
    form_of,
    on_device,
    quantized_kernel,
)
from convoy.errors import Incompatible
from convoy.model.backends.host.checks.bits import bits_digest
from convoy.model.backends.host.checks.selfcheck import available_kernels
from convoy.model.device import (
    HOST,
    MLX,
    RANKS,
    choose_devices,
    describe_devices,
    device_memory_bytes,
    kernels_on,
)
from convoy.model.kernels.registry import own_form
from convoy.plan.memory.free import free_bytes, total_bytes
from convoy.plan.memory.memory import MEMORY_SHARE
from convoy.wire.messages.control import MAX_OFFER_BYTES, Hello

# The kernel of a plan with stages that run several kernels.
MIXED = "mixed"
# The types in which hidden states may cross a link.
_DTYPES = ("float32", "bfloat16")


def make_hello(options: MemberOptions) -> Hello:
    """Examine this machine once, and return its greeting. The kernels are those that passed here, best first.

    Where `auto` chooses MLX, those of the host follow: MLX does not run every model.

    Raises `UsageError` for a device that is not here.
    """
    devices = choose_devices(options.device, options.kernel)
    on_host = devices == (HOST,)
    kernels = [] if on_host else kernels_on(devices[0], options.kernel)
    if on_host or (options.device == AUTO and devices == (MLX,)):
        kernels += available_kernels(options.kernel, num_threads=options.num_threads)
    exact = next((kernel for kernel in kernels if kernel in EXACT_KERNELS), None)
    return Hello(
        software=__version__,
        dtypes=sorted(_DTYPES, key=lambda dtype: dtype != options.activation_dtype),
        kernels=kernels,
        memory_bytes=min(_memory_bytes(options.memory_bytes, devices), MAX_OFFER_BYTES),
        num_threads=options.num_threads or os.cpu_count() or 1,
        platform=f"{platform.system()}-{platform.machine()}",
        bits="" if exact is None else bits_digest(),
        device=options.device if RANKS in options.device else describe_devices(devices),
        unpacks=exact is not None and own_form(exact) != exact,
    )


def without_mlx(hello: Hello) -> Hello:
    """Return a greeting without kernels of MLX. One that offers no others is returned as it is."""
    kept = [kernel for kernel in hello.kernels if kernel not in MLX_KERNELS]
    if not kept or len(kept) == len(hello.kernels):
        return hello
    return msgspec.structs.replace(hello, kernels=kept, device=HOST)


def other_bits(hellos: Mapping[str, Hello], head: str, kernel: str) -> list[str]:
    """Return the members that compute other bits than the head.

    A text may change when layers move to or from them. Empty if ``kernel`` is not exact, because then
    equal bits are not promised.
    """
    if kernel not in EXACT_KERNELS or head not in hellos:
        return []
    return sorted(name for name, hello in hellos.items() if hello.bits != hellos[head].bits)


def _memory_bytes(granted: int, devices: tuple[str, ...]) -> int:
    """Return the granted memory, at most the devices' own; 0 grants most of the free memory."""
    if devices != (HOST,):
        free = device_memory_bytes(devices)
        return min(granted, free) if granted else free
    return min(granted, total_bytes()) if granted else int(free_bytes() * MEMORY_SHARE)


def agree_kernels(
    hellos: Mapping[str, Hello], head: str, in_use: Collection[str] = frozenset()
) -> dict[str, str]:
    """Return the kernel of each member: members on devices have their own, and all hosts have one.

    Members on devices that offer a host's kernel too run that where a host insists on it.

    ``in_use`` are the kernels of earlier plans: only the same host kernel continues its texts unchanged.
    Raises `Incompatible`, naming the member and the kernel that it lacks.
    """
    on_devices = _on_devices(hellos, head)
    of_hosts = next((kernel for kernel in in_use if not on_device(kernel)), None)
    if in_use and not any(map(on_device, in_use)) and of_hosts is not None:
        _require(of_hosts, hellos)
        return dict.fromkeys(hellos, of_hosts)
    insists = next((name for name, hello in hellos.items() if hello.kernels == [EXACT]), None)
    if on_devices and insists is not None:
        if not all(EXACT in hellos[name].kernels for name in on_devices):
            raise _no_kernel(EXACT, insists, hellos)
        on_devices = {}
    on_hosts = [name for name in hellos if name not in on_devices]
    chosen = dict(on_devices)
    if on_hosts:
        lead = head if head in on_hosts else on_hosts[0]
        hosts = {name: hellos[name] for name in on_hosts}
        if of_hosts is not None:
            _require(of_hosts, hosts)
        chosen |= dict.fromkeys(on_hosts, of_hosts or _shared(hosts, lead))
    return chosen


def _on_devices(hellos: Mapping[str, Hello], head: str) -> dict[str, str]:
    """Return the kernel of each member on a device: rounded like the head's weights, if it offers that."""
    led = hellos[head].kernels[0] if head in hellos else CUDA_KERNEL
    quantize = KERNELS[led].quantize if led in KERNELS else ""
    wanted = CUDA_KERNEL
    if on_device(led):
        wanted = led
    elif quantize:
        wanted = quantized_kernel(CUDA_KERNEL, quantize)
    offered = {
        name: hello.kernels for name, hello in hellos.items() if any(map(on_device, hello.kernels[:1]))
    }
    return {name: wanted if wanted in kernels else kernels[0] for name, kernels in offered.items()}


def can_take_part(hello: Hello, in_use: Collection[str]) -> bool:
    """Return whether a member runs one of ``in_use``. Any does if that is empty or has a device's kernel."""
    return not in_use or any(on_device(kernel) or kernel in hello.kernels for kernel in in_use)


def holds_kv(kernel: str, asked: str) -> bool:
    """Return whether stages with ``kernel`` hold K/V in the dtype ``asked``."""
    return asked == AUTO or (kernel in KERNELS and asked in KERNELS[kernel].kv_dtypes)


def require_kv(asked: str, kernels: Mapping[str, str]) -> None:
    """Raise `Incompatible`, with both dtypes, for a member whose kernel does not hold K/V as ``asked``."""
    for name, kernel in kernels.items():
        if not holds_kv(kernel, asked):
            own = " or ".join(KERNELS[kernel].kv_dtypes if kernel in KERNELS else ())
            raise Incompatible(
                f"kv_dtype is {asked}, but {name} runs {kernel}, which holds K/V as {own or 'none'}",
                hint="choose a kv_dtype that every member holds, or leave it at auto",
            )


def _require(kernel: str, hellos: Mapping[str, Hello]) -> None:
    lacking = next((name for name, hello in hellos.items() if kernel not in hello.kernels), None)
    # Another kernel would change the text of running requests.
    if lacking is not None:
        raise Incompatible(
            f"{lacking} cannot run the kernel {kernel}, which is in use",
            hint="start that member with another kernel, or serve with one that all can run",
        )


def _shared(hellos: Mapping[str, Hello], lead: str) -> str:
    """Return the lead's best kernel that every member can run. Raises `Incompatible` if there is none."""
    for kernel in hellos[lead].kernels:
        if all(kernel in hello.kernels for hello in hellos.values()):
            return kernel
    raise _no_kernel(hellos[lead].kernels[0], lead, hellos)


def _no_kernel(kernel: str, lead: str, hellos: Mapping[str, Hello]) -> Incompatible:
    lacking = next(name for name, hello in hellos.items() if kernel not in hello.kernels)
    return Incompatible(
        f"{lead} asks for the kernel {kernel}, but {lacking} can run {', '.join(hellos[lacking].kernels)}",
        hint='set kernel = "auto" in the [model] section on every member',
    )


def agree_dtype(hellos: Mapping[str, Hello], head: str, kernels: Collection[str]) -> str:
    """Return the type in which hidden states cross links.

    It is bfloat16 if a stage on a device rounds them to that anyway, else the head's first choice. Raises
    `Incompatible` naming both.
    """
    rounds = any(on_device(kernel) and form_of(kernel).dtype == "bfloat16" for kernel in kernels)
    wanted = "bfloat16" if rounds else hellos[head].dtypes[0]
    for name, hello in hellos.items():
        if wanted not in hello.dtypes:
            raise Incompatible(
                f"{head} sends activations as {wanted}, but {name} takes {', '.join(hello.dtypes)}",
                hint="set the same activation_dtype in the [model] section on every member",
            )
    return wanted
