"""A whole model answers over real sockets, recorded outside TLS and between the layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

import convoy.engine.run.kv_client
import convoy.engine.run.kv_server
import convoy.engine.run.pipeline
import convoy.engine.run.stage_worker
from confidentiality.search import Secrets, find_secrets
from confidentiality.test_recording_link import null_sealing
from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.streams import RecordedStream
from convoy.transport.member import LocalMember
from convoy.transport.network import TcpNetwork
from convoy.transport.ports import free_port
from convoy.transport.streams.stream import Stream
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster
from convoy.wire.tensor import WireTensor
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of
from support.relay import Relay

PROMPT = "Remember: the unannounced merger is called Heronsgate. What is the merger called?"
# The reverse layout puts the embedding on the peer, so that token ids have to cross.
LAYOUTS = {
    "default": {"alpha": "0:1,output", "beta": "2:3"},
    "reverse": {"alpha": "2:output", "beta": "0:1"},
}


@dataclass
class Recording:
    """Hold everything that crossed, and everything that must not be found in it."""

    outside: bytes = b""
    between: bytes = b""
    token_ids: list[list[int]] = field(default_factory=list)
    activations: list[bytes] = field(default_factory=list)
    texts: list[str] = field(default_factory=lambda: [PROMPT])

    @property
    def secrets(self) -> Secrets:
        return Secrets(self.texts, self.token_ids, self.activations)


def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: dict[str, str]) -> Recording:
    source = ModelSource.resolve("demo-mini")
    recording = Recording()
    parts: list[bytearray] = []

    def wrap(stream: Stream) -> Stream:
        parts.append(bytearray())
        return RecordedStream(stream, parts[-1])

    for module in (
        convoy.engine.run.stage_worker,
        convoy.engine.run.pipeline,
        convoy.engine.run.kv_client,
        convoy.engine.run.kv_server,
    ):
        real = module.to_wire

        def keep(tensor: object, dtype: str | None = None, *, _real: object = real) -> WireTensor:
            sent: WireTensor = _real(tensor, dtype)  # type: ignore[operator]
            recording.activations.append(bytes(sent.data))
            return sent

        monkeypatch.setattr(module, "to_wire", keep)

    network = TcpNetwork(wrap=wrap)
    bind = ("127.0.0.1", free_port())
    relay = Relay(bind)
    alpha, beta = _members_behind(relay, tmp_path)
    peer = PeerThread(beta, PeerOptions(MEMBER), network, bind)
    cluster = RunningCluster.start(
        membership_of(alpha), source, HeadOptions(MEMBER, spans=spans, num_blocks=64), network=network
    )
    try:
        prompt_ids = cluster.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
        request = GenerationRequest(
            tuple(prompt_ids), SamplingParams(temperature=0.0), max_tokens=24, ignore_eos=True
        )
        answer = generate(cluster.engine, request)
        recording.token_ids = [prompt_ids, list(answer.token_ids)]
        before = len(recording.activations)
        with cluster.session() as session:
            session.sync(prompt_ids)
            session.save(tmp_path / "session", None)
            assert session.load(tmp_path / "session") >= 16
        assert len(recording.activations) > before + 1, "the peer's K/V went both ways"
    finally:
        cluster.close()
        peer.stop()
        relay.close()
    recording.outside = relay.everything()
    recording.between = b"\n".join(bytes(part) for part in parts)
    return recording


def _members_behind(relay: Relay, directory: Path) -> tuple[LocalMember, LocalMember]:
    """Return alpha and beta. Their roster has the relay's address in place of beta's."""
    alpha, beta = make_local_members(["alpha", "beta"], directory)
    members = [
        member_of("alpha", alpha.identity, ("127.0.0.1", 7000), head=True),
        member_of("beta", beta.identity, relay.address),
    ]
    roster = make_roster("test", members)
    return LocalMember("alpha", alpha.identity, roster), LocalMember("beta", beta.identity, roster)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_prompt_token_id_or_activation_of_a_running_model_can_be_read(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = record(tmp_path, monkeypatch, LAYOUTS[layout])
    assert sum(len(a) for a in recording.activations) > 10_000
    assert len(recording.outside) > len(recording.between) > 10_000
    assert find_secrets(recording.outside, recording.secrets) == []
    assert find_secrets(recording.between, recording.secrets) == []


def test_the_same_search_finds_them_once_the_inner_sealing_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.transport.link.establish.make_sealing", null_sealing)
    recording = record(tmp_path, monkeypatch, LAYOUTS["reverse"])
    found = find_secrets(recording.between, recording.secrets)
    assert any(item.startswith("token ids 0-8 of prompt 0") for item in found)
    assert any(item.startswith("activation 0 ") for item in found)
    assert find_secrets(recording.outside, recording.secrets) == [], "the outer layer stands alone"
