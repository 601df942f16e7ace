"""Weights at a plan: compared with the head's, or got from it. Real heads, peers and links over memory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.cluster.head.head import Head
from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.cluster.weights.head_server import HeadWeightServer
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import PeerRefused
from convoy.model.checkpoints.hub.cache import list_cache
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from convoy.wire.messages.fetch import Fetch, Piece
from support.cluster import MEMBER, NAMES, PeerThread
from support.gguf_models import CASES, build_model, write_case
from support.members import make_local_members, membership_of
from support.waiting import wait_until

Bytes = dict[str, bytes]
SPANS = {"alpha": "0:2,output", "beta": "3:4"}


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """Copy the same model once more, to be changed."""
    return shutil.copytree(model, tmp_path / "own")


@contextmanager
def started(
    model: Path,
    peer: PeerOptions,
    spans: dict[str, str] | None = None,
    member: MemberOptions = MEMBER,
) -> Iterator[tuple[RunningCluster, list[tuple[str, int, int]]]]:
    """Start a head with the files and one peer; yield it with the progress that the head heard of."""
    network = MemoryNetwork()
    members = make_local_members(NAMES[:2])
    thread = PeerThread(members[1], peer, network)
    heard: list[tuple[str, int, int]] = []
    try:
        cluster = RunningCluster.start(
            membership_of(members[0]),
            ModelSource.resolve(str(model)),
            HeadOptions(member, spans=spans or SPANS, wait_s=60, num_blocks=64),
            lambda *said: heard.append(said),
            network=network,
        )
        try:
            yield cluster, heard
        finally:
            cluster.close()
    finally:
        thread.stop()


def answer_of(cluster: RunningCluster) -> list[int]:
    request = GenerationRequest((3, 9, 20, 7), SamplingParams(temperature=0.0), max_tokens=12)
    return list(generate(cluster.engine, request).token_ids)


def change_a_byte(path: Path, tensor: str) -> None:
    """Change the last byte of one tensor's values, and nothing of its name or shape."""
    stored = ModelSource.resolve(str(path)).tensors[tensor]
    data = bytearray(stored.path.read_bytes())
    data[stored.offset + stored.num_bytes - 1] ^= 1
    stored.path.write_bytes(data)


def with_cache(folder: Path) -> PeerOptions:
    return PeerOptions(replace(MEMBER, cache=folder))


def test_members_with_the_same_files_start(model: Path, own: Path) -> None:
    with started(model, PeerOptions(MEMBER, model_path=own)) as (cluster, _):
        assert len(answer_of(cluster)) == 12


def test_members_with_different_weights_are_refused_with_the_first_tensor_that_differs(
    model: Path, own: Path
) -> None:
    change_a_byte(own, "model.layers.4.mlp.up_proj.weight")
    change_a_byte(own, "model.layers.3.mlp.down_proj.weight")
    refused = r"beta refused the plan: the weights of odd on beta are not the head's at layer 3: "
    with pytest.raises(
        PeerRefused, match=refused + r"model\.layers\.3\.mlp\.down_proj\.weight has the digest"
    ):
        started(model, PeerOptions(MEMBER, model_path=own)).__enter__()


def test_weights_that_a_member_does_not_hold_may_differ(model: Path, own: Path) -> None:
    change_a_byte(own, "model.layers.1.mlp.down_proj.weight")
    with started(model, PeerOptions(MEMBER, model_path=own)) as (cluster, _):
        assert len(answer_of(cluster)) == 12


