"""Single tensors from a hub: just their bytes, compared with a manifest, and gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.errors import HubUnreachable, ModelError, StepError
from convoy.model.checkpoints.hub.stream import HubCommit
from convoy.model.checkpoints.hub.weights import HubWeights
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.parts import ModelPart, is_whole
from convoy.model.checkpoints.store.received import ReceivedModel
from support.fake_hub import COMMIT, REPO, FakeHub

pytestmark = pytest.mark.outside


@pytest.fixture
def received(manifest: Manifest, tmp_path: Path) -> Iterator[ReceivedModel]:
    model = ReceivedModel(tmp_path / "cache", manifest)
    with model.open(lambda: None):
        yield model


def weights(hub: FakeHub, retry_wait_s: float = 0.0) -> HubWeights:
    return HubWeights(HubCommit(REPO, COMMIT, hub.url, retry_wait_s))


def layer(received: ReceivedModel, number: int) -> list[ModelPart]:
    """Return its tensors, each once: two that are equal are one part."""
    names = [name for name in received.manifest.tensors if f"layers.{number}." in name]
    parts = {part.digest: part for part in map(received.tensor, names)}
    return list(parts.values())


def fetch(hub: FakeHub, parts: list[ModelPart]) -> list[ModelPart]:
    return weights(hub).fetch(parts, lambda *_: None, lambda: None)


def cut_in_shards(directory: Path) -> None:
    """Cut the weights into one shard for each layer, and one for all else."""
    tensors = load_file(directory / "model.safetensors")
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        place = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(f"model-{place}.safetensors", {})[name] = tensor
    for file, held in shards.items():
        save_file(held, directory / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()


def test_a_layer_comes_alone_out_of_a_model_of_one_file(hub: FakeHub, received: ReceivedModel) -> None:
    parts = layer(received, 3)
    told: list[tuple[int, int]] = []
    assert weights(hub).fetch(parts, lambda *step: told.append(step), lambda: None) == []
    assert all(is_whole(part) for part in parts)
    size = sum(part.num_bytes for part in parts)
    assert told[-1] == (size, size)
    stored = ModelSource.resolve(str(hub.directory)).tensors
    header = min(tensor.offset for tensor in stored.values())
    assert hub.served == {"model.safetensors": header + size}, "the header, the layer, and nothing else"


def test_only_the_shard_that_holds_a_layer_is_asked_for(hub: FakeHub, received: ReceivedModel) -> None:
    cut_in_shards(hub.directory)
    assert fetch(hub, layer(received, 3)) == []
    assert set(hub.served) == {"model.safetensors.index.json", "model-3.safetensors"}


def test_a_tensor_that_broke_off_is_gone_on_with(hub: FakeHub, received: ReceivedModel) -> None:
    parts = sorted(layer(received, 3), key=lambda part: -part.num_bytes)[:1]
    hub.cuts = [8, 1 << 20, 1000, *[0] * 5]  # the header's length, the header, and then it breaks
    with pytest.raises(HubUnreachable):
        fetch(hub, parts)
    hub.served.clear()
    asked = weights(hub)
    asked.find([parts[0].name])
    header, hub.served = hub.served["model.safetensors"], {}
    assert header > 8
    assert asked.fetch(parts, lambda *_: None, lambda: None) == []
    assert hub.served == {"model.safetensors": parts[0].num_bytes - 1000}


def test_half_a_tensor_that_is_another_is_fetched_anew(hub: FakeHub, received: ReceivedModel) -> None:
    parts = layer(received, 3)
    parts[0].place.with_name(f"{parts[0].digest}.part").write_bytes(b"other")
    assert fetch(hub, parts) == []
    assert all(is_whole(part) for part in parts)


def test_tensors_with_other_bytes_than_the_manifest_lists_are_not_kept(
    hub: FakeHub, received: ReceivedModel
) -> None:
    stored = ModelSource.resolve(str(hub.directory)).tensors
    last = max(stored.values(), key=lambda tensor: tensor.offset)
    hub.lies = "model.safetensors"
    wrong = received.tensor(last.name)
    others = [part for part in layer(received, 2) if part.digest != wrong.digest]
    assert fetch(hub, [*others, wrong]) == [wrong]
    assert not is_whole(wrong)
    assert all(is_whole(part) for part in others)


def test_what_the_hub_has_not_is_left_over(hub: FakeHub, received: ReceivedModel) -> None:
    part = layer(received, 1)[0]
    foreign = ModelPart("model.layers.99.weight", part.place.with_name("x"), 4, "0" * 64)
    assert fetch(hub, [foreign, part]) == [foreign]


def test_an_index_that_names_a_file_elsewhere_is_refused(hub: FakeHub, received: ReceivedModel) -> None:
    index = {"weight_map": {"model.norm.weight": "../../secret.safetensors"}}
    (hub.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"expected a \.safetensors file beside it"):
        fetch(hub, layer(received, 1))


def test_a_header_without_end_is_refused(hub: FakeHub, received: ReceivedModel) -> None:
    file = hub.directory / "model.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(
        ModelError, match=r"model\.safetensors of somebody/odd@5f5f5f5f5f5f is truncated or not"
    ):
        fetch(hub, layer(received, 1))


def test_a_hub_that_does_not_answer_is_asked_once(hub: FakeHub, received: ReceivedModel) -> None:
    hub.down = True
    with pytest.raises(HubUnreachable, match="the hub cannot be reached"):
        fetch(hub, layer(received, 1))


def test_nobody_waits_for_another_try_once_the_plan_is_over(hub: FakeHub, received: ReceivedModel) -> None:
    hub.cuts = [8, 1 << 20, 1000]
    parts = layer(received, 3)
    done: list[int] = []

    def watch() -> None:
        if done:
            raise StepError("the plan is over")

    with pytest.raises(StepError, match="the plan is over"):
        weights(hub, 3600.0).fetch(parts, lambda num_bytes, _total: done.append(num_bytes), watch)
    assert any(part.place.with_name(f"{part.place.name}.part").exists() for part in parts)
