"""What the suite prints at its end: a row per attack and layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    """Describe one attack on one layer, over all its tries."""

    attack: str
    layer: str
    tries: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: bool = False

    def tried(self, *outcomes: str) -> None:
        """Add one try, and its errors by name."""
        self.tries += 1
        self.outcomes.update(outcomes)

    @property
    def held(self) -> bool:
        return self.tries > 0 and not self.failed

    @property
    def outcome(self) -> str:
        return ", ".join(name for name, _ in self.outcomes.most_common()) or "nothing seen"


class Ledger:
    """Hold all rows, in the order in which the attacks ran."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}

    def row(self, attack: str, layer: str) -> Row:
        return self._rows.setdefault((attack, layer), Row(attack, layer))

    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def lines(self) -> list[str]:
        rows = [("attack", "layer", "tries", "outcome", "held")]
        rows += [
            (row.attack, row.layer, str(row.tries), row.outcome, "yes" if row.held else "NO")
            for row in self._rows.values()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]

    def as_json(self) -> list[dict[str, object]]:
        return [
            {
                "attack": row.attack,
                "layer": row.layer,
                "tries": row.tries,
                "outcomes": dict(row.outcomes),
                "held": row.held,
            }
            for row in self._rows.values()
        ]

    def merge(self, told: list[dict[str, Any]]) -> None:
        """Add the rows of another process, as its `as_json` has them."""
        for one in told:
            row = self.row(one["attack"], one["layer"])
            row.tries += one["tries"]
            row.outcomes.update(one["outcomes"])
            row.failed = row.failed or not one["held"]
