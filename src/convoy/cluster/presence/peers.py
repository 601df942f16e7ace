"""The peers that are connected to the head: linked, greeted and admitted.

Missing members are dialled meanwhile. A peer is connected from its admission until its link ends or it is
given up. All of it happens on threads of links and of dials. Code that needs a change waits on
`Peers.wait`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec

from convoy.cluster.attestation.member_verifier import MemberVerifier
from convoy.cluster.handlers import Handler
from convoy.cluster.offer import make_hello, without_mlx
from convoy.cluster.options import HeadOptions
from convoy.cluster.presence.backoff import Backoffs
from convoy.cluster.presence.first_dial import DIAL_S, Arrival, FirstDial
from convoy.cluster.presence.mailbox import PlanMailbox
from convoy.cluster.presence.slow_members import SlowMembers
from convoy.cluster.status import AbsentStatus, IdleStatus
from convoy.cluster.traffic import Traffic
from convoy.config.kernels import MLX_KERNELS
from convoy.engine.run.stage_worker import StepMarks, marks_of
from convoy.errors import ConvoyError, LinkBroken, PeerUnreachable
from convoy.transport.link.link import Link, Received
from convoy.transport.member import Member, Roster
from convoy.transport.membership import Membership
from convoy.transport.network import Network
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import Hello, Inquire, Progress, Reached, Sender

_log = logging.getLogger(__name__)

_GREET_S = 10.0
_EXCLUDED_AGAIN_S = 60.0
_MAX_LOWERED = 3


class IdleTimes:
    """Track since when each member is idle: since it came, or since a plan began without it."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._since_s: dict[str, float] = {}

    def begin(self, names: Collection[str]) -> None:
        """Note that these members hold no layers from now on."""
        for name in names:
            self._since_s[name] = self._now()

    def report(self, here: Mapping[str, Hello], members: Collection[str]) -> list[IdleStatus]:
        """Return the idle members of ``here``: those that are not in ``members``, which hold layers.

        Standbys are left out, because they are meant to hold no layers.
        """
        return [
            IdleStatus(name, self._since_s.get(name, self._now()))
            for name, hello in sorted(here.items())
            if name not in members and not hello.standby
        ]


