"""The description of a model on a hub from its headers: equal to that of its files, and no weight comes."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from convoy.errors import HubUnreachable, ModelError
from convoy.model.checkpoints.hub.describe import MAX_HEADERS_BYTES, describe_on_hub
from convoy.model.checkpoints.hub.files import Hub, HubName
from convoy.model.checkpoints.source import ModelSource
from support.fake_hub import FakeHub
from support.gguf_models import CASES, build_model, write_case

pytestmark = pytest.mark.outside

NAME = HubName("somebody/odd")
NOWHERE = "http://127.0.0.1:9"


def test_a_description_is_that_of_the_files_and_takes_headers_alone(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    (hub.directory / "modeling_odd.py").write_text("raise SystemExit('code of a model was run')")
    ours, theirs = describe_on_hub(Hub(tmp_path / "cache", hub.url), NAME), ModelSource.resolve(str(model))
    assert (ours.name, ours.digest) == ("somebody/odd", theirs.digest)
    assert ours.spec.layers == theirs.spec.layers
    assert {file for file, _ in hub.asked} == {"config.json", "model.safetensors"}
    assert hub.served["model.safetensors"] < (model / "model.safetensors").stat().st_size


def test_the_headers_of_all_files_of_an_index_are_read(hub: FakeHub, tmp_path: Path) -> None:
    whole = hub.directory / "model.safetensors"
    shutil.copy(whole, hub.directory / "one.safetensors")
    whole.rename(hub.directory / "two.safetensors")
    weights = {"model.norm.weight": "one.safetensors", "lm_head.weight": "two.safetensors"}
    (hub.directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    describe_on_hub(Hub(tmp_path / "cache", hub.url), NAME)
    assert {"one.safetensors", "two.safetensors"} <= hub.served.keys()
    (hub.directory / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"somebody/odd@main has no two\.safetensors"):
        describe_on_hub(Hub(tmp_path / "cache", hub.url), NAME)


def test_a_wrapper_around_a_text_model_counts_with_its_text_model(hub: FakeHub, tmp_path: Path) -> None:
    path = hub.directory / "config.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "llava", "vision_config": {}, "text_config": text}))
    spec = describe_on_hub(Hub(tmp_path / "cache", hub.url), NAME).spec
    assert (spec.family, spec.num_layers) == ("llama", text["num_hidden_layers"])


def test_a_gguf_file_is_described_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "served" / "tiny-F16.gguf"
    write_case(path, CASES["llama"], build_model(CASES["llama"]), "F16", shards=1)
    fake = FakeHub(path.parent)
    try:
        found = describe_on_hub(Hub(tmp_path / "cache", fake.url), HubName(NAME.repo, file="F16"))
    finally:
        fake.close()
    assert found.digest == ModelSource.resolve(str(path)).digest


def test_a_model_that_is_here_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    Hub(tmp_path / "cache", hub.url).download(NAME)
    offline = Hub(tmp_path / "cache", NOWHERE)
    assert describe_on_hub(offline, NAME).name == "somebody/odd"
    assert "the hub cannot be reached; using" in (offline.offline or "")
    with pytest.raises(HubUnreachable, match="the hub cannot be reached") as lost:
        describe_on_hub(Hub(tmp_path / "other", NOWHERE), NAME)
    assert "name a directory" in (lost.value.hint or "")


def test_a_repository_of_others_is_refused_with_the_remedy(hub: FakeHub, tmp_path: Path) -> None:
    for name, status in ((HubName("nobody/nothing"), 0), (NAME, 401), (NAME, 403)):
        hub.status = status
        with pytest.raises(ModelError, match=rf"the hub has no {name} for you") as refused:
            describe_on_hub(Hub(tmp_path / "cache", hub.url), name)
        assert "for a private or gated model `hf auth login` first" in (refused.value.hint or "")


def _header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("config.json", b"[" * 100_000, "config.json of somebody/odd@5f5f5f5f5f5f is not JSON"),
        ("config.json", b"[]", "holds a list, expected an object"),
        ("config.json", b" " * (17 << 20), f"{17 << 20} bytes, expected at most {16 << 20}"),
        ("config.json", b'{"model_type": "nothing"}', "model type 'nothing' is not supported"),
        ("model.safetensors", _header(b"{}", 2**64 - 1), "header of 18446744073709551615"),
        ("model.safetensors", _header(b"{}", MAX_HEADERS_BYTES + 1), f"at most {MAX_HEADERS_BYTES}"),
        ("model.safetensors", _header(b"{}", 5000), "2 of 5000 bytes of its header came"),
        ("model.safetensors", _header(b"{" * 90), "has a malformed safetensors header"),
        (
            "model.safetensors",
            _header(b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
            "its header describes 86",
        ),
        ("model.safetensors.index.json", b'{"weight_map": 5}', "is not an index"),
        ("model.safetensors.index.json", b'{"weight_map": {"x": "../x.safetensors"}}', "beside it"),
        (
            "model.safetensors.index.json",
            json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(2049)}}).encode(),
            "names 2049 files, expected at most 2048",
        ),
    ],
)
def test_a_file_that_lies_is_refused_by_name(
    hub: FakeHub, tmp_path: Path, file: str, data: bytes, message: str
) -> None:
    (hub.directory / file).write_bytes(data)
    with pytest.raises(ModelError) as refused:
        describe_on_hub(Hub(tmp_path / "cache", hub.url), NAME)
    assert message in refused.value.message
