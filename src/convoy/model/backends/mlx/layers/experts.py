"""Choose experts for each row, and compute the weighted sum of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from convoy.model.backends.mlx.layers.matrices import Activation, GatedMlp, Linear, Matrix

# From router logits [T, experts] in float32 to the numbers and weights of the chosen, each [T, chosen].
Choose = Callable[[mx.array], tuple[mx.array, mx.array]]
# From a gate and its values to what the expert's last matrix multiplies.
ApplyGate = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class SoftmaxChoice:
    """Choose the best experts, weighted by a softmax over all of them or over the chosen."""

    num_chosen: int
    # Whether the weights of the chosen ones add up to 1.
    is_normed: bool
    # Of each expert, multiplied into its weight.
    scales: mx.array | None = None

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        scores = mx.softmax(logits, axis=-1)
        numbers = mx.argsort(-scores, axis=-1)[:, : self.num_chosen]
        weights = mx.take_along_axis(scores, numbers, axis=-1)
        if self.is_normed:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return numbers, weights if self.scales is None else weights * self.scales[numbers]


@dataclass(frozen=True)
class GroupedChoice:
    """Choose the best experts of the best groups by sigmoids, as DeepSeek V3 does."""

    num_chosen: int
    is_normed: bool
    num_groups: int
    num_best_groups: int
    scaling: float
    # Added to a score for the choice alone, [experts] in float32.
    bias: mx.array

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        scores = mx.sigmoid(logits)
        judged = scores + self.bias
        grouped = judged.reshape(len(judged), self.num_groups, -1)
        # A group counts as much as its two best.
        of_groups = mx.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        places = mx.argsort(mx.argsort(-of_groups, axis=-1), axis=-1)
        best = (places < self.num_best_groups)[..., None]
        judged = mx.where(best, grouped, -mx.inf).reshape(judged.shape)
        numbers = mx.argsort(-judged, axis=-1)[:, : self.num_chosen]
        weights = mx.take_along_axis(scores, numbers, axis=-1)
        if self.is_normed:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return numbers, weights * self.scaling


def plain_gate(activate: Activation) -> ApplyGate:
    """Return activation(gate) * values."""
    return lambda gate, up: activate(gate) * up


def clamped_gate(alpha: float, limit: float) -> ApplyGate:
    """Return GPT-OSS's gate, with bounds."""

    def apply(gate: mx.array, up: mx.array) -> mx.array:
        gate = mx.minimum(gate, limit)
        return (mx.clip(up, -limit, limit) + 1) * (gate * mx.sigmoid(gate * alpha))

    return apply


@dataclass(frozen=True)
class ExpertStack:
    """Hold one matrix of each expert, [experts, outputs, inputs], and their biases [experts, outputs]."""

    matrix: Matrix
    bias: mx.array | None = None

    def __call__(self, x: mx.array, numbers: mx.array) -> mx.array:
        """Return ``x`` [T, 1 or chosen, 1, inputs] times the experts ``numbers`` [T, chosen]."""
        found = self.matrix.multiply_chosen(x, numbers)
        return found if self.bias is None else found + self.bias[numbers][:, :, None]

    @property
    def arrays(self) -> list[mx.array]:
        return self.matrix.arrays + ([] if self.bias is None else [self.bias])


@dataclass(frozen=True)
class Experts:
    """Compute the experts that a router chooses for each row."""

    router: Linear
    choose: Choose
    gate: ExpertStack
    up: ExpertStack
    down: ExpertStack
    apply_gate: ApplyGate
    # Arrays that `choose` holds.
    kept: tuple[mx.array, ...] = ()
    # The numbers of the experts that this rank has; None: all.
    own: range | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """Return the weighted sum of each row's experts, for ``x`` [T, hidden]."""
        return self.mix(x, self.router(x))

    def mix(self, x: mx.array, logits: mx.array) -> mx.array:
        """Return the weighted sum, for the router's ``logits`` [T, experts]."""
        numbers, weights = self.choose(logits.astype(mx.float32))
        is_own = None
        if self.own is not None:
            numbers = numbers - self.own.start
            is_own = (numbers >= 0) & (numbers < len(self.own))
            numbers = mx.where(is_own, numbers, 0)
        # [T, 1, 1, hidden], so that each of a row's experts multiplies a matrix of one row.
        rows = x[:, None, None]
        found = self.down(self.apply_gate(self.gate(rows, numbers), self.up(rows, numbers)), numbers)
        weighted = found[:, :, 0] * weights[..., None].astype(x.dtype)
        if is_own is not None:
            # Experts of other ranks leave zeros, so the sum over ranks is the whole.
            weighted = mx.where(is_own[..., None], weighted, mx.zeros((), x.dtype))
        return weighted.sum(axis=1)

    @property
    def arrays(self) -> list[mx.array]:
        parts = (self.router, self.gate, self.up, self.down)
        return [array for part in parts for array in part.arrays] + list(self.kept)


@dataclass(frozen=True)
class SharedAndChosen:
    """Add an MLP for all rows to the experts, weighted by a gate of its own if there is one."""

    chosen: Experts
    shared: GatedMlp
    shared_gate: Linear | None

    def __call__(self, x: mx.array) -> mx.array:
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = mx.sigmoid(self.shared_gate(x)) * shared
        return self.chosen(x) + shared

    @property
    def arrays(self) -> list[mx.array]:
        gate = [] if self.shared_gate is None else self.shared_gate.arrays
        return self.chosen.arrays + self.shared.arrays + gate


@dataclass(frozen=True)
class MlpBesideExperts:
    """Compute an MLP and experts of the same row, each behind norms of its own, as Gemma 4 does."""

    mlp: GatedMlp
    chosen: Experts
    # Of the MLP's input, of its result, of the experts' input, and of their result.
    norms: tuple[mx.array, mx.array, mx.array, mx.array]
    # The router's own factors of a row, [hidden].
    router_scale: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        """Return the MLP's result and that of the experts side by side, which ranks sum, for `joined`."""
        before, _, before_experts, _ = self.norms
        known = self.mlp(mx.fast.rms_norm(x, before, self.eps))
        logits = self.chosen.router(mx.fast.rms_norm(x, self.router_scale, self.eps))
        found = self.chosen.mix(mx.fast.rms_norm(x, before_experts, self.eps), logits)
        return mx.concatenate([known, found], axis=-1)

    def joined(self, both: mx.array) -> mx.array:
        """Return the sum of both results, each behind its norm."""
        _, behind, _, behind_experts = self.norms
        known, found = mx.split(both, 2, axis=-1)
        return mx.fast.rms_norm(known, behind, self.eps) + mx.fast.rms_norm(found, behind_experts, self.eps)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.mlp.arrays, *self.chosen.arrays, *self.norms, self.router_scale]


FeedForward = GatedMlp | Experts | SharedAndChosen | MlpBesideExperts
