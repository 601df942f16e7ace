"""Examine the machine alone: versions, ciphers and their speed, memory, disk, and optional parts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from convoy.cluster.checkup.finding import Finding, fail, ok, warn
from convoy.crypto.cipher import KEY_BYTES, NONCE_BYTES, Cipher, local_ciphers
from convoy.plan.memory.free import free_bytes, total_bytes
from convoy.plan.memory.memory import format_bytes

if TYPE_CHECKING:
    from convoy.cluster.own_speed import OwnSpeed

# The least version, and the first one that is too new.
PYTHON = ((3, 11), (3, 14))
# As in pyproject.toml; a test compares them.
REQUIRED: Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "cryptography": ((50,), None),
    "msgspec": ((0, 20), None),
    "torch": ((2, 11), None),
    "transformers": ((5, 17), (6,)),
}
_MEASURE_S = 0.1
# A full record.
_BLOCK_BYTES = 1 << 17
_SLOW_BYTES_PER_S = 0.2e9
_LITTLE_MEMORY, _LITTLE_DISK = 10**9, 10**9
_SETUP = "make setup"
_UPDATE = "update the compiler, or install the wheel for Linux"
# Of the row on which norms are compared.
_NORM_SIZE = 1024


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    """Check Python's version, and that its TLS supports links."""
    shown = ".".join(map(str, version))
    least, below = (".".join(map(str, bound)) for bound in PYTHON)
    if PYTHON[0] <= version[:2] < PYTHON[1]:
        yield ok(f"Python {shown} on {platform.system()} {platform.machine()}")
    else:
        yield fail(f"Python is {shown}, expected {least} or later and below {below}", _SETUP)
    if ssl.HAS_TLSv1_3:
        yield ok(f"{ssl.OPENSSL_VERSION} with TLS 1.3")
    else:
        yield fail(f"{ssl.OPENSSL_VERSION} has no TLS 1.3", "install a Python that is built with OpenSSL 3")


def check_packages(installed: Mapping[str, str | None] | None = None) -> Iterator[Finding]:
    """Check the packages with version bounds. ``installed`` None means those of this Python."""
    found = {name: _version(name) for name in REQUIRED} if installed is None else installed
    right = []
    for name, (least, below) in REQUIRED.items():
        version = found[name]
        if version is None:
            yield fail(f"{name} is not installed", _SETUP)
            continue
        number = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
        if number < least or (below is not None and number >= below):
            wanted = ".".join(map(str, least)) + " or later"
            wanted += "" if below is None else f", below {'.'.join(map(str, below))}"
            yield fail(f"{name} is {version}, expected {wanted}", _SETUP)
        else:
            right.append(f"{name} {version}")
    if right:
        yield ok(", ".join(right))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_exact(num_threads: int | None = None) -> Iterator[Finding]:
    """Check whether exact mode holds here, with which bits, and whether compiled code runs the decodes."""
    from convoy.model.backends.host.checks.bits import bits_digest
    from convoy.model.backends.host.checks.selfcheck import why_not_exact
    from convoy.model.kernels.native.build import missing_features, own_sets
    from convoy.model.kernels.native.library import native_library, skipped_sets, why_no_native
    from convoy.model.kernels.native.norm import norm_library
    from convoy.model.kernels.registry import slow_int8, why_no_int8
    from convoy.model.kernels.stored.packed import failing_forms

    why_not = why_not_exact(num_threads)
    if why_not:
        yield warn(why_not, "members then agree to rounding, not to the bit; docs/configuration.md, kernel")
    else:
        digest = bits_digest()[:12]
        yield ok(f"exact mode holds, with bits {digest}; on members that show the same, texts are the same")
    library, reason = native_library(), why_no_native()
    made = "" if library is None else library.description
    sets = own_sets()
    missing = missing_features(sets[-1]) if sets else [platform.machine()]
    yield compiled_finding(made, reason, missing, is_exact=not why_not)
    if why_not or library is None:
        return
    for reason in skipped_sets(library.instruction_set):
        yield warn(reason, "install the wheel for this machine, or a newer C compiler")
    failing = failing_forms()
    if failing:
        yield warn(
            f"compiled code has other bits here for {', '.join(failing)}: such matrices are slow",
            "serve a checkpoint in another form from this machine",
        )
    if reason := why_no_int8():
        yield warn(f"{reason}; --compute int8 is refused", _UPDATE)
    if reason := slow_int8():
        yield warn(f"{reason}; the next instruction set computes them, more slowly", _UPDATE)
    norms = norm_library(_NORM_SIZE)
    if norms is not library:
        instead = "torch" if norms is None else norms.instruction_set.name
        yield warn(f"compiled norms have other bits here: {instead} computes them, more slowly", _UPDATE)


