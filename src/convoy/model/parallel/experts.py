"""Divide experts between ranks as whole experts.

Each rank computes only the rows that go to its own experts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from convoy.model.layers.experts import add_columns, is_experts
from convoy.plan.spec.sharding import Shard


class OwnExperts(nn.Module):
    """Run a layer's experts [first, first + count), addressed by the numbers of the whole layer's router."""

    def __init__(self, experts: nn.Module, first: int, count: int) -> None:
        super().__init__()
        self.experts = experts
        self._first, self._count = first, count

    def forward(self, hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map [T, hidden] to this rank's part of the sum, [T, hidden].

        ``numbers`` and ``weights`` are [T, chosen]. A row's own experts are added in the order in which
        its router ranked them.
        """
        own = numbers - self._first
        places = ((own >= 0) & (own < self._count)).view(-1).nonzero().view(-1)
        num_chosen = numbers.shape[1]
        # Experts of other ranks leave zeros, so the sum over ranks is the whole result.
        outs = hidden.new_zeros(numbers.numel(), hidden.shape[1])
        if len(places):
            rows = hidden.index_select(0, places // num_chosen)
            chosen = own.reshape(-1).index_select(0, places)[:, None]
            shares = weights.reshape(-1).index_select(0, places)[:, None]
            outs.index_copy_(0, places, self.experts(rows, chosen, shares))
        return add_columns(outs.view(*numbers.shape, -1))


def keep_own_experts(model: nn.Module, shard: Shard) -> None:
    """Give a model without memory yet the experts of this rank alone, in place of all."""
    for name, part in list(model.named_modules()) if shard.experts == "whole" else ():
        if is_experts(part):
            experts: Any = part
            model.set_submodule(name, _of_count(experts, experts.num_experts // shard.world_size))


def _of_count(experts: Any, count: int) -> nn.Module:
    """Return a copy with ``count`` experts, without memory for the others.

    Parameters have an expert in each row.
    """
    few: Any = copy.copy(experts)
    few._parameters = {
        name: nn.Parameter(parameter[:count], requires_grad=False)
        for name, parameter in experts._parameters.items()
    }
    few.num_experts = count
    return few  # type: ignore[no-any-return]
