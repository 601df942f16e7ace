"""Carry metric families from one process to the other, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from convoy.cluster.metrics.families import Metric


class _Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: str


class _Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[_Sample]


_decoder = msgspec.json.Decoder(list[_Family])


def encode_families(families: Iterable[Metric]) -> bytes:
    """Return the JSON of metric families. Values that JSON lacks, such as infinity, are text in it."""
    return msgspec.json.encode(
        [
            _Family(
                one.name,
                one.documentation,
                one.type,
                [_Sample(sample.name, sample.labels, repr(float(sample.value))) for sample in one.samples],
            )
            for one in families
        ]
    )


def decode_families(data: bytes) -> Iterator[Metric]:
    """Yield the families of `encode_families`."""
    from prometheus_client.metrics_core import Metric as Family

    for read in _decoder.decode(data):
        family = Family(read.name, read.text, read.kind)
        for sample in read.samples:
            family.add_sample(sample.name, sample.labels, float(sample.value))
        yield family
