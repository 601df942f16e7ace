"""Machines are compared by what they compute: the digest changes with a bit, and with nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.model.backends.host.checks import bits
from convoy.model.backends.host.checks.bits import bits_digest
from convoy.model.kernels.linear import packed_available
from convoy.model.kernels.stored.linear import StoredLinear, float_linear
from support.compiled import nothing_compiled

pytestmark = pytest.mark.skipif(not packed_available(), reason="this build of torch has no exact mode")


def elsewhere(**changes: str) -> str:
    """Return the digest of another process, as on another machine."""
    program = "from convoy.model.backends.host.checks.bits import bits_digest; print(bits_digest())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.long
def test_every_run_of_one_machine_computes_the_same_bits() -> None:
    before, found = torch.get_num_threads(), elsewhere()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert bits_digest() == found
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no vectors to do without")
def test_other_vector_instructions_give_the_same_digest() -> None:
    assert elsewhere(ATEN_CPU_CAPABILITY="default") == bits_digest()


def test_torchs_operators_give_the_digest_of_compiled_code_where_onednn_adds_as_written() -> None:
    # With AVX2, oneDNN adds some widths of the sample in another order, and the digest shows it.
    as_written = not any(
        isinstance(float_linear(bits.check_numbers("weight", rows, width), None), StoredLinear)
        for width, rows, _ in bits.SAMPLED_LINEARS
    )
    found = bits_digest()
    with nothing_compiled():
        assert (bits_digest() == found) is as_written


@pytest.mark.parametrize("part", ["_linears", "_elementwise", "_attention"])
def test_the_last_bit_of_any_part_shows(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bits_digest()
    compute = getattr(bits, part)

    def slightly_off() -> list[torch.Tensor]:
        found: list[torch.Tensor] = compute()
        first = found[0].clone().view(-1)
        first[0] = torch.nextafter(first[0], torch.tensor(9.0))
        return [first, *found[1:]]

    monkeypatch.setattr(bits, part, slightly_off)
    assert bits_digest() != before


def test_the_numbers_that_it_starts_from_need_no_generator() -> None:
    assert bits.check_numbers("rows", 2, 2).flatten().tolist() == bits.check_numbers("rows", 4).tolist()
    assert bits.check_numbers("rows", 3).tolist() == [
        0.4355499744415283,
        0.23367726802825928,
        -0.19449687004089355,
    ]


class Elements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the elements that torch's operators return."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.count += out.numel()
        return out


def test_it_costs_a_start_little() -> None:
    with Elements() as computed:  # type: ignore[no-untyped-call]
        bits_digest()
    assert 0 < computed.count < 40_000_000
