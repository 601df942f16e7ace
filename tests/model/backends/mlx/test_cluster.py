"""Clusters with members on MLX: the choice of `auto` by the model, weights of a peer, and sessions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.config.kernels import AUTO, EXACT, MLX_BF16, MLX_F32, PLAIN
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import ConvoyError, PlanError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import HOST, MLX, deal_devices
from convoy.model.mlx_device import why_no_mlx
from convoy.model.sampling.params import SamplingParams
from convoy.sdk.parity import device_and_kernel
from convoy.testing.network import MemoryNetwork
from support.cluster import MEMBER, NAMES, PeerThread, running_cluster
from support.members import make_local_members, membership_of
from support.quantised_models import fp8, write
from support.tiny_models import Models
from support.tiny_tokenizers import byte_level

if why_no_mlx():
    pytest.skip(f"{why_no_mlx()}: `make test-mlx` installs it", allow_module_level=True)

TOKENS = list(range(3, 73))


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine be a Mac whose check passed."""
    monkeypatch.setattr("convoy.model.mlx_device.why_not_default", lambda: "")


def run(
    source: ModelSource, device: str, num_members: int = 2, **options: Any
) -> tuple[list[int], str, list[str], list[str]]:
    """Return tokens, why the better kernel is not used, and the devices and kernels of the stages."""
    byte_level().save(str(source.path / "tokenizer.json"))
    member = replace(options.pop("member", MEMBER), device=device)
    with running_cluster(source, num_members, member=member, **options) as cluster:
        request = GenerationRequest(
            (5, 9, 30), SamplingParams(temperature=0.0), max_tokens=4, ignore_eos=True
        )
        tokens = list(generate(cluster.engine, request).token_ids)
        status = cluster.status()
    stages = status.stages
    return tokens, status.why_kernel, [one.device for one in stages], [one.kernel for one in stages]


