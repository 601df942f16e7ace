"""A member as a process of its own, for attacks: listens, dials and sends as it is told on standard input,
and says on standard output what happened to it. Every line is a JSON object.

`python -m adversary.victim SETUP`, where SETUP is a JSON object: directory, name, operator, options,
and layer: "both", or "inner" for links without their outer layer. With ranks true it may be told to join.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from adversary.bare import take_away_the_outer_layer
from adversary.options import attack_options
from convoy.crypto.claims import NO_LINK
from convoy.crypto.identity import Identity
from convoy.errors import ConvoyError
from convoy.transport.dial import dial
from convoy.transport.link.link import Link, Received, ReceivedTensor
from convoy.transport.listen.listener import Listener
from convoy.transport.member import LocalMember
from convoy.transport.membership import Membership, utc_now
from convoy.trust.roster.accepted import AcceptedFile
from convoy.trust.roster.authority import OperatorAuthority
from convoy.trust.roster.roster import verify_roster
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import FrameType, Row, Sender, Step
from convoy.wire.messages.ranks import Agree
from convoy.wire.tensor import WireTensor

# Only ranks need torch, and its import takes several times as long as everything else of a start.
if TYPE_CHECKING:
    from convoy.engine.ranks.sums.sealed import SealedCollective

ALLOWED = frozenset({FrameType.HELLO, FrameType.STEP, FrameType.HIDDEN, FrameType.REFUSE}) | frames_from(
    Sender.RANK
)
PLAN_ID = 3  # of collectives


def membership(setup: dict[str, Any], directory: Path) -> Membership:
    """Return this member under the roster in its directory. If it lies about itself, nothing is checked."""
    operator_key = bytes.fromhex(setup["operator"])
    signed = (directory / "roster.toml").read_bytes()
    roster = verify_roster(signed, operator_key=operator_key).roster
    keys = directory / setup.get("identity", setup["name"])
    identity = Identity.load(keys)
    me = object.__new__(LocalMember)
    for field, value in (("name", setup["name"]), ("identity", identity), ("roster", roster)):
        object.__setattr__(me, field, value)
    if not setup.get("liar", False):
        me = LocalMember(setup["name"], identity, roster)
    ahead = datetime.timedelta(seconds=setup.get("clock_ahead_s", 0))
    authority = OperatorAuthority(operator_key, AcceptedFile(keys))
    return Membership(me, signed, authority, now=lambda: utc_now() + ahead)


class Victim:
    """Hold one member and all its links, by key."""

    def __init__(self, setup: dict[str, Any]) -> None:
        directory = Path(setup["directory"])
        self._saying = threading.Lock()
        self._links: dict[str, Link] = {}
        self._ranks: dict[str, SealedCollective] = {}
        self._numbers = itertools.count()
        self._options = attack_options(setup.get("options", {}))
        self._me = membership(setup, directory)
        if setup.get("ranks", False):
            importlib.import_module("convoy.engine.ranks.sums.sealed")
        if setup["layer"] == "inner":
            take_away_the_outer_layer(self._me.current)
        self._listener = Listener(
            ("127.0.0.1", 0), self._me, self._greet, options=self._options, on_refused=self._refused
        )
        self.say("listening", port=self._listener.address[1])

    def say(self, event: str, **rest: Any) -> None:
        with self._saying:
            print(json.dumps({"event": event, **rest}), flush=True)

    def run(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            getattr(self, "do_" + order.pop("do"))(**order)

    # What it is told to do.

    def do_dial(self, key: str, peer: str, port: int, timeout_s: float, replaces: str = "") -> None:
        def work() -> None:
            began_s = time.monotonic()
            try:
                link = dial(
                    ("127.0.0.1", port),
                    me=self._me,
                    peer_name=peer,
                    timeout_s=timeout_s,
                    options=self._options,
                    replaces=bytes.fromhex(replaces) or NO_LINK,
                )
            except ConvoyError as error:
                self.say("failed", key=key, took_s=time.monotonic() - began_s, **_error(error))
                return
            self._keep(key, link)

        threading.Thread(target=work, daemon=True).start()

    def do_steps(self, key: str, numbers: list[int]) -> None:
        self._sending(key, lambda link: [link.send(_step(n), plan_id=1, step=n) for n in numbers])

    def do_tensor(self, key: str, step: int, boundary: int, size: int, fill: int = 7) -> None:
        tensor = WireTensor("bfloat16", (size // 2,), bytes([fill]) * size)
        self._sending(key, lambda link: link.send_tensor(tensor, plan_id=1, step=step, boundary=boundary))

    def do_join(self, key: str, rank: int, deadline_s: float) -> None:
        """Be one of two ranks over this link."""
        from convoy.engine.ranks.sums.sealed import SealedCollective

        link = self._links[key]
        self._ranks[key] = SealedCollective(rank, 2, {1 - rank: link}, PLAN_ID, deadline_s)
        self.say("joined", key=key)

    def do_agree(self, key: str) -> None:
        rank = self._ranks[key]
        said = Agree(PLAN_ID, rank.rank, 2, bytes(32), "float32", "")
        self._ranking(key, lambda: rank.agree(said))

    def do_add(self, key: str, count: int, size: int) -> None:
        """Add so many sums, and report each with whether it is right."""
        import torch

        def add() -> None:
            for number in range(count):
                part = np.random.default_rng([number, rank.rank]).standard_normal(size).astype("f4")
                parts = [
                    np.random.default_rng([number, r]).standard_normal(size).astype("f4") for r in (0, 1)
                ]
                total = rank.all_reduce(torch.from_numpy(part)).numpy()
                self.say("added", key=key, number=number, right=bool((total == parts[0] + parts[1]).all()))

        rank = self._ranks[key]
        self._ranking(key, add)

    def do_part(self, key: str, **place: Any) -> None:
        """Send a part of a sum as no rank sends it."""
        dtype, shape = place.pop("dtype"), tuple(place.pop("shape"))
        data = bytes((4 if dtype == "float32" else 2) * int(np.prod(shape)))
        tensor = WireTensor(dtype, shape, data)
        self._sending(key, lambda link: link.send_tensor(tensor, kind=FrameType.PARTIAL, **place))

    def _ranking(self, key: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
                self.say("ranked", key=key)
            except ConvoyError as error:
                self.say("ranked", key=key, **_error(error))

        threading.Thread(target=run, daemon=True).start()

    def do_ping(self, key: str, timeout_s: float) -> None:
        def work() -> None:
            try:
                self._links[key].ping(timeout_s)
                self.say("ponged", key=key)
            except ConvoyError as error:
                self.say("ping failed", key=key, **_error(error))
            except KeyError:
                self.say("ping failed", key=key, error="LinkBroken", message="the link is gone")

        threading.Thread(target=work, daemon=True).start()

    def do_roster(self, key: str, path: str) -> None:
        """Send whatever is in a file as a roster."""
        self._sending(key, lambda link: link.post_roster(Path(path).read_bytes()))

    def do_offer(self, path: str) -> None:
        """Adopt a roster, as from its file."""
        try:
            self.say("offered", adopted=self._me.offer(Path(path).read_bytes(), "a file"))
        except ConvoyError as error:
            self.say("offered", adopted=False, **_error(error))

    def do_close(self, key: str) -> None:
        link = self._links.get(key)
        if link is not None:
            link.close("told to")

    def do_state(self) -> None:
        rss_bytes = psutil.Process().memory_info().rss
        self.say(
            "state",
            epoch=self._me.roster.epoch,
            rss_bytes=rss_bytes,
            threads=threading.active_count(),
        )

    # What happens to it.

    def _greet(self, link: Link) -> None:
        self._keep(f"in {next(self._numbers)}", link)

    def _refused(self, error: ConvoyError) -> None:
        self.say("refused", **_error(error))

    def _keep(self, key: str, link: Link) -> None:
        self._links[key] = link
        link.start(
            lambda _, received: self._arrived(key, received),
            lambda _, error: self._ended(key, error),
            ALLOWED,
        )
        self.say("link", key=key, id=getattr(link, "link_id", b"").hex(), peer=link.peer, cipher=link.cipher)

    def _arrived(self, key: str, received: Received) -> None:
        rank = self._ranks.get(key)
        if rank is not None and rank.deliver(self._links[key], received):
            return
        if isinstance(received, ReceivedTensor):
            digest = hashlib.sha256(received.tensor.data).hexdigest()
            self.say("arrived", key=key, kind="HIDDEN", step=received.step, digest=digest)
        else:
            self.say("arrived", key=key, kind=type(received.message).__name__, step=received.step)

    def _ended(self, key: str, error: ConvoyError) -> None:
        # The rank stays: an order to it may come after its link has ended, and gets the link's error.
        link, rank = self._links.pop(key, None), self._ranks.get(key)
        if link is not None and rank is not None:
            rank.link_ended(link, error)
        self.say("ended", key=key, **_error(error))

    def _sending(self, key: str, send: Any) -> None:
        try:
            send(self._links[key])
            self.say("sent", key=key)
        except ConvoyError as error:
            self.say("send failed", key=key, **_error(error))
        except KeyError:
            self.say("send failed", key=key, error="LinkBroken", message="the link is gone")


def _step(number: int) -> Step:
    return Step(number, [], [], [Row(1, number, 2, 1)], b"\1\0\0\0\2\0\0\0")


def _error(error: ConvoyError) -> dict[str, str]:
    return {"error": type(error).__name__, "message": error.message}


class Crash(logging.Handler):
    """Report tracebacks in the log: the suite must see crashes that some code caught."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__(logging.ERROR)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._say("crashed", message=record.getMessage(), error=str(record.exc_info))


def main() -> None:
    victim = Victim(json.loads(sys.argv[1]))
    logging.getLogger("convoy").addHandler(Crash(victim.say))
    threading.excepthook = lambda args: victim.say(
        "crashed", message=str(args.thread), error=str(args.exc_value)
    )
    victim.run()


if __name__ == "__main__":
    main()
