"""``convoy bench recover``: lose members of real processes, and watch the streams."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb
from convoy.cli.local.served_cluster import ServedCluster, ServedOptions, memory_for
from convoy.cli.show.exit_codes import EXIT_FAILURE
from convoy.errors import ConvoyError, UsageError
from convoy.sdk.local_cluster import LocalOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from convoy.bench.recover import Loss, RecoverOptions, RecoverRow

# Small, so that a loss hits a prompt in the middle of its prefill.
_PREFILL_CHUNK = 32


@bench_verb(model="demo", max_seconds=1800)
def recover(
    run: BenchRun,
    losses: Annotated[
        str, typer.Option(help="Names of losses, as in the rows, separated by commas; or all.")
    ] = "all",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each of the two streams.")] = 256,
    before: Annotated[int, typer.Option(min=1, help="Tokens of each stream before the loss.")] = 48,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    long_prompt_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of each prompt for a loss during prefill.")
    ] = 1024,
) -> None:
    """Lose members in every way while clients stream. Reports the time to the next token, and if the text is
    the same.

    Exits with 1 unless every loss was survived with identical text.
    """
    from convoy.bench.recover import RecoverOptions, recover_ratios

    chosen = _chosen(losses)
    options = RecoverOptions(tokens, before, prompt_tokens, long_prompt_tokens)
    run.check_context(max(prompt_tokens, long_prompt_tokens) + tokens)
    rows = _rows(run, chosen, options)
    settings = {
        "tokens": tokens,
        "before": before,
        "prompt_tokens": prompt_tokens,
        "long_prompt_tokens": long_prompt_tokens,
    }
    lines = {"next token": [(n + 1.0, row.seconds_to_next_token or 0.0) for n, row in enumerate(rows)]}
    report = run.report("recover", settings, rows, recover_ratios(rows))
    run.show(report, ("number of the row", "s to the next token"), lines)
    if not all(row.survived and row.identical for row in rows):
        raise typer.Exit(EXIT_FAILURE)


def _chosen(losses: str) -> list[Loss]:
    from convoy.bench.recover import LOSSES

    if losses == "all":
        return list(LOSSES)
    by_name = {loss.name: loss for loss in LOSSES}
    names = [name.strip() for name in losses.split(",")]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(f"--losses has {unknown[0]!r}, expected some of: {', '.join(by_name)}")
    return [by_name[name] for name in names]


def _rows(run: BenchRun, losses: list[Loss], options: RecoverOptions) -> list[RecoverRow]:
    from convoy.bench.recover import LOSSES, try_loss, undisturbed
    from convoy.model.checkpoints.source import ModelSource

    source = ModelSource.resolve(run.named_model)
    deadline = run.clock.deadline
    bodies = {
        long: options.bodies(source.name, source.spec.vocab_size, long=long)
        for long in {loss.prefill for loss in losses}
    }
    # A cluster of one member cannot lose one. Its text is that of the whole model.
    with _served(run, replace(LOSSES[0], num_members=1)) as arena:
        expected = {long: undisturbed(arena, asked, deadline) for long, asked in bodies.items()}
    rows = []
    for loss in losses:
        deadline.left_s()
        with _served(run, loss) as arena:
            row = try_loss(
                arena, loss, bodies[loss.prefill], expected[loss.prefill], options=options, deadline=deadline
            )
        seconds = row.seconds_to_next_token
        said = "no token came" if seconds is None else f"the next token came after {seconds:.2f} s"
        run.say(f"{loss.name}: {said}, {'identical' if row.identical else 'not identical'}")
        rows.append(row)
    return rows


@contextmanager
def _served(run: BenchRun, loss: Loss) -> Iterator[ServedCluster]:
    from convoy.model.checkpoints.source import ModelSource

    layers = _forward(ModelSource.resolve(run.named_model).spec.num_layers) if loss.forward else None
    local = LocalOptions(
        loss.num_members,
        layers,
        run.kernel,
        run.threads or 1,
        engine={"prefill_chunk": _PREFILL_CHUNK},
        memory_gb=memory_for(run.named_model, loss.num_members) if loss.tight else None,
        sharing={"parallel": "pipeline"},
    )
    with ServedCluster(ServedOptions(run.named_model, local)) as arena:
        run.kernels.add(str(arena.status()["kernel"]))
        try:
            yield arena
        except ConvoyError as error:
            raise ConvoyError(f"{loss.name}: {error.message}", hint=error.hint) from error


def _forward(num_layers: int) -> list[str]:
    """Return spans of three members. The last member owns the output."""
    third = max(1, num_layers // 3)
    return [f"0:{third - 1}", f"{third}:{2 * third - 1}", f"{2 * third}:output"]
