"""The flags for the rates of `convoy plan`, and the rates as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.show.output import format_seconds

if TYPE_CHECKING:
    from convoy.plan.rates.rates import Rate, RatesReport

SpeedFlag = Annotated[
    list[str] | None,
    typer.Option(
        help="[NAME=]GB/S,GFLOP/S: a member's speed to read and to multiply, or all numbers that `convoy "
        "doctor` shows there.  [default: measured here]"
    ),
]
RoundTripFlag = Annotated[
    list[str] | None,
    typer.Option(
        help="[NAME,NAME=]MS: the round trip of a link, as `convoy doctor` shows.  [default: assumed]"
    ),
]
ContextFlag = Annotated[int, typer.Option(min=1, help="Tokens of a sequence, for the decode rates.")]
ThreadsFlag = Annotated[
    int | None, typer.Option(min=1, help="CPU threads of each member on this machine, for the rates.")
]


def print_rates(rates: RatesReport) -> None:
    """Print three rates, and their assumptions."""
    print(f"expected, of sequences of {rates.context} tokens:")
    rows = [
        ("decode, one sequence", rates.decode),
        (f"decode, {rates.decode_batch.batch} sequences", rates.decode_batch),
        ("prefill of one prompt", rates.prefill),
    ]
    width = max(len(name) for name, _ in rows)
    for name, rate in rows:
        print(f"  {name.ljust(width)}  {_rate_text(rate)}")
    if rates.assumed:
        print(f"  assumed: {'; '.join(rates.assumed)}")


def _rate_text(rate: Rate) -> str:
    return f"{format_rate(rate)}, a step every {format_seconds(rate.step_s)}; limited by {rate.limit}"


def format_rate(rate: Rate) -> str:
    """Return the rate like ``12.3 tokens/s``."""
    shown = f"{rate.tokens_per_s:,.0f}" if rate.tokens_per_s >= 100 else f"{rate.tokens_per_s:.1f}"
    return f"{shown} tokens/s"