def test_a_member_without_files_gets_its_own_layers_alone_and_answers_the_same(
    model: Path, own: Path, tmp_path: Path
) -> None:
    with started(model, PeerOptions(MEMBER, model_path=own)) as (cluster, _):
        expected = answer_of(cluster)
    with started(model, with_cache(tmp_path / "cache")) as (cluster, heard):
        assert answer_of(cluster) == expected
        manifest = cluster.head.weight_server.manifest()
    folder = tmp_path / "cache" / "models" / manifest.digest
    got = {path.name for path in (folder / "tensors").iterdir()}
    owned = {e.digest for name, e in manifest.tensors.items() if ".layers.3." in name or ".layers.4." in name}
    assert got == owned
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        ".use",
        "config.json",
        "manifest.json",
        "tensors",
    ]
    modes = {path.stat().st_mode & 0o077 for path in [folder.parent.parent, *folder.rglob("*")]}
    assert modes == {0}, "nobody else may read or change them"
    fetched = [done for who, done, _ in heard if who == "beta (from the head)"]
    sizes = {e.digest: e.num_bytes for e in manifest.tensors.values() if e.digest in owned}
    assert fetched[-1] == sum(sizes.values()), "and tensors that are equal only once"


def test_a_second_start_gets_nothing_twice(model: Path, tmp_path: Path) -> None:
    for times in range(2):
        with started(model, with_cache(tmp_path / "cache")) as (cluster, heard):
            fetched = [who for who, _, _ in heard if who == "beta (from the head)"]
            assert bool(fetched) == (times == 0)
            assert [one.in_use for one in list_cache(tmp_path / "cache")] == [True]
            assert len(answer_of(cluster)) == 12
    assert [one.in_use for one in list_cache(tmp_path / "cache")] == [False]


def test_what_came_before_a_member_ended_is_not_fetched_again(model: Path, tmp_path: Path) -> None:
    source = ModelSource.resolve(str(model))
    network, members = MemoryNetwork(), make_local_members(NAMES[:2])
    thread = PeerThread(members[1], with_cache(tmp_path / "cache"), network)
    options = HeadOptions(MEMBER, spans=SPANS, wait_s=60)
    head = Head(membership_of(members[0]), source, options, network=network)
    weights: Any = head.weight_server
    answer, answered, ended = weights.answer_fetch, [], threading.Event()

    def end_in_the_midst(fetch: Fetch, *more: object) -> Piece:
        answered.append(fetch)
        if len(answered) == 10:
            assert ended.wait(30)
        piece: Piece = answer(fetch, *more)
        return piece

    weights.answer_fetch = end_in_the_midst
    starting = threading.Thread(target=head.bring_up)  # which then goes on alone
    starting.start()
    wait_until(lambda: len(answered) == 10)
    tensors = tmp_path / "cache" / "models" / head.weight_server.manifest().digest / "tensors"
    wait_until(lambda: len([path for path in tensors.iterdir() if not path.suffix]) >= 5)
    thread.stop()
    ended.set()
    starting.join(60)
    head.close()
    kept = sum(path.stat().st_size for path in tensors.iterdir())
    with started(model, with_cache(tmp_path / "cache")) as (cluster, heard):
        fetched = max(total for who, _, total in heard if who == "beta (from the head)")
        assert len(answer_of(cluster)) == 12
    whole = sum(path.stat().st_size for path in tensors.iterdir())
    assert kept > 0
    assert fetched == whole - kept


