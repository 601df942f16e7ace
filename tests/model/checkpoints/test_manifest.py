"""The manifest: what it covers, its one form, and how digests are remembered."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from convoy.errors import ModelError
from convoy.model.checkpoints.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    layer_order,
    start_tensor_digest,
)
from convoy.model.checkpoints.source import BUNDLED, ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest, tensor_digests
from support.odd_models import make_odd_llama

PLAIN = Hashing(num_threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_odd_llama(tmp_path_factory.mktemp("model") / "odd")


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "own")


def manifest_of(path: Path) -> Manifest:
    return make_manifest(ModelSource.resolve(str(path)), PLAIN)


def later_ns() -> int:
    """Return a time one minute from now, when a file just written has settled."""
    return time.time_ns() + 60 * 10**9


def test_the_same_model_has_the_same_manifest_wherever_it_lies(model: Path, own: Path) -> None:
    assert manifest_of(model).digest == manifest_of(own).digest


def test_a_tensors_digest_is_that_of_dtype_shape_and_bytes(model: Path) -> None:
    source = ModelSource.resolve(str(model))
    stored = source.tensors["model.norm.weight"]
    data = stored.path.read_bytes()[stored.offset : stored.offset + stored.num_bytes]
    start = b"\0\0\0\x10convoy tensor v1" + b"\0\0\0\x03F32" + b"\0\0\0\x08" + (40).to_bytes(8, "big")
    assert start_tensor_digest("F32", (40,)) == start
    expected = hashlib.sha256(start + data).hexdigest()
    assert manifest_of(model).tensors["model.norm.weight"].digest == expected


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"]
)
def test_a_file_beside_the_weights_changes_the_manifest(model: Path, own: Path, name: str) -> None:
    with (own / name).open("ab") as file:
        file.write(b" ")
    before, after = manifest_of(model), manifest_of(own)
    assert before.digest != after.digest
    assert before.tensors == after.tensors
    assert {n for n in before.files if before.files[n] != after.files[n]} == {name}


@pytest.mark.parametrize("name", ["modeling_odd.py", "pytorch_model.bin", "notes.txt"])
def test_what_is_no_part_of_a_model_is_in_no_manifest(model: Path, own: Path, name: str) -> None:
    (own / name).write_bytes(b"anything")
    assert manifest_of(model).digest == manifest_of(own).digest


def test_a_manifest_survives_the_way_there_and_back(model: Path) -> None:
    manifest = manifest_of(model)
    again = Manifest.decode(manifest.encoded, manifest.digest)
    assert again == manifest
    assert hashlib.sha256(manifest.encoded).hexdigest() == manifest.digest


def test_a_manifest_with_another_digest_is_refused(model: Path) -> None:
    manifest = manifest_of(model)
    with pytest.raises(ModelError, match="came with the digest"):
        Manifest.decode(manifest.encoded + b" ", manifest.digest)


GOOD = {
    "version": 1,
    "files": {"config.json": [2, "a" * 64]},
    "tensors": {"t": ["F32", [2, 3], 24, "b" * 64]},
}
LIES: dict[str, dict[str, object]] = {
    "a version from later": {"version": 2},
    "a version without end": {"version": "9" * 9000},
    "a name without end": {"tensors": {"t" * 9000: ["F32", [2, 3], 25, "b" * 64]}},
    "a file of code": {"files": {"modeling.py": [2, "a" * 64]}},
    "a file elsewhere": {"files": {"../config.json": [2, "a" * 64]}},
    "a huge file": {"files": {"config.json": [1 << 40, "a" * 64]}},
    "a file without a digest": {"files": {"config.json": [2, ""]}},
    "a digest that is a path": {"tensors": {"t": ["F32", [2, 3], 24, "../" * 21 + "a"]}},
    "a digest in capitals": {"tensors": {"t": ["F32", [2, 3], 24, "B" * 64]}},
    "bytes that do not fit the shape": {"tensors": {"t": ["F32", [2, 3], 25, "b" * 64]}},
    "a negative size": {"tensors": {"t": ["F32", [-2, -3], 24, "b" * 64]}},
    "a huge size": {"tensors": {"t": ["X", [1], 1 << 62, "b" * 64]}},
    "too many dimensions": {"tensors": {"t": ["F32", [1] * 9, 4, "b" * 64]}},
    "a shape of text": {"tensors": {"t": ["F32", "23", 24, "b" * 64]}},
    "a name with an escape": {"tensors": {"t\x1b[2J": ["F32", [2, 3], 24, "b" * 64]}},
    "a name of a kilobyte": {"tensors": {"t" * 1024: ["F32", [2, 3], 24, "b" * 64]}},
    "tensors in a list": {"tensors": []},
    "a field too many": {"tensors": {"t": ["F32", [2, 3], 24, "b" * 64, 0]}},
}


def encoded(described: object) -> tuple[bytes, str]:
    data = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    return data, hashlib.sha256(data).hexdigest()


def test_what_the_lies_are_made_of_is_good() -> None:
    manifest = Manifest.decode(*encoded(GOOD))
    assert manifest.tensors == {"t": TensorEntry("F32", (2, 3), 24, "b" * 64)}
    assert manifest.files == {"config.json": FileEntry(2, "a" * 64)}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie: str) -> None:
    with pytest.raises(ModelError, match="describes no model") as refused:
        Manifest.decode(*encoded(GOOD | LIES[lie]))
    assert len(refused.value.message) < 400


@pytest.mark.parametrize("data", [b"", b"[]", b"nothing", b"[" * 100_000, b'{"version":1}', b"\xff"])
def test_garbage_with_the_right_digest_is_refused(data: bytes) -> None:
    with pytest.raises(ModelError, match="describes no model"):
        Manifest.decode(data, hashlib.sha256(data).hexdigest())


def test_a_manifest_in_another_form_is_refused() -> None:
    data = json.dumps(GOOD, indent=1).encode()
    with pytest.raises(ModelError, match="not in its canonical form"):
        Manifest.decode(data, hashlib.sha256(data).hexdigest())


def test_layers_come_in_their_order() -> None:
    names = ["lm_head.weight", "model.layers.10.a", "model.layers.9.b", "model.embed_tokens.weight"]
    assert sorted(names, key=layer_order) == list(reversed(names))


def test_the_first_difference_names_layer_and_tensor(model: Path) -> None:
    manifest = manifest_of(model)
    own = {name: entry.digest for name, entry in manifest.tensors.items()}
    assert manifest.first_difference(own) is None
    changed = own | {"model.norm.weight": "0" * 64, "model.layers.2.mlp.up_proj.weight": "1" * 64}
    said = manifest.first_difference(changed)
    assert said is not None
    assert said.startswith(
        "at layer 2: model.layers.2.mlp.up_proj.weight has the digest 111111111111, expected "
    )
    assert manifest.first_difference({"model.embed_tokens.x": "0" * 64}) == (
        "in the embedding: model.embed_tokens.x is not in the manifest"
    )


def test_drawn_weights_have_a_manifest_that_costs_nothing_and_follows_the_seed() -> None:
    manifests = [make_manifest(ModelSource.resolve(f"synthetic:llama-250m@{seed}"), PLAIN) for seed in (1, 2)]
    again = make_manifest(ModelSource.resolve("synthetic:llama-250m@1"), PLAIN)
    assert manifests[0].digest == again.digest != manifests[1].digest
    assert sum(entry.num_bytes for entry in again.tensors.values()) > 900_000_000


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_have_one_and_no_file_of_theirs_is_left_out(name: str) -> None:
    source = ModelSource.resolve(name)
    manifest = make_manifest(source, PLAIN)
    beside = {path.name for path in source.path.iterdir()} - {"MODEL_CARD.md", "model.safetensors"}
    assert manifest.files.keys() == beside
    assert manifest.tensors.keys() == source.tensors.keys()


def test_digests_are_remembered_until_the_file_changes(own: Path, tmp_path: Path) -> None:
    weights = own / "model.safetensors"
    cache = tmp_path / "cache"
    source = ModelSource.resolve(str(own))
    tensors = list(source.tensors.values())
    num_hashed: list[int] = []

    def hashed() -> dict[str, str]:
        num_hashed.append(0)

        def progress(done: int, total: int) -> None:
            num_hashed[-1] = total

        return tensor_digests(source, tensors, Hashing(cache, 1, later_ns), progress)

    first, second = hashed(), hashed()
    assert first == second
    assert num_hashed == [sum(t.num_bytes for t in tensors), 0]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    third = hashed()
    assert num_hashed[-1] == num_hashed[0]
    assert third != first
    modes = {path.stat().st_mode & 0o077 for path in [cache / "digests", *(cache / "digests").iterdir()]}
    assert modes == {0}


def test_a_file_that_was_changed_a_moment_ago_is_not_remembered(own: Path, tmp_path: Path) -> None:
    """It could change again within one tick of its clock."""
    source = ModelSource.resolve(str(own))
    tensor_digests(source, list(source.tensors.values()), Hashing(tmp_path / "cache", 1))
    assert not (tmp_path / "cache").exists()


def test_a_file_that_was_changed_and_says_that_it_was_not_is_hashed_anew(own: Path, tmp_path: Path) -> None:
    weights = own / "model.safetensors"
    tensors = list(ModelSource.resolve(str(own)).tensors.values())

    def hashed() -> dict[str, str]:
        hashing = Hashing(tmp_path / "cache", 1, later_ns)
        return tensor_digests(ModelSource.resolve(str(own)), tensors, hashing)

    first, status = hashed(), weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_ino == status.st_ino
    assert hashed() != first


@pytest.mark.parametrize(
    "said", [b"", b"[]", b"{}", b"[" * 100_000, b'{"version":2,"path":0,"key":0,"digests":[]}']
)
def test_a_broken_memory_is_none(own: Path, tmp_path: Path, said: bytes) -> None:
    source = ModelSource.resolve(str(own))
    tensors = list(source.tensors.values())
    expected = tensor_digests(source, tensors, Hashing(tmp_path / "cache", 1, later_ns))
    (remembered,) = (tmp_path / "cache" / "digests").iterdir()
    remembered.write_bytes(said)
    assert tensor_digests(source, tensors, Hashing(tmp_path / "cache", 1, later_ns)) == expected


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(own: Path, tmp_path: Path) -> None:
    source = ModelSource.resolve(str(own))
    (tmp_path / "cache").write_bytes(b"a file")
    assert tensor_digests(source, list(source.tensors.values()), Hashing(tmp_path / "cache", 1, later_ns))


def test_a_file_that_is_cut_short_while_it_is_hashed_is_named_with_the_tensor(own: Path) -> None:
    source = ModelSource.resolve(str(own))
    last = max(source.tensors.values(), key=lambda tensor: tensor.offset)
    with last.path.open("r+b") as file:
        file.truncate(last.offset + 1)
    with pytest.raises(ModelError, match=rf"model\.safetensors is truncated: .* of {last.name} are missing"):
        tensor_digests(source, [last], PLAIN)


def test_whoever_watches_the_hashing_can_end_it(own: Path) -> None:
    source = ModelSource.resolve(str(own))

    def stop(_done: int, _total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        tensor_digests(source, list(source.tensors.values()), PLAIN, stop)
