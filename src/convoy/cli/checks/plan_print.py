"""Print the plan of `convoy plan`: stages and ranks, blocks, the rates of every mode, and rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoy.cli.checks.rates import format_rate, print_rates
from convoy.cli.show.cluster_status import unpacked_text
from convoy.cli.show.output import (
    counted,
    format_bytes,
    format_seconds,
    print_fields,
    print_table,
    reads_text,
)

if TYPE_CHECKING:
    from convoy.plan.rates.compare import TensorReport
    from convoy.plan.report import BlocksReport, PlanReport, RuleReport
    from convoy.sdk.planning.fit import FitForm, FitReport


def print_plan(found: PlanReport) -> None:
    print_fields(
        [
            ("model", f"{found.model} ({found.family}, {found.num_layers} layers)"),
            ("route", found.route),
            (
                "weights",
                f"{format_bytes(found.weight_bytes)} as {found.weight_form}, computed in {found.dtype}",
            ),
            ("K/V", kv_text(found)),
            (
                "context",
                f"{found.max_context} tokens; {found.max_kv_tokens} tokens of K/V fit at the tightest member",
            ),
            ("hops", f"{len(found.hops)}, {format_bytes(found.hop_bytes_per_token)} for each decoded token"),
        ]
    )
    print()
    _print_stages(found)
    if found.blocks is not None:
        _print_blocks(found, found.blocks)
    if found.rates is not None:
        print_rates(found.rates)
        _print_modes(found)
        print()
    print_rules(found.rules)
    for name in found.standbys:
        print(f"standby: {name} holds no layers until another member is lost")
    for out in found.left_out:
        print(f"no stage: {out.reason}")
    _print_readers(found.can_read_prompts)


def kv_text(found: PlanReport) -> str:
    """Return the dtype of K/V with the memory of a token, and that of every other possible dtype."""
    own = f"{found.kv_dtype}, {format_bytes(found.kv_bytes_per_token)} for each token"
    others = (
        f"{one.kv_dtype} {format_bytes(one.bytes_per_token)}"
        for one in found.kv_choices
        if one.kv_dtype != found.kv_dtype
    )
    text = ", ".join(others)
    return f"{own}; with --kv-dtype {text}" if text else own


def _print_stages(found: PlanReport) -> None:
    joint = any(stage.ranks for stage in found.stages)
    weights = "weights of a rank" if joint else "weights"
    print_table(
        ["stage", "member", "span", weights, "K/V per token", "memory offered", "can read prompts"],
        [
            (
                index,
                "+".join(stage.ranks or [stage.member]) + (" (head)" if stage.head else ""),
                stage.span,
                format_bytes(stage.weight_bytes)
                + (f" ({stage.weight_share:.2f} of all)" if stage.ranks else ""),
                format_bytes(stage.kv_bytes_per_token),
                format_bytes(stage.memory_bytes),
                reads_text(stage.can_read_prompts),
            )
            for index, stage in enumerate(found.stages)
        ],
    )
    unpacking = [name for stage in found.stages for name in stage.unpacks]
    if unpacking:
        print(f"unpacked: {unpacked_text(unpacking)}")
    print()


def _print_readers(found: dict[str, str]) -> None:
    """Print for every member, also one without a layer, whether it can read prompts."""
    told = (f"{name} {reads_text(source)}" for name, source in found.items())
    print(f"can read prompts: {', '.join(told)}")


def _print_modes(found: PlanReport) -> None:
    """Print the rates of every mode that these members allow.

    Mark the chosen mode and give the reason. If members share the model, say when ranks pay.
    """
    if found.parallel is None:
        return
    if len(found.rates_by_mode) > 1:
        print()
        print_table(
            ["parallel", "decode, one sequence", "a step every", "decode, a full batch", "prefill"],
            [
                (
                    f"{mode} *" if mode == found.parallel.mode else mode,
                    format_rate(rates.decode),
                    format_seconds(rates.decode.step_s),
                    format_rate(rates.decode_batch),
                    format_rate(rates.prefill),
                )
                for mode, rates in found.rates_by_mode.items()
            ],
        )
    print(f"parallel: {found.parallel.mode}; {found.parallel.reason}")
    # It compares ranks with a pipeline.
    if found.tensor is not None and found.parallel.mode != "single":
        print(crossover_text(found.tensor))


def crossover_text(tensor: TensorReport) -> str:
    """Return when ranks that share layers are faster than a pipeline, for one sequence."""
    size, each_s = format_bytes(tensor.all_reduce_bytes), format_seconds(tensor.all_reduce_s)
    each = (
        f"tensor pays {tensor.num_all_reduces} all-reduces of {size} a step, {each_s} each as predicted, "
        f"to save {format_seconds(tensor.saved_s)}"
    )
    if tensor.crossover_s <= 0:
        return f"{each}; it is not faster at any speed of links"
    return f"{each}; it is faster where one takes less than {format_seconds(tensor.crossover_s)}"


def _print_blocks(found: PlanReport, blocks: BlocksReport) -> None:
    """Print a row for each cache group, and the member that leaves no room for more."""
    print_table(
        ["cache group", "layers", "K/V blocks", "tokens a block", "memory over all", "of one sequence"],
        [
            (
                group.name,
                group.num_layers,
                group.num_blocks,
                blocks.block_size,
                format_bytes(group.num_blocks * group.block_bytes),
                "as long as it is" if group.ring is None else f"at most {counted(group.ring, 'block')}",
            )
            for group in blocks.groups
        ],
    )
    limit = "as many as are wanted" if blocks.is_all_wanted else f"no more fit on {blocks.tightest}"
    working = max(stage.working_bytes for stage in found.stages)
    print(f"{limit}; beside weights and K/V a step takes up to {format_bytes(working)} of a member")
    print()


def print_rules(rules: list[RuleReport]) -> None:
    """Print a row for each rule of the policy with the members that it excludes; nothing without rules."""
    if not rules:
        return
    print_table(
        ["rule", "keeps", "on", "satisfied by", "excludes"],
        [
            (
                rule.number,
                rule.keeps,
                rule.on,
                ", ".join(rule.satisfied_by) or "no member",
                ", ".join(f"{out.member} ({out.level})" for out in rule.excluded) or "no member",
            )
            for rule in rules
        ],
    )
    print()


def print_fits(found: FitReport) -> None:
    """Print a row for each model: its decode rate in each form, or the memory that it would need."""
    print(
        f"members: {', '.join(f'{name} {format_bytes(size)}' for name, size in found.memory_bytes.items())}"
    )
    print()
    words = [form.form for form in found.rows[0].forms]
    print_table(
        ["model", "parameters", *(f"decode, {word}" for word in words), "prefill, best", "best"],
        [
            (
                row.model,
                f"{row.num_elements / 1e9:.1f} billion",
                *(_fit_text(form) for form in row.forms),
                next((_tokens(form.prefill_tokens_per_s) for form in row.forms if form.form == row.best), ""),
                row.best or "none",
            )
            for row in found.rows
        ],
    )
    print()
    print(f"rates: of one sequence of {found.context} tokens, in tokens/s; memory: of all weights")
    if any(_is_alone_faster(form) for row in found.rows for form in row.forms):
        print("alone: the first member would be faster without the others")
    if found.assumed:
        print(f"assumed: {'; '.join(found.assumed)}")


def _fit_text(form: FitForm) -> str:
    if not form.fits:
        return f"no: {format_bytes(form.weight_bytes)}"
    rate, alone = _tokens(form.decode_tokens_per_s), _tokens(form.alone_tokens_per_s)
    return f"{rate} ({alone} alone)" if _is_alone_faster(form) else rate


def _is_alone_faster(form: FitForm) -> bool:
    """Return whether the first member alone is faster by as much as the printed figures show."""
    alone, rate = form.alone_tokens_per_s, form.decode_tokens_per_s
    return form.fits and alone > rate and _tokens(alone) != _tokens(rate)


def _tokens(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
