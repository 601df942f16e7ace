"""Test the cache of models: listed with sizes and removed, except for models in use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from convoy.errors import ModelError
from convoy.model.checkpoints.hub.cache import InUse, list_cache, remove, unused
from convoy.model.checkpoints.store.parts import alone_in

COMMIT = "5f" * 20


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    received = tmp_path / "models" / ("ab" * 32)
    whole = tmp_path / "hub" / "models--somebody--odd" / "snapshots" / COMMIT
    for folder, size in ((received / "tensors", 8192), (whole, 65536), (tmp_path / "digests", 4096)):
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"x" * size)
    (received / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_what_is_kept_is_listed_the_largest_first(cache: Path) -> None:
    kept = list_cache(cache)
    assert [one.name for one in kept] == [f"somebody/odd@{COMMIT}", "ab" * 32, "digests"]
    assert [one.num_bytes for one in kept] == [65536, 8192 + 4096, 4096]
    assert kept[1].what == "layers of a llama model"
    assert not any(one.in_use for one in kept)


def test_what_is_removed_is_gone_and_the_rest_stays(cache: Path) -> None:
    whole, received, _ = list_cache(cache)
    remove(whole)
    assert not whole.folder.exists()
    assert [one.name for one in list_cache(cache)] == [received.name, "digests"]


def test_what_a_process_uses_stays(cache: Path) -> None:
    whole = list_cache(cache)[0]
    first, second = InUse(whole.folder), InUse(whole.folder)
    first.close()
    assert list_cache(cache)[0].in_use
    with pytest.raises(ModelError, match=f"somebody/odd@{COMMIT} is in use and is not removed"):
        remove(whole)
    second.close()
    remove(whole)
    assert not whole.folder.exists()


def test_what_a_process_begins_to_use_while_the_cache_is_listed_stays(tmp_path: Path) -> None:
    InUse(tmp_path).close()
    held: list[InUse] = []
    begins = threading.Thread(target=lambda: held.append(InUse(tmp_path)))
    with unused(tmp_path) as is_free:
        assert is_free
        begins.start()
        begins.join(0.2)  # it waits for the listing, or has given up
    begins.join()
    with unused(tmp_path) as is_free:
        assert not is_free
    held[0].close()


def test_what_a_process_fetches_stays(cache: Path) -> None:
    received = list_cache(cache)[1]
    with alone_in(received.folder, lambda: None), pytest.raises(ModelError, match="is in use"):
        remove(received)
    remove(received)


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert list_cache(tmp_path / "none") == []


def test_a_folder_that_cannot_be_written_can_be_used(tmp_path: Path) -> None:
    InUse(tmp_path / "none").close()
