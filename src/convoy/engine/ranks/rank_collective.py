"""The operations that a stage's ranks need of each other, over any transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from convoy.errors import CollectiveError, ConvoyError
from convoy.model.collective import Collective
from convoy.transport.link.link import Link


class RankCollective(Collective, Protocol):
    """Extend a collective by the operations that end it or let it rest."""

    def abort(self, error: ConvoyError) -> None:
        """End the collective from any thread: every waiting call raises a `CollectiveError`."""

    def rest(self) -> None:
        """Announce that no operation follows at once, so that other messages are handled without delay."""


def prove(collective: Collective) -> None:
    """Check that every rank is there and computes, for a step without rows. Raises `CollectiveError`."""
    total = float(collective.all_reduce(torch.ones(1)).item())
    if total != collective.world_size:
        raise CollectiveError(f"{collective.world_size} ranks say that they are {total:g}")


def named(error: CollectiveError, links: Mapping[int, Link]) -> str | None:
    """Return the member of the rank that a collective's error names, or None."""
    link = None if error.rank is None else links.get(error.rank)
    return None if link is None else link.peer
