"""Choose the devices on which a member computes: this host, MLX, or CUDA devices, with their free memory."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable

import torch

from convoy.config.kernels import (
    AUTO,
    CUDA_FP8,
    CUDA_KERNEL,
    CUDA_KERNELS,
    KERNELS,
    MLX_BF16,
    MLX_F32,
    MLX_KERNELS,
    PLAIN,
    on_device,
)
from convoy.errors import ModelError, UsageError
from convoy.model import mlx_device
from convoy.plan.memory.memory import CUDA_MEMORY_SHARE

_DOCTOR = "`convoy doctor` shows this machine's devices"

HOST = "cpu"
CUDA = "cuda"
MLX = "mlx"
# separates the devices of one member's ranks, which share every layer
RANKS = "+"
# the CUDA kernel for each kernel that may be requested; kernels that are missing run on the host alone
_ON_CUDA = {
    AUTO: CUDA_KERNEL,
    **{name: kernel.cuda_name for name, kernel in KERNELS.items() if kernel.cuda_name},
    **{name: name for name in CUDA_KERNELS},
}
# the same on MLX
_ON_MLX = {AUTO: MLX_BF16, PLAIN: MLX_F32, **{name: name for name in MLX_KERNELS}}
_KERNELS = {CUDA: _ON_CUDA, MLX: _ON_MLX}
# those offered for "auto", best first
_OFFERED = {CUDA: CUDA_KERNELS, MLX: MLX_KERNELS}
_MAX_DEVICES = 16
_DEVICE = re.compile(r"(?:cpu|mlx|cuda(?::[0-9]{1,3})?)\Z", re.ASCII)


def runs_on(device: str, kernel: str) -> bool:
    """Tell whether ``kernel`` may be requested of a stage on ``device``, which is not the host."""
    return kernel in _KERNELS[_kind_of(device)]


def kernel_on(device: str, kernel: str, asked_by: str = "[model] kernel") -> str:
    """Return the device's kernel for the requested ``kernel``.

    Raises UsageError for one of hosts alone. Its hint names ``asked_by``, the flag or key with the kernel.
    """
    if not runs_on(device, kernel):
        raise UsageError(
            f"kernel {kernel} does not run on {_kind_of(device)}",
            hint=f"leave out {asked_by}, or compute on cpu",
        )
    return _KERNELS[_kind_of(device)][kernel]


def kernels_on(device: str, kernel: str) -> list[str]:
    """Return the kernels that a member on ``device`` offers for the requested ``kernel``, best first."""
    return list(_OFFERED[_kind_of(device)]) if kernel == AUTO else [kernel_on(device, kernel)]


def _kind_of(device: str) -> str:
    return re.split("[:,+]", device)[0]


def or_host(device: str, kernel: str) -> str:
    """Return ``device``, or the host for a kernel of hosts, which `auto` offers beside those of MLX."""
    return HOST if device == MLX and not on_device(kernel) else device


def stage_device(wish: str, kernel: str = AUTO) -> str:
    """Return a stage's device text, as `choose_devices`; joined devices give one device per rank."""
    chosen = choose_devices(wish, kernel)
    if RANKS not in wish:
        return ",".join(chosen)
    return RANKS.join(_joined(wish) if chosen == (HOST,) else chosen)


def _joined(wish: str) -> list[str]:
    """Return the devices of one member's ranks. Raises UsageError for devices that cannot be joined."""
    names = [name.strip() for name in wish.split(RANKS)]
    known = all(_DEVICE.match(name) for name in names)
    mixed = HOST in names and set(names) != {HOST}
    if not known or len(names) > _MAX_DEVICES or mixed or MLX in names:
        raise UsageError(
            f"device is {wish[:80]!r}: ranks of one member are joined on the host or on CUDA devices, "
            "such as cpu+cpu or cuda:0+cuda:1"
        )
    return names


def choose_devices(
    wish: str,
    kernel: str = AUTO,
    asked_by: str = "[model] kernel",
    *,
    why_not_mlx: Callable[[], str] | None = None,
) -> tuple[str, ...]:
    """Return the devices for ``wish``.

    ``wish`` is auto, cpu, mlx, cuda, cuda:N, several cuda:N separated by commas, or cpu+cpu or
    cuda:0+cuda:1 for ranks. auto means the first CUDA device, if there is one and the requested kernel does
    not run on hosts alone. Without one, and without a requested kernel, it means MLX unless ``why_not_mlx``
    has a reason; None asks `mlx_device.why_not_default`.

    Raises UsageError for an invalid device, a device that this machine lacks, and a ``kernel`` that does not
    run there; its hint names ``asked_by``, the flag or key with the kernel.
    """
    if kernel == CUDA_FP8:
        asked_by = "--compute fp8"
    if wish == AUTO:
        reason = why_no_cuda()
        if kernel == CUDA_FP8 and reason:
            raise UsageError(
                f"kernel {kernel} runs on CUDA, and {reason}",
                hint=f"leave out {asked_by}; --compute int8 is for CPUs",
            )
        if kernel in _ON_CUDA and not reason:
            return ("cuda:0",)
        why_not = why_not_mlx or mlx_device.why_not_default
        return (MLX,) if kernel == AUTO and not why_not() else (HOST,)
    names = _joined(wish) if RANKS in wish else split_devices(wish)
    if names == [HOST] or (RANKS in wish and HOST in names):
        if on_device(kernel):
            raise UsageError(f"kernel {kernel} does not run on cpu", hint=f"leave out {asked_by}")
        return (HOST,)
    if names == [MLX]:
        kernel_on(MLX, kernel, asked_by)
        if reason := mlx_device.why_no_mlx():
            raise UsageError(f"device is {MLX}, and {reason}", hint=mlx_device.how_to_run())
        return (MLX,)
    if HOST in names or MLX in names:
        raise UsageError(
            f"device is {wish}, expected cpu, mlx or CUDA devices, and one kind in a member",
            hint="start a member for each: a route may have stages on all of them",
        )
    kernel_on(CUDA, kernel, asked_by)
    return _require_cuda(wish, names)


