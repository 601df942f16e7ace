"""Quantised files and rounded weights on the card: the values of the host's, in the bytes of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.quantize.load import LoadRounding
from convoy.wire.messages.control import StageAssignment
from support.kernels import why_not
from support.quantised_models import Writer, awq, compressed, fp8, gptq, library_model, mlx, write, write_gguf

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from convoy.model.backends.cuda.kernels.forms import DeviceMatrix
from convoy.model.backends.cuda.memory.weights import StageWeights, load_weights

pytestmark = pytest.mark.gpu
_NAMES = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "out": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
_Write = Callable[[Path], Path]


def quantised(how: Callable[[Writer], None]) -> _Write:
    return lambda root: write(root, "llama", how).quantised


def gguf(kind: str) -> _Write:
    return lambda root: write_gguf(root, Writer(library_model("llama")), kind).quantised


FILES: dict[str, _Write] = {
    "mlx 4": quantised(mlx(4, 64)),
    "mlx 8": quantised(mlx(8, 64)),
    "compressed 4": quantised(compressed(4, 32)),
    "compressed 8": quantised(compressed(8, None)),
    "gptq": quantised(gptq(4, 64)),
    "awq": quantised(awq(64)),
    "fp8 rows": quantised(fp8(None)),
    "fp8 squares": quantised(fp8((64, 64))),
    "Q8_0": gguf("Q8_0"),
    "Q4_0": gguf("Q4_0"),
}


def loaded(source: ModelSource, device: torch.device, bits: int = 0) -> StageWeights:
    assignment = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    return load_weights(source, assignment, device, None, bits=bits)


@pytest.mark.parametrize("kind", FILES)
def test_linears_on_the_card_have_the_values_and_the_bytes_of_their_file(
    kind: str, tmp_path: Path, device: torch.device
) -> None:
    source = ModelSource.resolve(str(FILES[kind](tmp_path)))
    weights = loaded(source, device)
    kept = source.layout.kept(source.tensors)
    for number, layer in weights.layers.items():
        for field, linears in _NAMES.items():
            matrix = getattr(layer, field)
            assert isinstance(matrix, DeviceMatrix)
            names = [f"model.layers.{number}.{linear}.weight" for linear in linears]
            expected = torch.cat([read_tensor(source, name).float() for name in names])
            # The reader may round to the file's 16 bits, which the card does once at the end.
            difference = (matrix.dense().cpu() - expected).abs()
            assert bool((difference <= 2**-8 * expected.abs()).all())
            assert matrix.nbytes == pytest.approx(sum(kept[name] for name in names), rel=0.15)


@pytest.mark.parametrize("kind", ["mlx 3", "gguf Q5_0"])
def test_a_form_without_a_layout_is_unpacked(kind: str, tmp_path: Path, device: torch.device) -> None:
    write_one = quantised(mlx(3, 64)) if kind == "mlx 3" else gguf("Q5_0")
    source = ModelSource.resolve(str(write_one(tmp_path)))
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
    weights, host = loaded(source, device, bits), LoadRounding(source, bits)
    for field, linears in _NAMES.items():
        expected = [host.read(f"model.layers.1.{linear}.weight") for linear in linears]
        found = getattr(weights.layers[1], field)
        assert isinstance(found, DeviceMatrix)
        assert torch.equal(
            found.dense().cpu(), torch.cat([one.dense() for one in expected if isinstance(one, StoredMatrix)])
        )
    assert isinstance(weights.head, DeviceMatrix)
    assert weights.head.ranges[0].bits == 8
