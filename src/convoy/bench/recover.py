"""Measure how streams survive the loss of a member: every kind of loss, on a cluster that the caller brings.

bench/METHODOLOGY.md explains the figures and their limits.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from convoy.bench.report.clock import Deadline
from convoy.bench.watched import Watched, seconds_to_next, seconds_to_pace
from convoy.errors import ConvoyError, PeerError

_POLL_S = 0.01
# A pause up to this is no consequence of a loss.
_PACE_S = 0.5
_IDLE_S = 30.0
# The most time until tokens flow again, before the next blow.
_BETWEEN_S = 60.0


class Arena(Protocol):
    """Control a served cluster and disturb its peers; ``peers`` are named in the order of their layers."""

    @property
    def peers(self) -> Sequence[str]: ...

    def ask(self, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the pieces of a streamed completion. Raises ConvoyError if it ends in an error."""

    def status(self) -> Mapping[str, Any]:
        """Return the body of ``GET /status``."""

    def kill(self, name: str) -> None: ...

    def start(self, name: str) -> None:
        """Start the member again, after `kill`."""

    def stop(self, name: str) -> None:
        """Send SIGSTOP: the process stays and does nothing."""

    def resume(self, name: str) -> None: ...

    def cut(self, name: str) -> None:
        """End every link into the member, and let no new one come about."""

    def mend(self, name: str) -> None: ...

    def slow(self, name: str) -> None:
        """Let the member run for a small share of the time, until `resume`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Describe one way to lose members.

    ``blows`` are dealt one after the other, each once tokens flow after the last one. ``after`` undoes them
    when the streams are over.
    """

    name: str
    blows: tuple[Callable[[Arena], None], ...]
    after: Callable[[Arena], None] | None = None
    num_members: int = 3
    # The last peer owns the output.
    forward: bool = False
    # The model does not fit onto fewer members.
    tight: bool = False
    # The loss comes while the prompts are read.
    prefill: bool = False


def _restart(arena: Arena) -> None:
    arena.kill(arena.peers[0])
    arena.start(arena.peers[0])


LOSSES = (
    Loss("kill -9", (lambda arena: arena.kill(arena.peers[0]),)),
    Loss(
        "SIGSTOP",
        (lambda arena: arena.stop(arena.peers[0]),),
        lambda arena: arena.resume(arena.peers[0]),
    ),
    Loss("cut link", (lambda arena: arena.cut(arena.peers[0]),), lambda arena: arena.mend(arena.peers[0])),
    Loss(
        "slow member",
        (lambda arena: arena.slow(arena.peers[0]),),
        lambda arena: arena.resume(arena.peers[0]),
    ),
    Loss("restart and rejoin", (_restart,), num_members=2, tight=True),
    Loss(
        "two in a row",
        (lambda arena: arena.kill(arena.peers[0]), lambda arena: arena.kill(arena.peers[1])),
    ),
    Loss("during prefill", (lambda arena: arena.kill(arena.peers[0]),), prefill=True),
    Loss("owner of the output", (lambda arena: arena.kill(arena.peers[-1]),), forward=True),
)


@dataclass(frozen=True, slots=True)
class RecoverOptions:
    """Hold the options. A loss comes once every stream has ``before_tokens`` pieces of its ``max_tokens``."""

    max_tokens: int = 256
    before_tokens: int = 48
    prompt_tokens: int = 64
    long_prompt_tokens: int = 1024

    def bodies(self, model_name: str, vocab_size: int, *, long: bool) -> dict[str, dict[str, Any]]:
        """Return the request bodies by name: one greedy, one seeded."""
        count = self.long_prompt_tokens if long else self.prompt_tokens
        shared = {"model": model_name, "max_tokens": self.max_tokens, "ignore_eos": True, "stream": True}
        kinds: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0},
            "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 11},
        }
        return {
            name: {**shared, "prompt": prompt_of(count, vocab_size, number), **params}
            for number, (name, params) in enumerate(kinds.items())
        }


