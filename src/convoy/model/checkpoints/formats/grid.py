"""Unpack small numbers under a grid of scales: one per matrix, row, group of a row, or rectangle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.formats.unpacking import Index, Parts, Unpacking

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.matrix import StoredMatrix
    from convoy.model.kernels.stored.weights import Stored


@dataclass(frozen=True)
class GridScaled(Unpacking):
    """Unpack ``(number - zero) * scale`` to [..., rows, inputs]; leading dimensions are experts.

    Parts: ``weight``, plain or, with ``bits``, packed in words along a row; ``scales``, one per tile;
    ``zeros``, one per scale, packed down the columns; ``places``, the group of each input where groups are
    not runs.
    """

    # rows and inputs that share a scale
    tile: tuple[int, int]
    # width of packed numbers, from each of which half their range is subtracted
    bits: int | None = None

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows, expert by expert."""
        import torch

        num_rows, width = self.shape[-2:]
        leads: list[tuple[int, ...]] = [()] if len(self.shape) == 2 else [(e,) for e in range(self.shape[0])]
        for lead in leads:
            grid = (-(-num_rows // self.tile[0]), -(-width // self.tile[1]))
            scales = parts["scales"][lead].to(torch.float32).reshape(grid)
            zeros = self._zeros(parts)
            for rows in self.row_slices(num_rows, width):
                place: Index = (*lead, rows)
                of_row = torch.arange(rows.start, rows.stop, device=scales.device) // self.tile[0]
                values = self._numbers(parts["weight"][place])
                if zeros is not None:
                    values -= self._spread(zeros[of_row], parts)
                values *= self._spread(scales[of_row], parts)
                yield place, values

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of numbers, and of scales and zeros for each row."""
        num_rows, width = math.prod(self.shape[:-1]), self.shape[-1]
        if self.bits and width % 8:
            return 0
        group, places = min(self.tile[1], width), self.parts.get("places")
        each = (4 if self.parts["scales"].dtype == "F32" else 2) + ("zeros" in self.parts)
        # the last group is filled up
        of_row = -(-width // group) * (group * (self.bits or 8) // 8 + each)
        return num_rows * of_row + (0 if places is None else 4 * width)

    @property
    def kept_form(self) -> str:
        """Return the form of numbers or codes, if groups are runs of inputs."""
        if "places" in self.parts:
            return ""
        return self._form

    @property
    def kept_group(self) -> int:
        """Return the inputs of a tile, or 0 where one spans them all."""
        return 0 if self.tile[1] >= self.shape[-1] else self.tile[1]

    @property
    def _form(self) -> str:
        return self.parts["weight"].dtype if self.bits is None else f"centred{self.bits}"

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix or the stack, with scales and zeros repeated for each row."""
        from convoy.model.kernels.stored.weights import StoredStack

        if len(self.shape) == 2:
            return self._matrix(parts, ())
        return StoredStack(tuple(self._matrix(parts, (number,)) for number in range(self.shape[0])))

    def _matrix(self, parts: Parts, lead: tuple[int, ...]) -> StoredMatrix:
        import torch

        from convoy.model.kernels.stored.bits import stream_codes
        from convoy.model.kernels.stored.matrix import PLACES, StoredMatrix, StoredRange

        num_rows, width = self.shape[-2:]
        grid = (-(-num_rows // self.tile[0]), -(-width // self.tile[1]))
        of_row = torch.arange(num_rows) // self.tile[0]
        scales = parts["scales"][lead].reshape(grid)
        if scales.dtype not in (torch.float32, torch.float16):
            # powers of two in 8 bits are exact in bfloat16
            scales = scales.to(torch.bfloat16)
        weight = parts["weight"][lead]
        found = {"values" if self.bits is None else "codes": weight, "scales": scales[of_row]}
        zeros = parts.get("zeros")
        if zeros is not None:
            is_packed = self.bits is not None and zeros.dtype == torch.int32
            # columns of packed zeros are filled up to whole words
            zeros = stream_codes(zeros.T, self.bits or 8).T if is_packed else zeros.reshape(grid)
            found["zeros"] = zeros[of_row]
        places = self._places(parts, grid[1])
        if places is not None:
            found[PLACES] = places.to(torch.int32)
        return StoredMatrix((StoredRange(self._form, num_rows, width, found, self.kept_group),))

    def _numbers(self, weight: torch.Tensor) -> torch.Tensor:
        import torch

        from convoy.model.kernels.stored.bits import stream_codes

        if self.bits is None:
            return weight.to(torch.float32)
        codes = stream_codes(weight, self.bits)[..., : self.shape[-1]].to(torch.float32)
        return codes.sub_(1 << (self.bits - 1))

    def _zeros(self, parts: Parts) -> torch.Tensor | None:
        """Return the zeros [rows, groups], less half their range as the numbers are, or None."""
        import torch

        from convoy.model.kernels.stored.bits import stream_codes

        zeros = parts.get("zeros")
        if zeros is None or self.bits is None or zeros.dtype != torch.int32:
            return (
                None
                if zeros is None
                else zeros.to(torch.float32).view(-1, -(-self.shape[-1] // self.tile[1]))
            )
        codes = stream_codes(zeros.T, self.bits).T[: self.shape[-2]]
        return codes.to(torch.float32) - (1 << (self.bits - 1))

    def _spread(self, of_group: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Spread [rows, groups] to [rows, inputs]. Raises ModelError for a group that does not exist."""
        places = self._places(parts, of_group.shape[1])
        if places is None:
            # limit the tile: settings may declare it far wider than the matrix
            width = self.shape[-1]
            return of_group.repeat_interleave(min(self.tile[1], width), 1)[:, :width]
        return of_group[:, places]

    def _places(self, parts: Parts, num_groups: int) -> torch.Tensor | None:
        """Return the group of each input, int64 [inputs], or None where groups are runs.

        Raises ModelError for a group that does not exist.
        """
        import torch

        places = parts.get("places")
        if places is None:
            return None
        places = places.to(torch.int64)
        if int(places.min()) < 0 or int(places.max()) >= num_groups:
            stored = self.parts["places"]
            raise ModelError(
                f"{stored.path}: {stored.name} names groups {int(places.min())} to {int(places.max())}, "
                f"expected 0 to {num_groups - 1}"
            )
        return places
