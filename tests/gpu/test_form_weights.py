"""Quantised files and rounded weights on the card: the values of the host's, in the bytes of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.config.kernels import CUDA_INT4, CUDA_INT8, form_of
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.quantize.load import LoadRounding
from convoy.wire.messages.control import StageAssignment
from support.kernels import why_not
from support.quantised_files import FILES, quantised
from support.quantised_models import gptq, mlx, write

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from convoy.model.backends.cuda.kernels.forms import DeviceMatrix
from convoy.model.backends.cuda.memory.weights import StageWeights, load_weights
from convoy.model.backends.cuda.options import KERNEL

pytestmark = pytest.mark.gpu
KERNELS_OF_BITS = {4: CUDA_INT4, 8: CUDA_INT8}
_NAMES = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "out": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


def loaded(source: ModelSource, device: torch.device, kernel: str = KERNEL) -> StageWeights:
    assignment = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    return load_weights(source, assignment, device, None, form=form_of(kernel))


@pytest.mark.parametrize("kind", FILES)
def test_linears_on_the_card_have_the_values_and_the_bytes_of_their_file(
    kind: str, tmp_path: Path, device: torch.device
) -> None:
    source = ModelSource.resolve(str(FILES[kind](tmp_path)))
    weights = loaded(source, device)
    planned, num_layers = source.layout.kept_on_card(), source.spec.num_layers
    whole = source.spec.weight_bytes(0, num_layers, embed=True, output=True, dtype=KERNEL)
    assert weights.weight_bytes == whole, "the plan counts what is held"
    for number, layer in weights.layers.items():
        for field, linears in _NAMES.items():
            matrix = getattr(layer, field)
            assert isinstance(matrix, DeviceMatrix)
            names = [f"model.layers.{number}.{linear}.weight" for linear in linears]
            expected = torch.cat([read_tensor(source, name).float() for name in names])
            # The reader may round to the file's 16 bits, which the card does once at the end.
            difference = (matrix.dense().cpu() - expected).abs()
            assert bool((difference <= 2**-8 * expected.abs()).all())
            assert matrix.nbytes == sum(planned[name] for name in names)


def test_a_form_without_a_layout_is_unpacked(tmp_path: Path, device: torch.device) -> None:
    source = ModelSource.resolve(str(quantised(gptq(4, 64, shuffled=True))(tmp_path)))
    layer = loaded(source, device).layers[0]
    expected = read_tensor(source, "model.layers.0.mlp.down_proj.weight").to(torch.bfloat16)
    assert isinstance(layer.down, torch.Tensor)
    assert torch.equal(layer.down.cpu(), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_on_the_card_as_on_the_host(
    bits: int, tmp_path: Path, device: torch.device
) -> None:
    write(tmp_path, "llama", mlx(8, 64))
    source = ModelSource.resolve(str(tmp_path / "dense"))
    weights, host = loaded(source, device, KERNELS_OF_BITS[bits]), LoadRounding(source, bits)
    for field, linears in _NAMES.items():
        expected = [host.read(f"model.layers.1.{linear}.weight") for linear in linears]
        found = getattr(weights.layers[1], field)
        assert isinstance(found, DeviceMatrix)
        assert torch.equal(
            found.dense().cpu(), torch.cat([one.dense() for one in expected if isinstance(one, StoredMatrix)])
        )
    assert isinstance(weights.head, DeviceMatrix)
    assert weights.head.ranges[0].bits == 8
