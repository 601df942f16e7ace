"""A synthetic model in each form: every file loads, takes its own size, and has values of the right size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.bench.forms.blocks import write_blocks
from convoy.bench.forms.files import FORMS, GGUF_FORMS, stored_bytes, write_form
from convoy.errors import ModelError
from convoy.model.checkpoints.formats.gguf.header import read_gguf
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import Tokenizer
from support.synthetic import write_config

# Rows that fill the blocks of every type.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 8}
BITS = {"F32": 32, "BF16": 16, "fp8": 8, "mlx-8": 8.5, "Q8_0": 8.5}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    config = write_config(tmp_path_factory.mktemp("wide"), **WIDE)
    return ModelSource.resolve(f"synthetic:{config}")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_loads_and_has_the_spread_of_the_model(source: ModelSource, tmp_path: Path, form: str) -> None:
    path = write_form(source, form, tmp_path)
    found = ModelSource.resolve(str(path))
    assert Tokenizer(found).vocab_size == source.spec.vocab_size
    values = read_tensor(found, "model.layers.3.mlp.up_proj.weight").float()
    assert values.shape == (256, 256)
    assert values.std() * 16 == pytest.approx(1, rel=0.5)
    assert torch.isfinite(values).all()
    stored = sum(one.num_bytes for name, one in found.tensors.items() if name.startswith("model.layers.3."))
    assert 8 * stored / source.spec.layers[3].elements == pytest.approx(BITS.get(form, 4.5), abs=0.75)
    assert stored < stored_bytes(path) / source.spec.num_layers


def test_types_of_q4_k_m_are_those_of_llama_cpps_quantiser(source: ModelSource, tmp_path: Path) -> None:
    types = {
        name: tensor.dtype
        for name, tensor in read_gguf(write_form(source, "Q4_K_M", tmp_path)).tensors.items()
    }
    more = [number for number in range(8) if types[f"blk.{number}.ffn_down.weight"] == "Q6_K"]
    assert more == [0, 3, 6, 7]
    assert types["output.weight"] == "Q6_K"
    assert {types["token_embd.weight"], types["blk.0.attn_q.weight"]} == {"Q4_K"}


def test_models_that_do_not_fit_are_refused_by_name(source: ModelSource, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="demo-mini is no synthetic model"):
        write_form(ModelSource.resolve("demo-mini"), GGUF_FORMS[0], tmp_path)
    narrow = ModelSource.resolve(f"synthetic:{write_config(tmp_path)}")
    with pytest.raises(ModelError, match="rows of 40 numbers, and Q8_0 has blocks of 32"):
        write_form(narrow, "Q8_0", tmp_path)
    with pytest.raises(ModelError, match="rows of 40 numbers, expected a multiple of 64"):
        write_form(narrow, "mlx-4", tmp_path)
    with pytest.raises(ModelError, match="demo-mini is no synthetic Llama"):
        write_blocks(ModelSource.resolve("demo-mini"), tmp_path / "x.gguf", lambda *_: "F32")