@pytest.mark.usefixtures("on_a_mac")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma2", "model type gemma2 has other layers than"),
        ("fp8", r"a form \(F8_E4M3\) that quantized_matmul"),
    ],
)
def test_a_model_that_mlx_does_not_run_is_computed_on_the_hosts_of_macs_with_the_reason(
    kind: str, why: str, models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "fp8":
        source = ModelSource.resolve(str(write(tmp_path, "llama", fp8((128, 128))).quantised))
    else:
        source = models.source(kind)
    tokens, reason, devices, kernels = run(source, AUTO)
    assert (devices, kernels) == ([HOST, HOST], [EXACT, EXACT])
    assert re.search(f"computes on cpu: .* does not run on mlx: .*{why}", reason)
    assert tokens == run(source, HOST)[0]
    # Each member says it, too.
    assert len(re.findall(f"this member computes on cpu: .*{why}", caplog.text)) == 2
    assert device_and_kernel(source, AUTO, AUTO, 1, 1) == (HOST, EXACT)
    # A person who asked for MLX hears why not.
    with pytest.raises(ConvoyError, match=why):
        run(source, MLX, 1)


@pytest.mark.usefixtures("on_a_mac")
def test_a_model_that_mlx_runs_is_computed_on_it(models: Models) -> None:
    source = models.source("qwen3")
    _, reason, devices, kernels = run(source, AUTO)
    assert not reason
    assert kernels == [MLX_BF16, MLX_BF16]
    assert all(device.startswith("mlx (") for device in devices)
    assert device_and_kernel(source, AUTO, AUTO, 1, 1) == (MLX, MLX_BF16)
    # Members of one machine choose by the model each.
    assert deal_devices(AUTO, 2) == [AUTO, AUTO]


def test_two_members_on_mlx_share_every_layer_over_sealed_links(models: Models) -> None:
    source = models.source("qwen3")
    alone = replace(MEMBER, kernel=PLAIN)
    tokens, _, devices, kernels = run(source, MLX, member=alone, parallel="tensor")
    assert kernels == [MLX_F32, MLX_F32]
    assert all(device.startswith("mlx (") for device in devices)
    assert tokens == run(source, MLX, 1, member=alone)[0]


def test_a_host_and_mlx_in_one_stage_are_refused_by_name_before_weights_are_read(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("convoy.model.backends.mlx.stage.load_weights", lambda *_: pytest.fail("no refusal"))
    found = "alpha would run plain-f32 and beta mlx-f32, expected one kernel for all ranks of a stage"
    with (
        pytest.raises(PlanError, match=found) as refused,
        beside_mlx(models.source("qwen3"), tmp_path, spans={"alpha+beta": "0:output"}),
    ):
        pytest.fail("no refusal")
    assert "pipeline" in str(refused.value.hint)


@contextmanager
def beside_mlx(source: ModelSource, cache: Path, **changes: Any) -> Iterator[RunningCluster]:
    """Run a head on its host, and a peer on MLX that has no files of the model, in float32."""
    byte_level().save(str(source.path / "tokenizer.json"))
    members, network = make_local_members(NAMES[:2]), MemoryNetwork()
    ours, theirs = (
        replace(MEMBER, kernel=PLAIN, device=device, cache=cache / device, weights_from="head")
        for device in (HOST, MLX)
    )
    peer = PeerThread(members[1], PeerOptions(theirs), network)
    spans = {"alpha": "0:1,output", "beta": f"2:{source.spec.num_layers - 1}"}
    try:
        options = replace(HeadOptions(ours, spans=spans, wait_s=60, num_blocks=64), **changes)
        cluster = RunningCluster.start(membership_of(members[0]), source, options, network=network)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        peer.stop()


def carry(one: RunningCluster, other: RunningCluster, file: Path) -> int:
    """Go on with a session of one cluster on the other. Returns the number of tokens whose K/V came along."""
    with one.session() as before:
        before.sync(TOKENS)
        before.save(file, None)
        wanted = before.logits()
    with other.session() as after:
        found = after.load(file)
        after.sync(TOKENS)
        np.testing.assert_allclose(after.logits(), wanted, atol=5e-5)
    return found


def test_a_member_on_mlx_reads_its_own_layers_from_a_peer_and_sessions_move_to_hosts_and_back(
    models: Models, tmp_path: Path
) -> None:
    source = models.source("qwen3")
    with (
        beside_mlx(source, tmp_path) as mixed,
        running_cluster(source, 1, member=replace(MEMBER, kernel=PLAIN)) as alone,
    ):
        head, peer = mixed.status().stages
        assert (head.kernel, peer.kernel) == (PLAIN, MLX_F32)
        # Its own three layers, and nothing else.
        assert peer.weights_from == {"head": peer.weight_bytes}
        # Another kernel computes the tokens again.
        assert carry(alone, mixed, tmp_path / "to.session") == 0
        assert carry(mixed, alone, tmp_path / "back.session") == 0


def test_a_session_moves_with_its_kv_between_members_on_mlx(models: Models, tmp_path: Path) -> None:
    source, member = models.source("qwen3"), replace(MEMBER, kernel=PLAIN, device=MLX)
    byte_level().save(str(source.path / "tokenizer.json"))
    with running_cluster(source, 1, member=member) as one, running_cluster(source, 2, member=member) as two:
        assert carry(one, two, tmp_path / "to.session") == len(TOKENS) // 16 * 16
        assert carry(two, one, tmp_path / "back.session") == len(TOKENS) // 16 * 16


def test_a_member_whose_memory_got_short_offers_less_and_gets_fewer_layers(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = models.source("qwen3")
    three = source.spec.weight_bytes(2, 5, embed=False, output=False, dtype=MLX_F32)
    # Other programs took the rest after the member had offered 4 GB.
    room = three - 20_000
    monkeypatch.setattr("convoy.model.backends.mlx.stage.memory_bytes", lambda: room)
    with beside_mlx(source, tmp_path, spans=None, num_blocks=8, max_context=64) as cluster:
        head, peer = cluster.status().stages
    assert head.end == peer.start > 2
    assert peer.weight_bytes < room == peer.memory_bytes
    assert f"layers 2 to 4 take {three} bytes, and MLX may use {room} on this machine" in caplog.text
    assert "beta has 0.000106 GB of memory left of the 4.29 GB that it offered" in caplog.text