def prompt_of(num_tokens: int, vocab_size: int, number: int) -> list[int]:
    """Return tokens that no other number's prompt begins with. They are the same in every run."""
    return [
        (7 * position + 31 * number + position * position // 5) % vocab_size for position in range(num_tokens)
    ]


@dataclass(frozen=True, slots=True)
class RecoverRow:
    """Hold the outcome of one loss.

    ``seconds_to_next_token`` is the longest over both streams and all blows. ``seconds_to_pace`` counts from
    the last loss until no pause is much longer than those before it. ``identical`` means that both texts are
    those of the undisturbed run, and so is the text of a request after the loss.
    """

    loss: str
    seconds_to_next_token: float | None
    seconds_to_pace: float
    identical: bool
    survived: bool
    members: int
    members_after: int
    # The longest pause between two tokens before the loss.
    usual_pause_s: float
    blocks_leaked: int
    error: str | None


Texts = Mapping[str, str]


def undisturbed(arena: Arena, bodies: Mapping[str, Mapping[str, Any]], deadline: Deadline) -> dict[str, str]:
    """Return the texts to compare every disturbed run with. Raises ConvoyError if one does not complete."""
    texts = {}
    for name, body in bodies.items():
        watched = Watched(functools.partial(arena.ask, body))
        if not watched.wait(deadline.left_s()):
            raise PeerError(f"the undisturbed run did not end: {watched.error or 'no answer in time'}")
        texts[name] = watched.text
    return texts


def try_loss(
    arena: Arena,
    loss: Loss,
    bodies: Mapping[str, Mapping[str, Any]],
    expected: Texts,
    *,
    options: RecoverOptions,
    deadline: Deadline,
) -> RecoverRow:
    """Run two streams at once, cause the loss, and return the outcome."""
    members = len(arena.status()["stages"])
    steps = arena.status()["steps"]
    watched = {name: Watched(functools.partial(arena.ask, body)) for name, body in bodies.items()}
    if loss.prefill:
        _wait_for_steps(arena, list(watched.values()), steps + _chunks_before(options), deadline)
    else:
        _wait_for_tokens(watched.values(), options.before_tokens, deadline)
    # Take the usual pause before the blow, as the measure of a normal pause after it.
    usual_s = max((_longest_pause(one.times_s) for one in watched.values()), default=0.0)
    dealt = _deal(arena, loss, list(watched.values()), deadline)
    complete = [one.wait(deadline.left_s()) for one in watched.values()]
    survived = all(complete)
    if loss.after is not None:
        loss.after(arena)
    error = next((one.error for one in watched.values() if one.error is not None), None)
    again, leaked, members_after = None, 0, 0
    if survived:
        again = _ask_again(arena, bodies["greedy"], deadline)
        leaked, members_after = _leaked(arena), len(arena.status()["stages"])
    same = {name: one.text == expected[name] for name, one in watched.items()}
    return RecoverRow(
        loss.name,
        _slowest(dealt, [one.times_s for one in watched.values()]),
        round(max(seconds_to_pace(one.times_s, dealt[-1], _much(usual_s)) for one in watched.values()), 3),
        all(same.values()) and again == expected["greedy"],
        survived,
        members,
        members_after,
        round(usual_s, 4),
        leaked,
        error,
    )


def _much(usual_s: float) -> float:
    # A pause longer than three times the usual one is a consequence of the loss, even on a slow machine.
    return max(_PACE_S, 3 * usual_s)


def _chunks_before(options: RecoverOptions) -> int:
    """Return the steps of a prefill before its loss: some, but not most of them."""
    return max(1, options.long_prompt_tokens // 256)


def _deal(arena: Arena, loss: Loss, watched: list[Watched], deadline: Deadline) -> list[float]:
    """Apply each blow, and return the time of each."""
    dealt: list[float] = []
    for blow in loss.blows:
        if dealt:
            _wait_for_tokens(watched, 1, deadline, beyond=True)
        if all(one.wait(0.0) for one in watched):
            raise ConvoyError(
                f"the streams were over before the loss: {loss.name}", hint="ask for more with --tokens"
            )
        dealt.append(time.monotonic())
        blow(arena)
    return dealt


def _wait_for_tokens(
    watched: Sequence[Watched] | Any, count: int, deadline: Deadline, *, beyond: bool = False
) -> None:
    """Wait until each stream has ``count`` pieces; with ``beyond``, that many more than now.

    A stream that ended early is detected later.
    """
    for one in watched:
        wanted = count + (len(one.times_s) if beyond else 0)
        one.wait_for(wanted, min(_BETWEEN_S, deadline.left_s()))


def _wait_for_steps(arena: Arena, watched: Sequence[Watched], count: int, deadline: Deadline) -> None:
    """Wait until the cluster has made ``count`` steps. An answer that is already over is detected later."""
    while arena.status()["steps"] < count and not any(one.is_over for one in watched):
        deadline.left_s()
        # Only the status tells the number of steps, and it offers nothing to wait on.
        time.sleep(_POLL_S)


def _ask_again(arena: Arena, body: Mapping[str, Any], deadline: Deadline) -> str | None:
    """Ask once more: the cluster must answer as before, also with a resumed member present."""
    watched = Watched(functools.partial(arena.ask, body))
    return watched.text if watched.wait(deadline.left_s()) else None


def _leaked(arena: Arena) -> int:
    """Return the blocks that are not free although nothing runs."""
    end_s = time.monotonic() + _IDLE_S
    while True:
        status = arena.status()
        leaked: int = status["num_blocks"] - status["free_blocks"]
        if not leaked or time.monotonic() > end_s:
            return leaked
        # Only the status tells the number of free blocks, and it offers nothing to wait on.
        time.sleep(_POLL_S)


def _longest_pause(times_s: Sequence[float]) -> float:
    return max((b - a for a, b in itertools.pairwise(times_s)), default=0.0)


def _slowest(dealt: Sequence[float], streams: Sequence[Sequence[float]]) -> float | None:
    """Return the longest time from a blow to a stream's next token, or None if one never came."""
    found = []
    for number, lost_s in enumerate(dealt):
        until_s = dealt[number + 1] if number + 1 < len(dealt) else float("inf")
        found += [seconds_to_next(times, lost_s, until_s) for times in streams]
    known = [seconds for seconds in found if seconds is not None]
    return round(max(known), 3) if known and len(known) == len(found) else None


def recover_ratios(rows: Sequence[RecoverRow]) -> dict[str, float]:
    """Return the share of losses survived with identical text, and the longest time to the next token."""
    good = [row for row in rows if row.survived and row.identical]
    seconds = [row.seconds_to_next_token for row in rows if row.seconds_to_next_token is not None]
    ratios = {"survived_and_identical": round(len(good) / len(rows), 3)}
    if seconds:
        ratios["slowest_seconds_to_next_token"] = max(seconds)
    return ratios
