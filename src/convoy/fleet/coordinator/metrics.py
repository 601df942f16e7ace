"""Count what a coordinator does, for Prometheus. Labels are few: known models and approved providers.

No label is an account, a key, or anything else that a client may make many of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convoy.cluster.metrics.families import Metric, build_info, counter, gauge, histogram
from convoy.engine.stats import Histogram, HistogramCounts
from convoy.fleet.capacity import ModelState
from convoy.fleet.coordinator.bounds import BilledOutcome
from convoy.fleet.outcomes import LabelSums, word_of
from convoy.fleet.timing import SEGMENTS, Timing

_SEGMENT_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)


class FleetCounts:
    """Count requests, tokens and failures. Lives on the event loop's thread."""

    def __init__(self) -> None:
        self._segments = {name: Histogram(_SEGMENT_S) for name in SEGMENTS}
        self._requests = LabelSums("model", "outcome")
        self._tokens = LabelSums("model", "kind")
        self._charged = LabelSums("model")
        self._answers = LabelSums("provider")
        self._failures = LabelSums("provider")
        self._unproved = LabelSums("provider")
        self._unbilled = LabelSums("provider", "kind")
        self._refused = 0
        # Tokens of answers so far, as providers report them. Those of answers that run count too.
        self.generated_tokens = 0
        self.retries = 0
        # Requests that came sealed.
        self.sealed = 0

    def request(self, model: str, outcome: str, timing: Timing, *, tries: int, is_sealed: bool) -> None:
        """Count a request that is over. Every segment is counted, with 0 where it did not apply."""
        self._requests.add(model, word_of(outcome))
        self.retries += max(0, tries - 1)
        self.sealed += is_sealed
        for name, seconds in timing.seconds().items():
            self._segments[name].observe(seconds)

    def outcomes(self) -> dict[str, int]:
        """Return how many requests are over, by how they ended."""
        return self._requests.totals("outcome")

    def generated(self, tokens: int) -> None:
        """Count tokens that a provider has sent."""
        self.generated_tokens += tokens

    def prompt_tokens(self) -> int:
        """Return the prompt tokens that were settled for."""
        return self._tokens.totals("kind").get("prompt", 0)

    def billed(
        self, model: str, provider: str, *, prompt_tokens: int, completion_tokens: int, cost_micro: int
    ) -> None:
        """Count the answer, the tokens and the cost of a request that was settled."""
        self._answers.add(provider)
        self._tokens.add(model, "prompt", amount=prompt_tokens)
        self._tokens.add(model, "completion", amount=completion_tokens)
        self._charged.add(model, amount=cost_micro)

    def claimed(self, provider: str, said: BilledOutcome, billed: BilledOutcome) -> None:
        """Count the tokens that a provider reported beyond the bounds, and that were therefore not billed."""
        for kind in ("prompt", "completion"):
            beyond = getattr(said, f"{kind}_tokens") - getattr(billed, f"{kind}_tokens")
            if beyond > 0:
                self._unbilled.add(provider, kind, amount=beyond)

    def unbilled(self, provider: str) -> int:
        """Return how many tokens a provider has reported beyond its bounds since this process started."""
        return sum(self._unbilled.get(provider, kind) for kind in ("prompt", "completion"))

    def answers(self, provider: str) -> int:
        """Return how many of its answers were settled since this process started."""
        return self._answers.get(provider)

    def failures(self, provider: str) -> int:
        """Return how many requests it has refused, failed or left since this process started."""
        return self._failures.get(provider)

    def failed_challenges(self, provider: str) -> int:
        """Return how many challenges it has not answered rightly since this process started."""
        return self._unproved.get(provider)

    def provider_failed(self, provider: str) -> None:
        """Count a provider that refused a request, failed it or fell silent."""
        self._failures.add(provider)

    def challenge_failed(self, provider: str) -> None:
        """Count a challenge that was not answered, or answered wrongly."""
        self._unproved.add(provider)

    def registration_refused(self) -> None:
        self._refused += 1

    def families(self) -> Iterator[Metric]:
        """Yield the metrics up to now."""
        yield self._requests.family("convoy_fleet_requests", "Requests that are over, and how.")
        segments: list[tuple[dict[str, str], HistogramCounts]] = [
            ({"segment": name}, one.snapshot()) for name, one in self._segments.items()
        ]
        yield histogram("convoy_fleet_segment_seconds", "Each part of a request's way.", segments)
        yield self._tokens.family("convoy_fleet_billed_tokens", "Tokens that were settled for.")
        yield self._charged.family("convoy_fleet_charged_micro", "Millionths of a unit that were charged.")
        yield self._answers.family("convoy_fleet_provider_answers", "Its answers that were settled.")
        yield self._failures.family("convoy_fleet_provider_failures", "Requests that it failed.")
        text = "Tokens that a provider reported beyond the bytes sent or seen, and that were not billed."
        yield self._unbilled.family("convoy_fleet_unbilled_tokens", text)
        yield self._unproved.family("convoy_fleet_challenges_failed", "Challenges not answered rightly.")
        text = "Registrations that were refused."
        yield counter("convoy_fleet_registrations_refused", text, [({}, self._refused)])


@dataclass(frozen=True, slots=True)
class ProviderState:
    """Hold the present state of one connected provider."""

    level: str
    draining: bool


def fleet_families(
    counts: FleetCounts,
    models: Iterable[ModelState],
    providers: Iterable[ProviderState],
    *,
    draining: bool,
) -> Iterator[Metric]:
    """Yield the metrics of a coordinator at this moment."""
    yield build_info("coordinator")
    yield gauge("convoy_draining", "1 once no more requests are taken.", [({}, int(draining))])
    listed = list(models)
    for name, text, attribute in (
        ("convoy_fleet_providers", "Connected providers of a model.", "providers"),
        ("convoy_fleet_free_slots", "Requests that they would take at once.", "free_slots"),
        ("convoy_fleet_requests_running", "Requests that are with a provider.", "running"),
        ("convoy_fleet_requests_waiting", "Requests that wait for one.", "waiting"),
    ):
        yield gauge(name, text, [({"model": one.name}, getattr(one, attribute)) for one in listed])
    by_level = Counter((one.level, str(one.draining).lower()) for one in providers)
    yield gauge(
        "convoy_fleet_providers_connected",
        "Connected providers, by what they proved and whether they take nothing new.",
        [({"level": level, "draining": draining}, n) for (level, draining), n in sorted(by_level.items())],
    )
    yield from counts.families()
