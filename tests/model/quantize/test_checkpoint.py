"""Checkpoints that `convoy quantize` writes: their contents, their readers, and the refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.config.kernels import QuantizeFormat
from convoy.errors import ModelError, UsageError
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import HEADER, ModelSource
from convoy.model.quantize.checkpoint import quantize
from convoy.model.quantize.record import RECORD, read_record
from convoy.model.quantize.search import GROUP
from convoy.model.text.tokens import Tokenizer
from support.odd_models import make_odd_llama
from support.quantised_models import Writer, library_model, mlx, mxfp4, write, write_gguf

DOWN = "model.layers.1.mlp.down_proj"


def as_it_is(_writer: Writer) -> None:
    """Round nothing."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Return a Llama in float32 with an output of its own."""
    return ModelSource.resolve(str(write(tmp_path_factory.mktemp("llama"), "llama", as_it_is).dense))


def values_of(stored: Mapping[str, torch.Tensor], module: str, bits: int) -> torch.Tensor:
    """Return codes times scales, unpacked through Python's own integers."""
    words, scales = stored[f"{module}.weight_packed"], stored[f"{module}.weight_scale"].float()
    shifts = range(0, 32, bits)
    codes = torch.tensor(
        [
            [((word >> shift) & (2**bits - 1)) - 2 ** (bits - 1) for word in row for shift in shifts]
            for row in words.tolist()
        ]
    )
    return codes.float() * scales.repeat_interleave(GROUP, 1)


@pytest.mark.parametrize(("form", "bits"), [("q4", 4), ("q8", 8)])
def test_the_reader_gives_codes_times_scales_and_the_rest_as_it_was(
    llama: ModelSource, tmp_path: Path, form: QuantizeFormat, bits: int
) -> None:
    made = quantize(llama, form, tmp_path / "out")
    source = ModelSource.resolve(str(tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert source.layout.made.keys() == {
        name for name in llama.tensors if name.endswith("_proj.weight") or name == "lm_head.weight"
    }
    # exact mode keeps each of them in this form
    assert source.layout.made.keys() <= source.layout.kept(source.tensors).keys()
    assert torch.equal(read_tensor(source, f"{DOWN}.weight"), values_of(stored, DOWN, bits))
    assert torch.equal(read_tensor(source, "lm_head.weight"), values_of(stored, "lm_head", 8))
    for name in llama.tensors.keys() - source.layout.made.keys():
        assert torch.equal(stored[name], read_tensor(llama, name))
    assert made.record.kinds["q_proj"].bits == bits
    assert made.record.kinds["lm_head"].bits == 8
    assert made.record.bytes_after == sum(tensor.nbytes for tensor in stored.values())
    assert made.record == read_record(tmp_path / "out")
    # half a step is the greatest error of a value that is not cut off
    expected = {"q4": 0.1, "q8": 0.006}[form]
    assert 0 < made.record.kinds["down_proj"].error < expected
    assert made.record.error < made.record.nearest_error


def test_several_shards_hold_the_same_tensors_as_one(llama: ModelSource, tmp_path: Path) -> None:
    quantize(llama, "q4", tmp_path / "one")
    quantize(llama, "q4", tmp_path / "several", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found.update(load_file(tmp_path / "several" / name))
    expected = load_file(tmp_path / "one" / "model.safetensors")
    assert len(set(index["weight_map"].values())) > 2
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_tied_output_stays_the_embedding(tmp_path: Path) -> None:
    source = ModelSource.resolve(str(write(tmp_path, "tied", as_it_is).dense))
    quantize(source, "q4", tmp_path / "out")
    made = ModelSource.resolve(str(tmp_path / "out"))
    assert "lm_head.weight" not in made.tensors
    assert made.spec.tied_embeddings
    assert len(made.config["quantization_config"]["config_groups"]) == 1  # type: ignore[index]


def test_stacked_experts_are_rounded_one_by_one_and_routers_stay(tmp_path: Path) -> None:
    packed = ModelSource.resolve(str(write(tmp_path, "qwen3_moe", mlx(8, 64)).quantised))
    quantize(packed, "q8", tmp_path / "out")
    made = ModelSource.resolve(str(tmp_path / "out"))
    stack = read_tensor(packed, "model.layers.1.mlp.experts.gate_up_proj")
    up = read_tensor(made, "model.layers.1.mlp.experts.2.up_proj.weight")
    assert torch.allclose(up, stack[2, 64:], atol=0.02)
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(read_tensor(made, router), read_tensor(packed, router))
    ignored: Any = made.config["quantization_config"]
    assert "model.layers.1.mlp.gate" in ignored["ignore"]


def test_experts_that_are_loaded_from_stacks_only_are_refused(tmp_path: Path) -> None:
    source = ModelSource.resolve(str(write(tmp_path, "gpt_oss", mxfp4).quantised))
    with pytest.raises(ModelError, match="gpt_oss has no form in which each is rounded by itself"):
        quantize(source, "q4", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_header_of_a_gguf_file_comes_along_with_its_tokeniser(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model", Writer(library_model("llama")), "Q8_0").quantised
    source = ModelSource.resolve(str(model))
    quantize(source, "q4", tmp_path / "out")
    made = ModelSource.resolve(str(tmp_path / "out"))
    assert (made.path / HEADER).read_bytes() == source.own_files[HEADER]
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(read_tensor(made, name), read_tensor(source, name))


def test_a_folder_with_files_is_refused_and_an_empty_one_is_used(llama: ModelSource, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    quantize(llama, "q8", out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(UsageError, match="is a folder with files"):
        quantize(llama, "q4", out)
    with pytest.raises(UsageError, match="is no folder"):
        quantize(llama, "q4", out / "config.json")
    with pytest.raises(ModelError, match=r"cannot write .*absent"):
        quantize(llama, "q4", tmp_path / "absent" / "out")
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupt_leaves_nothing(llama: ModelSource, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(llama, "q4", tmp_path / "out", interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_refused_by_its_tensor(
    llama: ModelSource, tmp_path: Path, value: float
) -> None:
    stored = load_file(next(llama.path.glob("*.safetensors")))
    stored[f"{DOWN}.weight"][3, 5] = value
    (tmp_path / "bad").mkdir()
    save_file(stored, tmp_path / "bad" / "model.safetensors")
    (tmp_path / "bad" / "config.json").write_bytes((llama.path / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"bad: {DOWN}.weight holds a value that is not a number"):
        quantize(ModelSource.resolve(str(tmp_path / "bad")), "q4", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_record_that_is_malformed_is_refused_by_its_file(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    for text in ("{", "[]", '{"format": "q4"}', "[" * 100_000, " " * (1 << 20) + "{}"):
        (tmp_path / RECORD).write_text(text)
        with pytest.raises(ModelError, match=RECORD):
            read_record(tmp_path)


def test_rows_that_fill_no_group_stay_as_they_are(tmp_path: Path) -> None:
    source = ModelSource.resolve(str(make_odd_llama(tmp_path / "odd", intermediate_size=64)))
    made = quantize(source, "q4", tmp_path / "out")
    assert made.record.kinds.keys() == {"down_proj"}
    found = ModelSource.resolve(str(tmp_path / "out"))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(read_tensor(found, name), read_tensor(source, name))
    assert Tokenizer(found).encode("abc") == Tokenizer(source).encode("abc")
    narrow = ModelSource.resolve(str(make_odd_llama(tmp_path / "narrow")))
    with pytest.raises(ModelError, match="narrow has no matrix with a multiple of 32 inputs"):
        quantize(narrow, "q4", tmp_path / "none")
