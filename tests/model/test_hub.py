"""A model by its name on a hub: our own small one on loopback, and none at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.errors import ModelError
from convoy.model.digests import Hashing, make_manifest
from convoy.model.hub import Hub, HubName
from convoy.model.source import ModelSource
from support.fake_hub import COMMIT, FakeHub
from support.odd_models import make_odd_llama

NOWHERE = "http://127.0.0.1:9"
NAME = HubName("somebody/odd")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_odd_llama(tmp_path_factory.mktemp("model") / "odd")
    (directory / "modeling_odd.py").write_text("raise SystemExit('code of a model was run')")
    (directory / "pytorch_model.bin").write_bytes(b"pickled")
    return directory


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[FakeHub]:
    fake = FakeHub(shutil.copytree(model, tmp_path / "served"))
    yield fake
    fake.close()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/Name-7B.v2@refs/pr/3", HubName("org/Name-7B.v2", "refs/pr/3")),
        (f"org/name@{COMMIT}", HubName("org/name", COMMIT)),
        ("demo", None),
        ("./org/name", None),
        ("../org", None),
        ("org/../name", None),
        ("org/name/more", None),
        ("/org/name", None),
        ("org/name@", None),
        ("org/name@../../etc", None),
        ("org/na me", None),
    ],
)
def test_what_is_a_name_on_the_hub(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name


def test_a_directory_that_is_here_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert HubName.parse("org/name") is None


def test_a_model_comes_whole_at_one_commit_and_without_code_or_pickles(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    said: list[tuple[str, int, int]] = []
    commit, directory = Hub(tmp_path / "cache", hub.url).download(NAME, lambda *step: said.append(step))
    assert commit == COMMIT
    fetched = {name for name, _ in hub.asked}
    assert fetched == {path.name for path in model.iterdir()} - {"modeling_odd.py", "pytorch_model.bin"}
    manifests = [make_manifest(ModelSource.resolve(str(path)), Hashing()) for path in (model, directory)]
    assert manifests[0].digest == manifests[1].digest
    size = (model / "model.safetensors").stat().st_size
    assert [step for step in said if step[0] == "model.safetensors"][-1][1:] == (size, size)


def test_a_second_time_nothing_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    first = Hub(tmp_path / "cache", hub.url).download(NAME)
    hub.asked.clear()
    assert Hub(tmp_path / "cache", hub.url).download(NAME) == first
    assert hub.asked == []


def test_a_broken_connection_is_gone_on_with(tmp_path: Path) -> None:
    demo = ModelSource.resolve("demo").path
    hub = FakeHub(demo)
    hub.cuts = [12 << 20]
    _, directory = Hub(tmp_path / "cache", hub.url).download(NAME)
    starts = [start for file, start in hub.asked if file == "model.safetensors"]
    assert starts == [0, 10 << 20], "pieces of 10 MiB that came whole are not asked for again"
    assert (directory / "model.safetensors").read_bytes() == (demo / "model.safetensors").read_bytes()
    hub.close()


def test_a_download_that_fails_is_named_and_whole_files_stay(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts = [0] * 6  # and then the library gives up
    lost = r"model\.safetensors of somebody/odd@main cannot be fetched"
    with pytest.raises(ModelError, match=lost) as broken:
        Hub(tmp_path / "cache", hub.url).download(NAME)
    assert "start again to go on" in (broken.value.hint or "")
    hub.asked.clear()
    Hub(tmp_path / "cache", hub.url).download(NAME)
    assert [file for file, _ in hub.asked] == ["model.safetensors"]


def test_a_file_with_another_digest_than_the_hub_lists_is_removed(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    _, directory = Hub(cache, hub.url).download(NAME)
    (directory / ".model.safetensors.verified").unlink()
    blob = (directory / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors of somebody/odd@main came with the digest"):
        Hub(cache, hub.url).download(NAME)
    hub.asked.clear()
    Hub(cache, hub.url).download(NAME)
    assert [name for name, _ in hub.asked] == ["model.safetensors"]


@pytest.mark.parametrize(
    "shard", ["../../../etc/model.safetensors", "sub/model.safetensors", "model.bin", "/etc/x.safetensors"]
)
def test_an_index_that_names_a_file_elsewhere_is_refused(hub: FakeHub, tmp_path: Path, shard: str) -> None:
    index = {"weight_map": {"model.norm.weight": shard}}
    (hub.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"expected a \.safetensors file beside it"):
        Hub(tmp_path / "cache", hub.url).download(NAME)
    assert not any(name.endswith(("safetensors", ".bin")) for name, _ in hub.asked)


def test_a_shard_that_the_hub_lacks_is_named(hub: FakeHub, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (hub.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"somebody/odd@main has no model-00001-of-00002\.safetensors"):
        Hub(tmp_path / "cache", hub.url).download(NAME)


def test_a_model_of_pickles_alone_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    (hub.directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors") as refused:
        Hub(tmp_path / "cache", hub.url).download(NAME)
    assert "only safetensors are read" in (refused.value.hint or "")


def test_a_name_that_the_hub_does_not_know_is_said(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the hub has no nobody/nothing@main for you \(HTTP 404\)"):
        Hub(tmp_path / "cache", hub.url).download(HubName("nobody/nothing"))


def test_a_hub_that_cannot_be_reached_is_said_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the hub cannot be reached for somebody/odd@main: ") as lost:
        Hub(tmp_path / "cache", NOWHERE).download(NAME)
    assert "a peer needs no --model" in (lost.value.hint or "")


def test_what_was_fetched_before_is_used_where_the_hub_cannot_be_reached(
    hub: FakeHub, tmp_path: Path
) -> None:
    first = Hub(tmp_path / "cache", hub.url).download(NAME)
    offline = Hub(tmp_path / "cache", NOWHERE)
    assert offline.download(NAME) == first
    assert offline.offline is not None
    assert COMMIT[:12] in offline.offline


def test_whoever_watches_a_download_can_end_it(hub: FakeHub, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hub(tmp_path / "cache", hub.url).download(NAME, stop)


def test_a_directory_of_the_hubs_cache_has_the_name_that_the_hub_has_for_it(
    hub: FakeHub, tmp_path: Path
) -> None:
    _, directory = Hub(tmp_path / "cache", hub.url).download(NAME)
    assert ModelSource.resolve(str(directory)).name == "somebody/odd"
