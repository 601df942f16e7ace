"""A loader of models that a test controls."""

from __future__ import annotations

import threading

from convoy.errors import CapacityError, ConvoyError


class FakeLoader:
    """Note what is loaded. ``gate`` holds loads up, and ``failure`` fails the next one."""

    def __init__(self) -> None:
        self.loaded: str | None = "a"
        self.done: list[str | None] = []
        self.too_large: set[str] = set()
        self.failure: ConvoyError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def check_fit(self, name: str) -> None:
        if name in self.too_large:
            raise CapacityError(f"{name} does not fit")

    def load(self, name: str) -> None:
        self.loaded = None
        assert self.gate.wait(30)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        self.loaded = name
        self.done.append(name)

    def unload(self) -> None:
        self.loaded = None
        self.done.append(None)
