"""Tensors in the form of their file, as stages read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.errors import ModelError
from convoy.model.checkpoints.read_tensor import read_kept
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.matrix import FORMS, GGUF, HALVES
from support.quantised_models import Quantise, Writer, compressed, gptq, library_model, mlx, write, write_gguf

NAME = "model.layers.1.mlp.down_proj.weight"


def put_nan(path: Path, part: str) -> None:
    """Replace one number of a tensor."""
    tensors = load_file(path)
    tensors[part].view(-1)[3] = torch.nan
    save_file(tensors, path, {"format": "pt"})


FORMS_OF_FILES: dict[str, tuple[Quantise, str]] = {
    "mlx scales": (mlx(4, 64), "scales"),
    "mlx biases": (mlx(4, 64), "biases"),
    "compressed": (compressed(4, 32), "weight_scale"),
    "gptq": (gptq(4, 64), "scales"),
}


@pytest.mark.parametrize("form", FORMS_OF_FILES)
def test_a_scale_that_is_no_number_is_refused_by_file_and_tensor(tmp_path: Path, form: str) -> None:
    how, part = FORMS_OF_FILES[form]
    folder = write(tmp_path, "llama", how).quantised
    read_kept(ModelSource.resolve(str(folder)), NAME)
    (path,) = folder.glob("*.safetensors")
    put_nan(path, f"{NAME.removesuffix('weight')}{part}")
    with pytest.raises(ModelError, match=rf"{path.name}: {NAME} has a scale that is not a number"):
        read_kept(ModelSource.resolve(str(folder)), NAME)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_block_whose_scale_is_no_number_is_refused_by_file_and_tensor(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path, Writer(library_model("llama")), kind).quantised
    source = ModelSource.resolve(str(path))
    read_kept(source, NAME)
    stored = source.layout.made[NAME].parts["stored"]
    at = stored.offset + 2 * FORMS[f"{GGUF}{kind}"].block_bytes + HALVES[kind][-1]
    raw = bytearray(path.read_bytes())
    raw[at : at + 2] = b"\x00\x7e"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=rf"{path.name}: {NAME} has a scale that is not a number"):
        read_kept(ModelSource.resolve(str(path)), NAME)
