"""``bench/compare.py llama``: all forms of files, and llama.cpp in turn on the same GGUF files."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.benches.formats import (
    ConcurrentFlag,
    ContextFlag,
    OpenedForms,
    PromptFlag,
    RoundsFlag,
    StepsFlag,
    chosen_forms,
    num_threads,
    opened_forms,
    print_forms,
    settings_of,
)
from convoy.cli.benches.run import BenchRun, bench_verb, counts

if TYPE_CHECKING:
    from convoy.bench.forms.rates import RateOptions, RateRow

_MAX_CONCURRENT = 64
_LLAMA = "llama.cpp"
_FIRST = "F32"


@bench_verb(max_seconds=3600)
def llama(
    run: BenchRun,
    llama: Annotated[Path, typer.Option(help="The folder of llama.cpp's programs.")],
    forms: Annotated[str, typer.Option(help="Forms for one process; empty: none.")] = "all",
    two: Annotated[str, typer.Option(help="GGUF forms for two members; empty: none.")] = "F32,Q4_0,Q4_K_M",
    concurrent: ConcurrentFlag = "1,4,16",
    context: ContextFlag = 64,
    prompt_tokens: PromptFlag = 1024,
    steps: StepsFlag = 16,
    rounds: RoundsFlag = 3,
) -> None:
    """Compare every form with llama.cpp: one process, then two members beside two RPC servers.

    The two have a core each, and Convoy's link is sealed.
    """
    from comparisons.llama_cpp import find_programs
    from convoy.bench.forms.files import GGUF_FORMS
    from convoy.bench.forms.rates import RateOptions

    programs = find_programs(llama)
    names = chosen_forms(forms) if forms else []
    pairs = chosen_forms(two, GGUF_FORMS) if two else []
    options = RateOptions(
        counts("--concurrent", concurrent, _MAX_CONCURRENT), context, prompt_tokens, steps, rounds
    )
    run.check_context(max(options.max_tokens, prompt_tokens))
    with opened_forms(run, options) as opened:
        rows = _alone(opened, names, programs)
        # The stages of the first part are gone by now, and their memory with them.
        pinned = replace(opened, run=replace(run, pin=True, threads=None)) if pairs else opened
        rows += _together(pinned, pairs, programs)
    report = run.report("llama", settings_of(run, options), [*opened.sizes, *rows], _ratios(rows))
    shown = [row for row in rows if row.what == "decode" and row.members == 1]
    lines = {
        f"{form}, {through}": [
            (float(row.number), row.tokens_per_s)
            for row in shown
            if (row.form, row.through) == (form, through)
        ]
        for form, through in dict.fromkeys((row.form, row.through) for row in shown)
    }
    run.show(report, ("decodes at once", "tokens/s"), lines, print_forms)


def _alone(opened: OpenedForms, names: list[str], programs: Path) -> list[RateRow]:
    """Measure one process of each program."""
    from comparisons.llama_cpp import LlamaRates
    from convoy.bench.forms.files import GGUF_FORMS
    from convoy.bench.forms.rates import Way, take_turns

    run, ways = opened.run, list[Way]()
    for name in names:
        way = opened.stage(name)
        if name in GGUF_FORMS:
            theirs = LlamaRates(
                programs, opened.path(name), num_threads(run), opened.options, run.clock.deadline
            )
            ways.append(Way(name, _LLAMA, 1, theirs.measure))
            way = replace(way, over=ways[-1])
        ways.append(way)
    return take_turns(ways, opened.options.rounds, run.clock.deadline, run.say)


def _together(opened: OpenedForms, names: list[str], programs: Path) -> list[RateRow]:
    """Measure two members of one core each, and two RPC servers on the same cores."""
    from comparisons.llama_cpp import LlamaRates, rpc_servers
    from convoy.bench.forms.rates import Way, take_turns

    if not names:
        return []
    run, ways = opened.run, list[Way]()
    options: RateOptions = replace(opened.options, prompt_tokens=0)
    with ExitStack() as stack:
        # Before a member pins this thread, which the servers would inherit.
        cores = run.cores
        assert cores is not None, "the caller pins"
        both = tuple(core for own in cores for core in own)
        for name in names:
            servers = stack.enter_context(rpc_servers(programs, cores, run.clock.deadline))
            theirs = LlamaRates(
                *(programs, opened.path(name), 1, options, run.clock.deadline), servers=servers, cores=both
            )
            ways.append(Way(name, _LLAMA, 2, theirs.measure))
            ways.append(replace(opened.engine(name), over=ways[-1]))
        return take_turns(ways, options.rounds, run.clock.deadline, run.say)


def _ratios(rows: list[RateRow]) -> dict[str, float]:
    """Return the rates of each form over those of float32, both Convoy's, by name."""
    own = {
        (row.form, row.members, row.what, row.number): row.tokens_per_s
        for row in rows
        if row.through != _LLAMA
    }
    return {
        f"{form}_over_{_FIRST}_{what}_{number}" + ("_two_members" if members > 1 else ""): round(
            rate / base, 3
        )
        for (form, members, what, number), rate in own.items()
        if form != _FIRST and (base := own.get((_FIRST, members, what, number)))
    }
