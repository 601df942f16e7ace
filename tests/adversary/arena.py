"""Where attacks happen: alpha and beta, each a process, an untouched link between them, and links
through a man in the middle that somebody does.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adversary.middle import Middle, Tamper, Way
from adversary.process import WAIT_S, Event, VictimProcess
from adversary.units import Measure, inner_frames, tls_records
from convoy.crypto.identity import Identity, OperatorKey
from convoy.transport.member import LocalMember, Roster
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster

NAMES = ("alpha", "beta", "gamma")
CLUSTER = "arena"
MAX_GROWTH_BYTES = 96 << 20


@dataclass
class AttackedLink:
    """Hold a standing link through a middle: ``near`` dialled, ``far`` accepted."""

    arena: Arena
    middle: Middle
    near: str
    far: str

    @property
    def up(self) -> Way:
        """Return the way of frames to the listener."""
        return self.middle.up(0)

    @property
    def down(self) -> Way:
        """Return the way of frames to the dialler."""
        return self.middle.down(1)

    def steps(self, *numbers: int) -> None:
        self.arena.alpha.tell("steps", key=self.near, numbers=list(numbers))

    def steps_back(self, *numbers: int) -> None:
        self.arena.beta.tell("steps", key=self.far, numbers=list(numbers))

    def tensor(self, **order: Any) -> None:
        self.arena.alpha.tell("tensor", key=self.near, **order)

    def arrived(self) -> Event:
        return self.arena.beta.wait("arrived", self.far)

    def all_arrived(self) -> list[int]:
        """Return the steps that were delivered. Call it once the link has ended."""
        return [event["step"] for event in self.arena.beta.now("arrived", self.far)]

    def far_end(self, timeout_s: float = WAIT_S) -> Event:
        return self.arena.beta.wait("ended", self.far, timeout_s)

    def near_end(self, timeout_s: float = WAIT_S) -> Event:
        return self.arena.alpha.wait("ended", self.near, timeout_s)

    def ends(self) -> tuple[Event, Event]:
        """Return how both ends ended: (near, far)."""
        far = self.far_end()
        return self.near_end(), far


class Arena:
    """Run the attacked members. `open` makes it. ``layer`` is the table's word for the attacked layer.

    With ``ranks`` they can be ranks, for which each imports torch.
    """

    def __init__(self, directory: Path, layer: str, *, ranks: bool = False) -> None:
        self.directory = directory
        self.layer = layer
        self.is_bare = layer != "both"
        self.measure: Measure = inner_frames if self.is_bare else tls_records
        self.operator = OperatorKey.generate()
        self.identities = {name: Identity.generate() for name in NAMES}
        for name, identity in self.identities.items():
            identity.save(directory / name)
        members = [
            member_of(name, identity, ("127.0.0.1", 7000 + i), head=i == 0)
            for i, (name, identity) in enumerate(self.identities.items())
        ]
        self.roster: Roster = make_roster(CLUSTER, members, epoch=7)
        (directory / "roster.toml").write_bytes(sign_roster(self.roster, self.operator))
        self._numbers = itertools.count(1)
        self._middles: list[Middle] = []
        self._started: list[VictimProcess] = []
        self.alpha = self.start_as({"name": "alpha", "ranks": ranks})
        self.beta = self.start_as({"name": "beta", "ranks": ranks})
        self._rss_bytes: dict[str, int] = {}
        self._beside = self.link_direct()
        for victim in (self.alpha, self.beta):
            self._rss_bytes[victim.name] = victim.rss_bytes()

    @classmethod
    @contextmanager
    def open(cls, directory: Path, layer: str, *, ranks: bool = False) -> Iterator[Arena]:
        arena = cls(directory, layer, ranks=ranks)
        try:
            yield arena
        finally:
            for middle in arena._middles:
                middle.close()
            for victim in arena._started:
                victim.stop()

    def start(self, name: str, **options: Any) -> VictimProcess:
        """Start one more process of a member of the roster."""
        return self.start_as({"name": name}, **options)

    def start_as(self, lies: dict[str, Any], **options: Any) -> VictimProcess:
        """Start a process with the set-up in ``lies``: see `adversary.victim`."""
        setup = {
            "directory": str(self.directory),
            "operator": self.operator.public_key.hex(),
            "layer": "inner" if self.is_bare else "both",
            "options": options,
            **lies,
        }
        victim = VictimProcess(setup)
        self._started.append(victim)
        return victim

    def under(self, roster: Roster, name: str, *, operator: OperatorKey | None = None) -> Path:
        """Make a directory with all members' keys and another roster."""
        directory = self.directory / name
        directory.mkdir()
        for member in NAMES:
            shutil.copytree(self.directory / member, directory / member, copy_function=shutil.copy2)
        (directory / "roster.toml").write_bytes(sign_roster(roster, operator or self.operator))
        return directory

    def member(self, name: str) -> LocalMember:
        """Return a member in this process, for a test that plays it."""
        return LocalMember(name, self.identities[name], self.roster)

    def middle(self, **tampers: Any) -> Middle:
        middle = Middle(tampers.pop("target", self.beta.address), self.measure, **tampers)
        self._middles.append(middle)
        return middle

    def link(
        self, *, up: dict[int, Tamper] | None = None, down: dict[int, Tamper] | None = None
    ) -> AttackedLink:
        """Open a link through a new middle. It stands at both ends when this returns."""
        return self.link_through(self.middle(up=up, down=down))

    def link_through(self, middle: Middle) -> AttackedLink:
        self.beta.now("link in")
        near = self.alpha.dial("beta", middle.address)
        found = self.alpha.wait_either(("link", "failed"), near)
        assert found["event"] == "link", found
        return AttackedLink(self, middle, near, self._far_of(found))

    def link_direct(self) -> tuple[str, str]:
        self.beta.now("link in")
        near = self.alpha.dial("beta", self.beta.address)
        found = self.alpha.wait_either(("link", "failed"), near)
        assert found["event"] == "link", found
        return near, self._far_of(found)

    def failed_dial(self, middle: Middle, timeout_s: float = WAIT_S) -> Event:
        """Return how a dial through this middle failed at the dialler, or how its link ended at once."""
        near = self.alpha.dial("beta", middle.address, timeout_s)
        found = self.alpha.wait_either(("link", "failed"), near)
        if found["event"] == "link":
            found = self.alpha.wait("ended", near)
        return found

    def _far_of(self, near: Event) -> str:
        """Return the listener's key of the link that the dialler has just got."""
        while True:
            far = self.beta.wait("link in")
            if far["id"] == near["id"]:
                key: str = far["key"]
                return key

    def check_unharmed(self) -> None:
        """Check that both processes live without a crash, in bounded memory, and the link beside works."""
        number = next(self._numbers)
        near, far = self._beside
        self.alpha.tell("steps", key=near, numbers=[number])
        self.alpha.tell("tensor", key=near, step=number, boundary=4, size=300_000, fill=number % 256)
        assert self.beta.wait("arrived", far)["step"] == number
        hidden = self.beta.wait("arrived", far)
        assert hidden["digest"] == hashlib.sha256(bytes([number % 256]) * 300_000).hexdigest()
        for victim in (self.alpha, self.beta):
            assert victim.alive
            assert not victim.crashes, victim.crashes
            assert victim.rss_bytes() - self._rss_bytes[victim.name] < MAX_GROWTH_BYTES


def random_id() -> bytes:
    return os.urandom(16)