class Peers:
    """Hold the connected peers. Thread-safe.

    ``receive`` gets every frame that a peer sends; see `after_greeting`. It and ``lost`` are called on
    receiver threads, ``joined`` on a dial's thread. ``why_not_mlx`` is the reason why no stage on MLX runs
    the model; members that offer a host's kernel too then compute on their hosts.
    """

    def __init__(
        self,
        me: Membership,
        network: Network,
        options: HeadOptions,
        *,
        receive: Handler,
        lost: Callable[[Link, ConvoyError], None],
        joined: Callable[[str], None],
        why_not_mlx: str = "",
    ) -> None:
        self.verifier = MemberVerifier(lambda: me.current, options.member)
        self.links: dict[str, Link] = {}
        self.hellos: dict[str, Hello] = {}
        self.slow = SlowMembers()
        self.idle = IdleTimes()
        self.traffic = Traffic()
        # Why a better kernel is not used, if the model is the reason.
        self.why_kernel = ""
        # The members that did not come at the bring-up.
        self.absent: dict[str, PeerUnreachable] = {}
        # Both are called during the bring-up only. The second has what a linked member does while it starts.
        self.on_arrival: Arrival = lambda *_: None
        self.on_start: Callable[[str, Progress], None] = lambda *_: None
        # Called with the name of a member that left, and the reason.
        self.on_gone: Callable[[str, str], None] = lambda _name, _why: None
        self._me, self._network, self._options = me, network, options
        self._receive, self._lost, self._joined = receive, lost, joined
        self._why_not_mlx, self._num_lowered = why_not_mlx, Counter[str]()
        # The greetings as they came.
        self._said = {me.name: make_hello(options.member)}
        self._hello = self._counted(me.name, self._said[me.name], head=True)
        self._changed = threading.Condition()
        self._num_changes = 0
        self._greeting: dict[Link, PlanMailbox] = {}
        self._sought: set[str] = set()
        # When each member that was connected before was last lost, by Unix time.
        self._gone_unix_s: dict[str, float] = {}
        self._backoffs = Backoffs()
        self._seeking = False
        self._closed = threading.Event()
        self._unsubscribe: Callable[[], None] = lambda: None
        # The last answer of each member.
        self._reached: dict[str, tuple[Reached, float]] = {}
        # One thread asks at a time. The status is asked for on any thread.
        self._asking = threading.Lock()
        self._answered = threading.Condition()
        self._past_bytes = 0
        # The error that ended the last link to each member.
        self._ends: dict[str, ConvoyError] = {}

    @property
    def hello(self) -> Hello:
        """Return the head's own greeting."""
        return self._hello

    @property
    def num_changes(self) -> int:
        return self._num_changes

    def drop_kernel(self, name: str, kernel: str, why: str) -> bool:
        """Remove ``kernel`` from a member's offer until it greets anew.

        Returns False if it offers no other kernel.
        """
        with self._changed:
            hello = self._hello if name == self._me.name else self.hellos.get(name)
            left = [] if hello is None else [one for one in hello.kernels if one != kernel]
            if hello is None or not left or len(left) == len(hello.kernels):
                # A kernel that the member did not offer would be dropped again and again.
                return False
            changed = msgspec.structs.replace(hello, kernels=left)
            if name == self._me.name:
                self._hello = changed
            else:
                self.hellos[name] = changed
            self.why_kernel = why
        return True

    def lower_offer(self, name: str, memory_bytes: int) -> bool:
        """Lower the memory that a member offers, until it greets anew.

        Returns False if it offers no more than that, or lowered its offer too often.
        """
        with self._changed:
            hello = self._hello if name == self._me.name else self.hellos.get(name)
            # Each time the plan is made anew, so a member must not do it again and again.
            if hello is None or memory_bytes >= hello.memory_bytes or self._num_lowered[name] == _MAX_LOWERED:
                return False
            self._num_lowered[name] += 1
            changed = msgspec.structs.replace(hello, memory_bytes=memory_bytes)
            if name == self._me.name:
                self._hello = changed
            else:
                self.hellos[name] = changed
        text = "%s has %.3g GB of memory left of the %.3g GB that it offered, and gets fewer layers"
        _log.warning(text, name, memory_bytes / 1e9, hello.memory_bytes / 1e9)
        return True

    # Returns as soon as the head begins to close.
    def closed_within(self, timeout_s: float) -> bool:
        return self._closed.wait(timeout_s)

    def present(self) -> dict[str, tuple[Link, Hello]]:
        """Return the link and the greeting of each connected member."""
        with self._changed:
            return {name: (link, self.hellos[name]) for name, link in self.links.items() if not link.is_over}

    def sealed_bytes(self) -> int:
        """Return the bytes of all sealed frames over the head's links, links that ended included."""
        with self._changed:
            links = list(self.links.values())
            past = self._past_bytes
        return past + sum(link.sent_sealed_bytes + link.received_sealed_bytes for link in links)

    def missing(self) -> list[str]:
        """Return the roster's members that are not connected, except those below the policy's minimum."""
        here = {self._me.name, *self.present(), *self.verifier.excluded}
        return [member.name for member in self._me.roster.members if member.name not in here]

    def absent_status(self) -> list[AbsentStatus]:
        """Return the `missing` members, and since when each is."""
        names, now_s = self.missing(), time.time()
        with self._changed:
            # A link that is over and still held broke just now, and its loss is about to be noted.
            just_lost = {name: now_s for name, link in self.links.items() if link.is_over}
            return [AbsentStatus(name, (self._gone_unix_s | just_lost).get(name)) for name in names]

    # Bring-up: all members that the roster lists, or those that came.

    def gather(self, watch: Callable[[], None]) -> set[str]:
        """Dial, greet and admit all peers, and return their names.

        Waits for each. ``absent`` then holds the members that did not come. Raises the first other error.
        """
        mailbox = PlanMailbox(watch)
        links: dict[str, Link] = {}

        def greet(link: Link) -> None:
            self._greet(link, mailbox)

        try:
            first_dial = FirstDial(
                self._me,
                self._network,
                self._options.wait_s,
                watch,
                on_link=greet,
                on_arrival=self.on_arrival,
            )
            dialled = first_dial.call()
            links, self.absent = dialled.links, dialled.absent
            hellos = mailbox.gather(links, Hello, self._options.answer_s, self.on_start)
            self.verifier.admit(links, watch)
        except BaseException:
            for link in links.values():
                link.dismiss("the head could not bring the cluster up")
            raise
        finally:
            mailbox.close()
        for name, link in links.items():
            self._admit(link, hellos[name])
        return set(links)

    def require(self, names: Collection[str]) -> dict[str, Link]:
        """Return the links of these members. Raises `LinkBroken` for the first that is not connected."""
        present = self.present()
        for name in names:
            if name not in present:
                error = self._ends.get(name) or LinkBroken("it was given up")
                raise LinkBroken(f"the link to {name} ended: {error.message}", hint=error.hint) from error
        return {name: present[name][0] for name in names}

    # While the cluster runs.

    def judge_mlx(self, why_not: str) -> None:
        """Take offers for another model from now on: ``why_not`` is as for this class.

        A member that MLX cannot serve offers its host's kernels alone.
        """
        self._why_not_mlx, self.why_kernel = why_not, ""
        with self._changed:
            for name, hello in self.hellos.items():
                self.hellos[name] = self._counted(name, self._with_mlx(name, hello))
            me = self._me.name
            self._hello = self._counted(me, self._with_mlx(me, self._hello), head=True)

    def _with_mlx(self, name: str, hello: Hello) -> Hello:
        """Return a greeting with the kernels of MLX that the member offered, if it did."""
        said = self._said[name]
        kernels = [kernel for kernel in said.kernels if kernel in {*hello.kernels, *MLX_KERNELS}]
        return msgspec.structs.replace(hello, kernels=kernels, device=said.device)

    def seek(self) -> None:
        """Dial the roster's missing members from now on, as often as a backoff allows."""
        if not self._seeking:
            self._seeking = True
            self._unsubscribe = self._me.subscribe(self._seek_missing)
        self._seek_missing(self._me.roster)

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Wait until ``num_changes`` differs from ``seen``. Returns False after the time."""
        self._seek_missing(self._me.roster)
        with self._changed:
            return self._changed.wait_for(lambda: self._num_changes != seen, timeout_s)

    def wake(self) -> None:
        """Wake the threads that wait for a change."""
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    def give_up(self, name: str, reason: str, *, slow: bool = False) -> None:
        """Drop a member now, and ignore all that it still sends. It may come back on a new link.

        ``slow`` marks it as slow, so that later plans avoid it.
        """
        with self._changed:
            link = self.links.get(name)
            if link is None:
                return
            self._forget(link)
            if slow:
                self.slow.add(name)
        self.on_gone(name, f"given up, {reason}")
        link.dismiss(reason, revoke=True)
        self._lost(link, LinkBroken(f"{name} was given up: {reason}"))

    def silent(self, names: set[str], timeout_s: float) -> set[str]:
        """Return the connected members that do not answer a ping within ``timeout_s``.

        Members without an open link are not included.
        """
        answers = self.answers(names, timeout_s)
        return {name for name, after_s in answers.items() if after_s is None}

    def answers(self, names: set[str], timeout_s: float) -> dict[str, float | None]:
        """Return the seconds after which each connected member answered a ping; None if not in time."""
        with self._changed:
            links = [link for name, link in self.links.items() if name in names]
        found: dict[str, float | None] = dict.fromkeys(link.peer for link in links)
        began_s = time.monotonic()

        def ask(link: Link) -> None:
            try:
                is_there = link.is_there(timeout_s)
            # The link is over, and its end is reported separately.
            except ConvoyError:
                is_there = True
            if is_there:
                found[link.peer] = time.monotonic() - began_s

        threads = [threading.Thread(target=ask, args=(link,), daemon=True) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def positions(self, plan_id: int, names: set[str], timeout_s: float) -> dict[str, int]:
        """Return the last step that each member has run and sent on, for the members that answer in time."""
        answers = self._inquire(plan_id, names, timeout_s)
        return {name: reached.step for name, (reached, _) in answers.items()}

    def marks(self, plan_id: int, names: set[str], timeout_s: float) -> dict[str, list[StepMarks]]:
        """Return the times of the last steps at each member that answers in time, by this machine's clock.

        The answer is taken to be made halfway between question and arrival, so times may be wrong by half a
        round trip.
        """
        answers = self._inquire(plan_id, names, timeout_s)
        return {name: marks_of(reached.marks, at_s) for name, (reached, at_s) in answers.items()}

    def _inquire(self, plan_id: int, names: set[str], timeout_s: float) -> dict[str, tuple[Reached, float]]:
        """Return the answers that come in time, each with the monotonic time at which it was made."""
        asked_s: dict[str, float] = {}
        with self._asking:
            with self._answered:
                self._reached.clear()
            for name, (link, _) in self.present().items():
                if name in names:
                    asked_s[name] = time.monotonic()
                    try:
                        link.post(Inquire(plan_id))
                    except ConvoyError as error:
                        _log.debug("%s cannot be asked: %s", name, error.message)

            def found() -> dict[str, tuple[Reached, float]]:
                answers = self._reached.items()
                return {n: one for n, one in answers if n in asked_s and one[0].plan_id == plan_id}

            with self._answered:
                self._answered.wait_for(lambda: len(found()) == len(names), timeout_s)
                return {n: (one, (asked_s[n] + at_s) / 2) for n, (one, at_s) in found().items()}

    def close(self, reason: str) -> None:
        """Say goodbye on every link. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._unsubscribe()
        self.verifier.attestation.close()
        with self._changed:
            links = {*self.links.values(), *self._greeting}
        for link in links:
            link.close(reason)
        self.wake()

    # Dials' and receiver threads.

    def _greet(self, link: Link, mailbox: PlanMailbox) -> None:
        self.traffic.began(link)
        self.verifier.attestation.attach(link)
        with self._changed:
            self._greeting[link] = mailbox
        link.start(self._receive, self._ended, frames_from(Sender.PEER))
        link.send(self._hello)

    def _admit(self, link: Link, hello: Hello) -> None:
        said, hello = hello, self._counted(link.peer, hello)
        with self._changed:
            self._greeting.pop(link, None)
            self._said[link.peer] = said
            self.links[link.peer], self.hellos[link.peer] = link, hello
            self._num_lowered.pop(link.peer, None)
            self._backoffs.came(link.peer)
            self.slow.came(link.peer)
            self.idle.begin([link.peer])
            # The link may have ended before it was entered above.
            if link.is_over:
                self._forget(link)
        self.wake()

    def _counted(self, name: str, hello: Hello, *, head: bool = False) -> Hello:
        """Return a greeting with the memory that the policy lets count, and kernels that run the model."""
        if self._why_not_mlx and (kept := without_mlx(hello)) is not hello:
            hello, self.why_kernel = kept, f"{name} computes on cpu: {self._why_not_mlx}"
            _log.warning("%s", self.why_kernel)
        counted = self._options.member.policy.capped(name, hello.memory_bytes, head=head)
        if counted < hello.memory_bytes:
            text = "%s offers %.1f GB of memory, and the policy lets %.1f GB count"
            _log.warning(text, name, hello.memory_bytes / 1e9, counted / 1e9)
        return msgspec.structs.replace(hello, memory_bytes=counted)

    def handle_reached(self, link: Link, reached: Reached) -> None:
        """Note how far a peer is, for `positions`."""
        with self._answered:
            self._reached[link.peer] = reached, time.monotonic()
            self._answered.notify_all()

    def after_greeting(self, handle: Handler) -> Handler:
        """Return a handler that calls ``handle`` for connected peers alone.

        Before a peer is admitted, its frames belong to its greeting. After it was given up they are dropped.
        """

        def handle_connected(link: Link, received: Received) -> None:
            mailbox = self._greeting.get(link)
            if mailbox is not None:
                mailbox.deliver(link, received)
            elif self.links.get(link.peer) is link:
                handle(link, received)

        return handle_connected

    def _ended(self, link: Link, error: ConvoyError) -> None:
        self.traffic.ended(link, error)
        told = self.verifier.lost(link, error)
        with self._changed:
            self._ends[link.peer] = told or error
            mailbox = self._greeting.pop(link, None)
            was_here = self.links.get(link.peer) is link
            if was_here:
                self._forget(link)
        if mailbox is not None:
            mailbox.lost(link, told or error)
        elif was_here and told is not None:
            if not self._closed.is_set():
                self.on_gone(link.peer, told.message)
            self._lost(link, told)
        self.wake()
        self._seek_missing(self._me.roster)

    def _forget(self, link: Link) -> None:
        """Remove a link and count its bytes. The caller holds the lock."""
        del self.links[link.peer]
        self.hellos.pop(link.peer, None)
        self._said.pop(link.peer, None)
        self._gone_unix_s[link.peer] = time.time()
        self._past_bytes += link.sent_sealed_bytes + link.received_sealed_bytes
        self._num_changes += 1
        self._changed.notify_all()

    def _seek_missing(self, roster: Roster) -> None:
        if not self._seeking or self._closed.is_set():
            return
        with self._changed:
            here = {self._me.name, *self.links, *(link.peer for link in self._greeting)}
            missing = [m.name for m in roster.members if m.name not in here and m.name not in self._sought]
            self._sought.update(missing)
        for name in missing:
            try:
                threading.Thread(target=self._seek, args=(name,), name=f"seek {name}", daemon=True).start()
            # No thread can be started now. The next look tries again.
            except RuntimeError as error:
                _log.warning("%s cannot be dialled now: %s", name, error)
                with self._changed:
                    self._sought.discard(name)

    def _seek(self, name: str) -> None:
        """Dial a member until it is connected, or the roster no longer lists it, or the head closes."""
        (backoff, pause_s), joined = self._backoffs.begin(name), False
        try:
            self._closed.wait(pause_s)
            if name in self.verifier.excluded:
                self._closed.wait(_EXCLUDED_AGAIN_S)
            while not self._closed.is_set():
                if not (listed := [one for one in self._me.roster.members if one.name == name]):
                    return
                try:
                    self._fetch(listed[0])
                    joined = True
                    return
                except ConvoyError as error:
                    _log.debug("%s is not back: %s", name, error.message)
                except Exception:  # noqa: BLE001 - a machine short of threads may have some later
                    _log.warning("an unexpected error; %s is dialled again", name, exc_info=True)
                excluded = name in self.verifier.excluded
                self._closed.wait(_EXCLUDED_AGAIN_S if excluded else backoff.next_s())
        finally:
            with self._changed:
                self._sought.discard(name)
            if joined:
                # The member may have left again while it still counted as sought.
                self._seek_missing(self._me.roster)
                self._joined(name)

    def _fetch(self, member: Member) -> None:
        """Dial, greet and admit one. Raises `ConvoyError` if any of that fails."""
        link = self._network.dial(self._me, member, DIAL_S)
        mailbox = PlanMailbox(self._require_open)
        links = {member.name: link}
        try:
            self._greet(link, mailbox)
            hello = mailbox.gather([member.name], Hello, _GREET_S)[member.name]
            self.verifier.admit(links, self._require_open)
            if not links:
                raise LinkBroken(f"{member.name} is below the policy's minimum")
        except BaseException:
            with self._changed:
                self._greeting.pop(link, None)
            link.dismiss("the greeting failed")
            raise
        finally:
            mailbox.close()
        again = " again" if member.name in self._gone_unix_s else ""
        standby = ", as a standby" if hello.standby else ""
        self._admit(link, hello)
        # A warning, because a loss is one too.
        _log.warning("joined: %s is here%s%s", member.name, again, standby)

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise LinkBroken("the head is shutting down")
