"""Make the library's tensors of tensors that a converter split, joined, or reordered.

`ARRANGED` has one row for each `plan.spec.family.Arrangement`: which shape comes of the parts' shapes, and
how their values are put together. Values stay as they are unpacked, except where a converter computed with
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.unpacking import (
    FLOATS,
    Index,
    Parts,
    Unpacking,
    joined_rows,
    require,
)

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.weights import Stored

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Values = Sequence["torch.Tensor"]


@dataclass(frozen=True)
class Heads:
    """Count the heads of values of a delta net: ``per_key`` for each of ``keys``, each ``width`` wide."""

    keys: int
    per_key: int
    width: int
    # Rows before those of values.
    queries_and_keys: int

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Heads | None:
        """Return the heads that a config.json describes, or None if it has no such heads."""
        names = ("key_head_dim", "num_key_heads", "value_head_dim", "num_value_heads")
        found = [config.get(f"linear_{name}") for name in names]
        sizes = [one for one in found if type(one) is int and 0 < one < 1 << 20]
        if len(sizes) != 4 or sizes[3] % sizes[1]:
            return None
        return cls(sizes[1], sizes[3] // sizes[1], sizes[2], 2 * sizes[0] * sizes[1])

    @property
    def count(self) -> int:
        return self.keys * self.per_key


@dataclass(frozen=True)
class Arranged:
    """Describe an arrangement of ``num_parts`` tensors.

    ``shape`` returns the shape of the result, or None for shapes that do not fit. ``make`` returns the result
    of the parts' values. Experts come one at a time if ``by_expert``. ``kept`` says how matrices in the form
    of their file make the result: with their rows or their heads' columns in another order, or as stacks of
    [outputs, inputs].
    """

    num_parts: int
    shape: Callable[[Shapes, Heads | None], Shape | None]
    make: Callable[[Values, Heads | None], torch.Tensor]
    by_expert: bool = False
    kept: Literal["", "rows", "columns", "stack", "stacks side by side"] = ""


@dataclass(frozen=True)
class Plain(Unpacking):
    """Take ``stored`` as float32, an expert at a time where there are experts."""

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield the whole tensor, or the matrix of each expert."""
        import torch

        stored = parts["stored"]
        if stored.dim() < 3:
            yield (slice(0, self.shape[0]),), stored.to(torch.float32)
            return
        for expert in range(self.shape[0]):
            yield (expert, slice(0, self.shape[1])), stored[expert].to(torch.float32)


