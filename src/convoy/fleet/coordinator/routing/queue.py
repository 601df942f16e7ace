"""Queue requests that wait for a provider of one model: bounded, fair between accounts, each with a deadline.

Accounts take turns, and the one with the fewest tokens in flight goes first. Within an account the oldest
request goes first.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from convoy.fleet.coordinator.routing.route_request import RouteRequest, Trusted
from convoy.trust.evidence.level import Level

Demands = tuple[Level, Trusted | None, frozenset[str]]

# Kinds of requests of an account that are tried at each of its turns.
_MAX_TRIED = 64


class FairQueue:
    """Hold requests by account. Not thread-safe; its owner has the lock."""

    def __init__(self, max_waiting: int, max_per_account: int) -> None:
        self.max_waiting = max_waiting
        self.max_per_account = max_per_account
        self._asks: dict[int, RouteRequest] = {}
        # Accounts are in the order of their turns.
        self._accounts: OrderedDict[str, OrderedDict[int, RouteRequest]] = OrderedDict()
        self._deadlines: list[tuple[float, int]] = []
        # Worst-case tokens of the running requests, by account.
        self._under_way: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._asks)

    def waiting(self, account: str) -> int:
        """Return how many requests of the account wait here."""
        return len(self._accounts.get(account, ()))

    def is_full(self, account: str) -> bool:
        """Return whether one more request of the account would be too many."""
        return len(self._asks) >= self.max_waiting or self.waiting(account) >= self.max_per_account

    def ahead_of(self, account: str) -> int:
        """Return how many requests would have their turn before one more of this account's."""
        own = self.waiting(account)
        others = (len(asks) for name, asks in self._accounts.items() if name != account)
        return own + sum(min(count, own + 1) for count in others)

    def add(self, ask: RouteRequest, *, first: bool = False) -> None:
        """Append a request.

        ``first`` puts it before the others of its account: it had a turn, and a provider failed it.
        """
        asks = self._accounts.setdefault(ask.account, OrderedDict())
        self._asks[ask.number] = asks[ask.number] = ask
        if first:
            asks.move_to_end(ask.number, last=False)
        heapq.heappush(self._deadlines, (ask.deadline_s, ask.number))

    def remove(self, number: int) -> RouteRequest | None:
        """Take a request out, whatever its turn, and return it, or None if it is not here."""
        ask = self._asks.pop(number, None)
        if ask is None:
            return None
        asks = self._accounts[ask.account]
        del asks[number]
        if not asks:
            del self._accounts[ask.account]
        return ask

    def expired(self, now_s: float) -> list[RouteRequest]:
        """Take out the requests past their deadline, and return them."""
        over = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            # Requests that left the queue earlier stay in the heap, and are skipped here.
            _, number = heapq.heappop(self._deadlines)
            if (ask := self.remove(number)) is not None:
                over.append(ask)
        return over

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline, or None."""
        while self._deadlines and self._deadlines[0][1] not in self._asks:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take(self, place: Callable[[RouteRequest], bool]) -> RouteRequest | None:
        """Take out and return the next request that ``place`` accepts. Its account then goes last.

        If ``place`` finds no provider for a request, it would find none for another one with the same demands
        and a prompt that is no shorter. Such requests are skipped.
        """
        # The shortest prompt that was not placed, by demands.
        not_placed: dict[Demands, int] = {}
        for account in self._turns():
            num_tried = 0
            # A demand that keeps an account's oldest request
            # waiting, such as a level, need not keep its others.
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
        """Count a request as running; accounts with fewer tokens in flight come before its account."""
        self._under_way[ask.account] = (
            self._under_way.get(ask.account, 0) + ask.prompt_tokens + ask.max_tokens
        )

    def ended(self, ask: RouteRequest) -> None:
        """Count a request as no longer running."""
        left = self._under_way.get(ask.account, 0) - ask.prompt_tokens - ask.max_tokens
        if left > 0:
            self._under_way[ask.account] = left
        else:
            self._under_way.pop(ask.account, None)

    def _turns(self) -> Iterator[str]:
        # The sort is stable: among equal accounts, the one that has waited longest for a turn goes first.
        return iter(sorted(self._accounts, key=lambda account: self._under_way.get(account, 0)))
