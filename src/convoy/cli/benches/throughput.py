"""``convoy bench solo``, ``loop``, ``batch`` and ``prefill``: the speed of one and two members here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.run import BenchRun, bench_verb, counts
from convoy.cli.local.pin import pinned

if TYPE_CHECKING:
    from convoy.bench.bare import BareDecode, Steps, Window
    from convoy.bench.report.report import DecodeRow, PrefillRow, StepRow
    from convoy.bench.throughput import DecodeOptions
    from convoy.wire.messages.control import StageAssignment

_MAX_CONCURRENT = 64
_MAX_CHUNK = 1 << 16

ConcurrentFlag = Annotated[str, typer.Option(help="Counts of requests that decode at once.")]
ContextFlag = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
WindowsFlag = Annotated[int, typer.Option(min=1, help="Measured windows for each count.")]
TokensFlag = Annotated[int, typer.Option(min=1, help="Tokens of each request in a window.")]


@bench_verb(max_seconds=600)
def solo(
    run: BenchRun, context: ContextFlag = 512, windows: WindowsFlag = 5, tokens: TokensFlag = 32
) -> None:
    """Measure one process with the whole model: no engine, no links. With --pin on half of the cores."""
    run.check_context(_bare_tokens(context, windows, tokens))
    threads = run.options(1, {}).threads
    row = _solo(run, context, windows, tokens, threads)
    settings = {"context": context, "windows": windows, "window_tokens": tokens, "threads": threads}
    lines = {"one process": [(1.0, row.tokens_per_s)]}
    run.show(run.report("solo", settings, [row], {}), ("requests at once", "tokens/s"), lines)


@bench_verb(max_seconds=900)
def loop(
    run: BenchRun, context: ContextFlag = 512, windows: WindowsFlag = 5, tokens: TokensFlag = 32
) -> None:
    """Measure one request: bare, and over one and two members. Also shows the cost of a hop."""
    from convoy.bench.report.report import decode_ratios, hop_ratios
    from convoy.bench.throughput import DecodeOptions

    options = DecodeOptions((1,), context, windows, tokens)
    run.check_context(context + options.max_tokens)
    solo_row, steps = _bare_rows(run, context, windows, tokens)
    rows = [solo_row, *_decode(run, 1, options), *_decode(run, 2, options)]
    ratios = {**decode_ratios(rows), **hop_ratios(rows, steps)}
    settings = {
        "context": context,
        "windows": windows,
        "window_tokens": tokens,
        "threads": run.options(2, {}).threads,
    }
    lines = {
        "bare, members 1": [(1.0, solo_row.ms_per_token)],
        "engine": [(float(row.members), row.ms_per_token) for row in rows[1:]],
    }
    report = run.report("loop", settings, [*rows, *steps], ratios)
    run.show(report, ("members", "ms for a token"), lines)


@bench_verb(max_seconds=1800)
def batch(
    run: BenchRun,
    concurrent: ConcurrentFlag = "1,4,16,32",
    context: ContextFlag = 512,
    windows: WindowsFlag = 5,
    tokens: TokensFlag = 8,
) -> None:
    """Measure requests that decode at once, on one member and two."""
    from convoy.bench.report.report import decode_ratios
    from convoy.bench.throughput import DecodeOptions

    sizes = counts("--concurrent", concurrent, _MAX_CONCURRENT)
    options = DecodeOptions(sizes, context, windows, tokens)
    run.check_context(context + options.max_tokens)
    rows = [row for members in (1, 2) for row in _decode(run, members, options)]
    # The engine's lone request has the longest context. Measure the bare process after the same context.
    alone = next((row for row in rows if row.members == 2 and row.concurrent == 1), None)
    if alone is not None:
        behind = max(1, alone.context_tokens - (windows + 1) * tokens)
        rows.append(_solo(run, behind, windows, tokens, run.options(2 if run.pin else 1, {}).threads))
    lines = {
        f"members {members}": [
            (float(row.concurrent), row.tokens_per_s)
            for row in rows
            if row.members == members and row.through == "engine"
        ]
        for members in (1, 2)
    }
    settings = {"context": context, "windows": windows, "window_tokens": tokens}
    report = run.report("batch", settings, rows, decode_ratios(rows))
    run.show(report, ("requests at once", "tokens/s"), lines)


@bench_verb(max_seconds=3600)
def prefill(
    run: BenchRun,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 8192,
    chunks: Annotated[str, typer.Option(help="Sizes of a chunk, in tokens.")] = "128,256,512",
    windows: Annotated[
        str, typer.Option(help="Chunks in flight on two members; 0: as many as stages.")
    ] = "0,4",
    rounds: Annotated[int, typer.Option(min=1, help="Prompts for each size and window.")] = 3,
) -> None:
    """Measure a long prompt in chunks of several sizes. On one member, and on two with several chunks in
    flight. Also shows the next turn of the same chat, which finds the prompt in the prefix cache.
    """
    from convoy.bench.report.report import prefill_ratios
    from convoy.bench.throughput import TURN_TOKENS

    sizes = counts("--chunks", chunks, _MAX_CHUNK)
    in_flight = counts("--windows", windows, 64, least=0)
    run.check_context(prompt_tokens + TURN_TOKENS + 1)
    # One member runs one step at a time, whatever the window.
    plans = [(1, size, 0) for size in sizes] + [(2, size, window) for size in sizes for window in in_flight]
    rows = [_prefill(run, *one, prompt_tokens, rounds) for one in plans]
    lines = {"members 1": [(float(row.chunk), row.tokens_per_s) for row in rows if row.members == 1]}
    for window in in_flight:
        lines[f"members 2, window {window or 'auto'}"] = [
            (float(row.chunk), row.tokens_per_s)
            for row in rows
            if row.members == 2 and row.window == _window(2, window)
        ]
    settings = {"prompt_tokens": prompt_tokens, "rounds": rounds}
    report = run.report("prefill", settings, rows, prefill_ratios(rows))
    run.show(report, ("tokens of a chunk", "tokens/s"), lines)


def _window(members: int, window: int) -> int:
    """Return the number of chunks in flight."""
    return (window or members) if members > 1 else 1


def _prefill(
    run: BenchRun, members: int, size: int, window: int, prompt_tokens: int, rounds: int
) -> PrefillRow:
    from convoy.bench.bare import BLOCK_SIZE
    from convoy.bench.throughput import TURN_TOKENS, PrefillOptions, measure_prefill

    options = PrefillOptions(prompt_tokens, size, _window(members, window), rounds)
    limits = {
        "prefill_chunk": size,
        "prefill_window": window,
        "max_step_tokens": size,
        "num_blocks": -(-(prompt_tokens + TURN_TOKENS + 1) // BLOCK_SIZE) + 1,
    }
    with run.cluster(members, limits) as cluster:
        vocab_size = cluster.tokenizer.vocab_size
        deadline = run.clock.deadline
        return measure_prefill(cluster.engine, vocab_size, members, options, deadline=deadline, say=run.say)


def _decode(run: BenchRun, members: int, options: DecodeOptions) -> list[DecodeRow]:
    from convoy.bench.throughput import measure_decode

    limits = {
        "max_batch": max(options.concurrent),
        "prefill_chunk": options.prefill_chunk,
        "num_blocks": options.num_blocks,
    }
    with run.cluster(members, limits) as cluster:
        vocab_size = cluster.tokenizer.vocab_size
        deadline = run.clock.deadline
        return measure_decode(cluster.engine, vocab_size, members, options, deadline=deadline, say=run.say)


def _bare_tokens(context: int, windows: int, tokens: int) -> int:
    return context + (windows + 1) * tokens


def _solo(run: BenchRun, context: int, windows: int, tokens: int, threads: int) -> DecodeRow:
    from convoy.bench.bare import load_in_turn, whole
    from convoy.model.checkpoints.source import ModelSource

    source = ModelSource.resolve(run.named_model)
    num_tokens = _bare_tokens(context, windows, tokens)
    with pinned(run.alone_cores):
        executor = load_in_turn(source, whole(source), run.kernel, threads, num_tokens)
        run.kernels.add(executor.kernel)
        decode = _bare(run, executor, source.spec.vocab_size, num_tokens)
        decode.read(context)
        decode.window(tokens)
        measured = [decode.window(tokens) for _ in range(windows)]
    return _solo_row(run, measured, num_tokens)


def _bare_rows(run: BenchRun, context: int, windows: int, tokens: int) -> tuple[DecodeRow, list[StepRow]]:
    """Return the rows of three ways without an engine.

    The ways take turns, so that other load on the machine affects all of them alike.
    """
    from convoy.bench.bare import load_in_turn, step_row, whole
    from convoy.bench.report.report import RING, STAGE, STAGES
    from convoy.model.checkpoints.source import ModelSource

    source = ModelSource.resolve(run.named_model)
    num_tokens = _bare_tokens(context, windows, tokens)
    threads = run.options(2, {}).threads

    def in_turn(assignments: list[StageAssignment]) -> BareDecode:
        executor = load_in_turn(source, assignments, run.kernel, threads, num_tokens)
        return _bare(run, executor, source.spec.vocab_size, num_tokens)

    with run.head(2, {}) as (head, _):
        assert head.executor is not None
        assert head.active_plan is not None
        stages = head.active_plan.plan.stages
        ways = {
            STAGE: in_turn(whole(source)),
            STAGES: in_turn(stages),
            RING: _bare(run, head.executor, source.spec.vocab_size, num_tokens),
        }
        measured = _take_turns(run, ways, context, windows, tokens)
    hops = {STAGE: 0, STAGES: 0, RING: len(stages)}
    rows = [step_row(through, hops[through], measured[through]) for through in ways]
    return _solo_row(run, measured[STAGE], num_tokens), rows


def _take_turns(
    run: BenchRun, ways: dict[str, BareDecode], context: int, windows: int, tokens: int
) -> dict[str, list[Window]]:
    for through, way in ways.items():
        way.read(context)
        # This window is not measured, so that cold caches and the prompt's steps do not count.
        way.window(tokens)
        run.say(f"{through}: a prompt of {context} tokens is read")
    measured: dict[str, list[Window]] = {through: [] for through in ways}
    for _ in range(windows):
        for through, way in ways.items():
            measured[through].append(way.window(tokens))
    return measured


def _bare(run: BenchRun, executor: Steps, vocab_size: int, num_tokens: int) -> BareDecode:
    from convoy.bench.bare import BareDecode

    return BareDecode(executor, vocab_size, num_tokens, run.clock.deadline)


def _solo_row(run: BenchRun, windows: list[Window], context_tokens: int) -> DecodeRow:
    from convoy.bench.bare import solo_row

    row = solo_row(windows, context_tokens)
    run.say(f"one process, one request: {row.tokens_per_s:.1f} tokens/s")
    return row
