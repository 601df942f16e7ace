"""GGUF models on a hub: the choice of a file, single tensors by ranges, and headers that lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.errors import ModelError
from convoy.model.checkpoints.hub.files import Hub, HubName, commit_of, snapshot_of
from convoy.model.checkpoints.hub.gguf import choose_gguf, fits_gguf
from convoy.model.checkpoints.hub.stream import HubCommit
from convoy.model.checkpoints.hub.weights import HubWeights
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.checkpoints.store.parts import is_whole
from convoy.model.checkpoints.store.received import ReceivedModel
from support.fake_hub import COMMIT, REPO, FakeHub
from support.gguf_models import CASES, build_model, write_case
from support.quantised_models import Writer, library_model, write_gguf

pytestmark = pytest.mark.outside

FILES = [
    *("config.json", "mmproj-model-f16.gguf", "Tiny-7B-Q4_K_M.gguf", "Tiny-7B-UD-Q4_K_M.gguf"),
    *("tiny-7b.Q8_0.gguf", "BF16/Tiny-7B-BF16-00001-of-00002.gguf", "BF16/Tiny-7B-BF16-00002-of-00002.gguf"),
]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """Serve one model in a file, and another one in three files of a folder."""
    served = tmp_path / "served"
    write_gguf(served, Writer(library_model("llama3")), "Q8_0")
    (served / "model.gguf").rename(served / "tiny-Q8_0.gguf")
    write_case(served / "F16" / "tiny-F16.gguf", CASES["llama"], build_model(CASES["llama"]), "F16", shards=3)
    fake = FakeHub(served)
    yield fake
    fake.close()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("Q4_K_M", ["Tiny-7B-Q4_K_M.gguf"]),
        ("ud-q4_k_m", ["Tiny-7B-UD-Q4_K_M.gguf"]),
        ("q8_0", ["tiny-7b.Q8_0.gguf"]),
        ("tiny-7b.Q8_0.gguf", ["tiny-7b.Q8_0.gguf"]),
        ("BF16", FILES[-2:]),
        ("Tiny-7B-BF16-00002-of-00002.gguf", FILES[-2:]),
        ("BF16/Tiny-7B-BF16-00001-of-00002.gguf", FILES[-2:]),
    ],
)
def test_a_file_or_a_quantisation_picks_one_model(asked: str, expected: list[str]) -> None:
    assert choose_gguf("org/name", asked, FILES) == expected
    assert fits_gguf(asked, expected[0])


@pytest.mark.parametrize(
    ("asked", "files", "expected"),
    [
        ("", FILES, "org/name has 4 GGUF models, of 4: BF16/Tiny-7B-BF16-00001-of-00002.gguf, "),
        ("Q5_0", FILES, "org/name has 0 GGUF models that fit Q5_0, of 4: "),
        ("K_M", FILES, "org/name has 0 GGUF models that fit K_M"),
        ("f16", FILES, "org/name has 0 GGUF models that fit f16"),
        ("BF16", FILES[:-1], "org/name lacks BF16/Tiny-7B-BF16-00002-of-00002.gguf, one of the 2 files"),
    ],
)
def test_a_choice_of_none_or_several_is_refused_with_the_files(
    asked: str, files: list[str], expected: str
) -> None:
    with pytest.raises(ModelError) as caught:
        choose_gguf("org/name", asked, files)
    assert expected in str(caught.value)


@pytest.mark.parametrize("asked", ["Q8_0", "F16"])
def test_only_the_chosen_files_are_downloaded_and_their_commit_is_known(
    hub: FakeHub, tmp_path: Path, asked: str
) -> None:
    commit, path = Hub(tmp_path / "cache", hub.url).download(HubName(REPO, file=asked))
    file = path.relative_to(tmp_path / "cache" / f"models--{REPO.replace('/', '--')}" / "snapshots" / commit)
    assert commit_of(path) == f"{REPO}@{COMMIT}:{file.as_posix()}"
    assert snapshot_of(path) == snapshot_of(path.parent) != path
    assert HubName.read(commit_of(path)) == HubName(REPO, COMMIT, file.as_posix())
    assert len(hub.served) == (1 if asked == "Q8_0" else 3)
    ours, theirs = (ModelSource.resolve(str(one)) for one in (path, hub.directory / file))
    assert make_manifest(ours, Hashing()).digest == make_manifest(theirs, Hashing()).digest


@pytest.mark.parametrize("file", ["tiny-Q8_0.gguf", "F16/tiny-F16-00001-of-00003.gguf"])
def test_a_layer_and_the_files_of_a_signed_model_come_by_ranges(
    hub: FakeHub, tmp_path: Path, file: str
) -> None:
    source = ModelSource.resolve(str(hub.directory / file))
    received = ReceivedModel(tmp_path / "cache", make_manifest(source, Hashing()))
    weights = HubWeights(HubCommit(REPO, COMMIT, hub.url, 0.0), file, first_bytes=1024)
    assert weights.name == f"{REPO}@{COMMIT}:{file}"
    names = [name for name in received.manifest.tensors if ".layers.1." in name]
    parts = list({part.digest: part for part in map(received.tensor, names)}.values())
    with received.open(lambda: None):
        assert weights.fetch(parts, lambda *_: None, lambda: None) == []
    assert all(is_whole(part) for part in parts)
    sizes = sum(part.num_bytes for part in parts)
    whole = sum(path.stat().st_size for path in (hub.directory / file).parent.glob("*.gguf"))
    assert sum(hub.served.values()) <= sizes + 3 * 2 * source.header_bytes < whole
    for name, data in source.own_files.items():
        assert b"".join(weights.stream_file(received.file(name))) == data


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + bytes(8), "is truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "a length of 1099511627776"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 10, 1 << 40),
            "its header takes more than",
        ),
        (b"<html>" + bytes(64), "is no GGUF file of version 2 or 3"),
    ],
)
def test_a_header_that_lies_is_refused_by_its_file_before_more_is_fetched(
    hub: FakeHub, head: bytes, expected: str
) -> None:
    (hub.directory / "bad.gguf").write_bytes(head)
    weights = HubWeights(HubCommit(REPO, COMMIT, hub.url, 0.0), "bad.gguf")
    with pytest.raises(ModelError, match=rf"bad\.gguf of {REPO}@5f5f5f5f5f5f.*{expected}"):
        weights.find(["model.norm.weight"])
    assert hub.served["bad.gguf"] <= len(head)


def test_an_answer_with_another_range_is_refused(hub: FakeHub) -> None:
    hub.shift = 7
    weights = HubWeights(HubCommit(REPO, COMMIT, hub.url, 0.0), "tiny-Q8_0.gguf")
    with pytest.raises(ModelError, match="answers with the range 'bytes 7-"):
        weights.find(["model.norm.weight"])
