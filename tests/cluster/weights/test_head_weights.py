"""A head that has a signed manifest and its own layers alone, and members that may run one model alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.weights.test_peer_weights import SPANS, answer_of, change_a_byte, started
from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.cluster.weights.head_weights import HeadWeights
from convoy.errors import HubUnreachable, ModelError, PeerRefused
from convoy.model.checkpoints.hub.stream import HubCommit
from convoy.model.checkpoints.hub.weights import HubWeights
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.checkpoints.store.received import ReceivedModel
from convoy.testing.network import MemoryNetwork
from support.cluster import MEMBER, NAMES, PeerThread
from support.fake_hub import COMMIT, REPO, FakeHub
from support.gguf_models import CASES, build_model, write_case
from support.members import make_local_members, membership_of

Heard = list[tuple[str, int, int]]


def opened(hub: FakeHub, manifest: Manifest, cache: Path, gguf: str = "") -> HeadWeights:
    """What a head has before a plan: every file but the weights."""
    received = ReceivedModel(cache, manifest)
    weights = HubWeights(HubCommit(REPO, COMMIT, hub.url, 0.0), gguf)
    with received.open(lambda: None):
        for part in map(received.file, manifest.files):
            here = hub.directory / part.name
            part.place.write_bytes(b"".join(weights.stream_file(part)) if gguf else here.read_bytes())
    source = received.source(REPO, received.file("config.json"))
    return HeadWeights(received, source, weights)


@contextmanager
def partly(
    own: HeadWeights, peer: PeerOptions, spans: dict[str, str] = SPANS
) -> Iterator[tuple[RunningCluster, Heard]]:
    network, members, heard = MemoryNetwork(), make_local_members(NAMES[:2]), Heard()
    thread = PeerThread(members[1], peer, network)
    options = HeadOptions(replace(MEMBER, signed=own.manifest.digest), spans=spans, wait_s=60, num_blocks=64)
    try:
        cluster = RunningCluster.start(
            membership_of(members[0]),
            own.source,
            options,
            lambda *said: heard.append(said),
            network=network,
            own=own,
        )
        try:
            yield cluster, heard
        finally:
            cluster.close()
    finally:
        thread.stop()


def tensors_in(cache: Path, manifest: Manifest) -> set[str]:
    return {path.name for path in (cache / "models" / manifest.digest / "tensors").iterdir()}


def test_no_member_has_the_whole_model_and_all_answer_as_it_does(
    hub: FakeHub, model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    with started(model, PeerOptions(MEMBER, model_path=model)) as (cluster, _):
        expected = answer_of(cluster)
    peer = PeerOptions(replace(MEMBER, cache=tmp_path / "beta", hub=hub.url))
    with partly(opened(hub, manifest, tmp_path / "alpha"), peer) as (cluster, heard):
        assert answer_of(cluster) == expected
    assert {who for who, _, total in heard if "(from" in who and total > 4096} == {
        "alpha (from the hub)",
        "beta (from the hub)",
    }
    own = {e.digest for name, e in manifest.tensors.items() if ".layers.3." in name or ".layers.4." in name}
    assert tensors_in(tmp_path / "beta", manifest) == own
    others = {
        e.digest
        for name, e in manifest.tensors.items()
        if not name.startswith(("model.layers.3", "model.layers.4"))
    }
    assert tensors_in(tmp_path / "alpha", manifest) == others


def test_a_split_gguf_model_of_a_hub_runs_and_no_member_has_it_whole(tmp_path: Path) -> None:
    first = write_case(
        tmp_path / "served" / "tiny.gguf", CASES["llama"], build_model(CASES["llama"]), "Q8_0", shards=2
    )
    spans = {"alpha": "0:1,output", "beta": "2:2"}
    with started(first, PeerOptions(MEMBER, model_path=first), spans) as (cluster, _):
        expected = answer_of(cluster)
    hub = FakeHub(first.parent)
    try:
        manifest = make_manifest(ModelSource.resolve(str(first)), Hashing())
        peer = PeerOptions(replace(MEMBER, cache=tmp_path / "beta", hub=hub.url))
        own = opened(hub, manifest, tmp_path / "alpha", first.name)
        with partly(own, peer, spans) as (cluster, _):
            assert answer_of(cluster) == expected
    finally:
        hub.close()
    theirs = {entry.digest for name, entry in manifest.tensors.items() if ".layers.2." in name}
    assert tensors_in(tmp_path / "beta", manifest) == theirs


def test_a_member_that_cannot_reach_the_hub_gets_its_layers_through_the_head(
    hub: FakeHub, manifest: Manifest, tmp_path: Path
) -> None:
    peer = PeerOptions(replace(MEMBER, cache=tmp_path / "beta", hub="http://127.0.0.1:9"))
    with partly(opened(hub, manifest, tmp_path / "alpha"), peer) as (cluster, heard):
        assert len(answer_of(cluster)) == 12
    assert {who for who, _, total in heard if who.startswith("beta (from") and total > 4096} == {
        "beta (from the head)"
    }
    assert not tensors_in(tmp_path / "beta", manifest) <= tensors_in(tmp_path / "alpha", manifest)


def test_a_second_start_needs_no_hub(hub: FakeHub, manifest: Manifest, tmp_path: Path) -> None:
    peer = PeerOptions(replace(MEMBER, cache=tmp_path / "beta", hub=hub.url))
    for down in (False, True):
        hub.down = down
        with partly(opened(hub, manifest, tmp_path / "alpha"), peer) as (cluster, _):
            assert len(answer_of(cluster)) == 12


def test_a_head_without_its_layers_and_without_a_hub_says_so(
    hub: FakeHub, manifest: Manifest, tmp_path: Path
) -> None:
    hub.down = True
    own = opened(hub, manifest, tmp_path / "alpha")
    peer = PeerOptions(replace(MEMBER, cache=tmp_path / "beta", hub=hub.url))
    with pytest.raises(HubUnreachable, match=r"index\.json of somebody/odd@5f5f5f5f5f5f cannot be fetched"):
        partly(own, peer).__enter__()


def test_a_hub_that_has_other_bytes_than_were_signed_is_named_with_the_tensor(
    hub: FakeHub, manifest: Manifest, tmp_path: Path
) -> None:
    change_a_byte(hub.directory, "model.layers.1.mlp.up_proj.weight")
    own = opened(hub, manifest, tmp_path / "alpha")
    peer = PeerOptions(replace(MEMBER, cache=tmp_path / "beta", hub=hub.url))
    wrong = r"lacks the bytes of model\.layers\.1\.mlp\.up_proj\.weight that the signed manifest lists"
    with pytest.raises(ModelError, match=wrong):
        partly(own, peer).__enter__()


def test_a_head_runs_no_other_model_than_was_signed(model: Path, manifest: Manifest, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    change_a_byte(other, "model.norm.weight")
    found = make_manifest(ModelSource.resolve(str(other)), Hashing()).digest
    members = make_local_members(NAMES[:1])
    options = HeadOptions(replace(MEMBER, signed=manifest.digest))
    said = f"has the digest {found[:12]}, and the operator signed {manifest.digest[:12]}"
    with pytest.raises(ModelError, match=said):
        RunningCluster.start(
            membership_of(members[0]), ModelSource.resolve(str(other)), options, network=MemoryNetwork()
        )


def test_a_peer_runs_no_other_model_than_was_signed(model: Path, manifest: Manifest) -> None:
    signed = PeerOptions(replace(MEMBER, signed="ab" * 32), model_path=model)
    said = (
        f"has the manifest {manifest.digest[:12]}, and the operator signed {'ab' * 6}, which alone beta may"
    )
    with pytest.raises(PeerRefused, match=said):
        started(model, signed).__enter__()


def test_a_peer_runs_the_model_that_was_signed(model: Path, manifest: Manifest) -> None:
    options: MemberOptions = replace(MEMBER, signed=manifest.digest)
    with started(model, PeerOptions(options, model_path=model)) as (cluster, _):
        assert len(answer_of(cluster)) == 12