def test_half_a_tensor_is_gone_on_with_through_the_link(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(model, with_cache(tmp_path / "cache")) as (cluster, _):
        expected = answer_of(cluster)
    victim = max((tmp_path / "cache").rglob("tensors/*"), key=lambda path: path.stat().st_size)
    data = victim.read_bytes()
    victim.unlink()
    victim.with_name(f"{victim.name}.part").write_bytes(data[:1000])
    asked: list[Fetch] = []
    answer = HeadWeightServer.answer_fetch

    def counted(self: HeadWeightServer, fetch: Fetch, *more: Any) -> Piece:
        asked.append(fetch)
        return answer(self, fetch, *more)

    monkeypatch.setattr(HeadWeightServer, "answer_fetch", counted)
    with started(model, with_cache(tmp_path / "cache")) as (cluster, heard):
        assert answer_of(cluster) == expected
    assert [(fetch.start, fetch.num_bytes) for fetch in asked] == [(1000, len(data) - 1000)]
    assert ("beta (from the head)", len(data), len(data)) in heard


def test_other_layers_are_added_to_those_that_are_here(model: Path, tmp_path: Path) -> None:
    with started(model, with_cache(tmp_path / "cache")) as (_, heard):
        first = max(done for who, done, _ in heard if who == "beta (from the head)")
    spans = {"alpha": "0:1,output", "beta": "2:4"}
    with started(model, with_cache(tmp_path / "cache"), spans) as (cluster, heard):
        second = max(done for who, done, _ in heard if who == "beta (from the head)")
        assert len(answer_of(cluster)) == 12
    assert first * 0.49 < second < first * 0.51, "one layer more, where two were"


@pytest.mark.parametrize("damage", [pytest.param("changed", marks=pytest.mark.long), "truncated"])
def test_what_was_damaged_on_disk_is_noticed_and_got_anew(model: Path, tmp_path: Path, damage: str) -> None:
    with started(model, with_cache(tmp_path / "cache")) as (cluster, _):
        expected = answer_of(cluster)
    victim = max((tmp_path / "cache").rglob("tensors/*"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[0] ^= 255
    victim.write_bytes(data if damage == "changed" else data[:-1])
    with started(model, with_cache(tmp_path / "cache")) as (cluster, heard):
        assert answer_of(cluster) == expected
        fetched = max(done for who, done, _ in heard if who == "beta (from the head)")
    assert fetched == len(data)


def test_a_member_without_files_gets_its_layers_of_a_split_gguf_model(tmp_path: Path) -> None:
    case = CASES["qwen3_moe"]
    first = write_case(tmp_path / "model" / "moe.gguf", case, build_model(case), "Q8_0", shards=3)
    spans, cache = {"alpha": "0:0,output", "beta": "1:2"}, tmp_path / "cache"
    with started(first, PeerOptions(MEMBER, model_path=first.parent), spans) as (cluster, _):
        expected = answer_of(cluster)
    with started(first, with_cache(cache), spans) as (cluster, _):
        assert answer_of(cluster) == expected
    parts = [path for path in cache.rglob("tensors/*") if not path.name.endswith(".part")]
    tensors = ModelSource.resolve(str(first)).tensors.values()
    own = [one for one in tensors if one.name.startswith(("model.layers.1.", "model.layers.2."))]
    assert sum(path.stat().st_size for path in parts) == sum(one.num_bytes for one in own)
    assert not list(cache.rglob("header.gguf"))


def test_a_file_that_changes_at_the_head_after_it_was_hashed_is_found_out(own: Path, tmp_path: Path) -> None:
    source = ModelSource.resolve(str(own))
    network, members = MemoryNetwork(), make_local_members(NAMES[:2])
    thread = PeerThread(members[1], with_cache(tmp_path / "cache"), network)
    head = Head(
        membership_of(members[0]), source, HeadOptions(MEMBER, spans=SPANS, wait_s=60), network=network
    )
    head.weight_server.manifest()
    change_a_byte(own, "model.layers.3.mlp.up_proj.weight")
    wrong = r"alpha sent other bytes of model\.layers\.3\.mlp\.up_proj\.weight than the manifest"
    with pytest.raises(PeerRefused, match=wrong):
        head.bring_up()
    thread.stop()
    assert not [path for path in (tmp_path / "cache").rglob("*.part") if path.stat().st_size]


def test_a_file_that_was_cut_short_at_the_head_is_named_with_the_tensor(own: Path) -> None:
    source = ModelSource.resolve(str(own))
    weights = HeadWeightServer(source, MemberOptions())
    manifest = weights.manifest()
    last = max(source.tensors.values(), key=lambda tensor: tensor.offset)
    with last.path.open("r+b") as file:
        file.truncate(last.offset + 1)
    fetch = Fetch(7, manifest.digest, manifest.tensors[last.name].digest, 0, last.num_bytes)
    piece = weights.answer_fetch(fetch)
    assert piece.error.startswith(f"model.safetensors is truncated at {last.name}")
    assert (piece.number, piece.data) == (7, b"")
