"""Examine this machine once in a test process, where a program examines it once at its start.

A test process stands for many members, and each would check exact mode, digest its bits and measure its
speed anew: a quarter of a second, or two, that show nothing. The checks and measurements themselves have
tests of their own, which call them directly.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest


def examine_once(patch: pytest.MonkeyPatch) -> None:
    """Keep the results for equal arguments, in the modules that the collected tests have imported."""
    for name, functions in (
        ("convoy.cluster.offer", ("available_kernels", "bits_digest")),
        ("convoy.cluster.head.step_time", ("measure_speed",)),
    ):
        module = sys.modules.get(name)
        for function in functions if module is not None else ():
            patch.setattr(module, function, functools.cache(getattr(module, function)))
    # A third of the load of a tiny stage.
    for name, function in (
        ("convoy.model.backends.host.stage", "check_heads"),
        ("convoy.model.backends.host.stage_kv", "least_tile_rows"),
    ):
        if (module := sys.modules.get(name)) is not None:
            patch.setattr(module, function, _once_with_these_threads(getattr(module, function)))
    if (module := sys.modules.get("convoy.model.backends.host.stage")) is not None:
        patch.setattr(module, "check_linears", _of_new_shapes(module.check_linears))
    if (module := sys.modules.get("convoy.model.backends.host.checks.trial")) is not None:
        patch.setattr(module.Trial, "prove", _of_new_layers(module.Trial.prove))


def _once_with_these_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its results kept for equal arguments and PyTorch's number of threads."""
    import torch

    @functools.cache
    def kept(_num_threads: int, *given: Any) -> Any:
        return function(*given)

    return lambda *given: kept(torch.get_num_threads(), *given)


def _of_new_shapes(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``check``, which skips linears if their shapes, products and threads were all checked."""
    import torch

    from convoy.model.backends.host.checks import selfcheck
    from convoy.model.kernels.linear import PackedLinear

    checked: set[object] = set()
    check_linear = selfcheck.check_linear

    def check_new(parts: Any) -> None:
        parts, threads = list(parts), torch.get_num_threads()
        found = {
            # A test may put a product that drifts in place of its own.
            (type(one).forward, one.in_features, one.out_features, one.activation, type(one.native), threads)
            for part in parts
            for one in part.modules()
            if isinstance(one, PackedLinear)
        }
        # A test may put a check that fails in place of that of one linear.
        if selfcheck.check_linear is not check_linear:
            check(parts)
        elif not found <= checked:
            check(parts)
            checked.update(found)

    return check_new


def _of_new_layers(prove: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``prove``, which skips a stage if all its layers were proved with its kernel and threads.

    The trial of a single row, which finds layers that do not run, is not skipped.
    """
    import torch

    proved: dict[object, set[int]] = {}

    def prove_new(trial: Any) -> None:
        stage = trial.make_pools.__self__
        kind = (repr(trial.spec), stage.options.kernel, stage.shard, torch.get_num_threads())
        layers, known = set(stage.layers), proved.setdefault(kind, set())
        if not layers <= known:
            prove(trial)
            known |= layers

    return prove_new


def measure_once(patch: pytest.MonkeyPatch) -> None:
    """Measure once what a command measures, for each kernel, number of threads and device, in no folder."""
    from convoy.cluster import own_speed

    # By this clock one round takes all the time that a measurement may.
    clock = itertools.count(0.0, 10.0)
    measure = functools.cache(functools.partial(own_speed.own_speed, now=clock.__next__))

    def kept(kernel: str, num_threads: int | None, device: str, folder: object) -> own_speed.OwnSpeed:
        return measure(kernel, num_threads, device, None)

    patch.setattr(own_speed, "own_speed", kept)


def derive_quickly(patch: pytest.MonkeyPatch) -> None:
    """Let a passphrase cost this process nothing, in place of 128 MiB and a third of a second.

    The envelope still names the real cost, so only this process opens a key that it has sealed.
    """
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    patch.setattr("convoy.crypto.key_envelope.Scrypt", lambda **given: Scrypt(**given | {"n": 16}))
