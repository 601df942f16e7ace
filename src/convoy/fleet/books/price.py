"""What a request costs, in millionths of a unit of account; whole numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.errors import ConfigError

MAX_MICRO = 1 << 53  # of anything: what a JSON number holds exactly
_MAX_PRICE = 10**15  # for a million tokens
_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million tokens each, in millionths of a unit."""

    prompt_micro: int = 0
    completion_micro: int = 0

    def check(self) -> None:
        """Raises `ConfigError` for prices below 0 or beyond all sense."""
        for name in ("prompt_micro", "completion_micro"):
            if not 0 <= getattr(self, name) <= _MAX_PRICE:
                raise ConfigError(f"a price has {name} {getattr(self, name)}, expected 0 to {_MAX_PRICE}")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Rounded up. Raises `ConfigError` for counts below 0, or a cost over MAX_MICRO."""
        if prompt_tokens < 0 or completion_tokens < 0:
            raise ConfigError(f"{prompt_tokens} and {completion_tokens} tokens cannot be charged")
        cost = -(-(prompt_tokens * self.prompt_micro + completion_tokens * self.completion_micro) // _MILLION)
        if cost > MAX_MICRO:
            raise ConfigError(f"a request would cost {cost}, and the limit is {MAX_MICRO}")
        return cost