def deal_devices(wish: str, num_members: int, kernel: str = AUTO) -> list[str]:
    """Return the device of each of several members on this machine.

    If there are more devices than members, each member gets several adjacent ones. If there are fewer,
    members share them in turn. auto deals all devices that `choose_devices` might choose. Raises UsageError
    as it does.
    """
    if RANKS in wish:
        return [stage_device(wish, kernel)] * num_members
    if wish == AUTO:
        names = list(choose_devices(AUTO, kernel))
        if names == [MLX]:
            # Each chooses by the model, too.
            return [AUTO] * num_members
        if names != [HOST]:
            names = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    else:
        names = split_devices(wish)
    if len(names) <= num_members:
        dealt = [names[member % len(names)] for member in range(num_members)]
    else:
        cuts = [len(names) * member // num_members for member in range(num_members + 1)]
        dealt = [",".join(names[a:b]) for a, b in itertools.pairwise(cuts)]
    # with members on the host and on CUDA, the kernel is that of the members on the host
    mixed = HOST in dealt
    return [
        ",".join(choose_devices(device, AUTO if mixed and device != HOST else kernel)) for device in dealt
    ]


def split_devices(text: str) -> list[str]:
    """Return the names between commas, whether or not they exist here. Raises UsageError."""
    names = [name.strip() for name in text.split(",")]
    if len(names) > _MAX_DEVICES or not all(_DEVICE.match(name) for name in names):
        raise UsageError(
            f"device is {text[:80]!r}, expected auto, cpu, mlx, cuda, cuda:N, "
            f"or at most {_MAX_DEVICES} cuda:N"
        )
    return names


def why_no_cuda() -> str:
    """Return the reason why no stage runs on CUDA here, or ""."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this build of torch has no CUDA)"
        return f"this machine has no CUDA device{built}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def device_memory_bytes(devices: tuple[str, ...]) -> int:
    """Return the bytes that MLX, or CUDA devices together, have for a member: most of their free memory."""
    if devices == (MLX,):
        return mlx_device.memory_bytes()
    return int(sum(torch.cuda.mem_get_info(torch.device(name))[0] for name in devices) * CUDA_MEMORY_SHARE)


def describe_devices(devices: tuple[str, ...]) -> str:
    """Describe devices as the picture of a cluster shows them: ``cpu``, or ``cuda:0 (NVIDIA H200)``."""
    if devices == (HOST,):
        return HOST
    if devices == (MLX,):
        return mlx_device.describe()
    kinds = [torch.cuda.get_device_name(torch.device(name)) for name in devices]
    if len(set(kinds)) == 1:
        return f"{','.join(devices)} ({kinds[0]})"
    return ", ".join(f"{name} ({kind})" for name, kind in zip(devices, kinds, strict=True))


def check_device(name: str) -> torch.device:
    """Return ``cuda`` or ``cuda:N`` with its number. Raises ModelError if this machine lacks it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is not known, expected cpu, cuda or cuda:N") from error
    if device.type != "cuda":
        raise ModelError(f"device {name!r} is not supported, expected cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise ModelError(f"this machine has {count} CUDA devices, and {name!r} is asked for", hint=_DOCTOR)
    return torch.device("cuda", index)


def _require_cuda(wish: str, names: list[str]) -> tuple[str, ...]:
    reason = why_no_cuda()
    if reason:
        raise UsageError(
            f"device is {wish}, and {reason}",
            hint='set device = "cpu", or install a CUDA build of torch, which brings Triton',
        )
    count = torch.cuda.device_count()
    numbers = [int(name.partition(":")[2] or 0) for name in names]
    if max(numbers) >= count:
        raise UsageError(
            f"device is {wish}, and this machine has {count} CUDA devices, from cuda:0 on", hint=_DOCTOR
        )
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"device is {wish}, which names a device twice", hint="name each device once")
    return tuple(f"cuda:{number}" for number in numbers)