@dataclass(frozen=True)
class Composed(Unpacking):
    """Unpack ``wholes``, and put them together as ``arrangement`` says."""

    wholes: tuple[Unpacking, ...]
    arrangement: str
    heads: Heads | None

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield the whole tensor, or an expert at a time."""
        import torch

        how = ARRANGED[self.arrangement]
        matrices = [
            _matrices(whole, {role: parts[f"{number}.{role}"] for role in whole.parts})
            for number, whole in enumerate(self.wholes)
        ]
        if how.by_expert:
            for expert, values in enumerate(zip(*matrices, strict=True)):
                yield (expert,), how.make(values, self.heads)
            return
        whole_values = [
            torch.stack(list(own)) if len(whole.shape) == 3 else next(own)
            for whole, own in zip(self.wholes, matrices, strict=True)
        ]
        yield (slice(None),), how.make(whole_values, self.heads)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all tensors if each can be kept, and so their arrangement.

        Columns of heads can be moved where a head has whole blocks.
        """
        how, each = ARRANGED[self.arrangement].kept, [whole.kept_bytes for whole in self.wholes]
        if how == "columns" and (self.heads is None or self.heads.width % self.wholes[0].kept_block):
            return 0
        return sum(each) if how and all(each) else 0

    @property
    def kept_form(self) -> str:
        """Return the one form of all tensors, if they have one."""
        forms = {whole.kept_form for whole in self.wholes}
        return forms.pop() if self.kept_bytes and len(forms) == 1 else ""

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix with rows or columns in the library's order, or the stack of all experts."""
        import torch

        from convoy.model.kernels.stored.matrix import StoredMatrix
        from convoy.model.kernels.stored.weights import StoredStack

        how, stacks = ARRANGED[self.arrangement], []
        for number, whole in enumerate(self.wholes):
            own = {role: parts[f"{number}.{role}"] for role in whole.parts}
            if how.kept == "columns":
                return whole.kept({role: self._moved(part) for role, part in own.items()})
            found = whole.kept(own)
            if isinstance(found, StoredMatrix):
                return found.rows(how.make([torch.arange(self.shape[0])], self.heads))
            assert isinstance(found, StoredStack), "only matrices and stacks have a form"
            stacks.append(found.matrices)
        joined = tuple(StoredMatrix.joined(one) for one in zip(*stacks, strict=True))
        return StoredStack(joined, is_joined=how.kept == "stacks side by side")

    def _moved(self, raw: torch.Tensor) -> torch.Tensor:
        """Return bytes [rows, bytes of a row] with the columns of heads in the library's order."""
        assert self.heads is not None, "columns of heads are kept"
        of_head = replace(self.heads, width=raw.shape[1] // self.heads.count)
        return ARRANGED[self.arrangement].make([raw], of_head)


def _matrices(whole: Unpacking, parts: Parts) -> Iterator[torch.Tensor]:
    """Yield the values of a tensor, or of each expert of one."""
    import torch

    rows: list[torch.Tensor] = []
    expert: Index = ()
    for index, values in whole.pieces(parts):
        if rows and index[:-1] != expert:
            yield torch.cat(rows)
            rows = []
        expert = index[:-1]
        rows.append(values)
    yield torch.cat(rows)


def arranged(name: str, arrangement: str, wholes: Sequence[Unpacking], heads: Heads | None) -> Unpacking:
    """Describe one of the library's tensors. Raises ModelError for shapes that do not fit together."""
    stored = [next(iter(one.parts.values())) for one in wholes]
    if arrangement == "joined":
        for one, own in zip(wholes, stored, strict=True):
            if one.shape != wholes[0].shape:
                raise ModelError(
                    f"{own.path}: {own.name} has the shape {list(one.shape)}, expected "
                    f"{list(wholes[0].shape)} as {stored[0].name} has"
                )
        return joined_rows(name, wholes)
    how = ARRANGED[arrangement]
    shapes = [one.shape for one in wholes]
    shape = how.shape(shapes, heads) if len(shapes) == how.num_parts else None
    if shape is None:
        pairs = zip(stored, shapes, strict=True)
        found = ", ".join(f"{own.name} of shape {list(one)}" for own, one in pairs)
        raise ModelError(f"{stored[0].path}: {found} cannot make {name}")
    parts = {f"{i}.{role}": part for i, one in enumerate(wholes) for role, part in one.parts.items()}
    return Composed(name, shape, parts, tuple(wholes), arrangement, heads)


def plain(stored: StoredTensor) -> Plain:
    """Describe a tensor of floats as it is stored."""
    require(stored, FLOATS)
    return Plain(stored.name, stored.shape, {"stored": stored})


def _same(shapes: Shapes, heads: Heads | None) -> Shape | None:  # noqa: ARG001 - as the others'
    return shapes[0]


def _less_one(values: Values, heads: Heads | None) -> torch.Tensor:  # noqa: ARG001 - as the others'
    return values[0] - 1


def _row_shape(shapes: Shapes, heads: Heads | None) -> Shape | None:  # noqa: ARG001 - as the others'
    """Accept one row with or without its dimension: converters write both."""
    return (1, shapes[0][-1]) if len(shapes[0]) == 1 or shapes[0][0] == 1 else None


def _one_row(values: Values, heads: Heads | None) -> torch.Tensor:  # noqa: ARG001 - as the others'
    return values[0].reshape(1, -1)


def _turned_shape(shapes: Shapes, heads: Heads | None) -> Shape | None:  # noqa: ARG001 - as the others'
    return (shapes[0][0], shapes[0][2], shapes[0][1]) if len(shapes[0]) == 3 else None


def _transposed(values: Values, heads: Heads | None) -> torch.Tensor:  # noqa: ARG001 - as the others'
    return values[0].T


def _alternating_shape(shapes: Shapes, heads: Heads | None) -> Shape | None:  # noqa: ARG001 - as the others'
    first, second = shapes
    return (first[0], 2 * first[1]) if first == second and len(first) == 2 else None


def _alternating(values: Values, heads: Heads | None) -> torch.Tensor:  # noqa: ARG001 - as the others'
    import torch

    return torch.stack(tuple(values), -1).flatten(-2)


def _alternating_columns_shape(shapes: Shapes, heads: Heads | None) -> Shape | None:  # noqa: ARG001
    first, second = shapes
    return (first[0], first[2], 2 * first[1]) if first == second and len(first) == 3 else None


def _alternating_columns(values: Values, heads: Heads | None) -> torch.Tensor:
    return _alternating([one.T for one in values], heads)


def _latents_shape(shapes: Shapes, heads: Heads | None) -> Shape | None:  # noqa: ARG001 - as the others'
    keys, values = shapes
    if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
        return None
    return keys[0] * (keys[2] + values[1]), keys[1]


def _latents(values: Values, heads: Heads | None) -> torch.Tensor:  # noqa: ARG001 - as the others'
    """Join keys [heads, latent, key] and values [heads, value, latent], the keys of each head first."""
    import torch

    keys, of_values = values
    return torch.cat((keys.transpose(1, 2), of_values), 1).flatten(0, 1)


def _fits(dim: int, width: Callable[[Heads], int]) -> Callable[[Shapes, Heads | None], Shape | None]:
    """Return a check that a dimension has all heads of values, and leaves the shape as it is."""

    def shape(shapes: Shapes, heads: Heads | None) -> Shape | None:
        found = shapes[0]
        good = heads is not None and len(found) > dim and found[dim] == width(heads)
        return found if good else None

    return shape


def _taps_shape(shapes: Shapes, heads: Heads | None) -> Shape | None:
    found = shapes[0]
    if heads is None or len(found) != 2 or found[0] != heads.queries_and_keys + heads.count * heads.width:
        return None
    return found[0], 1, found[1]


def _by_key(values: torch.Tensor, heads: Heads, width: int, dim: int) -> torch.Tensor:
    """Return heads of values with those of one key side by side.

    The file has the first head of every key, then the second of every key, and so on.
    """
    shape = (*values.shape[:dim], heads.per_key, heads.keys, width, *values.shape[dim + 1 :])
    apart = values.reshape(shape)
    return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _value_rows(values: Values, heads: Heads | None) -> torch.Tensor:
    assert heads is not None
    return _by_key(values[0], heads, heads.width, 0)


def _value_heads(values: Values, heads: Heads | None) -> torch.Tensor:
    assert heads is not None
    return _by_key(values[0], heads, 1, 0)


def _value_columns(values: Values, heads: Heads | None) -> torch.Tensor:
    assert heads is not None
    return _by_key(values[0], heads, heads.width, 1)


def _behind_keys(values: Values, heads: Heads | None) -> torch.Tensor:
    import torch

    assert heads is not None
    before = heads.queries_and_keys
    return torch.cat((values[0][:before], _by_key(values[0][before:], heads, heads.width, 0)))


def _taps(values: Values, heads: Heads | None) -> torch.Tensor:
    return _behind_keys(values, heads).unsqueeze(1)


def _decays(values: Values, heads: Heads | None) -> torch.Tensor:
    """Return the logarithms of the decays, of which the file has the negative."""
    return _value_heads([(-values[0]).log()], heads)


def _all_values(heads: Heads) -> int:
    return heads.count * heads.width


ARRANGED: dict[str, Arranged] = {
    "less one": Arranged(1, _same, _less_one),
    "one row": Arranged(1, _row_shape, _one_row),
    "transposed": Arranged(1, _turned_shape, _transposed, by_expert=True, kept="stack"),
    "alternating": Arranged(2, _alternating_shape, _alternating),
    "alternating columns": Arranged(
        *(2, _alternating_columns_shape, _alternating_columns), by_expert=True, kept="stacks side by side"
    ),
    "latents": Arranged(2, _latents_shape, _latents),
    "value rows": Arranged(1, _fits(0, _all_values), _value_rows, kept="rows"),
    "values behind keys": Arranged(
        *(1, _fits(0, lambda heads: heads.queries_and_keys + _all_values(heads)), _behind_keys), kept="rows"
    ),
    "value heads": Arranged(1, _fits(0, lambda heads: heads.count), _value_heads, kept="rows"),
    "value columns": Arranged(1, _fits(1, _all_values), _value_columns, kept="columns"),
    "decays": Arranged(1, _fits(0, lambda heads: heads.count), _decays),
    "taps": Arranged(1, _taps_shape, _taps),
}
