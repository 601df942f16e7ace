"""What `convoy plan` predicts rates from: flags, this machine's own measurement, and what is assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.output import format_seconds
from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.plan.placement import Placement
    from convoy.plan.rates import Links, Rate, RatesReport, Speed

SpeedFlag = Annotated[
    list[str] | None,
    typer.Option(
        help="[NAME=]GB/S,GFLOP/S: what a member reads and multiplies, as `convoy doctor` shows there.  "
        "[default: measured here]"
    ),
]
RoundTripFlag = Annotated[
    list[str] | None,
    typer.Option(help="[NAME,NAME=]MS: a link there and back, as `convoy doctor` shows.  [default: assumed]"),
]
ContextFlag = Annotated[int, typer.Option(min=1, help="Tokens of a sequence, for the decode rates.")]
_HERE_S, _ELSEWHERE_S = 0.15e-3, 0.5e-3  # assumed: both ends on one machine; a wired network
_MOST = 1e9  # GB/s, GFLOP/s and milliseconds that make sense


def speeds_of(
    placement: Placement,
    flags: Sequence[str],
    here: str,
    *,
    all_here: bool,
    num_threads: int | None,
    device: str,
) -> dict[str, Speed]:
    """Of every member with a stage. Measures this machine if a flag leaves anybody out.

    ``here`` is the member of this machine; with ``all_here`` all are. Raises UsageError for flags that make
    no sense.
    """
    from convoy.plan.rates import Speed

    names = [stage.member for stage in placement.stages]
    told: dict[str, Speed] = {}
    for text in flags:
        whose, numbers = _split(text, "--speed", "[NAME=]GB/S,GFLOP/S", count=2)
        if whose and whose not in names:
            raise UsageError(f"--speed {text} is for {whose}, expected a member: {', '.join(names)}")
        speed = Speed(numbers[0] * 1e9, numbers[1] * 1e9)
        told |= {whose: speed} if whose else {name: speed for name in names if name not in told}
    lacking = [name for name in names if name not in told]
    if lacking:
        from convoy.model.speed import measure_speed

        own = here if here in names else placement.head
        speed = measure_speed(placement.kernels[own], num_threads, device)
        guessed = dataclasses.replace(speed, measured=False)
        told |= {name: speed if all_here or name == here else guessed for name in lacking}
    return told


def links_of(placement: Placement, flags: Sequence[str], *, all_here: bool) -> Links:
    """Round trips by pair; without a flag they are assumed. Raises UsageError."""
    from convoy.plan.rates import Links

    names = [stage.member for stage in placement.stages]
    pairs: dict[frozenset[str], float] = {}
    for text in flags:
        whose, numbers = _split(text, "--round-trip", "[NAME,NAME=]MS", count=1)
        ends = [name.strip() for name in whose.split(",")] if whose else names
        if not set(ends) <= set(names) or (whose and len(set(ends)) != 2):
            raise UsageError(f"--round-trip {text} names {whose}, expected two of {', '.join(names)}")
        asked = {frozenset((one, other)) for one in ends for other in ends if one != other}
        pairs |= {pair: numbers[0] / 1e3 for pair in asked if whose or pair not in pairs}
    return Links(_HERE_S if all_here else _ELSEWHERE_S, by_pair=pairs)


def _split(text: str, flag: str, form: str, *, count: int) -> tuple[str, list[float]]:
    whose, _, values = text.rpartition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 < number < _MOST for number in numbers):
        raise UsageError(f"{flag} is {text}, expected {form}")
    return whose.strip(), numbers


def print_rates(rates: RatesReport) -> None:
    """Three lines, and what they assume."""
    print(f"expected, of sequences of {rates.context} tokens:")
    rows = [
        ("decode, one sequence", rates.decode),
        (f"decode, {rates.decode_batch.batch} sequences", rates.decode_batch),
        ("prefill of one long prompt", rates.prefill),
    ]
    width = max(len(name) for name, _ in rows)
    for name, rate in rows:
        print(f"  {name.ljust(width)}  {_rate_text(rate)}")
    if rates.assumed:
        print(f"  assumed: {'; '.join(rates.assumed)}")


def _rate_text(rate: Rate) -> str:
    shown = f"{rate.tokens_per_s:,.0f}" if rate.tokens_per_s >= 100 else f"{rate.tokens_per_s:.1f}"
    return f"{shown} tokens/s, a step every {format_seconds(rate.step_s)}; limited by {rate.limit}"
