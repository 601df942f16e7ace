"""What becomes of streams when a member is lost: every loss that we know, on a cluster that a caller brings.

bench/METHODOLOGY.md says what the figures mean and what they do not.
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
_PACE_S = 0.5  # a pause up to this is no consequence of a loss
_IDLE_S = 30.0
_BETWEEN_S = 60.0  # until tokens flow again, before the next blow


class Arena(Protocol):
    """A served cluster whose peers can be disturbed; ``peers`` are named in the order of their layers."""

    @property
    def peers(self) -> Sequence[str]: ...

    def ask(self, body: Mapping[str, Any]) -> Iterator[str]:
        """The pieces of a streamed completion. Raises ConvoyError where it ends in an error."""

    def status(self) -> Mapping[str, Any]:
        """What ``GET /status`` says."""

    def kill(self, name: str) -> None: ...

    def start(self, name: str) -> None:
        """Once more, after `kill`."""

    def stop(self, name: str) -> None:
        """SIGSTOP: it is there, and does nothing."""

    def resume(self, name: str) -> None: ...

    def cut(self, name: str) -> None:
        """Every link into it ends, and none comes about."""

    def mend(self, name: str) -> None: ...

    def slow(self, name: str) -> None:
        """It runs for a small share of the time, until `resume`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One way to lose members. ``blows`` are dealt one after the other, each once tokens flow after the last;
    ``after`` undoes them when the streams are over.
    """

    name: str
    blows: tuple[Callable[[Arena], None], ...]
    after: Callable[[Arena], None] | None = None
    num_members: int = 3
    forward: bool = False  # the last peer owns the output
    tight: bool = False  # no member less holds the model
    prefill: bool = False  # the loss comes while the prompts are read


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
    """A loss comes once every stream has ``before_tokens`` pieces, of ``max_tokens`` tokens in all."""

    max_tokens: int = 256
    before_tokens: int = 48
    prompt_tokens: int = 64
    long_prompt_tokens: int = 1024

    def bodies(self, model_name: str, vocab_size: int, *, long: bool) -> dict[str, dict[str, Any]]:
        """What is asked, by name: once greedy, once seeded."""
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
    """Tokens that no other number's prompt begins with; the same in every run."""
    return [
        (7 * position + 31 * number + position * position // 5) % vocab_size for position in range(num_tokens)
    ]


@dataclass(frozen=True, slots=True)
class RecoverRow:
    """What came of one loss. ``seconds_to_next_token``: the longer of both streams', and of two losses.

    ``seconds_to_pace``: from the last loss until no pause is much longer than those before it.
    ``identical``: both texts are those of the undisturbed run, and so is that of a request after the loss.
    """

    loss: str
    seconds_to_next_token: float | None
    seconds_to_pace: float
    identical: bool
    survived: bool
    members: int
    members_after: int
    usual_pause_s: float  # the longest between two tokens before the loss
    blocks_leaked: int
    error: str | None


Texts = Mapping[str, str]


def undisturbed(arena: Arena, bodies: Mapping[str, Mapping[str, Any]], deadline: Deadline) -> dict[str, str]:
    """The texts that every disturbed run is compared with. Raises ConvoyError if one does not end well."""
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
    """Two streams at once, the loss, and what becomes of them."""
    members = len(arena.status()["stages"])
    steps = arena.status()["steps"]
    watched = {name: Watched(functools.partial(arena.ask, body)) for name, body in bodies.items()}
    if loss.prefill:
        _wait_for_steps(arena, list(watched.values()), steps + _chunks_before(options), deadline)
    else:
        _wait_for_tokens(watched.values(), options.before_tokens, deadline)
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
    return max(_PACE_S, 3 * usual_s)


def _chunks_before(options: RecoverOptions) -> int:
    """Steps of a prefill after which it is lost: some, and not most."""
    return max(1, options.long_prompt_tokens // 256)


def _deal(arena: Arena, loss: Loss, watched: list[Watched], deadline: Deadline) -> list[float]:
    """When each blow was dealt."""
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
    """Until each has ``count`` pieces, or so many more than now; a stream that ended early is seen later."""
    for one in watched:
        wanted = count + (len(one.times_s) if beyond else 0)
        one.wait_for(wanted, min(_BETWEEN_S, deadline.left_s()))


def _wait_for_steps(arena: Arena, watched: Sequence[Watched], count: int, deadline: Deadline) -> None:
    """Until so many were made; an answer that is over already is seen later."""
    while arena.status()["steps"] < count and not any(one.is_over for one in watched):
        deadline.left_s()
        time.sleep(_POLL_S)  # steps are told by status alone, which has nothing to wait on


def _ask_again(arena: Arena, body: Mapping[str, Any], deadline: Deadline) -> str | None:
    """After all that: the cluster answers as before, also with a woken member about."""
    watched = Watched(functools.partial(arena.ask, body))
    return watched.text if watched.wait(deadline.left_s()) else None


def _leaked(arena: Arena) -> int:
    """Blocks that are not free though nothing runs."""
    end_s = time.monotonic() + _IDLE_S
    while True:
        status = arena.status()
        leaked: int = status["num_blocks"] - status["free_blocks"]
        if not leaked or time.monotonic() > end_s:
            return leaked
        time.sleep(_POLL_S)  # as above


def _longest_pause(times_s: Sequence[float]) -> float:
    return max((b - a for a, b in itertools.pairwise(times_s)), default=0.0)


def _slowest(dealt: Sequence[float], streams: Sequence[Sequence[float]]) -> float | None:
    """Of every blow and stream the longest way to the next token; None where one never came."""
    found = []
    for number, lost_s in enumerate(dealt):
        until_s = dealt[number + 1] if number + 1 < len(dealt) else float("inf")
        found += [seconds_to_next(times, lost_s, until_s) for times in streams]
    known = [seconds for seconds in found if seconds is not None]
    return round(max(known), 3) if known and len(known) == len(found) else None


def recover_ratios(rows: Sequence[RecoverRow]) -> dict[str, float]:
    """How many of the losses were survived with identical text, and the longest way to the next token."""
    good = [row for row in rows if row.survived and row.identical]
    seconds = [row.seconds_to_next_token for row in rows if row.seconds_to_next_token is not None]
    ratios = {"survived_and_identical": round(len(good) / len(rows), 3)}
    if seconds:
        ratios["slowest_seconds_to_next_token"] = max(seconds)
    return ratios
