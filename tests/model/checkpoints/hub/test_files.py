"""A model by its name on a hub: our own small one on loopback, and none at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from convoy.errors import HubUnreachable, ModelError
from convoy.model.checkpoints.hub.files import Hub, HubName
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from support.fake_hub import COMMIT, FakeHub
from support.odd_models import make_odd_llama
from support.small_disk import mounted_small_disk
from support.waiting import wait_until

pytestmark = pytest.mark.outside

NOWHERE = "http://127.0.0.1:9"
NAME = HubName("somebody/odd")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_odd_llama(tmp_path_factory.mktemp("model") / "odd")
    (directory / "modeling_odd.py").write_text("raise SystemExit('code of a model was run')")
    (directory / "pytorch_model.bin").write_bytes(b"pickled")
    return directory


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


def test_a_broken_connection_is_gone_on_with(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.cuts = [1000, 500]
    _, directory = Hub(tmp_path / "cache", hub.url).download(NAME)
    starts = [start for file, start in hub.asked if file == "model.safetensors"]
    assert starts == [0, 1000, 1500]
    assert (directory / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_process_that_is_killed_in_the_middle_of_a_file_goes_on_from_there(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    size = (model / "model.safetensors").stat().st_size
    hub.stalls_at = size // 2
    command = "import sys; from pathlib import Path; from convoy.model.checkpoints.hub.files import *; "
    command += "Hub(Path(sys.argv[1]), sys.argv[2]).download(HubName('somebody/odd'))"
    process = subprocess.Popen([sys.executable, "-c", command, str(tmp_path / "cache"), hub.url])
    wait_until(lambda: any(half.stat().st_size == size // 2 for half in _halves(tmp_path)))
    process.kill()
    process.wait()
    hub.stalls_at = 0
    _, directory = Hub(tmp_path / "cache", hub.url).download(NAME)
    assert (directory / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert hub.served["model.safetensors"] == size, "no byte came twice"
    assert not _halves(tmp_path)


def _halves(folder: Path) -> list[Path]:
    return list((folder / "cache").rglob("model.safetensors.part"))


def test_a_download_that_fails_is_named_and_what_came_stays(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts = [700, *[0] * 5]  # and then it is given up
    lost = r"model\.safetensors of somebody/odd@5f5f5f5f5f5f cannot be fetched, the hub cannot be reached: "
    with pytest.raises(HubUnreachable, match=lost) as broken:
        Hub(tmp_path / "cache", hub.url, retry_wait_s=0.0).download(NAME)
    assert "start again to resume" in (broken.value.hint or "")
    hub.asked.clear()
    Hub(tmp_path / "cache", hub.url).download(NAME)
    assert hub.asked == [("model.safetensors", 700)]


def test_a_file_with_another_digest_than_the_hub_lists_is_never_named(hub: FakeHub, tmp_path: Path) -> None:
    hub.lies = "model.safetensors"
    with pytest.raises(ModelError, match=r"model\.safetensors of somebody/odd@main came with the digest"):
        Hub(tmp_path / "cache", hub.url).download(NAME)
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    hub.lies = ""
    Hub(tmp_path / "cache", hub.url).download(NAME)


def test_half_a_file_that_is_another_is_fetched_anew(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    cached = Hub(tmp_path / "cache", hub.url)
    directory = cached.directory(NAME, COMMIT)
    directory.mkdir(parents=True)
    (directory / "model.safetensors.part").write_bytes(b"other" * 100)
    assert cached.download(NAME)[1] == directory
    assert (directory / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_small_disk(tmp_path / "small") as folder:
        yield folder


def test_a_disk_that_fills_up_meanwhile_is_named_with_the_file_and_what_came_stays(
    hub: FakeHub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 40))
    full = r"model\.safetensors\.part cannot be written for model\.safetensors: no space left on device"
    with pytest.raises(ModelError, match=full) as error:
        Hub(small_disk / "cache", hub.url).download(NAME)
    assert "received bytes are kept" in (error.value.hint or "")
    assert next(small_disk.rglob("model.safetensors.part")).stat().st_size > 50_000


def test_a_full_disk_is_said_with_both_numbers_before_a_byte_comes(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=12345))
    with pytest.raises(ModelError, match=r"\d+ bytes of weights are missing here, .* has 12345 free") as full:
        Hub(tmp_path / "cache", hub.url).download(NAME)
    assert "convoy models" in (full.value.hint or "")
    assert hub.asked == []


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
    lost = "the model somebody/odd@main cannot be fetched, the hub cannot be reached: "
    with pytest.raises(HubUnreachable, match=lost) as error:
        Hub(tmp_path / "cache", NOWHERE).download(NAME)
    assert "a peer needs no --model" in (error.value.hint or "")


def test_a_hub_that_is_out_of_order_is_as_good_as_none(hub: FakeHub, tmp_path: Path) -> None:
    hub.status = 503
    with pytest.raises(HubUnreachable, match="the hub answers HTTP 503"):
        Hub(tmp_path / "cache", hub.url).download(NAME)


def test_no_address_is_in_what_is_said_of_a_hub_that_refuses(hub: FakeHub, tmp_path: Path) -> None:
    hub.status = 410  # as of an address that was good for an hour: it has a signature in it
    with pytest.raises(ModelError, match=r"the hub refused .*410 Gone.*its address") as refused:
        Hub(tmp_path / "cache", hub.url.replace("//", "//someone:password@")).download(NAME)
    assert "password" not in refused.value.message
    assert "http" not in refused.value.message


def test_what_is_no_hub_is_said(hub: FakeHub, tmp_path: Path) -> None:
    hub.status = 200
    with pytest.raises(ModelError, match="the server that answers for somebody/odd@main is not a hub"):
        Hub(tmp_path / "cache", hub.url).download(NAME)


@pytest.mark.parametrize("said", [[], {}, None, {"id": "somebody/odd", "siblings": [5]}])
def test_a_hub_whose_answer_describes_no_model_is_said(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: object
) -> None:
    monkeypatch.setattr(hub, "info", lambda: json.dumps(said).encode())
    with pytest.raises(ModelError, match="answers for somebody/odd@main is not a hub: it described no"):
        Hub(tmp_path / "cache", hub.url).download(NAME)


def test_an_error_of_ours_is_not_taken_for_the_hubs(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(tmp_path / "cache", hub.url).download(NAME)
    monkeypatch.setattr("convoy.model.checkpoints.hub.files.HubFile", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        Hub(tmp_path / "cache", hub.url).download(NAME)


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


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_file_whose_size_the_hub_does_not_say_is_not_taken_for_an_empty_one(
    hub: FakeHub, tmp_path: Path, file: str
) -> None:
    hub.unsized = file
    with pytest.raises(ModelError, match=f"the hub lists no size for {file} of somebody/odd@main"):
        Hub(tmp_path / "cache", hub.url).download(NAME)
    assert not list(tmp_path.glob(f"cache/**/{file}"))
