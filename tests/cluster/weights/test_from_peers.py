"""Tensors from a peer to another, through a head that has not got them: real members and links over memory.

alpha leads and has its own layers alone, no hub can be reached, and what gamma lacks somebody else has.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.weights.test_peer_weights import answer_of, change_a_byte
from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.cluster.weights import request_queue as answers
from convoy.cluster.weights.head_weights import HeadWeights
from convoy.cluster.weights.part_index import PartLocation, tensor_places, to_bits
from convoy.cluster.weights.peer_server import held
from convoy.cluster.weights.peer_source import PeerWeightSource
from convoy.errors import ModelError, PeerRefused
from convoy.model.checkpoints.hub.stream import HubCommit
from convoy.model.checkpoints.hub.weights import HubWeights
from convoy.model.checkpoints.manifest import Manifest, TensorEntry
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.parts import PartFile
from convoy.model.checkpoints.store.received import ReceivedModel
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Hello, Message, Plan
from convoy.wire.messages.fetch import MAX_HELD_BYTES, MAX_HELD_TENSORS, Fetch, Held, Piece
from support.cluster import MEMBER, NAMES, PeerThread, running_cluster
from support.fake_hub import COMMIT, REPO
from support.members import make_local_members, membership_of

NOWHERE = "http://127.0.0.1:9"
SPANS = {"alpha": "0:1,output", "beta": "2:2", "gamma": "3:4"}
OF_ALPHA = ("model.layers.0.", "model.layers.1.", "model.embed", "model.norm")
OF_GAMMA = ("model.layers.3.", "model.layers.4.")

Heard = list[tuple[str, int, int]]
Bend = Callable[[Link, Message, Message], Message]


def opened(model: Path, manifest: Manifest, cache: Path, own: tuple[str, ...] = OF_ALPHA) -> HeadWeights:
    """Return a head's files without weights, and of these the tensors that begin with ``own``."""
    received = ReceivedModel(cache, manifest)
    source = ModelSource.resolve(str(model))
    with received.open(lambda: None):
        for name in manifest.files:
            shutil.copy(model / name, received.folder / name)
        for name, stored in source.tensors.items():
            if name.startswith(own):
                data = stored.path.read_bytes()[stored.offset : stored.offset + stored.num_bytes]
                received.tensor(name).place.write_bytes(data)
    described = received.source(REPO, received.file("config.json"))
    return HeadWeights(received, described, HubWeights(HubCommit(REPO, COMMIT, NOWHERE)))


def with_files(path: Path) -> PeerOptions:
    return PeerOptions(replace(MEMBER, hub=NOWHERE), model_path=path)


def without(tmp_path: Path, name: str = "gamma", **limits: int) -> PeerOptions:
    return PeerOptions(replace(MEMBER, cache=tmp_path / name, hub=NOWHERE, **limits))  # type: ignore[arg-type]


@contextmanager
def offline(
    own: HeadWeights,
    *peers: PeerOptions,
    bends: dict[str, Bend] | None = None,
    spans: dict[str, str] | None = None,
    change: Callable[[PeerThread], None] = lambda _thread: None,
    **limits: float,
) -> Iterator[tuple[RunningCluster, Heard]]:
    """Run an offline cluster.

    ``bends`` change the answers of peers, by name. ``change`` is done to each peer. ``limits`` are of the
    head's `MemberOptions`.
    """
    network, members, heard = MemoryNetwork(), make_local_members(NAMES[: 1 + len(peers)]), Heard()
    head = replace(MEMBER, signed=own.manifest.digest, hub=NOWHERE, **limits)  # type: ignore[arg-type]
    options = HeadOptions(head, spans=spans or SPANS, wait_s=60, num_blocks=64)
    with ExitStack() as stack:
        for me, peer in zip(members[1:], peers, strict=True):
            thread = PeerThread(me, peer, network)
            stack.callback(thread.stop)
            change(thread)
            if bends and me.name in bends:
                bend_answers(thread, bends[me.name])
        cluster = RunningCluster.start(
            membership_of(members[0]),
            own.source,
            options,
            lambda *said: heard.append(said),
            network=network,
            own=own,
        )
        stack.callback(cluster.close)
        yield cluster, heard


