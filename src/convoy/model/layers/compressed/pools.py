"""Hold the memory of compressed attention: keys and entries of a layer, pending numbers, and second keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.model.kv.packed import SAFE_ROWS, HeadShape
from convoy.model.kv.pool import ApartPool, RowPool
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.compressed.batch import Closing, EntryBatch, EntryShape, describe_entries
from convoy.model.layers.rope import RopeUse, Rotation, Rotations
from convoy.plan.spec.cache import CacheGroup
from convoy.wire.messages.control import Row

# The library's name for the rotation of compressed layers.
_ENTRIES = RopeUse("compress")


@dataclass(frozen=True)
class CompressedLayer:
    """Hold the inputs of one compressed layer in a step."""

    batch: EntryBatch
    pool: ApartPool  # of keys, and of entries behind them
    pending: RowPool
    index: ApartPool | None  # second keys of the entries
    # The rotation of the entries that the step closes, each [n, pairs].
    rotation: Rotation | None


class CompressedPools:
    """Hold the pools of the compressed layers among ``layers``. Other layers have their pools elsewhere."""

    def __init__(self, groups: Sequence[CacheGroup], layers: range, block_size: int) -> None:
        self._groups = groups
        self._layers = layers
        self._block_size = block_size
        # By layer. Layers of one kind have equal shapes, and so share the description of a batch.
        self._shapes: dict[int, EntryShape] = {}
        self._pools: dict[int, tuple[ApartPool, RowPool, ApartPool | None]] = {}

    @property
    def layers(self) -> frozenset[int]:
        """Return all compressed layers of the model, also those of other stages."""
        return frozenset(layer for group in self._groups if group.is_compressed for layer in group.layers)

    def forget(self) -> None:
        """Free the pools."""
        self._shapes, self._pools = {}, {}

    def make(self, num_blocks: Sequence[int], least_rows: Sequence[int]) -> None:
        """Make pools of ``num_blocks`` blocks. Both arguments have one item for each cache group.

        ``least_rows`` is the least number of rows of attention's matmuls.
        """
        for index, group in enumerate(self._groups):
            mine = [layer for layer in group.layers if layer in self._layers]
            if group.is_compressed and mine:
                shape = self._shape(index, num_blocks, least_rows)
                for layer in mine:
                    self._shapes[layer] = shape
                    self._pools[layer] = self._make_pools(shape, num_blocks)

    def describe(
        self, rows: Sequence[tuple[Row, BlockTable]], rotations: Rotations
    ) -> dict[int, CompressedLayer]:
        """Return the inputs of each compressed layer for checked, non-empty ``rows``."""
        described = {shape: describe_entries(rows, shape) for shape in dict.fromkeys(self._shapes.values())}
        turned = {shape: _rotation(batch.closing, rotations) for shape, batch in described.items()}
        return {
            layer: CompressedLayer(described[shape], *self._pools[layer], turned[shape])
            for layer, shape in self._shapes.items()
        }

    def _shape(self, entries: int, num_blocks: Sequence[int], least_rows: Sequence[int]) -> EntryShape:
        group = self._groups[entries]
        alike = [
            (index, other) for index, other in enumerate(self._groups) if group.layers[0] in other.layers
        ]
        (window,) = (index for index, other in alike if other.attends)
        (pending,) = (index for index, other in alike if other.is_pending)
        span = self._groups[pending].window
        assert span is not None, "what is pending has a window"
        heads = HeadShape(
            group.num_heads,
            1,
            group.head_dim,
            self._block_size,
            num_blocks[window] + num_blocks[entries],
            self._groups[window].window,
            least_rows[window],
            group.value_dim,
            latent=True,
        )
        return EntryShape(heads, num_blocks[window], group.stride, span, (window, entries, pending))

    def _make_pools(
        self, shape: EntryShape, num_blocks: Sequence[int]
    ) -> tuple[ApartPool, RowPool, ApartPool | None]:
        _, entries, pending = shape.groups
        index_dim = self._groups[entries].row_elements - shape.heads.head_dim
        index = None
        if index_dim:
            geometry = (index_dim, self._block_size, num_blocks[entries], None, SAFE_ROWS, index_dim)
            index = ApartPool(HeadShape(1, 1, *geometry, latent=True))
        kept = RowPool(num_blocks[pending] * self._block_size, self._groups[pending].row_elements)
        return ApartPool(shape.heads), kept, index


def _rotation(closing: Closing | None, rotations: Rotations) -> Rotation | None:
    if closing is None:
        return None
    cos, sin = rotations.look_up([_ENTRIES], closing.positions, closing.last_position)[_ENTRIES]
    return cos[0], sin[0]
