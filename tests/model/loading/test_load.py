"""Test loading: a stage reads its own tensors alone, and errors name the faulty tensor."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.errors import ModelError
from convoy.model.backends.host.stage import HostStage
from convoy.model.backends.registry import load_stage
from convoy.model.checkpoints.checkpoint import StoredTensor, map_tensor
from convoy.model.checkpoints.source import BUNDLED, ModelSource
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.tiny_models import Chain, Models, Prompt, Threads

WHOLE = StageAssignment("a", 0, 5, True, True)


def copy_of(directory: Path, to: Path) -> Path:
    shutil.copytree(directory, to)
    return to


def load(path: Path, assignment: StageAssignment = WHOLE, **options: Any) -> HostStage:
    return HostStage.load(
        ModelSource.resolve(str(path)), assignment, StageOptions(require_tags=False, **options)
    )


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps(config))


def edit_weights(path: Path, change: Any) -> None:
    file = path / "model.safetensors"
    tensors = dict(load_file(file))
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "start", "end", "embed", "output"),
    [
        ("odd", 0, 2, True, False),
        ("odd", 2, 5, False, True),
        ("odd", 1, 4, False, False),
        ("odd", 0, 5, True, True),
        ("odd", 0, 0, True, True),
        ("even", 0, 2, True, False),
        ("even", 2, 6, False, True),
        ("even", 0, 3, True, True),
    ],
)
def test_a_stage_reads_its_own_tensors_and_no_others(
    models: Models, kind: str, start: int, end: int, embed: bool, output: bool
) -> None:
    source = models.source(kind)
    stage = HostStage.load(source, StageAssignment("a", start, end, embed, output), StageOptions())
    spec = source.spec
    own = spec.weight_bytes(start, end, embed=embed, output=output, dtype="float32")
    assert stage.bytes_read == own
    # an exact stage that both embeds and puts out holds a tied matrix twice: packed, and to look rows up in
    twice = spec.embed_bytes("float32") if embed and output and spec.tied_embeddings else 0
    assert stage.weight_bytes == own + twice
    plain = HostStage.load(
        source, StageAssignment("a", start, end, embed, output), StageOptions(kernel="plain-f32")
    )
    assert plain.weight_bytes == own


def test_the_reader_is_asked_for_owned_tensors_alone(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[StoredTensor] = []

    def counting(stored: StoredTensor) -> torch.Tensor:
        asked.append(stored)
        return map_tensor(stored)

    monkeypatch.setattr("convoy.model.checkpoints.read_tensor.map_tensor", counting)
    stage = load(models.directory("odd"), StageAssignment("a", 1, 3, False, False))
    assert {tuple(stored.name.split(".")[:3]) for stored in asked} == {
        ("model", "layers", "1"),
        ("model", "layers", "2"),
    }
    assert len(asked) == len(set(asked)) == 18
    assert stage.bytes_read == sum(stored.num_bytes for stored in asked)


def test_terabytes_of_other_layers_are_never_touched(models: Models, tmp_path: Path) -> None:
    """The other layers' weights lie in a hole of the file, larger than this machine's memory and disk."""
    path = copy_of(models.directory("odd"), tmp_path / "sparse")
    own = {
        name: tensor.clone()
        for name, tensor in load_file(path / "model.safetensors").items()
        if name.startswith("model.layers.0.") or "layers" not in name
    }
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in own.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    hole = 1 << 40
    header["model.layers.1.huge"] = {
        "dtype": "F32",
        "shape": [hole // 4],
        "data_offsets": [offset, offset + hole],
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in own.values():
            file.write(tensor.numpy().tobytes())
        file.truncate(8 + len(raw) + offset + hole)
    stage = load(path, StageAssignment("a", 0, 1, True, True))
    assert stage.bytes_read == offset


def test_loading_reports_progress_up_to_all_bytes(models: Models) -> None:
    calls: list[tuple[int, int]] = []
    stage = HostStage.load(
        models.source("odd"), WHOLE, StageOptions(), lambda done, total: calls.append((done, total))
    )
    assert calls == sorted(calls)
    assert calls[-1] == (stage.bytes_read, stage.bytes_read)


def test_nothing_is_printed_while_loading(models: Models, capfd: pytest.CaptureFixture[str]) -> None:
    load(models.directory("odd"), StageAssignment("a", 1, 3, False, False))
    assert capfd.readouterr() == ("", "")


def test_two_byte_matrices_are_held_as_two_bytes_in_exact_mode_and_as_four_otherwise(models: Models) -> None:
    source = models.source("odd", dtype=torch.bfloat16)
    stage = HostStage.load(source, StageAssignment("a", 1, 3, False, False), StageOptions())
    assert stage.bytes_read == source.spec.weight_bytes(1, 3, embed=False, output=False, dtype="bfloat16")
    # some outputs more, which fill panels
    planned = source.spec.weight_bytes(1, 3, embed=False, output=False, dtype="exact-f32")
    assert stage.weight_bytes == planned < 1.95 * stage.bytes_read
    options = StageOptions(kernel="plain-f32")
    plain = HostStage.load(source, StageAssignment("a", 1, 3, False, False), options)
    assert plain.weight_bytes == 2 * stage.bytes_read


def test_a_change_of_the_file_does_not_change_a_loaded_stage(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("even"), tmp_path / "changing")
    stage = load(path, StageAssignment("a", 0, 6, True, True))
    before = [p.clone() for part in stage.modules.parts() for p in part.parameters()]
    file = path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(b"\x55" * (file.stat().st_size // 2))
    after = [p for part in stage.modules.parts() for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_shards_are_followed_and_a_missing_one_is_named(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "sharded")
    tensors = load_file(path / "model.safetensors")
    parts: dict[str, dict[str, torch.Tensor]] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for number, (name, tensor) in enumerate(tensors.items()):
        parts[f"model-{number % 2 + 1}.safetensors"][name] = tensor
    for name, part in parts.items():
        save_file(part, path / name)
    (path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(path).bytes_read == load(models.directory("odd")).bytes_read
    (path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks the shard model-2\.safetensors"):
        ModelSource.resolve(str(path))


def test_an_index_that_points_elsewhere_is_refused(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "elsewhere")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../secret.safetensors"}}')
    with pytest.raises(ModelError, match="beside it"):
        ModelSource.resolve(str(path))


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at") as caught:
        ModelSource.resolve(str(tmp_path / "nothing"))
    assert all(name in str(caught.value.hint) for name in BUNDLED)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("demmo", "demo"), ("demo-mni", "demo-mini"), ("syntetic:llama-250m", "synthetic:llama-250m")],
)
def test_a_name_with_a_typing_error_gets_the_name_that_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSource.resolve(wrong)
    assert caught.value.hint == f"did you mean {meant}?"


def test_a_file_of_another_kind_is_refused_as_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(ModelError, match=r"notes\.txt is a file, and no model"):
        ModelSource.resolve(str(tmp_path / "notes.txt"))


def test_a_directory_without_weights_is_refused(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "empty")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="has no weights") as caught:
        ModelSource.resolve(str(path))
    assert "pytorch_model.bin" in str(caught.value.hint)


def test_a_directory_without_a_config_is_refused(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "bare")
    (path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelSource.resolve(str(path))
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        ModelSource.resolve(str(path))


def test_an_unsupported_type_is_named_with_the_supported_ones(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "other")
    edit_config(path, model_type="mamba")
    with pytest.raises(ModelError, match="mamba") as caught:
        ModelSource.resolve(str(path))
    assert "llama" in str(caught.value.hint)


def test_rotary_positions_that_change_with_the_length_are_refused(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "dynamic")
    edit_config(path, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ModelError, match="'dynamic'"):
        load(path)


def test_a_missing_tensor_is_named(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "missing")
    edit_weights(path, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.3\.mlp\.up_proj\.weight"):
        load(path)
    load(path, StageAssignment("a", 0, 3, True, False))  # not this stage's


def test_a_missing_embedding_is_named_even_where_only_the_tied_output_needs_it(
    models: Models, tmp_path: Path
) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "tied")
    edit_weights(path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ModelError, match="weight"):
        load(path, StageAssignment("a", 3, 5, False, True))


@pytest.mark.parametrize("kernel", ["exact-f32", "plain-f32"])
def test_an_output_that_is_missing_or_of_another_shape_is_named(
    models: Models, tmp_path: Path, kernel: str
) -> None:
    path, whole = copy_of(models.directory("even"), tmp_path / "even"), StageAssignment("a", 0, 6, True, True)
    edit_weights(path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(7, 128)}))
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[7, 128\], expected \[256, 128\]"):
        load(path, whole, kernel=kernel)
    edit_weights(path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
        load(path, whole, kernel=kernel)


@pytest.mark.parametrize("kernel", ["exact-f32", "plain-f32"])
def test_a_tied_embedding_of_another_shape_is_named(models: Models, tmp_path: Path, kernel: str) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "odd")
    edit_weights(path, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(7, 40)}))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has shape \[7, 40\]"):
        load(path, kernel=kernel)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "shape")
    edit_weights(path, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 40)}))
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has shape \[3, 40\], expected \[44, 40\]"
    ):
        load(path)


def test_a_head_of_which_more_is_to_be_turned_than_there_is_is_refused(
    models: Models, tmp_path: Path
) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "model")
    edit_config(
        path,
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 1e4,
            "factor": 1.0,
            "partial_rotary_factor": 4.0,
        },
    )
    with pytest.raises(
        ModelError, match=r"partial_rotary_factor = 4\.0, expected a number above 0 and at most 1"
    ):
        load(path)


def test_a_bias_that_the_configuration_denies_is_named(models: Models, tmp_path: Path) -> None:
    path, name = copy_of(models.directory("odd"), tmp_path / "bias"), "model.layers.1.mlp.up_proj.bias"
    edit_weights(path, lambda tensors: tensors.update({name: torch.zeros(44)}))
    load(path)  # of nothing it is no bias
    edit_weights(path, lambda tensors: tensors.update({name: torch.ones(44)}))
    with pytest.raises(ModelError, match=r"safetensors: model\.layers\.1\.mlp\.up_proj\.bias is a bias, but"):
        load(path)


@pytest.mark.parametrize("keep", [0, 5, 100, 4000, -1])
def test_a_truncated_file_is_refused(models: Models, tmp_path: Path, keep: int) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "cut")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="truncated"):
        ModelSource.resolve(str(path))


def test_a_header_that_lies_is_refused(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "lies")
    for header in (
        {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}},
        {"x": 3},
        [1],
    ):
        raw = json.dumps(header).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(64))
        with pytest.raises(ModelError):
            ModelSource.resolve(str(path))


def test_layers_outside_the_model_are_refused(models: Models) -> None:
    with pytest.raises(ModelError, match="layers 0 to 4"):
        load(models.directory("odd"), StageAssignment("a", 3, 6, False, True))


@pytest.mark.parametrize(
    "options", [{"kernel": "fast"}, {"block_size": 24}, {"block_size": 0}, {"device": "cuda"}]
)
def test_options_that_cannot_be_met_are_refused(models: Models, options: dict[str, Any]) -> None:
    source = ModelSource.resolve(str(models.directory("odd")))
    with pytest.raises(ModelError):
        load_stage(source, WHOLE, StageOptions(require_tags=False, **options))


def test_an_activation_without_an_exact_form_is_refused_in_exact_mode_only(
    models: Models, tmp_path: Path
) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "mish")
    edit_config(path, hidden_act="mish")
    with pytest.raises(ModelError, match="mish") as caught:
        load(path)
    assert "plain-f32" in str(caught.value.hint)
    load(path, kernel="plain-f32")


def test_the_digest_tells_shapes_and_configurations_apart(models: Models, tmp_path: Path) -> None:
    path = copy_of(models.directory("odd"), tmp_path / "digest")
    source = ModelSource.resolve(str(path))
    assert source.digest == models.source("odd").digest
    edit_config(path, rms_norm_eps=1e-5)
    assert ModelSource.resolve(str(path)).digest != source.digest
    assert models.source("odd", dtype=torch.bfloat16).digest != source.digest


def test_the_thread_count_is_set_at_load(models: Models, threads: Threads) -> None:
    threads(1)
    load(models.directory("odd"), num_threads=2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "kind",
    cases(
        ["odd", "biased", "gemma3", "gemma4 e", "gpt_oss", "deepseek_v3", "qwen3_5"],
        ("gemma4 e", "deepseek_v3").__contains__,
    ),
)
def test_a_stage_built_layer_by_layer_is_the_one_built_at_once(
    models: Models, prompt: Prompt, kind: str
) -> None:
    (at_once,) = models.chain(kind).run((0, prompt(40)))
    source = models.source(kind)
    assignment = StageAssignment("a", 0, source.spec.num_layers, True, True)
    seen: list[tuple[int, int]] = []
    options = StageOptions(require_tags=False, portion_bytes=1)
    stage = HostStage.load(source, assignment, options, lambda *done: seen.append(done))
    (by_layer,) = Chain([stage]).run((0, prompt(40)))
    assert torch.equal(by_layer, at_once)
    assert seen == sorted(seen)
    assert seen[-1] == (stage.bytes_read, stage.bytes_read)
