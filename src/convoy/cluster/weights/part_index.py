"""The places of a model's parts on this disk. A member reads all that it serves here, by digest alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from convoy.errors import ModelError
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.source import ModelSource
from convoy.wire.messages.fetch import MAX_HELD_TENSORS


class PartLocation(NamedTuple):
    """Name the place of a part's bytes. If ``path`` is None they are in ``data``."""

    name: str
    path: Path | None
    offset: int
    num_bytes: int
    data: bytes = b""

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes from ``start`` on, fewer at the part's end. Raises ModelError naming file and part."""
        num_bytes = self.clip(start, num_bytes)
        if self.path is None:
            return self.data[start : start + num_bytes]
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + start)
                data = file.read(num_bytes)
        except OSError as error:
            reason = (error.strerror or "unreadable").lower()
            raise ModelError(f"{self.path.name} cannot be read: {reason}, at {self.name}") from error
        if data is None or len(data) != num_bytes:
            raise ModelError(
                f"{self.path.name} is truncated at {self.name}: it was changed since it was hashed",
                hint="restore the file and restart this member, which hashes it again",
            )
        return data

    def clip(self, start: int, num_bytes: int) -> int:
        """Return how many of ``num_bytes`` exist from ``start`` on.

        Raises ModelError if ``start`` is behind the end.
        """
        if start > self.num_bytes:
            raise ModelError(f"{self.name} has {self.num_bytes} bytes, and byte {start} was asked for")
        return min(num_bytes, self.num_bytes - start)


def places_of(source: ModelSource, manifest: Manifest) -> dict[str, PartLocation]:
    """Return the places of the manifest's files and tensors by digest; none if the weights are synthetic."""
    if source.seed is not None:
        # Synthetic weights are generated from their seed on every member.
        return {}
    own = source.own_files
    places = {
        entry.digest: PartLocation(name, None, 0, entry.num_bytes, own[name])
        if name in own
        else PartLocation(name, source.path / name, 0, entry.num_bytes)
        for name, entry in manifest.files.items()
    }
    return places | tensor_places(source, manifest)


def tensor_places(source: ModelSource, manifest: Manifest) -> dict[str, PartLocation]:
    """Return the places of the tensors that ``source`` has in the listed form. Their bytes are not read."""
    places = {}
    for name, entry in manifest.tensors.items():
        stored = source.tensors.get(name)
        if stored is not None and (stored.dtype, tuple(stored.shape)) == (entry.dtype, entry.shape):
            places[entry.digest] = PartLocation(name, stored.path, stored.offset, stored.num_bytes)
    return places


def check_listable(manifest: Manifest) -> None:
    """Raise ModelError if the model has more tensors than fit into one `Held` message."""
    count = len(manifest.tensors)
    if count > MAX_HELD_TENSORS:
        raise ModelError(
            f"a model of {count} tensors is got from no other member, expected at most {MAX_HELD_TENSORS}",
            hint="give every member its files, or let it read them from a hub",
        )


def to_bits(names: Iterable[str], held: Iterable[str]) -> bytes:
    """Return a bit for each of ``names``, sorted: 1 if it is in ``held``."""
    known = set(held)
    bits = bytearray()
    for index, name in enumerate(sorted(names)):
        if index % 8 == 0:
            bits.append(0)
        bits[-1] |= (name in known) << (index % 8)
    return bytes(bits)


def from_bits(names: Iterable[str], bits: bytes) -> frozenset[str]:
    """Return the names with a set bit, the reverse of `to_bits`. Names beyond the last bit are not held."""
    return frozenset(
        name
        for index, name in enumerate(sorted(names))
        if index // 8 < len(bits) and bits[index // 8] >> (index % 8) & 1
    )
