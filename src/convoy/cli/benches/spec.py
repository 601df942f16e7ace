"""``convoy bench spec``: measure the gain of guessed tokens, over links with several delays."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb
from convoy.cli.local.pin import pinned
from convoy.cli.serve import start_cluster
from convoy.config.table import DEFAULT_SPECULATE
from convoy.errors import ConvoyError, UsageError
from convoy.sdk.local_cluster import Address, LocalCluster

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from convoy.bench.spec import Contender, SpecRow

_MAX_DELAY_MS = 1000.0


@bench_verb(model="demo", max_seconds=1800)
def spec(
    run: BenchRun,
    delays: Annotated[
        str, typer.Option(help="Milliseconds added to each hop, separated by commas.")
    ] = "0.2,2,20",
    speculate: Annotated[
        int, typer.Option(min=1, max=64, help="Tokens guessed at once, at most.")
    ] = DEFAULT_SPECULATE,
    members: Annotated[int, typer.Option(min=2, help="Members, each a process.")] = 2,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each text, at most.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often each text is generated.")] = 3,
) -> None:
    """Compare guessing with none, on several kinds of text.

    The kinds are repetitive text, text of a schema and others. The texts must be the same.
    """
    from convoy.bench.spec import Said, SpecOptions, measure_spec, spec_ratios

    options, said = SpecOptions(tokens, rounds), Said()
    rows: list[SpecRow] = []
    for delay_ms in _delays(delays):
        with ExitStack() as stack:
            contenders = [
                stack.enter_context(_contender(run, members, delay_ms, length)) for length in (0, speculate)
            ]
            run.say(f"{delay_ms:g} ms per hop")
            rows += measure_spec(contenders, options, said=said, deadline=run.clock.deadline)
    settings = {"members": members, "tokens": tokens, "rounds": rounds}
    run.show(run.report("spec", settings, rows, spec_ratios(rows)), ("ms per hop", "tokens/s"), _lines(rows))


@contextmanager
def _contender(run: BenchRun, members: int, delay_ms: float, length: int) -> Iterator[Contender]:
    """Yield a cluster with relays between its members that delay each hop."""
    from convoy.bench.hop.delay import DelayRelay
    from convoy.bench.spec import Contender

    with ExitStack() as stack:

        def publish(_name: str, address: Address) -> Address:
            relay = DelayRelay(address, delay_ms / 1000)
            stack.callback(relay.close)
            return relay.address

        options = replace(run.options(members, {"speculate": length}), publish=publish)
        local = stack.enter_context(LocalCluster(options))
        stack.enter_context(pinned(options.head_cores))
        local.start_peers(run.named_model)
        try:
            config = local.config(local.head)
            cluster = start_cluster(config, run.named_model, quiet=True, watch=local.check_alive)
            stack.callback(cluster.close)
            status = cluster.status()
            run.kernels.add(status.kernel)
            trips = [stage.round_trip_s for stage in status.stages if stage.round_trip_s is not None]
            round_trip_ms = round(1000 * max(trips), 2)
            yield Contender(cluster.engine, cluster.tokenizer, length, delay_ms, round_trip_ms)
        except ConvoyError as error:
            local.reraise(error)


def _lines(rows: Iterable[SpecRow]) -> dict[str, list[tuple[float, float]]]:
    from convoy.bench.spec import FORMED

    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.drawn == "greedy" or row.text == FORMED:
            name = f"{row.text}, {f'{row.speculate} guesses' if row.speculate else 'none'}"
            lines.setdefault(name, []).append((row.delay_ms, row.tokens_per_s))
    return lines


def _delays(text: str) -> list[float]:
    """Return the numbers of ``0.2,2,20`` in rising order. Raises UsageError."""
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < delay_ms <= _MAX_DELAY_MS for delay_ms in found):
        raise UsageError(
            f"--delays is {text!r}, expected milliseconds above 0, to {_MAX_DELAY_MS:g}, between commas"
        )
    return found
