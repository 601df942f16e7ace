"""A gated delta net over slots: against the recurrence token by token, and cut at every position."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from convoy.errors import ModelError
from convoy.model.kernels.linear import pad_rows
from convoy.model.kv.delta_batch import DeltaShape, DeltaSlots
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.delta import GatedDeltaNet
from convoy.plan.spec.cache import CacheGroup
from convoy.wire.messages.control import Row
from support.tiny_models import build_config

LENGTH = 53
SHAPE = DeltaShape(4, 2, 40, 56, 4)
GROUP = CacheGroup("state", None, (0,), 4, 2, 40, 56, kind="recurrent", num_taps=4)
Part = tuple[int, int, int]  # sequence, first position, tokens


@pytest.fixture(scope="module")
def library() -> Qwen3_5GatedDeltaNet:
    torch.manual_seed(11)
    net = Qwen3_5GatedDeltaNet(build_config("qwen3_5"), 0).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        net.A_log.uniform_(-4, 0)
        net.norm.weight.normal_(1, 0.1)
    return net


class Runner:
    """Run a net over slots that other sequences left dirty."""

    def __init__(self, library: Qwen3_5GatedDeltaNet, *, packed: bool = True) -> None:
        self.net = GatedDeltaNet(library, packed=packed)
        self.slots = DeltaSlots([GROUP], range(1))
        self.slots.make([3])
        for dirty in (pool := self.slots.pools[0]).past, pool.kept, pool.states:
            dirty.fill_(3.0)

    @torch.inference_mode()
    def run(self, texts: Sequence[torch.Tensor], *parts: Part) -> list[torch.Tensor]:
        """Return the output for each part, all in one step; sequence n has slot 2 - n."""
        rows = [(Row(s, at, count, 0), BlockTable([[2 - s]])) for s, at, count in parts]
        hidden = torch.cat([texts[s][at : at + count] for s, at, count in parts])
        found = self.net(pad_rows(hidden)[None], self.slots.describe(rows))[0][: len(hidden)]
        return list(torch.split(found, [count for _, _, count in parts]))


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(LENGTH, 40, generator=generator) for _ in range(3)]


def by_the_book(net: Qwen3_5GatedDeltaNet, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the definition, one token after the other, in float64."""
    weights = {name: tensor.detach().double() for name, tensor in net.state_dict().items()}
    x = hidden.double()
    mixed = torch.cat((torch.zeros(3, SHAPE.mixed_width), x @ weights["in_proj_qkv.weight"].T))
    mixed = torch.stack([(mixed[t : t + 4] * weights["conv1d.weight"][:, 0].T).sum(0) for t in range(len(x))])
    mixed = torch.nn.functional.silu(mixed)
    query, key, value = torch.split(mixed, [80, 80, 224], dim=-1)
    query, key = (part.view(-1, 2, 40).repeat_interleave(2, dim=1) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    share = (x @ weights["in_proj_b.weight"].T).sigmoid()
    step = torch.nn.functional.softplus(x @ weights["in_proj_a.weight"].T + weights["dt_bias"])
    decay = (-weights["A_log"].exp() * step).exp()
    state, outs = torch.zeros(4, 40, 56, dtype=torch.float64), []
    for t, v in enumerate(value.view(-1, 4, 56)):
        state = state * decay[t, :, None, None]
        wrong = v - (state * key[t, :, :, None]).sum(1)
        state = state + key[t, :, :, None] * (share[t, :, None] * wrong)[:, None]
        outs.append((state * query[t, :, :, None]).sum(1) * 40**-0.5)
    out = torch.stack(outs)
    out = (
        out * (out.square().mean(-1, keepdim=True) + net.layer_norm_epsilon).rsqrt() * weights["norm.weight"]
    )
    gate = torch.nn.functional.silu(x @ weights["in_proj_z.weight"].T)
    result: torch.Tensor = (out.flatten(1) * gate) @ weights["out_proj.weight"].T
    return result


@pytest.mark.parametrize("packed", [True, False])
def test_a_whole_text_gives_what_the_definition_gives(
    library: Qwen3_5GatedDeltaNet, texts: list[torch.Tensor], packed: bool
) -> None:
    (found,) = Runner(library, packed=packed).run(texts, (0, 0, LENGTH))
    assert found.abs().max() > 0.1
    assert (found - by_the_book(library, texts[0])).abs().max() < 5e-6


def test_a_cut_at_any_position_changes_no_bit(
    library: Qwen3_5GatedDeltaNet, texts: list[torch.Tensor]
) -> None:
    runner = Runner(library)
    (whole,) = runner.run(texts, (0, 0, LENGTH))
    for cut in range(1, LENGTH):
        (first,) = runner.run(texts, (0, 0, cut))
        (second,) = runner.run(texts, (0, cut, LENGTH - cut))
        assert torch.equal(torch.cat((first, second)), whole), f"cut at {cut}"
    one_by_one = [runner.run(texts, (0, at, 1))[0] for at in range(LENGTH)]
    assert torch.equal(torch.cat(one_by_one), whole)


def test_neighbours_of_other_lengths_change_no_bit(
    library: Qwen3_5GatedDeltaNet, texts: list[torch.Tensor]
) -> None:
    runner = Runner(library)
    whole = [runner.run(texts, (s, 0, LENGTH))[0] for s in range(3)]
    steps: list[list[Part]] = [
        [(0, 0, 2)],
        [(1, 0, 40), (0, 2, 1), (2, 0, 16)],
        [(2, 16, 1), (1, 40, 13), (0, 3, 30)],
        [(0, 33, 20), (2, 17, 36)],
    ]
    found: list[list[torch.Tensor]] = [[], [], []]
    for parts in steps:
        for (sequence, _, _), out in zip(parts, runner.run(texts, *parts), strict=True):
            found[sequence].append(out)
    for sequence in range(3):
        assert torch.equal(torch.cat(found[sequence]), whole[sequence])


def test_a_net_with_another_activation_is_refused(library: Qwen3_5GatedDeltaNet) -> None:
    config = build_config("qwen3_5")
    config.hidden_act = "gelu"
    with pytest.raises(ModelError, match="the activation 'gelu'"):
        GatedDeltaNet(Qwen3_5GatedDeltaNet(config, 0), packed=False)
