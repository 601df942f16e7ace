"""Tied embeddings: a checkpoint that stores an output all the same is refused unless it is the embedding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.errors import ModelError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.manifest import Manifest, TensorEntry
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.checkpoints.store.received import ReceivedModel
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.quantised_models import mlx, write
from support.tiny_models import Models

PLAIN = StageOptions(kernel="plain-f32", require_tags=False)
OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
REFUSAL = r"/model\.safetensors: lm_head\.weight {}, and config\.json says tie_word_embeddings = true, by"
OTHER = r"has other values than model\.embed_tokens\.weight"
Change = Callable[[torch.Tensor], torch.Tensor]


def with_output(models: Models, to: Path, change: Change) -> ModelSource:
    """Add an output to a tied model: ``change`` makes it of the embedding."""
    directory = shutil.copytree(models.directory("odd"), to / "odd")
    tensors = load_file(directory / "model.safetensors")
    assert OUTPUT not in tensors
    tensors[OUTPUT] = change(tensors[EMBEDDING].clone())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return ModelSource.resolve(str(directory))


def one_value_changed(embedding: torch.Tensor) -> torch.Tensor:
    embedding[-1, -1] += 1e-3
    return embedding


@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (one_value_changed, OTHER),
        (lambda t: t.to(torch.bfloat16), r"is BF16 of shape \[105, 40\], not as model\.embed_tokens\.weight"),
        (lambda t: t[:100].contiguous(), r"is F32 of shape \[100, 40\], not as model\.embed_tokens\.weight"),
    ],
    ids=["other values", "another dtype", "another shape"],
)
def test_an_output_that_is_not_the_embedding_is_refused_by_who_loads_it_and_by_who_hashes_it(
    models: Models, tmp_path: Path, change: Change, said: str, embed: bool
) -> None:
    source = with_output(models, tmp_path, change)
    first = 0 if embed else 2
    with pytest.raises(ModelError, match=REFUSAL.format(said)) as caught:
        HostStage.load(source, StageAssignment("a", first, 5, embed, True), PLAIN)
    assert caught.value.hint is not None
    assert "tie_word_embeddings to false" in caught.value.hint
    with pytest.raises(ModelError, match=REFUSAL.format(said)):
        make_manifest(source, Hashing(num_threads=1))


def test_an_output_that_is_the_embedding_changes_nothing(models: Models, tmp_path: Path) -> None:
    source = with_output(models, tmp_path, lambda t: t)
    whole = StageAssignment("a", 0, 5, True, True)
    stage, expected = (HostStage.load(one, whole, PLAIN) for one in (source, models.source("odd")))
    assert stage.bytes_read == expected.bytes_read
    assert stage.weight_bytes == expected.weight_bytes
    assert make_manifest(source, Hashing(num_threads=1)).tensors[OUTPUT].num_bytes == 105 * 40 * 4


def test_who_owns_no_output_reads_neither(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_output(models, tmp_path, one_value_changed)

    def read(stored: object) -> None:
        raise AssertionError(stored)

    monkeypatch.setattr("convoy.model.checkpoints.tied.map_tensor", read)
    HostStage.load(source, StageAssignment("a", 0, 3, True, False), PLAIN)
    HostStage.load(source, StageAssignment("a", 1, 3, False, False), PLAIN)


def received(source: ModelSource, manifest: Manifest, cache: Path) -> ModelSource:
    """Return the model of a peer that got its configuration and no tensor."""
    model = ReceivedModel(cache, manifest)
    with model.open(lambda: None):
        config = model.file("config.json")
        shutil.copy(source.path / "config.json", config.place)
        return model.source("odd", config)


def test_a_peer_that_gets_its_weights_compares_the_digests_of_the_manifest(
    models: Models, tmp_path: Path
) -> None:
    source = with_output(models, tmp_path, lambda t: t)
    manifest = make_manifest(source, Hashing(num_threads=1))
    same = received(source, manifest, tmp_path / "cache")
    assert same.tensors[OUTPUT].path == same.tensors[EMBEDDING].path  # so nothing is left to compare
    entry = manifest.tensors[OUTPUT]
    other = TensorEntry(entry.dtype, entry.shape, entry.num_bytes, "0" * 64)
    changed = Manifest({**manifest.tensors, OUTPUT: other}, manifest.files)
    with pytest.raises(ModelError, match=rf"lm_head\.weight {OTHER}"):
        received(source, changed, tmp_path / "cache")


@pytest.mark.parametrize("part", ["scales", "biases", "weight", None])
def test_of_a_quantised_output_every_part_is_that_of_the_embedding(tmp_path: Path, part: str | None) -> None:
    file = write(tmp_path, "tied", mlx(4, 32)).quantised / "model.safetensors"
    tensors = load_file(file)
    copies = {n: t.clone() for n, t in tensors.items() if n.startswith("model.embed_tokens.")}
    copies = {name.replace("model.embed_tokens.", "lm_head."): tensor for name, tensor in copies.items()}
    assert copies.keys() == {"lm_head.weight", "lm_head.scales", "lm_head.biases"}
    if part is not None:
        copies[f"lm_head.{part}"].view(torch.uint8)[0, 0] ^= 1
    save_file(tensors | copies, file, metadata={"format": "pt"})
    source = ModelSource.resolve(str(file.parent))
    if part is None:
        HostStage.load(source, StageAssignment("a", 0, 3, True, True), PLAIN)
        return
    with pytest.raises(
        ModelError, match=rf"lm_head\.{part} has other values than model\.embed_tokens\.{part}"
    ):
        HostStage.load(source, StageAssignment("a", 0, 3, True, True), PLAIN)
