"""A machine's rates of reading and multiplying, and its overheads: the inputs of a stage's time."""

from __future__ import annotations

from dataclasses import dataclass, fields

# The row counts of the measured products, beside a lone row.
FEW_ROWS, MANY_ROWS = 16, 256
# Linears of the layer that was measured for ``layer_s``; a layer with more takes longer.
REFERENCE_LINEARS = 7
# Of the numbers of `Speed.text`.
_SCALES = (1e9, 1e9, 1e9, 1e9, 1e9, 1e-3, 1e-6, 1e-3)


@dataclass(frozen=True)
class Speed:
    """Hold a member's measurements; None or 0 means not measured, and counts as free beside the others.

    ``assumed`` says what the member is taken to be as fast as, if the figures are not its own.
    """

    # Of weights, as its kernel reads them from memory for a lone row.
    read_bytes_per_s: float
    # Of products of `MANY_ROWS` rows in the kernel's numbers.
    flop_per_s: float
    # Of `FEW_ROWS` rows; with None, products cost only the time beyond reading.
    few_flop_per_s: float | None = None
    # Of K/V, as decodes look back on it; None: as weights.
    cache_bytes_per_s: float | None = None
    # Of a chunk that looks back; None: as products.
    attention_flop_per_s: float | None = None
    # Of each layer of a step, however little there is to do.
    layer_s: float = 0.0
    # Of each further row in a layer; on a device, in a step.
    row_s: float = 0.0
    # Of each step of a stage beside its layers.
    step_s: float = 0.0
    # Of each layer of a chunk: the host starts its operations while the device computes. 0: no device, or one
    # with these overheads unknown.
    starts_s: float = 0.0
    assumed: str = ""

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> Speed:
        """Return the speed of the numbers of `text`: two, or all."""
        values = [number * scale for number, scale in zip(numbers, _SCALES, strict=False)]
        read, many, few, cache, attention, layer, row, step = [*values, *[0.0] * (len(_SCALES) - len(values))]
        return cls(read, many, few or None, cache or None, attention or None, layer, row, step)

    def text(self) -> str:
        """Return ``GB/S,GFLOP/S`` and the other measurements, as a flag takes them."""
        values = [getattr(self, field.name) for field in fields(self)][: len(_SCALES)]
        if not all(values):
            values = values[:2]
        return ",".join(f"{value / scale:.3g}" for value, scale in zip(values, _SCALES, strict=False))

    def linear_s(self, num_rows: float, num_bytes: float, num_elements: float) -> tuple[float, float]:
        """Return the seconds of reading a matrix, and those added by multiplying ``num_rows`` with it.

        From a lone row to `FEW_ROWS` to `MANY_ROWS`, seconds are interpolated by the row; above, they grow in
        proportion.
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
        return reading, max(many, num_rows * flop / self.flop_per_s) - reading
