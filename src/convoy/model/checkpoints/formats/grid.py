"""Unpack small numbers under a grid of scales: one per matrix, row, group of a row, or rectangle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.formats.unpacking import Index, Parts, Unpacking

if TYPE_CHECKING:
    import torch


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
            return None if zeros is None else zeros.to(torch.float32)
        codes = stream_codes(zeros.T, self.bits).T[: self.shape[-2]]
        return codes.to(torch.float32) - (1 << (self.bits - 1))

    def _spread(self, of_group: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Spread [rows, groups] to [rows, inputs]. Raises ModelError for a group that does not exist."""
        import torch

        places = parts.get("places")
        if places is None:
            # limit the tile: settings may declare it far wider than the matrix
            width = self.shape[-1]
            return of_group.repeat_interleave(min(self.tile[1], width), 1)[:, :width]
        places = places.to(torch.int64)
        if int(places.min()) < 0 or int(places.max()) >= of_group.shape[1]:
            stored = self.parts["places"]
            raise ModelError(
                f"{stored.path}: {stored.name} names groups {int(places.min())} to {int(places.max())}, "
                f"expected 0 to {of_group.shape[1] - 1}"
            )
        return of_group[:, places]
