"""GGUF files of every family that Convoy reads, against the library's model that they stand for."""

from __future__ import annotations

import contextlib
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from convoy.errors import ModelError
from convoy.evaluate.library_model import library_logits
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.checkpoint import StoredTensor, map_tensor
from convoy.model.checkpoints.formats.arrange import Heads, arranged
from convoy.model.checkpoints.formats.gguf.header import read_gguf
from convoy.model.checkpoints.formats.gguf.rows import gguf_rows
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.owned import owned_tensors
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.checkpoints.store.received import ReceivedModel
from convoy.model.stage import StageOptions
from convoy.plan.spec.registry import FAMILIES
from convoy.wire.messages.control import StageAssignment
from model.checkpoints.formats.test_formats import chain, put
from support.cases import cases
from support.gguf_models import CASES, Written, build_model, write_case
from support.tiny_models import Chain, Prompt

TOLERANCE = 5e-5
Get = Callable[[str, str], Written]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Get:
    root, known = tmp_path_factory.mktemp("families"), dict[tuple[str, str], Written]()

    def get(name: str, kind: str) -> Written:
        if (name, kind) not in known:
            case = CASES[name]
            model = build_model(case, mxfp4=kind == "MXFP4")
            path = write_case(root / f"{name}-{kind}.gguf".replace(" ", "-"), case, model, kind)
            known[name, kind] = Written(path, model)
        return known[name, kind]

    return get


