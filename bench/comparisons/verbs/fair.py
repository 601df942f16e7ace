"""``bench/compare.py fair``: measure the effect of a long prompt on streams that run during its prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb

if TYPE_CHECKING:
    from comparisons.fair import FairOptions, FairRow


@bench_verb(max_seconds=1800)
def fair(
    run: BenchRun,
    running: Annotated[int, typer.Option(min=1, max=64, help="Streams that decode meanwhile.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each stream's prompt.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 8192,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk, at most.")] = 256,
) -> None:
    """Measure pauses between two tokens during a long prefill. Compares them with a step that has both."""
    from comparisons.fair import FairOptions, fair_ratios

    options = FairOptions(running, context, prompt_tokens, chunk)
    run.check_context(max(prompt_tokens + 1, context + options.max_tokens))
    rows = [_fair(run, members, options) for members in (1, 2)]
    lines = {
        name: [(float(row.members), getattr(row, field)) for row in rows]
        for name, field in (("p50", "p50_ms"), ("p99", "p99_ms"), ("a mixed step", "mixed_step_ms"))
    }
    settings = {"running": running, "context": context, "prompt_tokens": prompt_tokens, "chunk": chunk}
    report = run.report("fair", settings, rows, fair_ratios(rows))
    run.show(report, ("members", "ms between two tokens"), lines)


def _fair(run: BenchRun, members: int, options: FairOptions) -> FairRow:
    from comparisons.fair import TimedExecutor, measure_fair
    from convoy.engine.engine import Engine, EngineOptions
    from convoy.model.checkpoints.source import ModelSource
    from convoy.model.text.tokens import Tokenizer

    limits = {
        "max_batch": options.num_running + 1,
        "prefill_chunk": options.chunk,
        "num_blocks": options.num_blocks,
    }
    source = ModelSource.resolve(run.named_model)
    with run.head(members, limits) as (head, asked):
        assert head.executor is not None
        assert head.active_plan is not None
        plan = head.active_plan.plan
        timed = TimedExecutor(head.executor)
        scheduled = asked.limits(
            source.spec,
            num_stages=len(plan.stages),
            num_blocks=head.active_plan.num_blocks,
            block_size=plan.block_size,
        )
        engine = Engine(timed, Tokenizer(source), scheduled, EngineOptions(head.active_plan.max_context))
        try:
            engine.start()
            return measure_fair(
                engine,
                timed,
                members,
                options,
                vocab_size=source.spec.vocab_size,
                deadline=run.clock.deadline,
                say=run.say,
            )
        finally:
            engine.close()
