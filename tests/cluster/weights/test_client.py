"""Pieces of a model between a real peer's half and a head's, and what neither takes from the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.cluster.options import MemberOptions, PeerOptions
from convoy.cluster.weights.client import MAX_ASKED, PartClient, Want
from convoy.cluster.weights.head_server import HeadWeightServer
from convoy.cluster.weights.peer_weights import Asker, PeerWeights
from convoy.errors import ConvoyError, LinkBroken, PeerRefused, StepError
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.links import memory_link_pair
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import FrameType, Hello, Message, Plan, Refuse, Sender, StageAssignment
from convoy.wire.messages.fetch import PIECE_BYTES, Fetch, Piece, Prepare, Prepared
from support.cluster import MEMBER, PeerThread
from support.links import End
from support.members import make_local_members, membership_of

HELLO = Hello("test", ["float32"], ["plain-f32"], 1 << 30, 1, "test")


class Ends:
    """Hold a head's end that answers from ``weights``, or by hand without them, and a peer's."""

    def __init__(self, weights: HeadWeightServer | None) -> None:
        head, peer = make_local_members(("alpha", "beta"))
        self.part_client = PartClient()
        to_peer, self.to_head = memory_link_pair(head, peer)
        self.asked: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
        self.to_peer = to_peer

        def answer(link: Link, received: Received) -> None:
            assert isinstance(received, ReceivedMessage)
            assert isinstance(received.message, Fetch)
            if weights is None:
                self.asked.put(received.message)
            else:
                weights.handle_fetch(link, received.message)

        def end(_link: Link, error: ConvoyError) -> None:
            self.part_client.ended(_link)
            self.ended.put(error)

        def take(link: Link, received: Received) -> None:
            assert isinstance(received, ReceivedMessage)
            assert isinstance(received.message, Piece)
            self.part_client.handle_piece(link, received.message)

        to_peer.start(answer, lambda *_: None, frames_from(Sender.PEER))
        self.to_head.start(take, end, frames_from(Sender.HEAD))

    def pull(self, manifest: str, *wants: Want) -> Iterator[tuple[Want, Piece]]:
        return self.part_client.pull(self.to_head, manifest, wants, lambda: None)

    def close(self) -> None:
        self.to_head.close()
        self.to_peer.close()


@pytest.fixture(scope="module")
def weights() -> HeadWeightServer:
    return HeadWeightServer(ModelSource.resolve("demo-mini"), MemberOptions())


@pytest.fixture(scope="module")
def manifest(weights: HeadWeightServer) -> Manifest:
    return weights.manifest()


@pytest.fixture
def served(weights: HeadWeightServer) -> Iterator[Ends]:
    ends = Ends(weights)
    yield ends
    ends.close()


@pytest.fixture
def by_hand() -> Iterator[Ends]:
    ends = Ends(None)
    yield ends
    ends.close()


def test_parts_come_whole_and_in_order_and_of_any_size(served: Ends, manifest: Manifest) -> None:
    source = ModelSource.resolve("demo-mini")
    names = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
    entries = [manifest.tensors[name] for name in names]
    cut = served.part_client.pieces_of
    wants = [w for e, n in zip(entries, names, strict=True) for w in cut(e.digest, n, 0, e.num_bytes)]
    assert len(wants) > 3, "one of them is larger than a piece"
    found = dict.fromkeys(names, b"")
    for want, piece in served.pull(manifest.digest, *wants):
        found[want.name] += piece.data
    for name in names:
        stored = source.tensors[name]
        with stored.path.open("rb") as file:
            file.seek(stored.offset)
            assert found[name] == file.read(stored.num_bytes)


def test_the_manifest_comes_by_its_own_digest(served: Ends, manifest: Manifest) -> None:
    ((_, piece),) = served.pull(manifest.digest, Want(manifest.digest, "the manifest", 0, None))
    assert piece.data == manifest.encoded[:PIECE_BYTES]
    assert piece.total_bytes == len(manifest.encoded)


@pytest.mark.parametrize(
    ("model", "part", "start", "said"),
    [
        ("served", "0" * 64, 0, "has no part with the digest 000000000000"),
        ("0" * 64, "served", 0, "the manifest 000000000000 is not served here"),
        ("served", "served", 1 << 62, "and byte 4611686018427387904 was asked for"),
    ],
)
def test_a_head_hands_out_nothing_but_what_its_manifest_lists(
    served: Ends, manifest: Manifest, model: str, part: str, start: int, said: str
) -> None:
    digests = {"served": manifest.digest}
    want = Want(digests.get(part, part), "it", start, start + 1)
    with pytest.raises(PeerRefused, match=f"alpha cannot send it: .*{said}"):
        list(served.pull(digests.get(model, model), want))


def test_drawn_weights_are_handed_out_by_nobody() -> None:
    weights = HeadWeightServer(ModelSource.resolve("synthetic:llama-250m"), MemberOptions())
    manifest = weights.manifest()
    norm = manifest.tensors["model.norm.weight"]
    assert weights.answer_fetch(Fetch(0, manifest.digest, norm.digest, 0, 1)).error


def test_no_more_is_asked_for_than_may_wait(by_hand: Ends) -> None:
    wants = by_hand.part_client.pieces_of("b" * 64, "it", 0, 100 * PIECE_BYTES)
    numbers: list[int] = []

    def answer_the_first() -> None:
        numbers.extend(by_hand.asked.get(timeout=60).number for _ in range(MAX_ASKED))
        by_hand.to_peer.send(Piece(0, 100 * PIECE_BYTES, bytes(PIECE_BYTES), ""))

    threading.Thread(target=answer_the_first).start()
    pulled = by_hand.pull("a" * 64, *wants)
    next(pulled)
    assert numbers == list(range(MAX_ASKED))
    assert by_hand.asked.empty()


def test_a_piece_that_nobody_asked_for_ends_the_link(by_hand: Ends) -> None:
    by_hand.to_peer.send(Piece(3, 9, b"unwanted!", ""))
    assert "this side closed the link" in by_hand.ended.get(timeout=60).message


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Piece(0, 9, b"short", ""), "sent 5 bytes of it, expected 9"),
        (Piece(0, 9, b"far too long", ""), "sent 12 bytes of it, expected 9"),
        (Piece(0, 9, b"", ""), "sent 0 bytes of it, expected 9"),
    ],
)
def test_a_piece_of_another_size_is_refused(by_hand: Ends, answer: Piece, said: str) -> None:
    with pytest.raises(StepError, match=said):
        list(_answered(by_hand, [answer], Want("b" * 64, "it", 0, 9)))


def test_pieces_in_another_order_are_refused(by_hand: Ends) -> None:
    wants = [Want("b" * 64, "it", 0, 1), Want("b" * 64, "it", 1, 2)]
    with pytest.raises(StepError, match="sent piece 1 of the model before piece 0"):
        list(_answered(by_hand, [Piece(1, 2, b"x", ""), Piece(0, 2, b"x", "")], *wants))


def test_what_a_head_says_is_wrong_is_passed_on_in_one_line(by_hand: Ends) -> None:
    with pytest.raises(PeerRefused, match=r"^alpha cannot send it: a\?\[31mbad\?disk$"):
        list(_answered(by_hand, [Piece(0, 0, b"", "a\x1b[31mbad\ndisk")], Want("b" * 64, "it", 0, 9)))


def test_a_broken_link_ends_the_wait(by_hand: Ends) -> None:
    def hang_up() -> None:
        by_hand.asked.get(timeout=60)
        by_hand.to_peer.close("done")

    threading.Thread(target=hang_up).start()
    with pytest.raises(LinkBroken):
        list(by_hand.pull("a" * 64, Want("b" * 64, "it", 0, 9)))


def _answered(ends: Ends, answers: list[Piece], *wants: Want) -> Iterator[tuple[Want, Piece]]:
    def answer() -> None:
        for _ in wants:
            ends.asked.get(timeout=60)
        for piece in answers:
            ends.to_peer.send(piece)

    threading.Thread(target=answer, daemon=True).start()
    return ends.pull("a" * 64, *wants)


def test_who_waits_for_its_turn_notices_that_its_link_ended(by_hand: Ends) -> None:
    weights = PeerWeights("beta", PeerOptions(MEMBER))
    weights.turn.acquire()
    threading.Timer(0.3, by_hand.close).start()
    with pytest.raises(LinkBroken, match="ended while its weights were got ready"):
        weights.find(Asker(PLAN, by_hand.to_head, lambda: None))


PLAN = Plan(
    1,
    "elsewhere",
    "0" * 64,
    [StageAssignment("alpha", 0, 1, True, True), StageAssignment("beta", 1, 2, False, False)],
    "plain-f32",
    "float32",
    16,
    64,
    "c" * 64,
)


def head_by_hand(tmp_path: Path) -> tuple[PeerThread, End]:
    network, members = MemoryNetwork(), make_local_members(("alpha", "beta"))
    peer = PeerThread(members[1], PeerOptions(replace(MEMBER, cache=tmp_path / "cache")), network)
    link = network.dial(membership_of(members[0]), members[1].member, 5)
    end = End(link).start(frames_from(Sender.PEER))
    link.send(HELLO)
    said(end, Hello)
    return peer, end


def said(end: End, kind: type[Message]) -> Message:
    while True:
        item = end.next()
        if isinstance(item, ReceivedMessage) and isinstance(item.message, kind):
            return item.message


def test_a_manifest_that_is_not_the_plans_is_refused_and_the_peer_lives_on(tmp_path: Path) -> None:
    peer, head = head_by_hand(tmp_path)
    head.link.send(PLAN, plan_id=1)
    fetch = said(head, Fetch)
    assert isinstance(fetch, Fetch)
    assert (fetch.manifest, fetch.part) == ("c" * 64, "c" * 64)
    head.link.send(Piece(fetch.number, 2, b"{}", ""))
    refusal = said(head, Refuse)
    assert "a manifest came with the digest 44136fa355b3, expected cccccccccccc" in str(refusal)
    assert not (tmp_path / "cache").exists()
    head.link.send(HELLO)
    said(head, Hello)
    peer.stop()


def test_a_manifest_without_end_is_refused_by_its_size(tmp_path: Path) -> None:
    peer, head = head_by_hand(tmp_path)
    head.link.send(PLAN, plan_id=1)
    fetch = said(head, Fetch)
    assert isinstance(fetch, Fetch)
    head.link.send(Piece(fetch.number, 1 << 60, bytes(PIECE_BYTES), ""))
    assert "manifest has 1152921504606846976 bytes, expected at most 67108864" in str(said(head, Refuse))
    peer.stop()


def test_a_preparation_that_comes_to_nothing_is_answered(tmp_path: Path) -> None:
    peer, head = head_by_hand(tmp_path)
    head.link.send(Prepare(PLAN))
    fetch = said(head, Fetch)
    assert isinstance(fetch, Fetch)
    head.link.send(Piece(fetch.number, 0, b"", "no such model"))
    answer = said(head, Prepared)
    assert answer == Prepared(1, "alpha cannot send the manifest: no such model")
    peer.stop()


def test_a_neighbour_that_is_no_head_may_send_no_piece() -> None:
    ours = {FrameType.FETCH, FrameType.PIECE, FrameType.PREPARE, FrameType.PREPARED}
    ours |= {FrameType.HOLDING, FrameType.HELD}
    assert not ours & frames_from(Sender.PREDECESSOR)
    asks = {FrameType.FETCH, FrameType.PIECE}
    assert ours & frames_from(Sender.HEAD) == asks | {FrameType.PREPARE, FrameType.HOLDING}
    assert ours & frames_from(Sender.PEER) == asks | {FrameType.PREPARED, FrameType.HELD}
