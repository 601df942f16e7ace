"""Hold matrices on the card in the form of their file: codes and scales.

Few layouts serve many forms. A `DeviceRange` has codes of 4 or 8 bits and numbers for groups of inputs. A
value is (code - zero) * scale, or code * scale + least. The operations are those of the format's reader, in
float32. `packing` beside this module makes ranges from stored matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

# A word of 16 bits holds four codes of 4 bits, this many inputs apart. A thread that loads 16 bytes of words
# then needs runs of inputs, and words of a run share a unit of `UNIT` inputs.
RUN = 8
UNIT = 4 * RUN


@dataclass(frozen=True)
class DeviceRange:
    """Hold consecutive outputs in one layout.

    ``codes`` are int16 [outputs, inputs / 4] with 4 bits, and int8 or float8 [outputs, inputs] with 8;
    ``zero`` is subtracted from each. ``scales`` are [outputs, inputs / group]. ``least`` is of the same
    shape: numbers that are added to products, or uint8 zeros that are subtracted from codes. With ``outers``
    [outputs, inputs / group / per_outer], and ``outer_least`` of the same shape, a scale and a least number
    are products of two.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor | None
    outers: torch.Tensor | None
    outer_least: torch.Tensor | None
    bits: int
    group: int
    zero: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        outputs, width = self.codes.shape
        return outputs, width * 4 if self.bits == 4 else width

    @property
    def has_zeros(self) -> bool:
        """Return whether ``least`` holds zeros."""
        return self.outers is None and self.least is not None and self.least.dtype == torch.uint8

    @property
    def per_outer(self) -> int:
        """Return the groups that share an outer scale, or 0 without outer scales."""
        return 0 if self.outers is None else self.scales.shape[1] // self.outers.shape[1]

    @property
    def words(self) -> torch.Tensor:
        """Return the codes as whole numbers."""
        return self.codes.view(torch.int8) if self.codes.dtype == torch.float8_e4m3fn else self.codes

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors beside codes, as kernels take them. Scales stand for those that are absent."""
        beside = (self.least, self.outers, self.outer_least)
        return (self.scales, *(self.scales if one is None else one for one in beside))

    @property
    def constants(self) -> dict[str, int]:
        """Return what kernels are compiled for. ``LEAST`` is 1 for numbers that are added, 2 for zeros."""
        return {
            "BITS": self.bits, "GROUP": self.group, "ZERO": self.zero, "OUTER": self.per_outer,
            "LEAST": 0 if self.least is None else 2 if self.has_zeros else 1,
            "FLOATS": self.codes.dtype == torch.float8_e4m3fn,
        }  # fmt: skip

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        every = (self.codes, self.scales, self.least, self.outers, self.outer_least)
        return [one for one in every if one is not None]

    def dense(self) -> torch.Tensor:
        """Return the values as float32 [outputs, inputs], slowly: the reference of the kernels."""
        codes = self._codes()
        scales, least = self.scales.to(torch.float32), self.least
        if self.outers is not None:
            scales = scales * self.outers.to(torch.float32).repeat_interleave(self.per_outer, 1)
        spread = scales.repeat_interleave(self.group, 1)
        codes -= self.zero
        if least is None:
            return codes * spread
        if self.has_zeros:
            return (codes - least.to(torch.float32).repeat_interleave(self.group, 1)) * spread
        added = least.to(torch.float32)
        if self.outer_least is not None:
            added = added * self.outer_least.to(torch.float32).repeat_interleave(self.per_outer, 1)
        return codes * spread + added.repeat_interleave(self.group, 1)

    def _codes(self) -> torch.Tensor:
        if self.bits == 8:
            return self.codes.to(torch.float32)
        outputs, inputs = self.shape
        words = self.codes.to(torch.int32).view(outputs, -1, 1, RUN)
        shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device).view(1, 1, 4, 1)
        return ((words >> shifts) & 15).to(torch.float32).view(outputs, inputs)

    def fits(self, other: DeviceRange) -> bool:
        """Return whether the outputs of ``other`` can be joined to these."""
        ours, theirs = (
            [
                None if one is None else (one.dtype, one.shape[1:])
                for one in (own.codes, own.scales, own.least, own.outers)
            ]
            for own in (self, other)
        )
        return ours == theirs and (self.bits, self.group, self.zero) == (other.bits, other.group, other.zero)


@dataclass(frozen=True)
class DeviceMatrix:
    """Hold a matrix [outputs, inputs] as ranges of outputs.

    With ``rounds_rows``, several rows are rounded to floats of 8 bits before they are multiplied. The matrix
    is then one range of such floats, with a scale for each output.
    """

    ranges: tuple[DeviceRange, ...]
    rounds_rows: bool = False

    @classmethod
    def joined(cls, ranges: Sequence[DeviceRange], *, rounds_rows: bool = False) -> DeviceMatrix:
        """Return a matrix of the ranges, in which neighbours of one layout are one range."""
        runs: list[list[DeviceRange]] = []
        for one in ranges:
            if runs and runs[-1][0].fits(one):
                runs[-1].append(one)
            else:
                runs.append([one])
        return cls(tuple(run[0] if len(run) == 1 else _cat(run) for run in runs), rounds_rows)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        return sum(one.shape[0] for one in self.ranges), self.ranges[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of all ranges."""
        return [tensor for one in self.ranges for tensor in one.tensors()]

    def numel(self) -> int:
        """Return the number of weights."""
        outputs, inputs = self.shape
        return outputs * inputs

    def dense(self) -> torch.Tensor:
        """Return the values as float32 [outputs, inputs], slowly."""
        return torch.cat([one.dense() for one in self.ranges])


def _cat(run: Sequence[DeviceRange]) -> DeviceRange:
    def whole(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        held = [part for part in parts if part is not None]
        return torch.cat(held) if held else None

    return replace(
        run[0],
        codes=torch.cat([one.codes for one in run]),
        scales=torch.cat([one.scales for one in run]),
        least=whole([one.least for one in run]),
        outers=whole([one.outers for one in run]),
        outer_least=whole([one.outer_least for one in run]),
    )


Matrix = torch.Tensor | DeviceMatrix