def compiled_finding(made: str, why_not: str, missing: Sequence[str], *, is_exact: bool) -> Finding:
    """Return whether compiled code runs here, and how it was ``made``.

    ``why_not`` says why it does not, or is empty. ``missing`` are features that the processor lacks.
    ``is_exact``: exact mode holds here.
    """
    if not why_not:
        return ok(f"decodes run on code for {made}, in the written order of sums")
    what = f"decodes run on torch's operators alone, slower and with the same bits: {why_not}"
    if not is_exact:
        return ok(what)
    return warn(
        f"{what}; exact mode unpacks the matrices of a file to float32",
        "give this member fewer layers, or more memory: `convoy plan` counts float32 for it"
        if missing
        else "install a C compiler (cc, gcc or clang), or mend that reason",
    )


def check_speed(
    kernel: str = "auto",
    num_threads: int | None = None,
    device: str = "auto",
    folder: Path | None = None,
    measure: Callable[[str, int | None, str, Path | None], OwnSpeed] | None = None,
) -> Iterator[Finding]:
    """Measure how fast this machine reads and multiplies, in the form that `convoy plan` takes.

    ``measure`` None means `own_speed`.
    """
    from convoy.cluster.own_speed import own_speed
    from convoy.config.kernels import EXACT, PLAIN
    from convoy.model.backends.host.checks.selfcheck import why_not_exact
    from convoy.model.device import HOST, choose_devices, kernel_on

    place = choose_devices(device, kernel)[0]
    if place != HOST:
        kernel = kernel_on(place, kernel)
    elif kernel == "auto":
        kernel = PLAIN if why_not_exact(num_threads) else EXACT
    found = (measure or own_speed)(kernel, num_threads, place, folder)
    speed = found.speed
    read, multiplied = speed.read_bytes_per_s / 1e9, speed.flop_per_s / 1e9
    yield ok(
        f"{place} reads {read:.1f} GB/s and multiplies {multiplied:.0f} GFLOP/s under {kernel}: elsewhere, "
        f"`convoy plan --speed NAME={speed.text()}`"
    )
    if found.warning is not None:
        yield warn(found.warning, "measure again when the machine is idle: `convoy doctor`")


def check_devices(wish: str = "auto", kernel: str = "auto") -> Iterator[Finding]:
    """List MLX and the CUDA devices of this machine, and check that [model] device is among them."""
    import torch

    from convoy.errors import UsageError
    from convoy.model.device import (
        MLX,
        choose_devices,
        describe_devices,
        device_memory_bytes,
        why_no_cuda,
    )
    from convoy.model.mlx_device import Platform, why_no_mlx, why_not_default

    reason = why_no_cuda()
    for number in range(0 if reason else torch.cuda.device_count()):
        name = f"cuda:{number}"
        free, total = torch.cuda.mem_get_info(torch.device(name))
        yield ok(f"{describe_devices((name,))}, {format_bytes(free)} of {format_bytes(total)} free")
    if not why_no_mlx():
        yield ok(f"{describe_devices((MLX,))}, {format_bytes(device_memory_bytes((MLX,)))} for a stage")
        yield from _check_wired()
    try:
        chosen = describe_devices(choose_devices(wish, kernel))
    except UsageError as error:
        yield fail(error.message, error.hint or "set device under [model]")
        return
    if wish == "auto" and reason and Platform.here().is_apple_silicon:
        reason = why_not_default()
    yield ok(f"computes on {chosen}" + (f": {reason}" if reason and wish == "auto" else ""))


def _check_wired() -> Iterator[Finding]:
    """Show how much of Metal's recommendation stages keep resident; nothing without Metal."""
    from convoy.model.mlx_device import recommended_bytes, set_wired_limit, wired_limit_bytes

    if not (limit := wired_limit_bytes()):
        return
    if reason := set_wired_limit():
        yield warn(reason, "update macOS to 15 or later: pages of weights may leave memory between steps")
    else:
        yield ok(
            f"stages keep up to {format_bytes(limit)} wired, of {format_bytes(recommended_bytes())} that "
            "Metal recommends"
        )


