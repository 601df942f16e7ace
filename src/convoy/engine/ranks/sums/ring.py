"""The routes of parts in a ring of ranks: numbers alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ring:
    """Compute ``rank``'s routes among ``world_size`` ranks.

    A part that circulates goes both ways, and reaches every rank once. Rank 0 gathers on the shorter way:
    ranks up to the middle send to the left, and those behind it to the right.
    """

    rank: int
    world_size: int

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.world_size

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.world_size

    @property
    def middle(self) -> int:
        """Return how many ranks a part travels to the right."""
        return self.world_size // 2

    def circulating(self) -> list[tuple[int, int]]:
        """Return (sending neighbour, origin) of every part that circulates to this rank, nearest first."""
        rank, size = self.rank, self.world_size
        found = [(self.left, (rank - far) % size) for far in range(1, self.middle + 1)]
        return found + [(self.right, (rank + far) % size) for far in range(1, (size - 1) // 2 + 1)]

    def onward(self, sender: int, origin: int) -> list[int]:
        """Return the ranks to which this rank forwards the part of ``origin`` from ``sender`` (or itself)."""
        found = []
        if sender in {self.rank, self.left} and (self.right - origin) % self.world_size <= self.middle:
            found.append(self.right)
        far = (origin - self.left) % self.world_size
        if sender in {self.rank, self.right} and far <= (self.world_size - 1) // 2:
            found.append(self.left)
        return [to for to in found if to != origin]

    def gathering(self) -> list[tuple[int, int]]:
        """Return (sending neighbour, origin) of every part that passes this rank on its way to rank 0."""
        if self.rank == 0:
            near = [(self.right, origin) for origin in range(1, self.middle + 1)]
            return near + [(self.left, origin) for origin in range(self.middle + 1, self.world_size)]
        if self.rank <= self.middle:
            return [(self.right, origin) for origin in range(self.rank + 1, self.middle + 1)]
        return [(self.left, origin) for origin in range(self.middle + 1, self.rank)]

    @property
    def toward_first(self) -> int:
        """Return the rank to which this rank sends parts for rank 0."""
        return self.left if self.rank <= self.middle else self.right
