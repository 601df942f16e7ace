"""Describe a provider's capacity as it reports it, and the room of a model at all of its providers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from convoy.errors import ProviderError

MAX_SLOTS = 4096
# The limits of a rate, in tokens a second.
MIN_RATE, MAX_RATE = 1e-3, 1e9
MAX_COUNT = 1 << 40
MAX_TEMPLATE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Capacity:
    """Hold a provider's capacity for one model. The provider measures the rates, in tokens a second.

    ``decode_rate`` is that of a lone stream, ``batch_rate`` that of ``slots`` streams together.
    ``template_tokens`` are the tokens that the model's chat template adds to a prompt.
    """

    slots: int
    decode_rate: float
    batch_rate: float
    prefill_rate: float
    max_context: int
    template_tokens: int = 0

    def check(self) -> None:
        """Check that the figures are possible. Raises `ProviderError`."""
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ProviderError(f"a provider offers {self.slots} slots, expected 1 to {MAX_SLOTS}")
        for name in ("decode_rate", "batch_rate", "prefill_rate"):
            rate = getattr(self, name)
            if not MIN_RATE <= rate <= MAX_RATE:
                raise ProviderError(
                    f"a provider offers a {name} of {rate}, expected {MIN_RATE:g} to {MAX_RATE:g}"
                )
        if not 1 <= self.max_context <= MAX_COUNT:
            raise ProviderError(
                f"a provider offers a context of {self.max_context} tokens, expected 1 or more"
            )

        if not 0 <= self.template_tokens <= MAX_TEMPLATE_TOKENS:
            raise ProviderError(
                f"a provider offers a template of {self.template_tokens} tokens, expected 0 to "
                f"{MAX_TEMPLATE_TOKENS}"
            )

    def token_s(self, running: int) -> float:
        """Return the seconds that a token takes in each of ``running`` streams.

        The time grows linearly from a lone stream to all slots.
        """
        alone = 1 / self.decode_rate
        full = max(alone, self.slots / self.batch_rate)
        return alone + (full - alone) * (max(1, running) - 1) / max(1, self.slots - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """Hold a heartbeat's account of one model."""

    free_slots: int
    # The tokens of prompts that wait or run there.
    queued_tokens: int
    free_memory_bytes: int
    # Tokens a second that each stream got lately, as measured there; 0 if none ran.
    decode_rate: float
    # Streams at once, in the mean.
    streams: float = 1.0

    def check(self) -> None:
        """Check that the counts are possible. Raises `ProviderError`."""
        for name in ("free_slots", "queued_tokens", "free_memory_bytes"):
            count = getattr(self, name)
            if not 0 <= count <= MAX_COUNT:
                raise ProviderError(f"a provider says {name} {count}, expected 0 to {MAX_COUNT}")
        if not (math.isfinite(self.decode_rate) and 0 <= self.decode_rate <= MAX_RATE):
            raise ProviderError(f"a provider says decode_rate {self.decode_rate}, expected 0 or more")
        if not 0 <= self.streams <= MAX_SLOTS:
            raise ProviderError(f"a provider says {self.streams} streams, expected 0 to {MAX_SLOTS}")


@dataclass(frozen=True, slots=True)
class Places:
    """Hold a provider's room for one model.

    Others than this coordinator take ``taken_elsewhere`` of its ``slots``. ``tokens_per_s`` is the rate of a
    request alone: offered, and corrected by the answers seen here. A provider ``on_trial`` has failed. It
    gets nothing for a while, and then one request at a time until one ends well.
    """

    slots: int
    taken_elsewhere: int
    tokens_per_s: float
    max_context: int
    on_trial: bool


@dataclass(frozen=True, slots=True)
class ModelState:
    """Hold the present state of one model over all its connected providers."""

    name: str
    providers: int = 0
    # Providers by the level that they proved.
    levels: dict[str, int] = field(default_factory=dict)
    # The longest context of a provider.
    max_context: int = 0
    free_slots: int = 0
    running: int = 0
    waiting: int = 0