def expected_logits(written: Written, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = written.model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


# Of these, another case has all that their form has, and more besides.
SLOW = ("arcee", "seed_oss", "gemma", "gemma3_text", "gemma4_text", "qwen3_moe", "qwen3_5_text")


# Q8_0 holds the values of these models without rounding.
@pytest.mark.parametrize("name", cases(CASES, lambda one: one not in SLOW))
def test_a_file_gives_the_logits_of_the_librarys_model(written: Get, prompt: Prompt, name: str) -> None:
    tokens = prompt(70)
    expected = expected_logits(written(name, "Q8_0"), tokens)
    (found,) = chain(written(name, "Q8_0").path, 1).run((0, tokens))
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", cases(CASES, ("qwen3_5_moe_text", "gpt_oss", "deepseek_v3").__contains__))
def test_rounded_values_give_the_bits_of_the_same_values_in_float32(
    written: Get, prompt: Prompt, name: str
) -> None:
    (plain,), (rounded,) = (chain(written(name, kind).path).run((0, prompt(70))) for kind in ("F32", "Q8_0"))
    assert torch.equal(rounded, plain)


def test_experts_may_be_blocks_of_4_bit_floats(written: Get, prompt: Prompt) -> None:
    tokens, file = prompt(70), written("gpt_oss", "MXFP4")
    (found,) = chain(file.path).run((0, tokens))
    assert {t.dtype for t in read_gguf(file.path).tensors.values()} == {"F32", "MXFP4"}
    assert (found - expected_logits(file, tokens)).abs().max() <= TOLERANCE


def test_every_family_with_a_form_is_tried() -> None:
    forms = {family.gguf.architecture for family in FAMILIES.values() if family.gguf is not None}
    assert forms - {case.architecture for case in CASES.values()} == {"qwen2"}


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_text", "deepseek_v3"])
def test_a_stage_reads_its_own_tensors_and_takes_what_the_plan_said(written: Get, name: str) -> None:
    source = ModelSource.resolve(str(written(name, "Q8_0").path))
    stage = HostStage.load(source, StageAssignment("a", 1, 2, False, False), StageOptions())
    own = [tensor for name, tensor in source.tensors.items() if ".layers.1." in name]
    assert stage.bytes_read == sum(tensor.num_bytes for tensor in own)
    planned = source.spec.weight_bytes(1, 2, embed=False, output=False, dtype="exact-f32")
    assert stage.weight_bytes == planned


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_all_linears_of_a_delta_net_stay_as_stored(written: Get, kind: str) -> None:
    source = ModelSource.resolve(str(written("qwen3_5_text", kind).path))
    kept = source.layout.kept(source.tensors)
    for module in ("in_proj_qkv", "in_proj_z", "out_proj"):
        name = f"model.layers.0.linear_attn.{module}.weight"
        values = math.prod(source.layout.shapes(source.tensors)[name])
        assert kept[name] == values * (34 / 32 if kind == "Q8_0" else 2)


def test_heads_that_share_a_block_are_unpacked(tmp_path: Path) -> None:
    heads, name = Heads(2, 3, 128, 512), "model.layers.0.linear_attn.out_proj.weight"
    for kind, num_bytes in (("Q4_K", 0), ("Q4_0", 64 * 768 * 18 // 32)):
        stored = StoredTensor(name, tmp_path, kind, (64, 768), 0, 64 * 768 * 18 // 32)
        assert arranged(name, "value columns", [gguf_rows(stored)], heads).kept_bytes == num_bytes


def test_the_certificates_judge_takes_the_file(written: Get, prompt: Prompt) -> None:
    file, tokens = written("deepseek_v3", "Q8_0"), prompt(30)
    (judged,) = library_logits(ModelSource.resolve(str(file.path)), [tokens])
    assert (judged - expected_logits(file, tokens)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_5_text"])
def test_a_member_without_files_gets_the_tensors_as_they_are_stored(
    written: Get, prompt: Prompt, tmp_path: Path, name: str
) -> None:
    source = ModelSource.resolve(str(written(name, "Q8_0").path))
    manifest = make_manifest(source, Hashing())
    received = ReceivedModel(tmp_path, Manifest.decode(manifest.encoded, manifest.digest))
    with received.open(lambda: None):
        put(received.file("config.json"), source.own_files["config.json"])
        found = received.source(source.name, received.file("config.json"))
        assert found.digest == source.digest
        for tensor in owned_tensors(found, {1}, embed=False, output=False):
            stored = source.tensors[tensor.name]
            with stored.path.open("rb") as file:
                file.seek(stored.offset)
                put(received.tensor(tensor.name), file.read(stored.num_bytes))
    (whole,) = chain(source.path).run((0, prompt(40)))
    first = StageAssignment("m0", 0, 1, True, False)
    middle = StageAssignment("m1", 1, 2, False, False)
    last = StageAssignment("m2", 2, source.spec.num_layers, False, True)
    options = StageOptions(require_tags=False)
    stages = [
        HostStage.load(of, mine, options) for of, mine in ((source, first), (found, middle), (source, last))
    ]
    (logits,) = Chain(stages).run((0, prompt(40)))
    assert torch.equal(logits, whole)


@pytest.fixture(scope="module")
def shards(written: Get, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model in three files, and a projector of images beside it."""
    folder = tmp_path_factory.mktemp("split")
    first = write_case(folder / "tiny.gguf", CASES["llama"], written("llama", "Q8_0").model, "Q8_0", shards=3)
    assert first.is_file()
    (folder / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    return folder


def test_a_split_model_opens_by_any_of_its_files_or_its_directory(
    written: Get, shards: Path, prompt: Prompt
) -> None:
    alone = ModelSource.resolve(str(written("llama", "Q8_0").path))
    names = [shards, *sorted(shards.glob("tiny-*.gguf"))]
    sources = [ModelSource.resolve(str(name)) for name in names]
    assert len(sources) == 4
    assert {(one.name, one.path, one.digest) for one in sources} == {
        ("tiny", shards / "tiny-00001-of-00003.gguf", alone.digest)
    }
    assert len({tensor.path for tensor in sources[0].tensors.values()}) == 3
    made = [make_manifest(one, Hashing()).tensors for one in (alone, sources[0])]
    assert made[0] == made[1]
    tokens = prompt(40)
    (logits,) = chain(shards, 1).run((0, tokens))
    assert torch.equal(logits, chain(alone.path).run((0, tokens))[0])


def test_files_that_do_not_make_a_split_model_are_refused(shards: Path, tmp_path: Path) -> None:
    files = [shards / f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]

    def refused(folder: str, names: dict[str, Path], opened: str, expected: str) -> None:
        (tmp_path / folder).mkdir()
        for name, file in names.items():
            shutil.copy(file, tmp_path / folder / name)
        with pytest.raises(ModelError, match=re.escape(expected)):
            ModelSource.resolve(str(tmp_path / folder / opened))

    whole = {file.name: file for file in files}
    lacking = {name: file for name, file in whole.items() if "-00002-" not in name}
    refused("lacking", lacking, "", "lacks the shard tiny-00002-of-00003.gguf, and tiny-00001-of-00003")
    swapped = {**whole, files[1].name: files[2], files[2].name: files[1]}
    refused("swapped", swapped, files[0].name, "tiny-00002-of-00003.gguf: split.no is 2, expected 1")
    refused("alone", {"tiny.gguf": files[0]}, "tiny.gguf", "tiny.gguf: split.count is 3, expected 1")
    fewer = {f"tiny-0000{number}-of-00002.gguf": files[number - 1] for number in (1, 2)}
    refused("fewer", fewer, "", "split.count is 3, expected 2")
    refused("beyond", {"tiny-00004-of-00003.gguf": files[0]}, "", "is named as file 4 of 3, expected 1 to")
    refused("many", {"tiny-00001-of-09999.gguf": files[0]}, "", "file 1 of 9999, expected 1 to the last")
    refused("two", {"a.gguf": files[0], "b.gguf": files[1]}, "", "holds 2 GGUF models: a.gguf, b.gguf")


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        (
            "qwen3_moe",
            b"blk.1.ffn_up_exps.weight",
            b"blk.1.ffn_xp_exps.weight",
            "is not a tensor that Convoy",
        ),
        ("qwen3_moe", b"blk.1.ffn_up_exps.weight", b"blk.2.ffn_up_exps.weight", "tensors twice"),
        ("gemma", b"\x05\0\0\0\0\0\0\0gemma", b"\x05\0\0\0\0\0\0\0mamba", "architecture 'mamba'"),
        (
            "deepseek_v3",
            b"expert_gating_func",
            b"expert_gating_fund",
            "None, expected 2: DeepSeek V2 does not",
        ),
        ("deepseek_v3", b"expert_group_count", b"expert_group_coun_", "has no expert_group_count"),
        (
            "deepseek_v3",
            b"blk.1.attn_v_b.weight",
            b"blk.9.attn_v_b.weight",
            "there is no model.layers.1.attn_v",
        ),
        ("qwen3_5_text", b"ssm.time_step_rank", b"ssm.time_step_ran_", "has no ssm.time_step_rank"),
        ("gemma4_text", b"sliding_window_pattern", b"sliding_window_patter_", "shape"),
    ],
)
def test_a_file_that_lies_is_refused(
    written: Get, tmp_path: Path, name: str, old: bytes, new: bytes, expected: str
) -> None:
    data = written(name, "F32").path.read_bytes()
    assert old in data
    path = tmp_path / "odd.gguf"
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ModelError, match=re.escape(expected)):
        chain(path)


@pytest.mark.parametrize("name", ["gemma4_text", "deepseek_v3"])
def test_a_header_with_other_bytes_is_read_or_refused(written: Get, tmp_path: Path, name: str) -> None:
    data, path = bytearray(written(name, "Q8_0").path.read_bytes()), tmp_path / "odd.gguf"
    end = ModelSource.resolve(str(written(name, "Q8_0").path)).header_bytes
    numbers, refused = random.Random(7), 0
    for _ in range(60):
        place, byte = numbers.randrange(8, end), numbers.choice((0, 1, 255, numbers.randrange(256)))
        changed, data[place] = data[place], byte
        path.write_bytes(data)
        data[place] = changed
        # any other exception ends the test
        with contextlib.suppress(ModelError):
            ModelSource.resolve(str(path))
            continue
        refused += 1
    assert refused > 15


def test_an_architecture_that_is_close_is_refused_with_the_reason(written: Get, tmp_path: Path) -> None:
    data = written("qwen3 yarn", "F32").path.read_bytes()
    old = b"\x05\0\0\0\0\0\0\0qwen3"
    assert old in data
    path = tmp_path / "near.gguf"
    for architecture, reason in (("qwen3next", "in another form"), ("llama4", "on chunks")):
        text = architecture.encode()
        size = len(text).to_bytes(8, "little")
        path.write_bytes(data.replace(old, size + text, 1))
        with pytest.raises(ModelError, match=reason) as caught:
            ModelSource.resolve(str(path))
        assert "gemma3" in str(caught.value.hint)


def test_the_manifest_names_the_stored_bytes(written: Get) -> None:
    source = ModelSource.resolve(str(written("gemma2", "Q8_0").path))
    tensors = make_manifest(source, Hashing()).tensors
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == "Q8_0"
    norm = source.tensors["model.layers.1.input_layernorm.weight"]
    assert map_tensor(norm).mean() > 0.5
