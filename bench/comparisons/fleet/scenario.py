"""Read the scenarios of `bench/compare.py providers`: numbers of providers, accounts and requests, and the
questions.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from convoy.errors import UsageError
from convoy.fleet.books.price import Price

_FILE = Path(__file__).with_name("scenarios.toml")
# 1 for a token read, 2 for a token generated.
PRICE = Price(prompt_micro=1_000_000, completion_micro=2_000_000)


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe one scenario.

    ``providers`` counts them by model. Prompts are padded with spaces to ``prompt_bytes``.
    """

    name: str
    providers: dict[str, int]
    users: int
    requests: int
    concurrency: int
    stream: bool
    max_tokens: int
    queue_capacity: int
    balance_micro: int
    prompt_bytes: int = 0

    @property
    def num_providers(self) -> int:
        return sum(self.providers.values())

    def asked(self, number: int) -> SimulatedRequest:
        """Return the request of this number, from 0. Accounts and models take turns."""
        models = list(self.providers)
        prompt = f"What is {number}+{number + 1}? Answer with just the number."
        body: dict[str, Any] = {
            "model": models[number % len(models)],
            "messages": [{"role": "user", "content": prompt.ljust(self.prompt_bytes)}],
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
        }
        return SimulatedRequest(number, account_name(number % self.users), body, str(2 * number + 1))

    def all_asked(self) -> list[SimulatedRequest]:
        """Return all requests in the order in which they begin."""
        return [self.asked(number) for number in range(self.requests)]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Hold one request. ``body`` has no stream fields; ``total`` is the correct sum."""

    number: int
    account: str
    body: dict[str, Any]
    total: str

    @property
    def model(self) -> str:
        return str(self.body["model"])


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scenario: list[Scenario]


def account_name(number: int) -> str:
    """Return the account of the user with this number, from 0."""
    return f"user-{number}"


def load_scenarios() -> dict[str, Scenario]:
    """Return all scenarios by name, in the file's order."""
    found = msgspec.convert(tomllib.loads(_FILE.read_text(encoding="utf-8")), _File)
    return {one.name: one for one in found.scenario}


def chosen_scenarios(text: str) -> list[Scenario]:
    """Return the scenarios named by ``text``: ``all``, or names between commas. Raises UsageError."""
    there = load_scenarios()
    if text == "all":
        return list(there.values())
    names = [name.strip() for name in text.split(",")]
    missing = [name for name in names if name not in there]
    if missing:
        raise UsageError(
            f"there is no scenario {missing[0]!r}", hint=f"use all, or one or more of: {', '.join(there)}"
        )
    return [there[name] for name in names]
