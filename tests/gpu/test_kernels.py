"""Norms, rotation, gates, the linears of a lone row and drawn weights against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import linear, silu

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import draw_tensor, drawn_key
from convoy.plan.spec.model import ModelSpec
from support.kernels import INTERPRETED, error_of, why_not

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from pathlib import Path

from convoy.model.backends.cuda.kernels.attention import DeviceHeadShape, Pool
from convoy.model.backends.cuda.kernels.pointwise import Rotation, add_norm, gate, rotate_and_store
from convoy.model.backends.cuda.kernels.single_row import TILES, lone_linear
from convoy.model.backends.cuda.memory.synthetic_weights import draw_into
from convoy.model.backends.cuda.rope import make_rotation
from support.slow_kernels import norm_slowly, rotate_slowly

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-2
EPS = 1e-5


def numbers(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def test_heads_that_are_not_turned_whole_are_refused(device: torch.device) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 1.0, "partial_rotary_factor": 0.5}
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 44,
        "vocab_size": 105,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, rope_parameters=rope).to_dict()
    source = ModelSource("x", Path(), config, ModelSpec.from_config(config, "x"), "x", {}, seed=0)
    with pytest.raises(ModelError, match="turns 8 dimensions of heads of 16"):
        make_rotation(source, 16, device)


@pytest.mark.parametrize("width", [40, 1024, 4096])
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_adds_to_the_residual_what_came_before(width: int, adds: bool, device: torch.device) -> None:
    x, delta = numbers(5, width, device=device), numbers(5, width, device=device, seed=1)
    weight = numbers(width, device=device, seed=2)
    expected = (x.float() + delta.float()).to(x.dtype) if adds else x.clone()
    found = add_norm(x, delta if adds else None, weight, EPS)
    assert torch.equal(x, expected)
    assert error_of(found, norm_slowly(expected, weight, EPS)) <= TOLERANCE


@pytest.mark.parametrize("width", [44, 2048])
def test_a_gate_is_silu_of_one_half_times_the_other(width: int, device: torch.device) -> None:
    both = numbers(3, 2 * width, device=device)
    expected = silu(both[:, :width].float()) * both[:, width:].float()
    assert error_of(gate(both), expected) <= TOLERANCE


@pytest.mark.parametrize("normed", [False, True])
def test_queries_turn_in_place_and_keys_and_values_go_to_their_slots(
    normed: bool, device: torch.device
) -> None:
    shape = DeviceHeadShape(6, 2, 24, 24, 16, 1.0)
    qkv = numbers(4, 10 * 24, device=device)
    pools = [torch.zeros(5, 2, 16, 24, dtype=qkv.dtype, device=device) for _ in range(2)]
    angles = torch.outer(torch.arange(64.0), 100.0 ** -torch.linspace(0, 1, 12)).to(device)
    rotation = Rotation(angles.cos(), angles.sin())
    positions = torch.tensor([3, 40, 0, 63], dtype=torch.int32, device=device)
    slots = torch.tensor([70, 3, -1, 17], dtype=torch.int32, device=device)
    norms = numbers(2, 24, device=device, seed=4) if normed else None
    q, k, v = torch.split(qkv.clone().view(4, 10, 24), [6, 2, 2], dim=1)
    if norms is not None:
        q, k = norm_slowly(q, norms[0], EPS), norm_slowly(k, norms[1], EPS)
    q, k = (rotate_slowly(x, rotation.cos[positions], rotation.sin[positions]) for x in (q, k))
    rotate_and_store(
        *(qkv, Pool(*pools), shape, rotation), positions=positions, slots=slots, norms=norms, eps=EPS
    )
    assert error_of(qkv.view(4, 10, 24)[:, :6], q) <= TOLERANCE
    for pool, expected in zip(pools, (k, v), strict=True):
        for token, (block, offset) in {0: (4, 6), 1: (0, 3), 3: (1, 1)}.items():
            assert error_of(pool[block, :, offset], expected[token]) <= TOLERANCE
        assert pool.count_nonzero() == 3 * 2 * 24  # and nothing else was written


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("size", [(40, 105), (1024, 512), (4096, 1030), (14336, 130)])
def test_the_linear_of_a_lone_row_does_what_stands_around_it(
    size: tuple[int, int], tile: object, device: torch.device
) -> None:
    if INTERPRETED and size[0] > 1024:
        pytest.skip("too slow for the interpreter")
    inputs, outputs = size
    x, norm = numbers(1, inputs, device=device), numbers(inputs, device=device, seed=1)
    weight = numbers(2 * outputs, inputs, device=device, seed=2) * inputs**-0.5
    bias = numbers(2 * outputs, device=device, seed=3)
    normed = norm_slowly(x, norm, EPS)
    plain = linear(x.float(), weight.float())
    full = linear(normed, weight.float(), bias.float())
    assert error_of(lone_linear(x, weight, tile=tile), plain) <= TOLERANCE  # type: ignore[arg-type]
    wide = lone_linear(x, weight, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert error_of(wide, plain) <= 1e-3
    gated = lone_linear(x, weight, bias=bias, norm=norm, eps=EPS, gated=True, tile=tile)  # type: ignore[arg-type]
    assert error_of(gated, silu(full[:, :outputs]) * full[:, outputs:]) <= TOLERANCE
    residual = numbers(1, 2 * outputs, device=device, seed=4)
    expected = residual.float() + full
    found = lone_linear(x, weight, bias=bias, norm=norm, eps=EPS, out=residual, adds=True)
    assert found is residual
    assert error_of(found, expected) <= TOLERANCE


@pytest.mark.parametrize("shape", [(3, 5), (301, 40), (1000, 700)])
def test_weights_drawn_on_the_device_are_those_drawn_on_the_host(
    shape: tuple[int, int], device: torch.device
) -> None:
    if INTERPRETED and shape[0] > 301:
        pytest.skip("too slow for the interpreter")
    stored = StoredTensor(
        "model.layers.3.mlp.up_proj.weight", Path(), "F32", shape, 0, 4 * shape[0] * shape[1]
    )
    # the interpreter cuts bfloat16 off where a device rounds it
    for dtype in (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16):
        found = torch.empty(shape, dtype=dtype, device=device)
        draw_into(found, drawn_key(stored, 7), (3 / shape[1]) ** 0.5 / 2**31)
        assert torch.equal(found.cpu(), draw_tensor(stored, 7).to(dtype))
