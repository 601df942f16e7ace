"""Check that a model answers the same whole and split: the core of ``convoy verify`` and `convoy.verify`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.config.table import ENGINE
from convoy.errors import ModelError, UsageError
from convoy.sdk.options import Note, unheard

if TYPE_CHECKING:
    from convoy.evaluate.certificate import Certificate
    from convoy.model.checkpoints.source import ModelSource


def verify(
    model: str,
    *,
    kernel: str = "auto",
    max_cuts: int | None = None,
    prompts: int | str | Path = 4,
    num_tokens: int = 6,
    device: str = "cpu",
    ranks: int = 1,
    num_threads: int | None = None,
    kv_dtype: str = ENGINE.kv_dtype,
    on_progress: Callable[[int, int, str], None] = lambda _done, _total, _what: None,
) -> Certificate:
    """Return the parity certificate of a model on this machine, over every allowed cut.

    ``max_cuts`` bounds the places to cut into two. ``prompts`` is a number of built-in prompts, or a file
    with one prompt per line; ``num_tokens`` are decoded after each. ``ranks`` hold each stage together, on
    the CPU or MLX. ``kv_dtype`` is that of K/V. ``on_progress`` hears (done, total, next layout). A layout
    that failed raises nothing: look at the certificate's ``passed``.

    Raises `InputError` for wrong values, and `SelfCheckError` if the kernel does not hold on this machine.
    """
    from convoy.evaluate.verify import VerifyOptions
    from convoy.evaluate.verify import verify as run
    from convoy.model.checkpoints.source import ModelSource

    source = ModelSource.resolve(model)
    asked = prompts_of(source, str(prompts), num_tokens)
    chosen_device, chosen = device_and_kernel(source, device, kernel, ranks, num_threads)
    options = VerifyOptions(
        chosen,
        max_cuts,
        num_tokens=num_tokens,
        num_threads=num_threads,
        device=chosen_device,
        ranks=ranks,
        kv_dtype=kv_dtype,
    )
    return run(source, asked, options, on_progress)


def device_and_kernel(
    source: ModelSource,
    device: str | None,
    kernel: str,
    ranks: int,
    threads: int | None,
    *,
    note: Note = unheard,
) -> tuple[str, str]:
    """Return the device and the kernel of the stages. Raises UsageError for ranks that cannot be verified
    there.
    """
    from convoy.model.backends.host.checks.selfcheck import choose_kernel, why_not_exact
    from convoy.model.backends.registry import why_not_chosen
    from convoy.model.device import RANKS, choose_devices, kernel_on
    from convoy.plan.spec.sharding import check_sharding

    if device and RANKS in device:
        raise UsageError(f"--device is {device}, and ranks are verified by their number", hint="give --ranks")
    device = ",".join(choose_devices(device or "cpu", kernel, why_not_mlx=partial(why_not_chosen, source)))
    chosen = choose_kernel(kernel, threads) if device == "cpu" else kernel_on(device, kernel)
    if device == "cpu" and kernel == "auto" and (reason := why_not_exact(threads)):
        note(f"kernel {chosen}: {reason}")
    if ranks > 1:
        check_sharding(source.spec, ranks)
        if device not in {"cpu", "mlx"}:
            raise UsageError(
                f"--ranks {ranks} is for the CPU and MLX, and --device is {device}",
                hint="leave out --ranks or --device",
            )
    return device, chosen


def prompts_of(source: ModelSource, text: str, num_tokens: int, note: Note = unheard) -> list[list[int]]:
    """Return prompts as token ids: so many of ours, or those in the lines of a file. Raises InputError."""
    from convoy.evaluate.prompts import TEXTS, draw_prompts, read_prompts, text_prompts
    from convoy.model.text.tokens import Tokenizer

    if not (text.isascii() and text.isdigit()):
        return read_prompts(Path(text), Tokenizer(source), source.spec, num_tokens)
    if not (len(text) < 7 and 1 <= int(text) <= len(TEXTS)):
        raise UsageError(f"--prompts is {text}, expected 1 to {len(TEXTS)}, or a file")
    try:
        tokenizer = Tokenizer(source)
    except ModelError:
        note("prompts: random ids, because the model has no tokeniser")
        return draw_prompts(source.spec, int(text), num_tokens)
    return text_prompts(tokenizer, source.spec, int(text), num_tokens)
