"""Compute experts in exact form: a row's bits do not depend on the experts of the rows beside it.

An expert's rows are gathered and padded as a stage's are. A row's experts are added in the order in which
its router ranked them. The library adds them in the order of their numbers, which differs only by
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from convoy.errors import ModelError, SelfCheckError
from convoy.model.kernels.activation import ACTIVATIONS, exact_sigmoid, exp_
from convoy.model.kernels.linear import PackedLinear, pad_rows
from convoy.model.kernels.native.activation import Activation
from convoy.model.kernels.stored.linear import float_linear, stored_linear
from convoy.model.kernels.stored.weights import StoredStack, Weight, take_rows
from convoy.model.layers.compiled import NativeExperts, gated_activation
from convoy.plan.spec.family import GateKind, RouterKind

# Of the experts' check. Three rows with three experts each share some and not others.
_PROBE_ROWS = 3

Routing = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # logits [T, experts], weights and numbers [T, chosen]


class ExactExperts(nn.Module):
    """Run all experts of a layer: three packed linears each, in place of the library's stacked matrices."""

    def __init__(self, experts: Any, gate: GateKind = "activation") -> None:
        super().__init__()
        own_gate = type(experts)._apply_gate.__module__ == type(experts).__module__
        if own_gate != (gate != "activation") or not experts.has_gate or experts.has_post_expert_norm:
            raise ModelError(
                f"the experts of {type(experts).__name__} have no exact form here",
                hint='set kernel = "plain-f32"',
            )
        every = range(experts.num_experts)
        self.experts = nn.ModuleList(_expert(experts, number, gate) for number in every)
        # Compiled code for few rows.
        self._native: NativeExperts | None = None

    @torch.inference_mode()
    def use_compiled(self) -> str:
        """Run few rows on compiled code from now on, if it has the bits of the experts one by one.

        Returns why it is not used, or "". The linears must stay in place afterwards.
        """
        self.leave_compiled()
        experts: Any = list(self.experts)
        try:
            linears = [(expert.gate, expert.up, expert.down) for expert in experts]
            native = NativeExperts(linears, experts[0].compiled_activation)
        except SelfCheckError as error:
            return error.message
        generator = torch.Generator().manual_seed(20)
        x = torch.randn(_PROBE_ROWS, experts[0].gate.in_features, generator=generator)
        scores = torch.rand(_PROBE_ROWS, len(experts), generator=generator)
        weights, numbers = torch.topk(scores, min(len(experts), _PROBE_ROWS), dim=-1)
        expected = self._one_by_one(x, numbers, weights)
        for rows in (_PROBE_ROWS, 1):
            if not torch.equal(expected[:rows], native(x[:rows], numbers[:rows], weights[:rows])):
                return "the bits of compiled experts differ"
        self._native = native
        return ""

    def leave_compiled(self) -> None:
        """Run the experts one by one from now on, so that their linears may move."""
        self._native = None

    def forward(self, hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map [T, hidden] to [T, hidden]. ``numbers`` and ``weights`` [T, chosen] give each row's experts."""
        if self._native is not None and self._native.can_run(numbers):
            return self._native(hidden, numbers, weights)
        return self._one_by_one(hidden, numbers, weights)

    def _one_by_one(self, hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        num_rows, num_chosen = numbers.shape
        flat = numbers.reshape(-1)
        # A stable sort keeps the rows of an expert in the order of the batch.
        places = torch.argsort(flat, stable=True)
        outs = hidden.new_empty(num_rows * num_chosen, hidden.shape[1])
        start = 0
        for number, count in enumerate(torch.bincount(flat, minlength=len(self.experts)).tolist()):
            if count:
                mine = places[start : start + count]
                rows = pad_rows(hidden.index_select(0, mine // num_chosen))
                outs.index_copy_(0, mine, self.experts[number](rows)[:count])
                start += count
        weighted = outs.view(num_rows, num_chosen, -1) * weights.unsqueeze(-1)
        return add_columns(weighted)


class _GatedExpert(nn.Module):
    """Compute down(activation(gate(x)) * up(x))."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    @property
    def compiled_activation(self) -> Activation:
        """Return the activation for compiled code. Raises SelfCheckError for one that it does not know."""
        return gated_activation(self.gate.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to the same shape."""
        out: torch.Tensor = self.down(self.up.times(x, self.gate(x)))
        return out


class _ClampedExpert(_GatedExpert):
    """Compute GPT-OSS's down((up + 1) * gate * sigmoid(alpha * gate)), with gate and up clamped before."""

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, *, alpha: float, limit: float
    ) -> None:
        super().__init__(gate, up, down)
        self._alpha, self._limit = alpha, limit

    @property
    def compiled_activation(self) -> Activation:
        """Return the activation for compiled code."""
        return Activation("clamped", (self._limit, self._alpha))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to the same shape."""
        gate = self.gate(x).clamp_(max=self._limit)
        up = self.up(x).clamp_(min=-self._limit, max=self._limit)
        gate = gate * exact_sigmoid(gate * self._alpha)
        out: torch.Tensor = self.down((up + 1).mul_(gate))
        return out


class _LimitedExpert(_GatedExpert):
    """Compute DeepSeek V4's down(silu(gate) * up), with gate and up clamped before."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, *, limit: float) -> None:
        super().__init__(gate, up, down)
        self._limit = limit

    @property
    def compiled_activation(self) -> Activation:
        """Return the activation for compiled code."""
        return Activation("limited", (self._limit,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to the same shape."""
        gate = self.gate(x).clamp_(max=self._limit)
        up = self.up(x).clamp_(min=-self._limit, max=self._limit)
        out: torch.Tensor = self.down(up.mul_(gate * exact_sigmoid(gate)))
        return out


class ExactRouter(nn.Module):
    """Score every expert for each row and choose the best, with the scoring of the library's own router."""

    def __init__(self, router: Any, kind: RouterKind) -> None:
        super().__init__()
        self.linear = float_linear(router.weight, getattr(router, "bias", None))
        self._choose = _ROUTERS[kind]
        correction = getattr(router, "e_score_correction_bias", None)
        if correction is not None:
            self.e_score_correction_bias = nn.Buffer(correction.detach().clone())
        self.top_k = int(router.top_k)
        self.norm_topk_prob = bool(getattr(router, "norm_topk_prob", True))
        self.num_group = int(getattr(router, "num_group", None) or 1)
        self.topk_group = int(getattr(router, "topk_group", None) or 1)
        self.routed_scaling_factor = float(getattr(router, "routed_scaling_factor", 1.0))

    def forward(self, hidden: torch.Tensor) -> Routing:
        """Return the routing of [..., hidden], with all leading dimensions flattened to rows."""
        logits = self.linear(hidden.reshape(-1, hidden.shape[-1]))
        return (logits, *self._choose(self, logits))


class RouterScores(nn.Module):
    """Score experts inside a router of the library, which does the rest itself (Gemma 4)."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, hidden] to [..., rows, experts]."""
        scores: torch.Tensor = self.linear(x)
        return scores


class GatedShare(nn.Module):
    """Add routed experts and one shared expert for every row, of which a gate passes a part (Qwen2-MoE)."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts
        self.shared_expert, self.shared_expert_gate = block.shared_expert, block.shared_expert_gate

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [1, T, hidden] to the same shape."""
        rows = hidden[0]
        shared = self.shared_expert(rows) * exact_sigmoid(self.shared_expert_gate(rows))
        _, weights, numbers = self.gate(rows)
        total: torch.Tensor = self.experts(rows, numbers, weights) + shared
        return total[None]


def add_columns(x: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns, ...] added over the columns, one after the other."""
    columns = x.unbind(1)
    total = columns[0]
    # Not in place at first, because the first column is a view of the input.
    for number, column in enumerate(columns[1:]):
        total = total.add_(column) if number else total + column
    return total


def _add_halves(x: torch.Tensor) -> torch.Tensor:
    """Return the sums [rows, 1] of [rows, columns].

    The second half of the columns is added to the first until one is left.
    """
    while (columns := x.shape[1]) > 1:
        half = (columns + 1) // 2
        x = torch.cat((x[:, : columns - half] + x[:, half:], x[:, columns - half : half]), dim=1)
    return x


def _choose_of_all(router: ExactRouter, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and numbers of the best experts, from a softmax over all experts."""
    best, numbers = torch.topk(logits, router.top_k, dim=-1)
    shares = exp_(best - best[:, :1])
    if router.norm_topk_prob:
        return shares / add_columns(shares)[:, None], numbers
    return shares / _add_halves(exp_(logits - best[:, :1])), numbers


def _choose_then_weigh(router: ExactRouter, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and numbers of the best experts, from a softmax over the best alone."""
    best, numbers = torch.topk(logits, router.top_k, dim=-1)
    shares = exp_(best - best[:, :1])
    return shares / add_columns(shares)[:, None], numbers


def _choose_by_group(router: ExactRouter, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best experts of the best groups.

    A group's rank is the sum of its two best scores (DeepSeek V3).
    """
    scores = exact_sigmoid(logits)
    rated = scores + router.e_score_correction_bias
    groups = rated.view(rated.shape[0], router.num_group, -1)
    of_group = add_columns(groups.topk(2, dim=-1)[0].transpose(1, 2))
    kept = torch.topk(of_group, router.topk_group, dim=-1)[1]
    mask = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, kept, False)
    rated = groups.masked_fill(mask[..., None], float("-inf")).view_as(rated)
    numbers = torch.topk(rated, router.top_k, dim=-1)[1]
    # The correction chooses experts only. The weights are the uncorrected scores.
    weights = scores.gather(1, numbers)
    if router.norm_topk_prob:
        weights = weights / (add_columns(weights)[:, None] + 1e-20)
    return weights * router.routed_scaling_factor, numbers


_ROUTERS: dict[RouterKind, Callable[[ExactRouter, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "softmax of all": _choose_of_all,
    "softmax of chosen": _choose_then_weigh,
    "best groups": _choose_by_group,
}


def is_router(module: Any) -> bool:
    """Return whether ``module`` is a router of the library: a matrix of scores, and the number to choose."""
    return isinstance(getattr(module, "weight", None), nn.Parameter) and hasattr(module, "top_k")


def has_gated_share(module: nn.Module) -> bool:
    """Return whether ``module`` is a block of the library that `GatedShare` replaces."""
    return hasattr(module, "shared_expert_gate")


def is_experts(module: nn.Module) -> bool:
    """Return whether ``module`` is the library's module of stacked expert matrices."""
    return hasattr(module, "is_transposed") and hasattr(module, "num_experts")


def activation_name(config: Any) -> str:
    """Return the activation of a model's MLPs. Raises ModelError where it has no fused form."""
    name = str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None))
    if name not in ACTIVATIONS:
        raise ModelError(f"the activation {name!r} has no exact form here", hint='set kernel = "plain-f32"')
    return name


def _expert(experts: Any, number: int, kind: GateKind) -> nn.Module:
    """Return expert ``number`` by itself, with matrices [outputs, inputs] for either layout of the stacks."""
    joined, down = (_matrix(experts, stack, number) for stack in (experts.gate_up_proj, experts.down_proj))
    joined_bias = experts.gate_up_proj_bias[number] if experts.has_bias else None
    down_bias = experts.down_proj_bias[number] if experts.has_bias else None
    activation = activation_name(experts.config) if kind == "activation" else None
    stack = experts.gate_up_proj
    is_joined = experts.is_concatenated or (isinstance(stack, StoredStack) and stack.is_joined)
    gate_rows, up_rows = _halves(joined.shape[0], joined=is_joined)
    gate_bias, up_bias = (
        None if joined_bias is None else joined_bias[rows]
        for rows in _halves(joined.shape[0], joined=experts.is_concatenated)
    )
    gate = stored_linear(take_rows(joined, gate_rows), gate_bias, activation)
    up = stored_linear(take_rows(joined, up_rows), up_bias)
    out = stored_linear(down, down_bias)
    if kind == "activation":
        return _GatedExpert(gate, up, out)
    if kind == "limited":
        return _LimitedExpert(gate, up, out, limit=float(experts.limit))
    return _ClampedExpert(gate, up, out, alpha=float(experts.alpha), limit=float(experts.limit))


def _matrix(experts: Any, stack: Any, number: int) -> Weight:
    """Return an expert's matrix [outputs, inputs] of a stack."""
    if isinstance(stack, StoredStack):
        return stack.matrices[number]
    matrix: torch.Tensor = stack[number]
    return matrix.T if experts.is_transposed else matrix


def _halves(num_rows: int, *, joined: bool) -> tuple[slice, slice]:
    """Return the rows of gate and of up: one behind the other, or alternating."""
    half = num_rows // 2
    return (slice(half), slice(half, None)) if joined else (slice(0, None, 2), slice(1, None, 2))
