"""Run DeepSeek V4's experts: chosen by scores, or in the first layers by token id alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from convoy.errors import ModelError, StepError
from convoy.model.kernels.activation import exact_sigmoid
from convoy.model.kernels.native import formulas
from convoy.model.layers.compressed.attention import linear_of, own_linear
from convoy.model.layers.experts import ExactExperts, ExactRouter, Routing, add_columns


class RoutedExperts(nn.Module):
    """Replace the library's block, with the same weights: the chosen experts, and one shared by all rows."""

    def __init__(self, block: Any, *, packed: bool) -> None:
        super().__init__()
        self.gate = IdRouter(block.gate, packed=packed)
        self.experts = ExactExperts(block.experts, "limited") if packed else block.experts
        self.shared_experts = ClampedMlp(block.shared_experts, packed=packed)

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Map [T, hidden] to the same shape.

        ``input_ids`` is int64 [T] in layers that choose experts by it.
        """
        _, weights, numbers = self.gate(x, input_ids)
        found: torch.Tensor = self.experts(x, numbers, weights) + self.shared_experts(x)
        return found


class IdRouter(ExactRouter):
    """Choose the best experts of a row, or those of its token id. The scores weight them in both cases."""

    def __init__(self, router: Any, *, packed: bool) -> None:
        nn.Module.__init__(self)
        self.scores = linear_of(router.weight, packed=packed)
        self.top_k = int(router.top_k)
        self.routed_scaling_factor = float(router.routed_scaling_factor)
        self._score = _scoring(router)
        if hasattr(router, "tid2eid"):
            self.tid2eid: torch.Tensor | None = nn.Buffer(_checked(router.tid2eid, len(router.weight)))
        else:
            self.tid2eid = None
            self.e_score_correction_bias = nn.Buffer(router.e_score_correction_bias)

    def forward(self, hidden: torch.Tensor, input_ids: torch.Tensor | None = None) -> Routing:
        """Return the routing of [T, hidden]."""
        logits = self.scores(hidden)
        scores = self._score(logits)
        numbers = self._numbers(scores, input_ids)
        weights = scores.gather(1, numbers)
        return logits, weights / (add_columns(weights)[:, None] + 1e-20) * self.routed_scaling_factor, numbers

    def _numbers(self, scores: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Return the numbers of the chosen experts, [T, chosen]."""
        if self.tid2eid is None:
            return torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1)[1]
        if input_ids is None:
            raise StepError("layers that choose experts by token id got no token ids")
        return self.tid2eid.index_select(0, input_ids)


def _checked(table: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the file's table of experts by token id. Raises ModelError for experts that do not exist.

    Checked at load time, because a step would otherwise index outside the experts.
    """
    lowest, highest = int(table.min()), int(table.max())
    if lowest < 0 or highest >= num_experts:
        raise ModelError(
            f"tid2eid names experts {lowest} to {highest}, expected some of 0 to {num_experts - 1}"
        )
    return table


class ClampedMlp(nn.Module):
    """Compute down(silu(gate) * up), with gate and up clamped before."""

    def __init__(self, mlp: Any, *, packed: bool) -> None:
        super().__init__()
        self._limit = float(mlp.limit)
        self.gate_proj = own_linear(mlp.gate_proj, packed=packed)
        self.up_proj = own_linear(mlp.up_proj, packed=packed)
        self.down_proj = own_linear(mlp.down_proj, packed=packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, hidden] to the same shape."""
        gate = self.gate_proj(x).clamp(max=self._limit)
        up = self.up_proj(x).clamp(-self._limit, self._limit)
        down: torch.Tensor = self.down_proj(gate * exact_sigmoid(gate) * up)
        return down


def _root_softplus(logits: torch.Tensor) -> torch.Tensor:
    """Return sqrt(log(1 + e^x)), computed in float64 and rounded once."""
    return formulas.softplus(logits).sqrt_().to(torch.float32)


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sqrtsoftplus": _root_softplus,
    "sigmoid": exact_sigmoid,
}


def _scoring(gate: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers.activations import ACT2FN

    for name, score in _SCORES.items():
        if type(gate.score_fn) is type(ACT2FN[name]):
            return score
    raise ModelError(
        f"experts are scored by {type(gate.score_fn).__name__}, expected one of {', '.join(_SCORES)}"
    )
