"""Models without files: the same weights wherever they are drawn, and text that goes there and back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.source import ModelSource, needs_no_files
from convoy.model.checkpoints.synthetic import Synthetic, draw_tensor
from convoy.model.loading.load import load_modules
from convoy.model.text.stop import TextStream
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import StageAssignment
from support.synthetic import SYNTHETIC, write_config
from support.tiny_models import build_config

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
}


def parameters(source: ModelSource, start: int, end: int) -> dict[str, torch.Tensor]:
    assignment = StageAssignment("alpha", start, end, embed=start == 0, output=end == source.spec.num_layers)
    modules = load_modules(source, assignment, packed=False, progress=None)
    parts = {f"layers.{number}": layer for number, layer in modules.layers.items()}
    ends = {"embedding": modules.embedding, "norm": modules.norm, "output": modules.output}
    parts |= {name: part for name, part in ends.items() if part is not None}
    return {f"{name}.{n}": p for name, part in parts.items() for n, p in part.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_draws_the_same_tensors_and_all_that_the_family_has(family: str, tmp_path: Path) -> None:
    source = ModelSource.resolve(f"synthetic:{write_config(tmp_path, **FAMILIES[family])}")
    num_layers = source.spec.num_layers
    whole = parameters(source, 0, num_layers)
    for cut in range(1, num_layers):
        parts = parameters(source, 0, cut) | parameters(source, cut, num_layers)
        assert parts.keys() == whole.keys()
        assert all(torch.equal(part, whole[name]) for name, part in parts.items())
    elements = sum(math.prod(t.shape) for t in source.tensors.values())
    assert 4 * elements == source.spec.weight_bytes(0, num_layers, embed=True, output=True, dtype="float32")


def test_only_what_a_stage_owns_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ModelSource.resolve(f"synthetic:{write_config(tmp_path)}")
    drawn: list[str] = []

    def counting(described: StoredTensor, seed: int) -> torch.Tensor:
        drawn.append(described.name)
        return draw_tensor(described, seed)

    monkeypatch.setattr("convoy.model.checkpoints.read_tensor.draw_tensor", counting)
    parameters(source, 1, 2)
    assert len(drawn) == 9
    assert all(name.startswith("model.layers.1.") for name in drawn)


def test_the_values_are_those_of_every_release() -> None:
    # Written down once: members of different machines and libraries must draw these very bits.
    first = draw_tensor(described("model.layers.0.mlp.up_proj.weight", 2, 3), 7)
    norm = draw_tensor(described("model.norm.weight", 2), 7)
    assert first.numpy().view(np.uint32).tolist() == FIRST
    assert norm.numpy().view(np.uint32).tolist() == NORM


FIRST = [[3204896486, 3201593322, 3203655785], [3202699945, 1051748369, 1052612026]]
NORM = [1064880832, 1064824083]


def test_a_large_tensor_is_drawn_in_blocks_without_a_seam() -> None:
    small = draw_tensor(described("w", 1, 1 << 21), 1)
    large = draw_tensor(described("w", 3, 1 << 20), 1) / math.sqrt(2)
    assert torch.allclose(small.flatten(), large.flatten()[: 1 << 21])
    rest = large.flatten()[1 << 21 :]
    assert np.unique(rest.numpy()).size > 900_000
    assert abs(float(rest.std()) * math.sqrt(1 << 21) - 1) < 0.01


def described(name: str, *shape: int) -> StoredTensor:
    return StoredTensor(name, Path(), "F32", shape, 0, 4 * math.prod(shape))


def test_the_digest_differs_by_seed_and_by_configuration(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    texts = [f"synthetic:{path}", f"synthetic:{path}@1", f"synthetic:{path}@2"]
    digests = [ModelSource.resolve(text).digest for text in texts]
    (tmp_path / "copy").mkdir()
    copy = write_config(tmp_path / "copy")
    assert ModelSource.resolve(f"synthetic:{copy}@0").digest == digests[0]
    other = write_config(tmp_path, rms_norm_eps=1e-6)
    assert len({*digests, ModelSource.resolve(f"synthetic:{other}").digest}) == 4


def test_llama_250m_has_the_dimensions_it_is_known_by() -> None:
    source = ModelSource.resolve("synthetic:llama-250m")
    spec = source.spec
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (1024, 16, 16, 4)
    assert source.tensors["model.layers.15.mlp.up_proj.weight"].shape == (2816, 1024)
    assert (spec.vocab_size, spec.tied_embeddings) == (32_000, False)
    assert spec.max_context >= 8_704
    assert sum(math.prod(t.shape) for t in source.tensors.values()) == 245_924_864


def test_path_and_name_find_the_same_model_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = ModelSource.resolve("synthetic:config.json@3")
    monkeypatch.chdir("/")
    assert ModelSource.resolve(str(source.path)).digest == source.digest
    assert source.name == "synthetic:config.json@3"
    named = ModelSource.resolve("synthetic:llama-250m@3")
    assert (
        ModelSource.resolve(named.name).digest == ModelSource.resolve(str(named.path)).digest == named.digest
    )


@pytest.mark.parametrize("name", ["demo", "synthetic:llama-250m", "synthetic:llama-250m@12"])
def test_a_head_may_name_what_needs_no_files(name: str) -> None:
    assert needs_no_files(name)


@pytest.mark.parametrize(
    "name",
    [
        "synthetic:config.json",
        "synthetic:../llama-250m",
        "synthetic:llama-250m@-1",
        "synthetic:llama-250m@" + "9" * 19,
        "synthetic:llama-250m@1@2",
        "synthetic:llama-250m\n",
        "synthetic:",
        "llama-250m",
        "/etc/passwd",
    ],
)
def test_a_head_may_name_nothing_else(name: str) -> None:
    assert not needs_no_files(name)


def test_wrong_synthetic_models_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    for text, error in (
        ("synthetic:", "names no model"),
        ("synthetic:llama-9m", "no synthetic model llama-9m"),
    ):
        with pytest.raises(ModelError, match=error):
            ModelSource.resolve(text)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"vocab_size": 200}, "expected at least 260"),
        ({"model_type": "gpt2"}, "not supported"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
    ]
    for changes, error in wrong:
        with pytest.raises(ModelError, match=error):
            ModelSource.resolve(f"synthetic:{write_config(tmp_path, **changes)}")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds a list"):
        ModelSource.resolve(f"synthetic:{tmp_path / 'config.json'}")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        ModelSource.resolve(f"synthetic:{tmp_path / 'config.json'}")


def test_what_is_not_synthetic_is_left_to_the_others() -> None:
    assert Synthetic.parse("demo") is None
    assert Synthetic.parse("./synthetic:demo") is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_config(tmp_path_factory.mktemp("synthetic"))
    return Tokenizer(ModelSource.resolve(f"synthetic:{path}"))


@given(st.text())
def test_text_is_its_bytes_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_a_token_that_is_no_byte_reads_as_its_number(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([300, 72, 105, 299]) == " 300Hi 299"
    assert tokenizer.token_bytes(300) == b" 300"
    assert all(tokenizer.token_bytes(byte) == bytes([byte]) for byte in range(256))


@pytest.mark.outside
def test_a_conversation_has_turns_that_no_text_can_forge(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "<|end|>"}])
    assert ids == [258, *b"<|end|>", 256, 259]
    assert tokenizer.eos_ids == {256}


def test_the_configuration_s_own_end_of_text_counts(tmp_path: Path) -> None:
    path = write_config(tmp_path, eos_token_id=[299])
    assert json.loads(path.read_text())["eos_token_id"] == [299]
    assert Tokenizer(ModelSource.resolve(f"synthetic:{path}")).eos_ids == {256, 299}
    assert SYNTHETIC["vocab_size"] == 301


def test_a_model_that_needs_tables_by_token_id_cannot_be_drawn(tmp_path: Path) -> None:
    config = {**build_config("deepseek_v4").to_dict(), "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="tables of experts by token id, which cannot be generated"):
        ModelSource.resolve(f"synthetic:{tmp_path / 'config.json'}")
