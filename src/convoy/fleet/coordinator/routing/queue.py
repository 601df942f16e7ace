"""Requests that wait for a provider of one model: bounded, fair between accounts, each with a deadline.

Accounts take turns, whoever has the fewest tokens under way first; within an account the oldest goes first.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from convoy.fleet.coordinator.routing.ask import RouteRequest, Trusted
from convoy.trust.evidence.level import Level

Demands = tuple[Level, Trusted | None, frozenset[str]]

_MAX_TRIED = 64  # kinds of an account's requests, at each of its turns


class FairQueue:
    """Holds asks by account. Not thread-safe; whoever owns it has the lock."""

    def __init__(self, max_waiting: int, max_per_account: int) -> None:
        self.max_waiting = max_waiting
        self.max_per_account = max_per_account
        self._asks: dict[int, RouteRequest] = {}
        self._accounts: OrderedDict[str, OrderedDict[int, RouteRequest]] = (
            OrderedDict()
        )  # in the order of their turns
        self._deadlines: list[tuple[float, int]] = []
        self._under_way: dict[str, int] = {}  # worst-case tokens of what runs, by account

    def __len__(self) -> int:
        return len(self._asks)

    def waiting(self, account: str) -> int:
        """How many of an account's wait here."""
        return len(self._accounts.get(account, ()))

    def is_full(self, account: str) -> bool:
        """Whether one more of this account's would be too many."""
        return len(self._asks) >= self.max_waiting or self.waiting(account) >= self.max_per_account

    def ahead_of(self, account: str) -> int:
        """How many would have their turn before one more of this account's, as accounts take turns."""
        own = self.waiting(account)
        others = (len(asks) for name, asks in self._accounts.items() if name != account)
        return own + sum(min(count, own + 1) for count in others)

    def add(self, ask: RouteRequest, *, first: bool = False) -> None:
        """``first``: before the others of its account, because it had a turn already and was failed."""
        asks = self._accounts.setdefault(ask.account, OrderedDict())
        self._asks[ask.number] = asks[ask.number] = ask
        if first:
            asks.move_to_end(ask.number, last=False)
        heapq.heappush(self._deadlines, (ask.deadline_s, ask.number))

    def remove(self, number: int) -> RouteRequest | None:
        """Take one out, whatever its turn; None if it is not here."""
        ask = self._asks.pop(number, None)
        if ask is None:
            return None
        asks = self._accounts[ask.account]
        del asks[number]
        if not asks:
            del self._accounts[ask.account]
        return ask

    def expired(self, now_s: float) -> list[RouteRequest]:
        """Take out those whose deadline is over."""
        over = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heapq.heappop(self._deadlines)
            if (ask := self.remove(number)) is not None:
                over.append(ask)
        return over

    def next_deadline_s(self) -> float | None:
        """Of whoever's is the first."""
        while self._deadlines and self._deadlines[0][1] not in self._asks:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take(self, place: Callable[[RouteRequest], bool]) -> RouteRequest | None:
        """The next whose turn it is and for whom ``place`` finds one; its account's next turn is the last.

        Where ``place`` finds none for a request, it would find none for another of the same demands whose
        prompt is no shorter: that is not asked.
        """
        not_placed: dict[Demands, int] = {}  # and the shortest prompt that was not
        for account in self._turns():
            num_tried = 0
            # what keeps an account's oldest waiting, such as a level, need not keep its others
            for number, ask in self._accounts[account].items():
                demands = ask.level, ask.trusted, ask.excluded
                if num_tried >= _MAX_TRIED or ask.prompt_tokens >= not_placed.get(demands, math.inf):
                    continue
                if place(ask):
                    self._take_turn(number)
                    return ask
                num_tried += 1
                not_placed[demands] = ask.prompt_tokens
        return None

    def _take_turn(self, number: int) -> None:
        ask = self.remove(number)
        if ask is not None and ask.account in self._accounts:
            self._accounts.move_to_end(ask.account)

    def started(self, ask: RouteRequest) -> None:
        """It runs; its account's other requests come after those of accounts with less under way."""
        self._under_way[ask.account] = (
            self._under_way.get(ask.account, 0) + ask.prompt_tokens + ask.max_tokens
        )

    def ended(self, ask: RouteRequest) -> None:
        """It does not run any more."""
        left = self._under_way.get(ask.account, 0) - ask.prompt_tokens - ask.max_tokens
        if left > 0:
            self._under_way[ask.account] = left
        else:
            self._under_way.pop(ask.account, None)

    def _turns(self) -> Iterator[str]:
        # sorted is stable: among equals, whoever's last turn is the longest ago
        return iter(sorted(self._accounts, key=lambda account: self._under_way.get(account, 0)))
