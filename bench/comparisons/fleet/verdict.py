"""Judge a scenario's answers: where the time went, and the conditions that must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from comparisons.fleet.load import LoadResult
from comparisons.fleet.scenario import PRICE, Scenario
from convoy.bench.report.percentile import percentile
from convoy.fleet.books.ledger import Ledger
from convoy.fleet.timing import SEGMENTS

# The most milliseconds, mean and p95, that the coordinator itself may take: the thresholds of the lineage.
THRESHOLDS_MS = {
    "parse": (1.0, 5.0),
    "reserve": (50.0, 200.0),
    "encrypt": (5.0, 50.0),
    "dispatch": (5.0, 50.0),
}
# A request is routed at once or waits in the queue. Every other segment takes time for every request.
_EITHER = ("route", "queue_wait")


@dataclass(frozen=True, slots=True)
class Books:
    """Hold the totals of the coordinator's ledger after the load."""

    # Settled requests, by account.
    charged: Mapping[str, int]
    cost_micro: Mapping[str, int]
    balance_micro: Mapping[str, int]
    # Accounts with a balance that is not the sum of their entries.
    torn: Sequence[str] = field(default=())


def books_of(ledger: Ledger) -> Books:
    """Return the ledger's present totals."""
    charged: Counter[str] = Counter()
    cost: Counter[str] = Counter()
    for row in ledger.usage():
        charged[row.account] += row.requests
        cost[row.account] += row.cost_micro
    return Books(charged, cost, ledger.balances(), ledger.check())


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """Hold the times of one segment over the requests in which it took any time, by nearest rank."""

    scenario: str
    segment: str
    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Hold one condition: the value found, and its upper bound or its exact required value."""

    scenario: str
    check: str
    held: bool
    found: float
    limit: float


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Count requests that were not served, by the status and error that they got instead."""

    scenario: str
    status: int
    error: str
    count: int


@dataclass(frozen=True, slots=True)
class ScenarioRow:
    """Summarise one scenario.

    ``right`` counts answers equal to the model's own. ``sums_right`` counts correct sums, which a small model
    may miss.
    """

    scenario: str
    providers: int
    users: int
    requests: int
    concurrency: int
    served: int
    right: int
    sums_right: int
    queued: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    held: bool


def segment_rows(scenario: str, answers: Sequence[LoadResult]) -> list[SegmentRow]:
    """Return a row for each segment that any served request spent time in."""
    rows = []
    for segment in SEGMENTS:
        taken = [ms for answer in answers if answer.is_served and (ms := _ms(answer, segment)) > 0]
        if taken:
            mean = sum(taken) / len(taken)
            ranks = (percentile(taken, 50), percentile(taken, 95), max(taken))
            rows.append(SegmentRow(scenario, segment, len(taken), *(round(x, 3) for x in (mean, *ranks))))
    return rows


def failure_rows(scenario: str, answers: Sequence[LoadResult]) -> list[FailureRow]:
    """Return a row for each way in which requests failed; no rows if all were served."""
    ways = Counter((one.status, one.error or "it ended early") for one in answers if not one.is_served)
    return [FailureRow(scenario, *way, count) for way, count in sorted(ways.items())]


def check_rows(
    scenario: Scenario, answers: Sequence[LoadResult], own: Mapping[int, str], books: Books
) -> list[CheckRow]:
    """Return all conditions with their values. ``own`` holds the model's own answers, by request."""
    rows = [*_answers(scenario, answers, own), *_segments(scenario.name, answers)]
    return [*rows, *_ledger(scenario, answers, books)]


def scenario_row(
    scenario: Scenario,
    answers: Sequence[LoadResult],
    own: Mapping[int, str],
    seconds: float,
    checks: Sequence[CheckRow],
) -> ScenarioRow:
    """Return the scenario's summary."""
    served = [answer for answer in answers if answer.is_served]
    return ScenarioRow(
        scenario=scenario.name,
        providers=scenario.num_providers,
        users=scenario.users,
        requests=scenario.requests,
        concurrency=scenario.concurrency,
        served=len(served),
        right=sum(_is_right(answer, own) for answer in served),
        sums_right=sum(answer.text.strip() == answer.asked.total for answer in served),
        queued=sum(_ms(answer, "queue_wait") > 0 for answer in served),
        seconds=round(seconds, 2),
        requests_per_s=round(len(served) / seconds, 2),
        tokens_per_s=round(sum(answer.completion_tokens for answer in served) / seconds, 1),
        held=all(check.held for check in checks),
    )


