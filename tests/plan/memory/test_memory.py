"""The refusal of stages that do not fit names what would help, in numbers."""

from __future__ import annotations

import pytest

from convoy.config.kernels import CUDA_KERNEL, EXACT, KERNELS, PLAIN, QUANTIZED, held_form, kv_form, on_device
from convoy.errors import PlanError
from convoy.model.checkpoints.source import ModelSource
from convoy.plan.memory.memory import check_memory, format_bytes, machines_needed, stage_bytes
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.placement import place
from convoy.plan.span import Span

SPEC = ModelSource.resolve("demo-mini").spec
OWNERS = [("alpha", Span(0, 1, output=True)), ("beta", Span(1, SPEC.num_layers))]


def hint_for(kernel: str) -> str:
    offers = {name: MemberOffer(name, 1000, kernel=kernel) for name, _ in OWNERS}
    with pytest.raises(PlanError, match=r"stage 0 on alpha needs .* but has 1\.0 kB") as caught:
        check_memory(SPEC, OWNERS, offers)
    assert caught.value.hint is not None
    return caught.value.hint


def in_all(kernel: str) -> str:
    return format_bytes(sum(stage_bytes(SPEC, span, kernel) for _, span in OWNERS))


@pytest.mark.parametrize("kernel", [EXACT, PLAIN, CUDA_KERNEL])
def test_the_hint_has_the_memory_of_each_kind_of_quantize(kernel: str) -> None:
    hint = hint_for(kernel)
    kv = kv_form(kernel).name
    weights = {EXACT: "weights as in the file", CUDA_KERNEL: "bfloat16 weights", PLAIN: "float32 weights"}
    assert f"all stages need {in_all(kernel)} with {kernel} ({weights[kernel]}) and K/V in {kv}, " in hint
    assert "(fits)" not in hint
    for kind, host in QUANTIZED.items():
        rounded = KERNELS[host].cuda_name if on_device(kernel) else host
        assert f"{in_all(rounded)} with --quantize {kind}" in hint


def test_the_hint_marks_the_kinds_that_fit() -> None:
    offers = {
        name: MemberOffer(name, stage_bytes(SPEC, span, "exact-q8"), kernel=EXACT) for name, span in OWNERS
    }
    with pytest.raises(PlanError) as caught:
        check_memory(SPEC, OWNERS, offers)
    assert f"{in_all('exact-q8')} with --quantize q8 (fits)" in str(caught.value.hint)


def test_a_kind_that_is_in_use_or_needs_more_is_not_offered() -> None:
    assert "--quantize q8" not in hint_for("exact-q8")
    assert "--quantize q4" in hint_for("exact-q8")
    rounded = hint_for("exact-q4")
    assert rounded.startswith("add a member, raise [model] memory_gb where a member sets it, or move layers")
    assert " with exact-q4 (4-bit weights) and K/V in f32; machines " in rounded


@pytest.mark.parametrize("kernel", [EXACT, "exact-q4", CUDA_KERNEL])
@pytest.mark.parametrize("share", [0.9, 0.45, 0.3])
def test_the_number_of_machines_that_fit_is_the_least_that_is_placed(kernel: str, share: float) -> None:
    spec = ModelSource.resolve("demo").spec
    size = int(share * stage_bytes(spec, Span(0, spec.num_layers, output=True), kernel))

    def placed(count: int) -> None:
        names = [f"m{number}" for number in range(count)]
        place(spec, [MemberOffer(name, size, name == "m0", kernel=kernel) for name in names])

    count = machines_needed(spec, MemberOffer("m0", size, kernel=kernel))
    assert count is not None
    placed(count)
    with pytest.raises(PlanError, match="needs") as refused:
        placed(count - 1)
    assert f"machines with {format_bytes(size)} that fit: {count}" in str(refused.value.hint)


def test_no_number_of_machines_fits_where_one_layer_does_not() -> None:
    assert machines_needed(SPEC, MemberOffer("m0", 1000)) is None
    assert "; machines with 1.0 kB that fit: no number of them" in hint_for(EXACT)


def test_a_member_without_compiled_code_needs_more_and_the_hint_has_the_bytes_with_it() -> None:
    offers = {name: MemberOffer(name, 1000, kernel=EXACT, unpacks=name == "beta") for name, _ in OWNERS}
    (_, first), (_, second) = OWNERS
    unpacked = held_form(EXACT, unpacks=True)
    needed = [stage_bytes(SPEC, first, EXACT), stage_bytes(SPEC, second, unpacked)]
    with pytest.raises(PlanError, match=f"stage 1 on beta needs {format_bytes(needed[1])} ") as caught:
        check_memory(SPEC, OWNERS, offers)
    assert caught.value.hint is not None
    assert f"all stages need {format_bytes(sum(needed))} with " in caught.value.hint
    kept = format_bytes(stage_bytes(SPEC, second, EXACT))
    assert caught.value.hint.endswith(
        f"; with compiled code beta would need {kept} (`convoy doctor` there says why there is none)"
    )
