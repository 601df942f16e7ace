"""What a member's machine reads, multiplies, and spends beside that: all that a stage's time is told from."""

from __future__ import annotations

from dataclasses import dataclass, fields

FEW_ROWS, MANY_ROWS = 16, 256  # of the products that were measured, beside those of a lone row
REFERENCE_LINEARS = 7  # of the layer whose own time was measured; one of more takes more
_SCALES = (1e9, 1e9, 1e9, 1e9, 1e9, 1e-3, 1e-6, 1e-3)  # of the numbers of `Speed.text`


@dataclass(frozen=True)
class Speed:
    """What a member measured; what is None or 0 was not, and is taken to cost nothing beside the others.

    ``measured``: that it is its own figure, and not another's taken for it.
    """

    read_bytes_per_s: float  # of weights, as its kernel gets them out of memory for a lone row
    flop_per_s: float  # of products of `MANY_ROWS` rows in the kernel's numbers
    few_flop_per_s: float | None = None  # of `FEW_ROWS` rows; None: whatever reading leaves
    cache_bytes_per_s: float | None = None  # of K/V, as decodes look back on it; None: as weights
    attention_flop_per_s: float | None = None  # of a chunk that looks back; None: as products
    layer_s: float = 0.0  # of each layer of a step, however little there is to do
    row_s: float = 0.0  # and of each row in it
    step_s: float = 0.0  # of each step of a stage beside its layers
    measured: bool = True

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> Speed:
        """Of those of `text`: two, or all."""
        values = [number * scale for number, scale in zip(numbers, _SCALES, strict=False)]
        read, many, few, cache, attention, layer, row, step = [*values, *[0.0] * (len(_SCALES) - len(values))]
        return cls(read, many, few or None, cache or None, attention or None, layer, row, step)

    def text(self) -> str:
        """``GB/S,GFLOP/S`` and what else was measured, as a flag takes it."""
        values = [getattr(self, field.name) for field in fields(self)][: len(_SCALES)]
        if not all(values):
            values = values[:2]
        return ",".join(f"{value / scale:.3g}" for value, scale in zip(values, _SCALES, strict=False))

    def linear_s(self, num_rows: float, num_bytes: float, num_elements: float) -> tuple[float, float]:
        """Seconds that reading a matrix takes, and those that multiplying ``num_rows`` with it takes longer.

        From a lone row to `FEW_ROWS` to `MANY_ROWS` seconds grow by the row, and from there in proportion.
        """
        reading, flop = num_bytes / self.read_bytes_per_s, 2 * num_elements
        if self.few_flop_per_s is None:
            return reading, max(0.0, num_rows * flop / self.flop_per_s - reading)
        few = max(reading, FEW_ROWS * flop / self.few_flop_per_s)
        many = max(few, MANY_ROWS * flop / self.flop_per_s)
        if num_rows <= FEW_ROWS:
            return reading, max(0.0, num_rows - 1) / (FEW_ROWS - 1) * (few - reading)
        if num_rows <= MANY_ROWS:
            share = (num_rows - FEW_ROWS) / (MANY_ROWS - FEW_ROWS)
            return reading, few + share * (many - few) - reading
        return reading, num_rows / MANY_ROWS * many - reading
