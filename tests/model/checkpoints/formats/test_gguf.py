"""GGUF files, written and quantised by llama.cpp's own package, against what they stand for."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from convoy.errors import ModelError
from convoy.evaluate.library_model import library_logits as judge_logits
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.formats.gguf.header import TYPES, read_gguf
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.stage import StageOptions
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import StageAssignment
from model.checkpoints.formats.test_formats import chain, library_logits
from support.cases import cases
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


WRITTEN = [
    *[("llama", kind) for kind in ("Q8_0", "Q4_0", "Q5_1", "F16", "BF16", "F32")],
    ("tied", "Q4_1"),
    ("llama3", "Q8_0"),
    ("qwen2", "Q5_0"),
    ("qwen3", "Q8_0"),
]
# Each architecture, each kind of block, and one kind of unquantised numbers.
SLOW = [("llama", "Q8_0"), ("llama", "F16"), ("llama", "F32")]


@pytest.mark.parametrize(("model", "kind"), cases(WRITTEN, lambda one: one not in SLOW))
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
    assert manifest.files.keys() == {"config.json", "header.gguf"}


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def spoken() -> dict[str, object]:
    """Return the demo's vocabulary in GGUF's form."""
    demo = ModelSource.resolve("demo")
    described = json.loads((demo.path / "tokenizer.json").read_text())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    tokens += [f"<unused {number}>" for number in range(demo.spec.vocab_size - len(tokens))]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    return {"tokens": tokens, "merges": merges, "eos": 1, "template": TEMPLATE}


def written_demo(root: Path, words: dict[str, object]) -> ModelSource:
    path = ModelSource.resolve("demo").path
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return ModelSource.resolve(str(write_gguf(root, Writer(model), "F16", words).quantised))


def test_its_tokeniser_and_its_template_are_the_models(tmp_path: Path, spoken: dict[str, object]) -> None:
    source = written_demo(tmp_path / "file", spoken)
    found, text = Tokenizer(source), "Once upon a time there was"
    assert found.decode(found.encode(text)) == text
    assert found.encode(text) == Tokenizer(ModelSource.resolve("demo")).encode(text)
    assert found.has_chat_template
    # a member that has the manifest's files, and not the GGUF file
    for name, data in source.own_files.items():
        (tmp_path / name).write_bytes(data)
    received = ModelSource.described("received", tmp_path, source.config, source.tensors)
    assert Tokenizer(received).encode(text) == found.encode(text)
    # a link of another name, as a hub's cache has for each file
    link = tmp_path / "linked.gguf"
    (tmp_path / "blob").write_bytes(source.path.read_bytes())
    link.symlink_to(tmp_path / "blob")
    assert ModelSource.resolve(str(link)).digest == source.digest


def test_a_tokeniser_that_would_be_another_is_refused_unless_its_file_is_beside(
    tmp_path: Path, spoken: dict[str, object]
) -> None:
    source = written_demo(tmp_path, {**spoken, "pre": "deepseek-v3"})
    with pytest.raises(ModelError, match="splits text by the rule 'deepseek-v3'"):
        Tokenizer(source)
    beside = (ModelSource.resolve("demo").path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(beside)
    assert Tokenizer(source).encode("Once upon") == Tokenizer(ModelSource.resolve("demo")).encode("Once upon")
    assert make_manifest(source, Hashing()).files.keys() == {"config.json", "header.gguf", "tokenizer.json"}


def changed(
    written: Get,
    target: Path,
    changes: dict[str, object],
    model: str = "llama",
    factors: npt.NDArray[np.float32] | None = None,
) -> Path:
    """Return a copy of a file with other settings, or other factors of frequencies.

    Settings are 32-bit floats or whole numbers, or words.
    """
    reader = gguf.GGUFReader(written(model, "F16").quantised)
    file = gguf.GGUFWriter(target, model.rstrip("3"))
    for field in reader.fields.values():
        key = field.name.partition(".")[2]
        if not field.name.startswith(("GGUF.", "general.architecture")) and key not in changes:
            file.add_key_value(field.name, field.contents(), field.types[0])
    for key, value in changes.items():
        kinds = {float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32}
        if value is not None:
            file.add_key_value(f"llama.{key}", value, kinds.get(type(value), gguf.GGUFValueType.STRING))
    for tensor in reader.tensors:
        if factors is not None and tensor.name == "rope_freqs.weight":
            file.add_tensor(tensor.name, factors)
        else:
            file.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return target


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope.dimension_count": 16}, "rope.dimension_count is 16, expected a whole head of 32"),
        ({"rope.scale_linear": 4.0}, "rope.scale_linear is 4.0, expected none or 1.0"),
        ({"rope.freq_base": 0.0}, "rope.freq_base is 0.0, expected a float above 0 other than 1"),
        ({"rope.freq_base": 1.0}, "rope.freq_base is 1.0, expected a float above 0 other than 1"),
        ({"rope.freq_base": float("nan")}, "rope.freq_base is nan, expected a float above 0 other than 1"),
        ({"rope.freq_base": 1}, "rope.freq_base is 1, expected a float above 0 other than 1"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.factor is None, expected a number above 0"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0},
            "rope.scaling.factor is 0.0, expected a number above 0",
        ),
        ({"rope.scaling.type": "ntk"}, "rope.scaling.type is 'ntk', expected none, linear or yarn"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.original_context_length is None, expected a number of tokens",
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.yarn_attn_factor": 2.0,
            },
            "rope.scaling.yarn_attn_factor is 2.0, expected none or 1.0",
        ),
        ({"block_count": 1 << 20}, "the header says block_count = 1048576, expected a whole number from 1"),
        ({"nextn_predict_layers": 3}, "the header says nextn_predict_layers = 3, expected a whole number"),
        ({"block_count": 2}, "is of layer 2, and config.json says that there are 2"),
        ({"attention.head_count": 3}, "is F16 of shape [128, 128], expected a matrix for 3 heads"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    written: Get, tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    path = changed(written, tmp_path / "odd.gguf", changes)
    with pytest.raises(ModelError, match=re.escape(expected)):
        ModelSource.resolve(str(path))


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        (np.ones((2, 8), np.float32), "is F32 of shape [2, 8], expected a number for each frequency"),
        (np.ones(8, np.float32), "has 8 numbers, expected one for each of 16 frequencies"),
        (-np.ones(16, np.float32), "has numbers that are not above 0, or not finite"),
        (np.full(16, np.nan, np.float32), "has numbers that are not above 0, or not finite"),
        (np.linspace(1, 9, 16, dtype=np.float32), "has frequencies that no Llama 3 has"),
    ],
)
def test_frequencies_are_a_row_of_numbers(
    written: Get, tmp_path: Path, factors: npt.NDArray[np.float32], expected: str
) -> None:
    path = changed(written, tmp_path / "odd.gguf", {}, model="llama3", factors=factors)
    with pytest.raises(ModelError, match=re.escape(f"{path}: rope_freqs.weight {expected}")):
        ModelSource.resolve(str(path))


def patched(sound: Path, target: Path, old: bytes, new: bytes) -> Path:
    data = sound.read_bytes()
    assert data.count(old) >= 1
    target.write_bytes(data.replace(old, new, 1))
    return target


def described(name: str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    text = name.encode()
    return (
        struct.pack("<Q", len(text)) + text + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    )


def setting(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def made_file(target: Path, settings: list[bytes], tensors: list[bytes], data: int = 0) -> Path:
    """Write a file by hand: the package writes no wrong one."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    body = head + b"".join((*settings, *tensors))
    target.write_bytes(body + bytes(-len(body) % 32 + data))
    return target


