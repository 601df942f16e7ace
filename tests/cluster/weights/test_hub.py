"""Members that get their layers from a hub that the plan names, and from the head where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.weights.test_peer_weights import answer_of, started
from convoy.cluster.options import PeerOptions
from convoy.cluster.weights import hub as from_hub
from convoy.errors import PeerRefused
from convoy.model.checkpoints.hub.files import Hub, HubName, commit_of
from convoy.model.checkpoints.source import ModelSource
from support.cluster import MEMBER
from support.fake_hub import COMMIT, REPO, FakeHub

ONE_LAYER = {"alpha": "0:3,output", "beta": "4:4"}


@pytest.fixture
def fetched(hub: FakeHub, tmp_path: Path) -> Path:
    """Return the directory of a head that has the model whole, from the hub."""
    _, directory = Hub(tmp_path / "head", hub.url).download(HubName(REPO))
    hub.served.clear()
    return directory


def peer(hub: FakeHub, tmp_path: Path, weights_from: str = "auto") -> PeerOptions:
    return PeerOptions(
        replace(MEMBER, cache=tmp_path / "cache", hub=hub.url, hub_retry_s=0.0, weights_from=weights_from)
    )


def layer_bytes(model: Path, layer: int) -> int:
    """Return the bytes of its tensors; equal ones count once."""
    tensors = ModelSource.resolve(str(model)).tensors.values()
    sizes = {}
    for tensor in tensors:
        if f"layers.{layer}." in tensor.name:
            data = tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
            sizes[data] = tensor.num_bytes
    return sum(sizes.values())


def sources(heard: list[tuple[str, int, int]]) -> set[str]:
    """Return the sources of weights; `config.json` always comes from the head."""
    return {who for who, _, total in heard if "(from the" in who and total > 4096}


def test_a_directory_of_a_hubs_cache_says_of_which_commit_it_is(fetched: Path, model: Path) -> None:
    assert commit_of(fetched) == f"{REPO}@{COMMIT}"
    assert commit_of(model) == ""


def test_a_member_gets_its_own_layers_from_the_hub_and_no_more(
    hub: FakeHub, fetched: Path, model: Path, tmp_path: Path
) -> None:
    with started(fetched, peer(hub, tmp_path), ONE_LAYER) as (cluster, heard):
        text = answer_of(cluster)
    assert sources(heard) == {"beta (from the hub)"}
    header = min(t.offset for t in ModelSource.resolve(str(model)).tensors.values())
    assert hub.served == {"model.safetensors": header + layer_bytes(model, 4)}
    with started(model, PeerOptions(MEMBER, model_path=model), ONE_LAYER) as (cluster, _):
        assert answer_of(cluster) == text


def test_a_member_that_cannot_reach_the_hub_gets_its_layers_from_the_head(
    hub: FakeHub, fetched: Path, tmp_path: Path
) -> None:
    hub.down = True
    with started(fetched, peer(hub, tmp_path)) as (cluster, heard):
        assert len(answer_of(cluster)) == 12
    assert sources(heard) == {"beta (from the head)"}


def test_a_hub_that_is_lost_half_way_leaves_the_rest_to_the_head(
    hub: FakeHub, fetched: Path, tmp_path: Path
) -> None:
    hub.cuts = [8, 1 << 20, 30_000, *[0] * 5]
    with started(fetched, peer(hub, tmp_path)) as (cluster, heard):
        assert len(answer_of(cluster)) == 12
    assert sources(heard) == {"beta (from the hub)", "beta (from the head)"}
    total = {who: total for who, _, total in heard}
    assert total["beta (from the head)"] < total["beta (from the hub)"]


def test_a_tensor_that_is_another_at_the_hub_comes_from_the_head(
    hub: FakeHub, fetched: Path, tmp_path: Path
) -> None:
    stored = ModelSource.resolve(str(hub.directory)).tensors["model.layers.4.mlp.up_proj.weight"]
    data = bytearray(stored.path.read_bytes())
    data[stored.offset] ^= 1
    stored.path.write_bytes(data)
    with started(fetched, peer(hub, tmp_path)) as (cluster, heard):
        assert len(answer_of(cluster)) == 12
    assert max(total for who, _, total in heard if who == "beta (from the head)") == stored.num_bytes


def test_members_that_are_forbidden_the_hub_do_not_ask_it(
    hub: FakeHub, fetched: Path, tmp_path: Path
) -> None:
    with started(fetched, peer(hub, tmp_path, "head")) as (_, heard):
        assert sources(heard) == {"beta (from the head)"}
    assert hub.served == {}


def test_members_that_may_ask_a_hub_alone_refuse_a_plan_without_one(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    refused = "beta gets weights from a hub alone, and the plan names none"
    with pytest.raises(PeerRefused, match=refused):
        started(model, peer(hub, tmp_path, "hub")).__enter__()


@pytest.mark.parametrize("weights_from", ["auto", "hub"])
def test_nobody_asks_the_public_hub_for_what_a_head_has_of_its_own(
    monkeypatch: pytest.MonkeyPatch, hub: FakeHub, fetched: Path, tmp_path: Path, weights_from: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(from_hub, "HubCommit", lambda *named: asked.append(named[0]))
    told_of_none = PeerOptions(replace(MEMBER, cache=tmp_path / "cache", weights_from=weights_from))
    head = replace(MEMBER, hub=hub.url)
    if weights_from == "hub":
        with pytest.raises(PeerRefused, match="none but the public one, which is not the head's"):
            started(fetched, told_of_none, member=head).__enter__()
    else:
        with started(fetched, told_of_none, member=head) as (_, heard):
            assert sources(heard) == {"beta (from the head)"}
    assert asked == []


def test_members_that_may_ask_a_hub_alone_say_what_it_has_not(
    hub: FakeHub, fetched: Path, tmp_path: Path
) -> None:
    hub.down = True
    with pytest.raises(PeerRefused, match="somebody/odd@5f5f5f5f5f5f cannot be fetched, the hub cannot be"):
        started(fetched, peer(hub, tmp_path, "hub")).__enter__()
