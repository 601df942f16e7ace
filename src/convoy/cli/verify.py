"""``convoy verify``: make the parity certificate of a model on this machine, over every allowed cut."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.checks.leak import (
    LEAK_DEPTHS,
    LEAK_TOKENS,
    LeakDepthsFlag,
    LeakFlag,
    LeakSearch,
    LeakTokensFlag,
    show_leak,
)
from convoy.cli.flags.device import DeviceFlag
from convoy.cli.flags.quantize import ComputeFlag, kernel_for
from convoy.cli.flags.steps import KvDtypeFlag, check_choice
from convoy.cli.show.exit_codes import EXIT_FAILURE
from convoy.cli.show.output import JsonFlag, plain, print_json, print_note, print_table, report_error
from convoy.cli.show.progress import VerifyLines
from convoy.config.kernels import host_kernels_text
from convoy.config.table import ENGINE
from convoy.errors import UsageError
from convoy.sdk.parity import device_and_kernel, prompts_of

if TYPE_CHECKING:
    from convoy.evaluate.certificate import Certificate, LayoutResult
    from convoy.evaluate.verify import Progress


def verify(
    model: Annotated[
        str, typer.Argument(help="demo, demo-mini, a Hugging Face directory or synthetic:NAME.")
    ],
    kernel: Annotated[str, typer.Option(help=f"{host_kernels_text()}.")] = "auto",
    compute: ComputeFlag = None,
    cuts: Annotated[
        str, typer.Option(help="all, or the most places to cut into two. A sample is cut into three.")
    ] = "all",
    prompts: Annotated[
        str, typer.Option(help="A number of prompts, or a file with one prompt per line.")
    ] = "4",
    tokens: Annotated[int, typer.Option(min=1, max=256, help="Tokens to decode after each prompt.")] = 6,
    device: DeviceFlag = "cpu",
    ranks: Annotated[
        int, typer.Option(min=1, max=8, help="Ranks that hold each stage together, on the CPU or MLX.")
    ] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.  [default: torch's]")] = None,
    kv_dtype: KvDtypeFlag = None,
    leak: LeakFlag = False,
    leak_tokens: LeakTokensFlag = LEAK_TOKENS,
    leak_depths: LeakDepthsFlag = LEAK_DEPTHS,
    as_json: JsonFlag = False,
) -> None:
    """Prove that a model answers the same whole and split.

    It tries every allowed cut. With --leak: show how much of a prompt a peer can recover from the activations
    that it receives.
    """
    max_cuts = _max_cuts(cuts)
    check_choice("engine", "kv_dtype", kv_dtype)
    if not leak and (leak_tokens, leak_depths) != (LEAK_TOKENS, LEAK_DEPTHS):
        raise UsageError("--leak-tokens and --leak-depths are for --leak", hint="add --leak")
    from convoy.evaluate.verify import VerifyOptions
    from convoy.evaluate.verify import verify as run
    from convoy.model.checkpoints.source import ModelSource

    kernel = kernel_for(None, kernel, compute, kernel_from="--kernel")
    source = ModelSource.resolve(model)
    asked = prompts_of(source, prompts, tokens, print_note)
    device, chosen = device_and_kernel(source, device, kernel, ranks, threads, note=print_note)
    progress = _progress("tokens" if leak else "layouts", quiet=as_json)
    if leak:
        search = LeakSearch(chosen, device, threads, leak_tokens, leak_depths)
        show_leak(source, asked[0], search, ranks, progress, as_json=as_json)
        return
    options = VerifyOptions(
        *(chosen, max_cuts),
        num_tokens=tokens,
        num_threads=threads,
        device=device,
        ranks=ranks,
        kv_dtype=kv_dtype or ENGINE.kv_dtype,
    )
    report(run(source, asked, options, progress), as_json=as_json)


def report(found: Certificate, *, as_json: bool) -> None:
    """Print the table or the one JSON value. Exit 1 if any layout failed."""
    if as_json:
        print_json(_finite({"passed": found.passed, **_object(found)}))
    else:
        _print(found)
    if not found.passed:
        failed = f"{found.num_failed} of {len(found.results)} layouts of {found.model}"
        report_error("ParityFailed", f"{failed} are not as they must be", None, as_json=False)
        raise typer.Exit(EXIT_FAILURE)


def _max_cuts(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise UsageError(f"--cuts is {text!r}, expected all or a number", hint="--cuts all")
    return int(text)


def _progress(unit: str, *, quiet: bool) -> Progress:
    """Return a progress callback: one changing line on a terminal, otherwise a line now and then.

    It prints nothing elsewhere if ``quiet``.
    """
    if not sys.stderr.isatty():
        return (lambda *_: None) if quiet else VerifyLines(unit).on_progress

    def show(done: int, total: int, what: str) -> None:
        line = f"{done}/{total} {unit}, {what}" if what else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    return show


def _print(found: Certificate) -> None:
    lengths = found.prompt_tokens
    print(
        f"{found.model}: {found.num_layers} layers, {found.kernel}, K/V in {found.kv_dtype}{_ranks(found)}; "
        f"{len(lengths)} prompts of "
        f"{min(lengths)} to {max(lengths)} tokens, {found.decoded_tokens} decoded behind each; "
        f"chunks of {', '.join(map(str, found.chunks))}"
    )
    print_table(
        ("layers of each member", "one piece", "chunks", "decode", "batch", "transformers", "once", "tokens"),
        [_row(found, result) for result in found.results],
    )
    for line in _limits(found):
        print(line)
    for result in found.results:
        for failure in result.failures:
            print(f"FAILED {result.spans}: {failure}")
    if found.passed:
        print(f"passed: {len(found.results)} layouts in {found.duration_s:.1f} s")


def _ranks(found: Certificate) -> str:
    return f" on {found.ranks} ranks a stage" if found.ranks > 1 else ""


def _row(found: Certificate, result: LayoutResult) -> tuple[object, ...]:
    return (
        result.spans,
        *(_number(distance) for distance in result.from_unsplit.values()),
        None if result.library is None else _number(result.library.greatest),
        f"{result.layers_once}/{found.num_layers}",
        _tokens(result),
    )


def _tokens(result: LayoutResult) -> str:
    if not result.tokens_equal:
        return "DIFFER"
    return f"equal, {result.near_ties} near ties" if result.near_ties else "equal"


def _limits(found: Certificate) -> list[str]:
    """Return lines that explain the columns and their limits."""
    unsplit, library = found.limits.unsplit, found.limits.library
    must = f"at most {unsplit:g} for each ten units of logit" if unsplit else "which must be 0"
    lines = [
        f"one piece to batch: the greatest difference of a logit from one stage with all layers, {must}",
        f"transformers: from the whole model of {found.library} in float32, at most {library:g} for each ten "
        f"units of logit; the median over positions at most {found.limits.median:g}",
        "once: layers that ran exactly once in every step",
        f"bits of the whole: {found.bits[:12]}, computed with {found.compiled_for or 'torch alone'}",
    ]
    if found.rounded is not None:
        record = found.rounded
        lines.append(
            f"weights: rounded to {record.format}, with a weighted error of {100 * record.error:.3g} %; "
            "transformers has the same weights"
        )
    of_whole = found.results[0].library
    if of_whole is not None:
        reach = of_whole.greatest_logit
        lines.append(
            f"the whole: logits reach {reach:.3g}, so at most {found.limits.grown(library, reach):.1e}; "
            f"greatest {of_whole.greatest:.1e}, median {of_whole.median:.1e}, "
            f"near ties {of_whole.num_near_ties}"
        )
        lines += [
            f"prompt {prompt}: {found.library} in float32 is {own:.1e} from itself in float64, "
            f"the whole {found.results[0].from_float64.get(prompt, math.nan):.1e}"
            for prompt, own in found.doubted.items()
        ]
    lines += [f"no cut before layer {cut}: {reason}" for cut, reason in found.forbidden_cuts.items()]
    lines += [
        f"not covered: a window of {window} tokens, longer than every prompt"
        for window in found.unreached_windows
    ]
    return lines


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _object(found: Certificate) -> dict[str, object]:
    value = plain(found)
    assert isinstance(value, dict)
    return value


def _finite(value: object) -> object:
    """Return ``value`` with None in place of infinity and NaN, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