ARCHITECTURE = setting("general.architecture", 8, struct.pack("<Q", 5) + b"llama")


@pytest.mark.parametrize(
    ("settings", "tensors", "expected"),
    [
        ([], [described("a", 32), described("b", 32, offset=64)], "b begins within a"),
        ([], [described("a", 32), described("a", 32, offset=128)], "the header has 1 tensors twice"),
        ([ARCHITECTURE] * 2, [], "has the setting 'general.architecture' twice"),
        ([], [described("a", 1 << 62, 1 << 62)], "is truncated"),
        ([], [described("a", 32, kind=9)], "a has ggml's type Q8_1, expected one of"),
        ([], [described("a", 32, kind=41)], "a has ggml's type Q1_0, expected one of"),
        (
            [],
            [described("a", 200, kind=21)],
            "a is IQ3_S of shape [200], expected rows of whole blocks of 256",
        ),
        ([], [described("a", 256, kind=21)] * 2, "the header has 1 tensors twice"),
        (
            [setting("k", 9, struct.pack("<IQ", 8, 1 << 40))],
            [],
            f"a setting has {1 << 40} values of the type 8",
        ),
        ([setting("k", 9, struct.pack("<IQ", 9, 4))], [], "a setting has 4 values of the type 9"),
        ([setting("k", 9, struct.pack("<IQ", 10, 1 << 60))], [], "its header takes more than"),
        ([setting("k", 9, struct.pack("<IQ", 10, 1 << 20))], [], "is truncated"),
        ([setting("k", 8, struct.pack("<Q", 1 << 60))], [], f"a length of {1 << 60}, expected at most"),
        ([setting("k", 8, struct.pack("<Q", 1 << 20))], [], "is truncated"),
        ([setting("k", 77, b"")], [], "a setting has the type 77"),
        ([setting("general.alignment", 4, struct.pack("<I", 0))], [], "general.alignment is 0, expected 1"),
    ],
)
def test_a_header_that_describes_what_cannot_be_is_refused(
    tmp_path: Path, settings: list[bytes], tensors: list[bytes], expected: str
) -> None:
    path = made_file(tmp_path / "odd.gguf", settings, tensors, data=512)
    with pytest.raises(ModelError, match=re.escape(expected)) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_the_types_are_those_that_the_package_unpacks() -> None:
    known = {number: (name, block, size) for number, (name, block, size) in TYPES.items()}
    for kind in gguf.GGMLQuantizationType:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            found = gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except (NotImplementedError, TypeError):
            assert kind.value not in known
            continue
        assert known.pop(kind.value) == (kind.name, block, size)
        assert found.shape == (1, block)
    assert not known


def test_what_is_wrong_with_a_file_is_said(written: Get, tmp_path: Path) -> None:
    sound = written("llama", "Q8_0").quantised
    name = struct.pack("<Q", len("blk.1.ffn_up.weight")) + b"blk.1.ffn_up.weight"
    dims = struct.pack("<IQQ", 2, 128, 192)
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