def bend_answers(thread: PeerThread, bend: Bend) -> None:
    asked = thread.peer.weights.server.answers
    begin = asked.begin

    def bent(link: Link) -> answers.Answer:
        honest = begin(link)
        return lambda question: bend(link, question, honest(question))

    asked.begin = bent


def digests(manifest: Manifest, begins: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes of each tensor that begins so; equal ones count once."""
    return {e.digest: e.num_bytes for name, e in manifest.tensors.items() if name.startswith(begins)}


def kept(tmp_path: Path, name: str, manifest: Manifest) -> set[str]:
    return {path.name for path in (tmp_path / name / "models" / manifest.digest / "tensors").iterdir()}


def lie(_link: Link, question: Message, answer: Message) -> Message:
    """Replace the bytes of every tensor."""
    if isinstance(question, Fetch) and isinstance(answer, Piece) and answer.data:
        return replace_data(answer, bytes(len(answer.data)))
    return answer


def replace_data(piece: Piece, data: bytes) -> Piece:
    return Piece(piece.number, piece.total_bytes, data, piece.error, piece.source)


def got(cluster: RunningCluster, member: str) -> dict[str, int]:
    return next(stage.weights_from for stage in cluster.status().stages if stage.member == member)


def test_a_member_gets_its_layers_from_another_where_the_head_has_them_not(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    with running_cluster(ModelSource.resolve(str(model)), 3, spans=SPANS) as cluster:
        expected = answer_of(cluster)
    own = opened(model, manifest, tmp_path / "alpha")
    with offline(own, with_files(model), without(tmp_path)) as (cluster, heard):
        assert answer_of(cluster) == expected
        stages = {stage.member: stage.weights_from for stage in cluster.status().stages}
    wanted, alphas = digests(manifest, OF_GAMMA), digests(manifest, OF_ALPHA)
    size = sum(num_bytes for digest, num_bytes in wanted.items() if digest not in alphas)
    assert stages["gamma"]["beta"] == size
    assert (stages["alpha"], stages["beta"]) == ({}, {})
    assert "gamma (from beta)" in {who for who, _, _ in heard}
    assert kept(tmp_path, "gamma", manifest) == wanted.keys()
    assert kept(tmp_path, "alpha", manifest) == alphas.keys(), "the head keeps nothing of what it hands on"


def test_a_head_gets_its_own_layers_from_a_member_too(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    own = opened(model, manifest, tmp_path / "alpha", own=())
    with offline(own, with_files(model), without(tmp_path)) as (cluster, heard):
        assert len(answer_of(cluster)) == 12
        assert got(cluster, "alpha") == {"beta": sum(digests(manifest, OF_ALPHA).values())}
    assert "alpha (from other members)" in {who for who, _, _ in heard}


def test_a_member_has_what_it_got_earlier_for_others(model: Path, manifest: Manifest, tmp_path: Path) -> None:
    """beta had gamma's layers in an earlier plan, and has their tensors in its cache."""
    other = SPANS | {"beta": "3:4", "gamma": "2:2"}
    with offline(
        opened(model, manifest, tmp_path / "alpha"), without(tmp_path, "beta"), with_files(model), spans=other
    ):
        pass
    own = opened(model, manifest, tmp_path / "alpha", own=(*OF_ALPHA, "model.layers.2."))
    with offline(own, without(tmp_path, "beta"), without(tmp_path)) as (cluster, _):
        assert len(answer_of(cluster)) == 12
        assert set(got(cluster, "beta")) == {"head"}
        assert "beta" in got(cluster, "gamma")


def test_a_member_that_sends_other_bytes_is_named_and_another_asked(
    model: Path, manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = opened(model, manifest, tmp_path / "alpha")
    spans = {"alpha": "0:1,output", "beta": "2:2", "delta": "3:3", "gamma": "4:4"}
    peers = with_files(model), without(tmp_path), with_files(model)
    caplog.set_level(logging.WARNING, "convoy")
    has_lied = threading.Event()

    def lie_first(link: Link, question: Message, answer: Message) -> Message:
        if isinstance(question, Fetch):
            has_lied.set()
        return lie(link, question, answer)

    def be_second(_link: Link, _question: Message, answer: Message) -> Message:
        """Answer late: the member that answers first is asked first."""
        assert has_lied.wait(30)
        return answer

    bends: dict[str, Bend] = {"beta": lie_first, "delta": be_second}
    with offline(own, *peers, spans=spans, bends=bends) as (cluster, _):
        assert len(answer_of(cluster)) == 12
        assert got(cluster, "gamma")["delta"] > 30_000
    assert "beta sent other bytes of model.layers.4." in caplog.text
    assert "delta sent other bytes" not in caplog.text


def test_where_nobody_else_has_it_the_one_who_sent_other_bytes_ends_the_start(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    own = opened(model, manifest, tmp_path / "alpha")
    wrong = r"no connected member has model\.layers\.3\.\S+: beta sent other bytes of it; "
    with pytest.raises(PeerRefused, match=wrong):
        offline(own, with_files(model), without(tmp_path), bends={"beta": lie}).__enter__()
    assert not [path for path in (tmp_path / "gamma").rglob("*.part") if path.stat().st_size]


def test_a_member_whose_files_are_others_is_found_out_where_they_differ(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    change_a_byte(other, "model.layers.4.mlp.up_proj.weight")
    own = opened(model, manifest, tmp_path / "alpha")
    wrong = r"no connected member has model\.layers\.4\.mlp\.up_proj\.weight: beta sent other bytes of it"
    with pytest.raises(PeerRefused, match=wrong):
        offline(own, with_files(other), without(tmp_path)).__enter__()


def test_a_member_that_goes_in_the_midst_of_a_tensor_is_taken_over_from_there(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    starts: dict[str, list[tuple[str, int]]] = {"beta": [], "delta": []}

    def note(member: str) -> Bend:
        def noted(link: Link, question: Message, answer: Message) -> Message:
            if isinstance(question, Fetch):
                starts[member].append((question.part, question.start))
                if member == "beta" and question.start:
                    return Piece(question.number, 0, b"", "the disk is gone")
            return answer

        return noted

    own = opened(model, manifest, tmp_path / "alpha")
    spans = {"alpha": "0:1,output", "beta": "2:2", "delta": "3:3", "gamma": "4:4"}
    peers = with_files(model), without(tmp_path, piece_bytes=1000), with_files(model)
    bends = {"beta": note("beta"), "delta": note("delta")}
    with offline(own, *peers, spans=spans, bends=bends, piece_bytes=1000) as (cluster, _):
        assert len(answer_of(cluster)) == 12
        assert got(cluster, "gamma")["beta"] >= 1000
    begun = {part for part, start in starts["beta"] if not start}
    gone_on = [(part, start) for part, start in starts["delta"] if part in begun]
    assert gone_on
    assert min(start for _, start in gone_on) == 1000, "and not from the beginning"


def test_after_a_loss_half_a_tensor_is_gone_on_with_from_somebody_else(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    lost: list[str] = []
    starts: dict[str, int] = {}

    def go(link: Link, question: Message, answer: Message) -> Message:
        if isinstance(question, Fetch) and question.start == 2000 and not lost:
            lost.append(question.part)
            link.dismiss("this machine is taken away", revoke=True)
        return answer

    def note(_link: Link, question: Message, answer: Message) -> Message:
        if isinstance(question, Fetch):
            starts.setdefault(question.part, question.start)
        return answer

    own = opened(model, manifest, tmp_path / "alpha")
    spans = {"alpha": "0:1,output", "beta": "2:2", "delta": "3:3", "gamma": "4:4"}
    peers = with_files(model), without(tmp_path, piece_bytes=1000), with_files(model)
    bends: dict[str, Bend] = {"beta": go, "delta": note}
    with offline(own, *peers, spans=spans, bends=bends, piece_bytes=1000) as (cluster, _):
        assert len(answer_of(cluster)) == 12
    assert starts[lost[0]] == 2000


def test_a_member_that_says_it_has_what_it_has_not_is_passed_over(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    def boast(_link: Link, _question: Message, answer: Message) -> Message:
        return Held(answer.manifest, b"\xff" * 99, "") if isinstance(answer, Held) else answer

    own = opened(model, manifest, tmp_path / "alpha", own=(*OF_ALPHA, "model.layers.2."))
    spans = {"alpha": "0:1,output", "beta": "2:2", "delta": "3:3", "gamma": "4:4"}
    peers = without(tmp_path, "beta"), without(tmp_path), with_files(model)
    with offline(own, *peers, spans=spans, bends={"beta": boast}) as (cluster, _):
        assert len(answer_of(cluster)) == 12
        assert set(got(cluster, "gamma")) >= {"delta"}


def test_a_member_that_answers_nothing_is_passed_over(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    over = threading.Event()

    def hang(_link: Link, _question: Message, answer: Message) -> Message:
        over.wait(60)
        return answer

    own = opened(model, manifest, tmp_path / "alpha")
    spans = {"alpha": "0:1,output", "beta": "2:2", "delta": "3:3", "gamma": "4:4"}
    peers = with_files(model), without(tmp_path), with_files(model)
    try:
        with offline(own, *peers, spans=spans, bends={"beta": hang}, held_answer_s=0.3) as (cluster, _):
            assert len(answer_of(cluster)) == 12
            assert "delta" in got(cluster, "gamma")
    finally:
        over.set()


@pytest.mark.long
def test_a_member_that_stalls_in_the_midst_is_passed_over(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    over = threading.Event()

    def hang(_link: Link, question: Message, answer: Message) -> Message:
        if isinstance(question, Fetch):
            over.wait(60)
        return answer

    own = opened(model, manifest, tmp_path / "alpha")
    spans = {"alpha": "0:1,output", "beta": "2:2", "delta": "3:3", "gamma": "4:4"}
    peers = with_files(model), without(tmp_path), with_files(model)
    try:
        with offline(own, *peers, spans=spans, bends={"beta": hang}, part_stall_s=0.3) as (cluster, _):
            assert len(answer_of(cluster)) == 12
            assert "delta" in got(cluster, "gamma")
    finally:
        over.set()


def test_where_nobody_has_it_the_tensor_is_named_and_the_hub_too(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    own = opened(model, manifest, tmp_path / "alpha")
    nobody = r"alpha cannot send model\.layers\.\S+: no connected member has .* the hub cannot be reached"
    peers = without(tmp_path, "beta"), without(tmp_path)
    with pytest.raises(PeerRefused, match=nobody):
        offline(own, *peers).__enter__()


def with_weights_of(directory: Path) -> Callable[[PeerThread], None]:
    """Let beta hand out the files in ``directory``, and run those that it loaded from its own."""

    def change(thread: PeerThread) -> None:
        server = thread.peer.weights.server
        look = server.look

        def looked(link: Link, plan: Plan) -> tuple[Manifest, dict[str, PartLocation]]:
            manifest, places = look(link, plan)
            there = {d: one._replace(path=directory / "model.safetensors") for d, one in places.items()}
            return manifest, there

        if thread.me.name == "beta":
            server.look = looked

    return change


LAST = "model.layers.4.self_attn.v_proj.weight"  # of the layer that gamma gets, and in the file


@pytest.mark.parametrize("others", [1, 0])
@pytest.mark.long
def test_a_file_that_was_cut_short_at_a_member_is_named_and_another_one_is_asked(
    model: Path, manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture, others: int
) -> None:
    damaged = shutil.copytree(model, tmp_path / "damaged")
    stored = ModelSource.resolve(str(model)).tensors[LAST]
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(stored.offset + 1)
    own = opened(model, manifest, tmp_path / "alpha")
    spans = {"alpha": "0:1,output", "beta": "2:2", "gamma": "3:4"}
    peers = [with_files(model), without(tmp_path)]
    if others:
        spans |= {"delta": "3:3", "gamma": "4:4"}
        peers.append(with_files(model))
    cluster = offline(own, *peers, spans=spans, change=with_weights_of(damaged))
    if not others:
        said = rf"beta sent no more of it: .*model[.]safetensors is truncated at {re.escape(LAST)}"
        with pytest.raises(PeerRefused, match=said):
            cluster.__enter__()
        return
    with cluster as (running, _):
        assert len(answer_of(running)) == 12
        assert got(running, "gamma")["delta"] > 0
    assert f"is truncated at {LAST}" in caplog.text


def test_a_tensor_of_another_shape_or_dtype_is_none_of_the_manifests(model: Path, manifest: Manifest) -> None:
    source = ModelSource.resolve(str(model))
    places = tensor_places(source, manifest)
    assert places.keys() == {entry.digest for entry in manifest.tensors.values()}
    name = "model.layers.4.mlp.up_proj.weight"
    stored = source.tensors[name]
    for change in ({"shape": stored.shape[::-1]}, {"dtype": "I32"}):
        changed = replace(source, tensors={**source.tensors, name: replace(stored, **change)})
        assert manifest.tensors[name].digest not in tensor_places(changed, manifest)


@pytest.mark.long
def test_a_members_disk_that_fills_up_keeps_what_came_and_goes_on_with_it(
    model: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, real = [0], PartFile.write

    def full(file: PartFile, data: bytes) -> None:
        if written[0] + len(data) > 30_000 and "gamma" in str(file.part.place):
            raise ModelError(f"{file.part.place} cannot be written: no space left on device")
        written[0] += len(data) if "gamma" in str(file.part.place) else 0
        real(file, data)

    own = opened(model, manifest, tmp_path / "alpha")
    with monkeypatch.context() as small:
        small.setattr(PartFile, "write", full)
        with pytest.raises(PeerRefused, match=r"gamma refused the plan: .* no space left on device"):
            offline(own, with_files(model), without(tmp_path)).__enter__()
    came = kept(tmp_path, "gamma", manifest)
    assert came
    with offline(opened(model, manifest, tmp_path / "alpha"), with_files(model), without(tmp_path)) as (
        cluster,
        _,
    ):
        assert len(answer_of(cluster)) == 12
        whole = sum(digests(manifest, OF_GAMMA).values())
        assert sum(got(cluster, "gamma").values()) < whole - 20_000


def test_a_model_of_more_tensors_than_one_message_lists_is_named_before_anybody_is_asked() -> None:
    entry = TensorEntry("F32", (1,), 4, "0" * 64)
    most = Manifest({f"model.{number}": entry for number in range(MAX_HELD_TENSORS)}, {})
    more = Manifest({**most.tensors, "one.more": entry}, {})
    assert len(to_bits(most.tensors, most.tensors)) == MAX_HELD_BYTES

    def nobody() -> dict[str, tuple[Link, Hello]]:
        raise AssertionError("members were asked")

    said = f"a model of {MAX_HELD_TENSORS + 1} tensors is got from no other member, expected at most"
    source = PeerWeightSource(nobody, answer_s=12.0, stall_s=12.0)
    with pytest.raises(ModelError, match=said):
        source.having(more, "one.more", "gamma", [], lambda: None)
    answer = held("0" * 64, lambda: (more, {}))
    assert (answer.tensors, answer.error.startswith(said)) == (b"", True)