def check_ciphers(measure_s: float = _MEASURE_S) -> Iterator[Finding]:
    """List the ciphers that links may use here, and how fast each seals on one core."""
    offered = local_ciphers()
    best = 0.0
    for cipher in Cipher:
        speed = seal_speed(cipher, measure_s)
        shown = f"{cipher.title} seals {speed / 1e9:.1f} GB/s on one core"
        if cipher in offered:
            best = max(best, speed)
            yield ok(shown)
        else:
            yield ok(f"{shown}; links do not use it, because this CPU has no AES instructions")
    if best < _SLOW_BYTES_PER_S:
        yield warn(
            f"sealing is slow here: {format_bytes(int(best))}/s",
            "stop other programs on this CPU, or check that `cryptography` was built for it",
        )


def seal_speed(cipher: Cipher, measure_s: float) -> float:
    """Return bytes per second over full records, under a key that is thrown away."""
    aead, block, count = cipher.make(os.urandom(KEY_BYTES)), bytes(_BLOCK_BYTES), 0
    started_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < measure_s or count == 0:
        aead.encrypt(count.to_bytes(NONCE_BYTES, "big"), block, None)
        count += 1
    return count * _BLOCK_BYTES / elapsed_s if elapsed_s else float("inf")


def check_memory(granted_bytes: int = 0) -> Iterator[Finding]:
    """Compare free memory with the grant of the configuration; 0 grants most of the free memory."""
    free, total = free_bytes(), total_bytes()
    shown = f"{format_bytes(free)} of {format_bytes(total)} memory free"
    if granted_bytes > total:
        yield fail(
            f"[model] memory_gb grants {format_bytes(granted_bytes)}, and this machine has "
            f"{format_bytes(total)}",
            f"set memory_gb = {total * 0.8 / 1e9:.1f} or less under [model]",
        )
    elif granted_bytes > free:
        yield warn(
            f"[model] memory_gb grants {format_bytes(granted_bytes)}, and {format_bytes(free)} is free now",
            "end other programs, or lower memory_gb under [model]",
        )
    elif free < _LITTLE_MEMORY:
        yield warn(shown, "end other programs: a stage needs its weights and K/V in memory")
    else:
        yield ok(shown)


def check_disk(directory: Path) -> Iterator[Finding]:
    """Check the free space for keys and rosters."""
    usage = shutil.disk_usage(directory)
    shown = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} disk free at {directory}"
    if usage.free < _LITTLE_DISK // 100:
        yield fail(shown, "make room: a new roster could not be stored")
    elif usage.free < _LITTLE_DISK:
        yield warn(shown, "make room")
    else:
        yield ok(shown)


def check_leaks() -> Iterator[Finding]:
    """Check the ways in which keys and activations could reach the disk: swap and core dumps."""
    ways = []
    swap = int(psutil.swap_memory().total)
    if swap:
        ways.append((f"{format_bytes(swap)} of swap", "swapoff -a, or encrypt the swap"))
    if resource.getrlimit(resource.RLIMIT_CORE)[0] != 0:
        ways.append(("core dumps are on", "ulimit -c 0 before starting a member"))
    if not ways:
        yield ok("no swap and no core dumps: keys and activations stay in memory")
        return
    yield warn(
        f"keys and activations could reach the disk: {' and '.join(way for way, _ in ways)}",
        "; ".join(mend for _, mend in ways),
    )


def check_discovery(*, wanted: bool) -> Iterator[Finding]:
    """Check the optional part that finds members on the local network."""
    if importlib.util.find_spec("zeroconf") is not None:
        yield ok(f"zeroconf is installed: discovery could be used, and is {'on' if wanted else 'off'}")
    elif wanted:
        yield fail("[listen] discover is on, and zeroconf is not installed", "pip install 'WHEEL[discovery]'")
    else:
        yield ok("zeroconf is not installed: members are reached at the roster's addresses alone")


def check_tpm(device: str | None) -> Iterator[Finding]:
    """Check the tools for hardware evidence, and the TPM that [cluster] tpm names; None wants no evidence."""
    tools = shutil.which("tpm2_quote")
    if device is None:
        installed = "not installed" if tools is None else "installed"
        yield ok(f"no TPM is configured: this machine has no hardware evidence; tpm2-tools is {installed}")
        return
    if tools is None:
        yield fail(f"[cluster] tpm is {device}, and tpm2-tools is not installed", "apt install tpm2-tools")
        return
    kind, _, place = device.partition(":")
    path = Path(place or kind)
    if kind == "device" and not path.exists():
        yield fail(f"[cluster] tpm is {device}, and there is no {path}", "turn the TPM on in the firmware")
    elif kind == "device" and not os.access(path, os.R_OK | os.W_OK):
        yield fail(f"{path} is not open to this user", "usermod -aG tss USER, and log in again")
    else:
        yield ok(f"tpm2-tools is installed; the TPM is {device}")