def _ms(answer: LoadResult, segment: str) -> float:
    # The client's own time, to the last byte.
    if segment == "total_e2e":
        return 1000 * answer.total_s
    return answer.timing_us.get(f"{segment}_us", 0) / 1000


def _is_right(answer: LoadResult, own: Mapping[int, str]) -> bool:
    return answer.text == own.get(answer.asked.number)


def _answers(scenario: Scenario, answers: Sequence[LoadResult], own: Mapping[int, str]) -> list[CheckRow]:
    served = [answer for answer in answers if answer.is_served]
    names = Counter((answer.provider, answer.response_id) for answer in served)
    # An answer given twice shows as a repeated response id, or as a second finish reason in one stream.
    twice = sum(count - 1 for count in names.values()) + sum(answer.ends > 1 for answer in answers)
    return [
        _exactly(scenario.name, "requests served", len(served), scenario.requests),
        _exactly(scenario.name, "answers right", sum(_is_right(a, own) for a in answers), scenario.requests),
        _exactly(scenario.name, "answers given twice", twice, 0),
    ]


def _segments(scenario: str, answers: Sequence[LoadResult]) -> list[CheckRow]:
    served = [answer for answer in answers if answer.is_served]
    rows = []
    for segment in SEGMENTS:
        present = sum(f"{segment}_us" in answer.timing_us for answer in served)
        rows.append(_exactly(scenario, f"{segment}: present", present, len(answers)))
    always = [segment for segment in SEGMENTS if segment not in _EITHER]
    for segment in always:
        taken = sum(_ms(answer, segment) > 0 for answer in served)
        rows.append(_exactly(scenario, f"{segment}: above 0", taken, len(answers)))
    placed = sum(any(_ms(answer, segment) > 0 for segment in _EITHER) for answer in served)
    rows.append(_exactly(scenario, "route or queue_wait: above 0", placed, len(answers)))
    for segment, (most_mean, most_p95) in THRESHOLDS_MS.items():
        taken_ms = [_ms(answer, segment) for answer in served]
        if taken_ms:
            rows.append(_at_most(scenario, f"{segment}: mean ms", sum(taken_ms) / len(taken_ms), most_mean))
            rows.append(_at_most(scenario, f"{segment}: p95 ms", percentile(taken_ms, 95), most_p95))
    return rows


def _ledger(scenario: Scenario, answers: Sequence[LoadResult], books: Books) -> list[CheckRow]:
    charged: Counter[str] = Counter()
    cost: Counter[str] = Counter()
    for answer in answers:
        if answer.is_served:
            charged[answer.asked.account] += 1
            cost[answer.asked.account] += PRICE.cost(answer.prompt_tokens, answer.completion_tokens)
    accounts = {answer.asked.account for answer in answers}
    left = {name: scenario.balance_micro - cost[name] for name in accounts}
    wrong = {
        "accounts charged once for each request": [n for n in accounts if books.charged.get(n) != charged[n]],
        "accounts charged what was used": [n for n in accounts if books.cost_micro.get(n) != cost[n]],
        "balances that add up": [n for n in accounts if books.balance_micro.get(n) != left[n]],
        "balances that are the sum of their entries": books.torn,
    }
    return [
        _exactly(scenario.name, check, len(accounts) - len(names), len(accounts))
        for check, names in wrong.items()
    ]


def _exactly(scenario: str, check: str, found: float, wanted: float) -> CheckRow:
    return CheckRow(scenario, check, found == wanted, found, wanted)


def _at_most(scenario: str, check: str, found: float, most: float) -> CheckRow:
    return CheckRow(scenario, check, found <= most, round(found, 3), most)
