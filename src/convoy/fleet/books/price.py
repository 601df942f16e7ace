"""Compute the cost of a request in millionths of a unit of account, in whole numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.errors import ConfigError

# The limit of any amount: a JSON number holds it exactly.
MAX_MICRO = 1 << 53
# The limit of the price of a million tokens.
_MAX_PRICE = 10**15
_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Hold the prices of a million tokens, in millionths of a unit."""

    prompt_micro: int = 0
    completion_micro: int = 0

    def check(self) -> None:
        """Check that the prices are within 0 and ``_MAX_PRICE``. Raises `ConfigError`."""
        for name in ("prompt_micro", "completion_micro"):
            if not 0 <= getattr(self, name) <= _MAX_PRICE:
                raise ConfigError(f"a price has {name} {getattr(self, name)}, expected 0 to {_MAX_PRICE}")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return the cost, rounded up. Raises `ConfigError` for counts below 0, or a cost over MAX_MICRO."""
        if prompt_tokens < 0 or completion_tokens < 0:
            raise ConfigError(f"{prompt_tokens} and {completion_tokens} tokens cannot be charged")
        cost = -(-(prompt_tokens * self.prompt_micro + completion_tokens * self.completion_micro) // _MILLION)
        if cost > MAX_MICRO:
            raise ConfigError(f"a request would cost {cost}, and the limit is {MAX_MICRO}")
        return cost
