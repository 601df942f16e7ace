"""What a stage's ranks need of each other, whatever carries it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from convoy.errors import CollectiveError, ConvoyError
from convoy.model.collective import Collective
from convoy.transport.link.link import Link


class RankCollective(Collective, Protocol):
    """A collective that another thread may end."""

    def abort(self, error: ConvoyError) -> None:
        """It is over: whoever waits in it raises a `CollectiveError`."""

    def rest(self) -> None:
        """No operation follows at once: what else the other ranks send is looked at without delay again."""


def prove(collective: Collective) -> None:
    """That every rank is there and computes, where a step has no rows. Raises `CollectiveError`."""
    total = float(collective.all_reduce(torch.ones(1)).item())
    if total != collective.world_size:
        raise CollectiveError(f"{collective.world_size} ranks say that they are {total:g}")


def named(error: CollectiveError, links: Mapping[int, Link]) -> str | None:
    """The member that an error of a collective is about."""
    link = None if error.rank is None else links.get(error.rank)
    return None if link is None else link.peer
