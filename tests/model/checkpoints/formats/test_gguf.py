"""GGUF files, written and quantised by llama.cpp's own package, against what they stand for."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from convoy.errors import ModelError
from convoy.evaluate.library_model import library_logits as judge_logits
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.formats import gguf
from convoy.model.checkpoints.formats.gguf_header import read_gguf
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.stage import StageOptions
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import StageAssignment
from model.checkpoints.formats.test_formats import chain, library_logits
from support.quantised_models import Writer, Written, library_model, unpack, write_gguf
from support.tiny_models import Prompt

Get = Callable[[str, str], Written]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Get:
    root, known = tmp_path_factory.mktemp("gguf"), dict[tuple[str, str], Written]()

    def get(model: str, kind: str) -> Written:
        if (model, kind) not in known:
            known[model, kind] = write_gguf(root / f"{model}-{kind}", Writer(library_model(model)), kind)
        return known[model, kind]

    return get


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *[("llama", kind) for kind in ("Q8_0", "Q4_0", "Q5_1", "F16", "BF16", "F32")],
        ("tied", "Q4_1"),
        ("llama3", "Q8_0"),
        ("qwen2", "Q5_0"),
        ("qwen3", "Q8_0"),
    ],
)
def test_a_gguf_file_gives_the_logits_of_what_it_stands_for(
    written: Get, prompt: Prompt, tmp_path: Path, model: str, kind: str
) -> None:
    tokens, files = prompt(60), written(model, kind)
    expected = library_logits(files.dense, tokens)
    (whole,) = chain(files.quantised).run((0, tokens))
    assert (whole - expected).abs().max() <= 2e-5
    (cut,) = chain(files.quantised, 1).run((0, tokens))
    assert torch.equal(cut, whole)
    unpack(ModelSource.resolve(str(files.quantised)), tmp_path / "float32")
    (unpacked,) = chain(tmp_path / "float32").run((0, tokens))
    assert torch.equal(unpacked, whole)


def test_a_stage_reads_its_own_part_of_the_file(written: Get) -> None:
    source = ModelSource.resolve(str(written("llama", "Q4_0").quantised))
    stage = HostStage.load(source, StageAssignment("a", 1, 2, False, False), StageOptions())
    own = [tensor for name, tensor in source.tensors.items() if ".layers.1." in name]
    assert stage.bytes_read == sum(tensor.num_bytes for tensor in own)
    assert stage.weight_bytes == source.spec.weight_bytes(1, 2, embed=False, output=False, dtype="exact-f32")


def test_the_certificates_judge_takes_the_file(written: Get, prompt: Prompt) -> None:
    files, tokens = written("qwen3", "Q8_0"), prompt(30)
    (judged,) = judge_logits(ModelSource.resolve(str(files.quantised)), [tokens])
    assert (judged - library_logits(files.dense, tokens)).abs().max() <= 1e-5


def test_its_tensors_are_hashed_as_they_are_stored(written: Get) -> None:
    source = ModelSource.resolve(str(written("llama", "Q4_0").quantised))
    manifest = make_manifest(source, Hashing())
    assert manifest.tensors["model.layers.0.mlp.up_proj.weight"].dtype == "Q4_0"
    assert not manifest.files


def test_its_tokeniser_is_the_models(tmp_path: Path) -> None:
    demo = ModelSource.resolve("demo")
    described = json.loads((demo.path / "tokenizer.json").read_text())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    tokens += [f"<unused {number}>" for number in range(demo.spec.vocab_size - len(tokens))]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.path, dtype=torch.float32)
    files = write_gguf(tmp_path, Writer(model), "F16", {"tokens": tokens, "merges": merges, "eos": 1})
    found = Tokenizer(ModelSource.resolve(str(files.quantised)))
    text = "Once upon a time there was"
    assert found.decode(found.encode(text)) == text
    assert found.encode(text) == Tokenizer(demo).encode(text)


@pytest.mark.parametrize("said", [("rope.dimension_count", 16), ("rope.scale_linear", 4.0)])
def test_a_rotation_that_is_not_done_here_is_refused(
    written: Get, monkeypatch: pytest.MonkeyPatch, said: tuple[str, object]
) -> None:
    header = read_gguf(written("llama", "F16").quantised)
    settings = header.settings | {f"llama.{said[0]}": said[1]}
    monkeypatch.setattr(gguf, "read_gguf", lambda _path: replace(header, settings=settings))
    with pytest.raises(ModelError, match=f"llama.{said[0]} is {said[1]}, expected"):
        ModelSource.resolve(str(written("llama", "F16").quantised))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope.freq_base": 0.0}, "rope.freq_base is 0.0, expected a float above 0 other than 1"),
        ({"rope.freq_base": 1.0}, "rope.freq_base is 1.0, expected a float above 0 other than 1"),
        ({"rope.freq_base": float("nan")}, "rope.freq_base is nan, expected a float above 0 other than 1"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.factor is None, expected a number above 0"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0},
            "rope.scaling.factor is 0.0, expected a number above 0",
        ),
    ],
)
def test_a_rotation_of_numbers_that_make_none_is_refused(
    written: Get, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], expected: str
) -> None:
    header = read_gguf(written("llama", "F16").quantised)
    settings = header.settings | {f"llama.{key}": value for key, value in changes.items()}
    monkeypatch.setattr(gguf, "read_gguf", lambda _path: replace(header, settings=settings))
    with pytest.raises(ModelError, match=re.escape(f"llama.{expected}")):
        ModelSource.resolve(str(written("llama", "F16").quantised))


@pytest.mark.parametrize("shape", [(2, 8), (), (0,)])
def test_frequencies_are_a_row_of_numbers(
    written: Get, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    header = read_gguf(written("llama3", "F16").quantised)
    stored = header.tensors["rope_freqs.weight"]
    assert stored.shape == (16,)
    odd = replace(stored, shape=shape, num_bytes=4 * math.prod(shape))
    tensors = {**header.tensors, "rope_freqs.weight": odd}
    monkeypatch.setattr(gguf, "read_gguf", lambda _path: replace(header, tensors=tensors))
    said = f"rope_freqs.weight is F32 of shape {list(shape)}, expected a number for each frequency"
    with pytest.raises(ModelError, match=re.escape(said)):
        ModelSource.resolve(str(written("llama3", "F16").quantised))


def patched(sound: Path, target: Path, old: bytes, new: bytes) -> Path:
    data = sound.read_bytes()
    assert data.count(old) >= 1
    target.write_bytes(data.replace(old, new, 1))
    return target


def test_what_is_wrong_with_a_file_is_said(written: Get, tmp_path: Path) -> None:
    sound = written("llama", "Q8_0").quantised
    name = struct.pack("<Q", len("blk.1.ffn_up.weight")) + b"blk.1.ffn_up.weight"
    dims = struct.pack("<IQQ", 2, 128, 192)
    base = b"llama.rope.freq_base"
    cases = [
        (b"GGUF", b"GGML", "is no GGUF file of version 2 or 3"),
        (struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"mamba", "the architecture 'mamba' is not"),
        (
            name,
            name.replace(b"ffn_up", b"ffn_ip"),
            "blk.1.ffn_ip.weight is not a tensor that Convoy knows in llama",
        ),
        (name + dims + struct.pack("<I", 8), name + dims + struct.pack("<I", 99), "has ggml's type 99"),
        (name + dims, name + struct.pack("<IQQ", 2, 100, 192), "expected rows of whole blocks of 32"),
        (name + dims, name + struct.pack("<IQQ", 2, 128, 0), "of shape [0, 128], expected rows"),
        (name + dims, name + struct.pack("<IQQ", 2, 128, 1 << 40), "is truncated"),
        (base + struct.pack("<I", 6), base + struct.pack("<I", 4), "llama.rope.freq_base is 1"),
        (struct.pack("<I", 3), struct.pack("<I", 9), "is no GGUF file of version 2 or 3"),
    ]
    for number, (old, new, expected) in enumerate(cases):
        path = patched(sound, tmp_path / f"{number}.gguf", old, new)
        with pytest.raises(ModelError, match=re.escape(expected)):
            ModelSource.resolve(str(path))
    short = tmp_path / "short.gguf"
    for size in (3, 40, 2000, sound.stat().st_size - 1):
        short.write_bytes(sound.read_bytes()[:size])
        with pytest.raises(ModelError, match=re.escape(str(short))):
            ModelSource.resolve(str(short))
