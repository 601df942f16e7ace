"""The kernel in which ranks add, run as one of two: what the other sends is there already, or never comes."""

from __future__ import annotations

import pytest
import torch

from support.kernels import INTERPRETED, why_not

if why_not() is not None:
    pytest.skip(why_not() or "", allow_module_level=True)

from convoy.model.backends.cuda.kernels.sums import sum_kernel

pytestmark = pytest.mark.gpu
ROOM, NUMBER = 1024, 7


def run(
    own: torch.Tensor, out: torch.Tensor, other: torch.Tensor | None, *, adds: bool
) -> list[torch.Tensor]:
    """Run as rank 1 of two, in operation `NUMBER`. Return both mailboxes, and its counters."""
    boxes = [torch.zeros(4 * ROOM, dtype=torch.int64, device=own.device) for _ in range(2)]
    count = torch.tensor([NUMBER - 2, 0], dtype=torch.int32, device=own.device)
    packed = own.dtype == torch.bfloat16
    words, into = (own.view(torch.int32), out.view(torch.int32)) if packed else (own, out)
    slot = NUMBER % 2 * 2
    if other is not None:
        sent = other.view(torch.int32).long() & 0xFFFFFFFF
        boxes[1][slot * ROOM : slot * ROOM + len(sent)] = sent | NUMBER << 32
    table = torch.tensor([box.data_ptr() for box in boxes], device=own.device)
    sum_kernel[-(-len(words) // 64),](
        into, words, table, count, 2, len(words), ROOM=ROOM, RANK=1, WORLD=2, BLOCK=64, PACKED=packed,
        ADDS=adds, MAX_POLLS=3, num_warps=1,
    )  # fmt: skip
    return [*boxes, count]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_added_in_the_order_of_ranks_and_sent_with_their_number(
    device: torch.device, dtype: torch.dtype, adds: bool
) -> None:
    first, second, before = (
        torch.randn(200, generator=torch.Generator().manual_seed(i)).to(device, dtype) for i in range(3)
    )
    out = before.clone()
    boxes = run(second, out, first, adds=adds)
    expected = first.float() + second.float()
    expected = (expected + before.float() if adds else expected).to(dtype)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter cuts off where a device rounds
        assert torch.allclose(out, expected, rtol=1e-2)
    else:
        assert torch.equal(out, expected)
    words = second.view(torch.int32)
    arrived = boxes[0][3 * ROOM : 3 * ROOM + len(words)]
    assert torch.equal(arrived >> 32, torch.full_like(arrived, NUMBER))
    assert torch.equal((arrived & 0xFFFFFFFF).to(torch.int32), words)
    assert boxes[2].tolist() == [NUMBER - 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_that_never_comes_is_no_number_and_nobody_is_waited_for_again(
    device: torch.device, dtype: torch.dtype
) -> None:
    out = torch.zeros(200, dtype=dtype, device=device)
    boxes = run(torch.ones(200, dtype=dtype, device=device), out, None, adds=False)
    assert out.isnan().all()
    assert boxes[2].tolist()[1] == 1
