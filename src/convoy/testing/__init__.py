"""Test a program that uses Convoy: a network inside one process, and the faults of a real network.

`serve` runs a model over members that are threads, and `script` decides its answers. `network` links members
without sockets, `links` makes a single pair of links, and `streams` has the faults. All else is as in
production: handshakes, sealing and the order of frames.
"""

from convoy.testing.cluster import serve
from convoy.testing.links import memory_link_pair
from convoy.testing.network import MemoryNetwork
from convoy.testing.script import Script, ScriptedCall
from convoy.testing.streams import (
    Cut,
    Drop,
    Fault,
    FlipBit,
    MemoryStream,
    RecordedStream,
    Reorder,
    Repeat,
    Stall,
    memory_stream_pair,
)

__all__ = [
    "Cut",
    "Drop",
    "Fault",
    "FlipBit",
    "MemoryNetwork",
    "MemoryStream",
    "RecordedStream",
    "Reorder",
    "Repeat",
    "Script",
    "ScriptedCall",
    "Stall",
    "memory_link_pair",
    "memory_stream_pair",
    "serve",
]
