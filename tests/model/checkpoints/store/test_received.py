"""Parts from another member: half of one is gone on with, a wrong one is not kept, a disk may be full."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.errors import ModelError
from convoy.model.checkpoints.manifest import FileEntry, Manifest, TensorEntry, start_tensor_digest
from convoy.model.checkpoints.store.parts import ModelPart, PartFile, is_whole, verify
from convoy.model.checkpoints.store.received import ReceivedModel
from support.small_disk import mounted_small_disk

DATA = bytes(range(256)) * 1000
START = start_tensor_digest("U8", (len(DATA),))
DIGEST = hashlib.sha256(START + DATA).hexdigest()
MANIFEST = Manifest({"t": TensorEntry("U8", (len(DATA),), len(DATA), DIGEST)}, {})


@pytest.fixture
def received(tmp_path: Path) -> Iterator[ReceivedModel]:
    model = ReceivedModel(tmp_path / "cache", MANIFEST)
    with model.open(lambda: None):
        yield model


def test_a_part_has_its_name_once_it_is_verified(received: ReceivedModel) -> None:
    part = received.tensor("t")
    with PartFile(part) as file:
        file.write(DATA)
        assert not is_whole(part)
        assert file.finish()
    assert is_whole(part)
    assert part.place.read_bytes() == DATA
    assert [path.name for path in part.place.parent.iterdir()] == [DIGEST]


def test_half_a_part_is_gone_on_with(received: ReceivedModel) -> None:
    part = received.tensor("t")
    with PartFile(part) as file:
        file.write(DATA[:1000])
    with PartFile(part) as file:
        assert file.resumed == 1000
        file.write(DATA[1000:])
        assert file.finish()
    assert part.place.read_bytes() == DATA


@pytest.mark.parametrize("data", [DATA[:-1], DATA[:-1] + b"x", DATA + b"x", b""])
def test_a_wrong_part_is_never_named_and_nothing_of_it_is_kept(received: ReceivedModel, data: bytes) -> None:
    part = received.tensor("t")
    with PartFile(part) as file:
        file.write(data)
        assert not file.finish()
    assert not is_whole(part)
    with PartFile(part) as file:
        assert file.resumed == 0


def test_what_an_earlier_try_left_too_long_is_forgotten(received: ReceivedModel) -> None:
    part = received.tensor("t")
    part.place.with_name(f"{DIGEST}.part").write_bytes(DATA + b"x")
    with PartFile(part) as file:
        assert file.resumed == 0
        file.write(DATA)
        assert file.finish()


def test_a_link_in_the_place_of_a_part_is_not_followed(received: ReceivedModel, tmp_path: Path) -> None:
    part = received.tensor("t")
    (tmp_path / "victim").write_bytes(b"precious")
    part.place.with_name(f"{DIGEST}.part").symlink_to(tmp_path / "victim")
    with pytest.raises(ModelError, match=r"\.part cannot be opened for t: "):
        PartFile(part)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_part_that_was_changed_on_disk_is_removed(received: ReceivedModel) -> None:
    part = received.tensor("t")
    part.place.write_bytes(DATA)
    assert verify(part, lambda _num_bytes: None)
    part.place.write_bytes(DATA[:-1] + b"x")
    assert not verify(part, lambda _num_bytes: None)
    assert not part.place.exists()


def test_the_manifest_is_remembered_and_a_broken_one_is_not(received: ReceivedModel, tmp_path: Path) -> None:
    assert ReceivedModel.remembered(tmp_path / "cache", MANIFEST.digest) == MANIFEST
    (received.folder / "manifest.json").write_bytes(b"{}")
    assert ReceivedModel.remembered(tmp_path / "cache", MANIFEST.digest) is None


def test_a_second_process_waits_for_the_first(received: ReceivedModel, tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    other = ReceivedModel(tmp_path / "cache", MANIFEST)
    with pytest.raises(InterruptedError), other.open(stop):
        pass


def test_a_model_that_does_not_fit_is_refused_before_a_byte_comes(received: ReceivedModel) -> None:
    free = shutil.disk_usage(received.folder).free
    huge = ModelPart("t", received.folder / "tensors" / "x", free + 1, "0" * 64)
    said = rf"{free + 1} bytes of weights are missing here, and the disk of .* has \d+ free"
    with pytest.raises(ModelError, match=said) as refused:
        received.require_room([huge])
    assert "--cache" in (refused.value.hint or "")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_small_disk(tmp_path / "small") as folder:
        yield folder


@pytest.mark.outside
def test_a_disk_that_fills_up_is_named_with_the_tensor_and_what_came_stays(small_disk: Path) -> None:
    model = ReceivedModel(small_disk / "cache", MANIFEST)
    part = model.tensor("t")
    full = r"\.part cannot be written for t: no space left on device"

    def fill() -> None:
        with PartFile(part) as file:
            for start in range(0, len(DATA), 4096):
                file.write(DATA[start : start + 4096])

    with model.open(lambda: None):
        with pytest.raises(ModelError, match=full) as refused:
            fill()
        assert "received bytes are kept" in (refused.value.hint or "")
        with PartFile(part) as file:
            assert file.resumed > 50_000


def test_a_file_that_the_manifest_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ReceivedModel(tmp_path, MANIFEST).file("config.json")
    with_file = Manifest({}, {"config.json": FileEntry(2, hashlib.sha256(b"{}").hexdigest())})
    assert ReceivedModel(tmp_path, with_file).file("config.json").num_bytes == 2
