"""Products of rounded rows and stored codes: their definition, compiled code beside it, and bad rows."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch

from convoy.cli.flags.quantize import kernel_for
from convoy.config.kernels import INT8_KERNELS, computing_kernel
from convoy.errors import ModelError, SelfCheckError, UsageError
from convoy.model.backends.host.checks.selfcheck import available_kernels, choose_kernel
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels import registry
from convoy.model.kernels.native import build
from convoy.model.kernels.native.library import NativeLibrary, load_library, native_libraries
from convoy.model.kernels.registry import slow_int8, why_no_int8
from convoy.model.kernels.stored.int8 import SAMPLES, failing_int8, int8_holds, rounds_inputs
from convoy.model.kernels.stored.integers import fused, int8_product, integers_of, round_rows
from convoy.model.kernels.stored.linear import StoredLinear
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.sample import sample_range, usual_shape
from convoy.model.layers.compiled import describe_linear
from convoy.model.loading.loaded import warn_of_exact_forms
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.compiled import faulty, nothing_compiled
from support.quantised_models import Writer, compressed, write
from support.tiny_models import Chain, Models, Prompt, Threads

INPUTS, OUTPUTS = 512, 70


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear_of(*forms: str, bias: torch.Tensor | None = None) -> StoredLinear:
    ranges = tuple(sample_range(usual_shape(form, INPUTS), OUTPUTS) for form in forms)
    linear = StoredLinear(StoredMatrix(ranges), bias)
    linear.round_inputs()
    return linear


def test_a_fused_multiply_add_is_rounded_once() -> None:
    a, b, c = (numbers(2000, seed=seed) * 2.0 ** (8 * numbers(2000, seed=3 + seed)) for seed in range(3))
    # Sums that lie just beside the middle of two float32 numbers.
    a[:3], b[:3] = 1 + 2.0**-12, torch.tensor([1 + 2.0**-12, 1 - 2.0**-12, 2.0**-24])
    c[:3] = torch.tensor([2.0**-60, -(2.0**-60), 1.0])
    found = fused(a, b, c)
    for one, x, y, z in zip(found.tolist(), a.tolist(), b.tolist(), c.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = [torch.nextafter(torch.tensor(one), torch.tensor(to)).item() for to in (-torch.inf, torch.inf)]
        assert all(abs(Fraction(one) - exact) <= abs(Fraction(other) - exact) for other in near)
    assert fused(a, b, c)[2] != (a * b + c)[2] or bool((found != a * b + c).any())


def test_rows_are_rounded_to_whole_numbers_of_their_groups() -> None:
    x = numbers(5, 96)
    x[1, 32:64] = 0
    codes, scales = round_rows(x)
    assert codes.abs().amax() == 127
    assert torch.equal(codes, codes.round())
    error = (codes.view(5, 3, 32) * scales.unsqueeze(-1) - x.view(5, 3, 32)).abs().amax(-1)
    assert (error <= 0.501 * scales).all()
    assert scales[1, 1] == 0


def test_a_row_is_divided_once_and_not_multiplied_by_a_reciprocal() -> None:
    x = numbers(64, 32 * 2000).numpy()
    groups = x.reshape(64, -1, 32)
    factors = numpy.float32(127) / numpy.abs(groups).max(-1)
    expected = numpy.rint(groups * factors[:, :, None]).reshape(x.shape)
    codes, scales = round_rows(torch.from_numpy(x))
    assert numpy.array_equal(codes.numpy(), expected)
    assert numpy.array_equal(scales.numpy(), numpy.abs(groups).max(-1) / numpy.float32(127))


def test_compiled_code_has_the_bits_of_the_definition_over_wide_rows() -> None:
    assert all(int8_holds(library, usual_shape("gguf:Q8_0", 14336)) for library in native_libraries())


@pytest.mark.parametrize("form", cases(SAMPLES, {"gguf:Q6_K", "affine4"}.__contains__))
def test_the_definition_is_near_the_exact_product(form: str) -> None:
    one, x = sample_range(usual_shape(form, INPUTS), OUTPUTS), numbers(9, INPUTS, seed=2)
    assert rounds_inputs(one)
    found, exact = int8_product(x, integers_of(one), None), x.double() @ one.unpack().double().t()
    assert 1e-4 < (found - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("form", cases(SAMPLES, {"gguf:Q4_K", "gguf:Q5_K", "MXFP4", "centred8"}.__contains__))
def test_compiled_code_has_the_bits_of_the_definition(form: str) -> None:
    for library in native_libraries():
        assert int8_holds(library, usual_shape(form, INPUTS)), library.instruction_set.name


def test_a_row_has_its_bits_beside_any_others_on_any_threads(threads: Threads) -> None:
    bias = numbers(3 * OUTPUTS, seed=1)
    # The last form has no products of whole numbers: its outputs are exact.
    linear, x = linear_of("gguf:Q4_K", "gguf:Q8_0", "gguf:IQ4_XS", bias=bias), numbers(130, INPUTS, seed=2)
    assert linear.exact_forms == {"gguf:IQ4_XS"}
    threads(1)
    whole = linear(x)
    plain = StoredMatrix((sample_range(usual_shape("gguf:IQ4_XS", INPUTS), OUTPUTS),))
    assert torch.equal(whole[:, 2 * OUTPUTS :], StoredLinear(plain, bias[2 * OUTPUTS :])(x))
    for count in (1, 2):
        threads(count)
        for rows, start in ((1, 7), (2, 0), (3, 90), (6, 60), (7, 1), (100, 30), (130, 0)):
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows]), (count, rows)


def test_without_compiled_code_the_definition_computes() -> None:
    x = numbers(3, INPUTS, seed=2)
    expected = linear_of("gguf:Q6_K", "affine8")(x)
    with nothing_compiled():
        found = linear_of("gguf:Q6_K", "affine8")
        assert found.stored is None
        assert torch.equal(found(x), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_leaves_no_finite_result_in_its_row(bad: float) -> None:
    linear, x = linear_of("gguf:Q4_0", "affine4"), numbers(5, INPUTS, seed=2)
    expected = linear(x)
    x[1, 40] = bad
    for rows in (3, 5):
        found = linear(x[:rows])
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_numbers_too_small_for_a_scale_are_zeros() -> None:
    linear, x = linear_of("gguf:Q4_0"), torch.full((1, INPUTS), 1e-38)
    assert torch.equal(linear(x), torch.zeros(1, OUTPUTS))


class _Quick(build.InstructionSet):
    """Compile without optimising, which takes a fifth of the time."""

    @property
    def options(self) -> tuple[str, ...]:
        return (*super().options, "-O0")


@pytest.fixture(
    scope="module",
    params=cases(("flipped bit", "wrong constant"), lambda fault: fault == "flipped bit"),
)
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """Return a library with a fault: in a result, or in the sources that it is compiled from."""
    compiler, best = build.find_compiler(), next(native_libraries(), None)
    if compiler is None or best is None:
        pytest.skip("nothing is compiled here")
    if request.param == "flipped bit":
        return faulty(best, "convoy_int8_linear", output=3)
    folder = tmp_path_factory.mktemp("broken")
    sources = folder / "sources"
    sources.mkdir(mode=0o700)
    for path in build.SOURCES[0].parent.glob("*.[ch]"):
        text = path.read_text(encoding="utf-8")
        right = "group->scale = is_finite ? top / 127.0f"
        assert (path.name == "int8.c") == (right in text)
        (sources / path.name).write_text(text.replace(right, right.replace("127", "128")), encoding="utf-8")
    with pytest.MonkeyPatch.context() as other:
        other.setattr(build, "SOURCES", tuple(sources / path.name for path in build.SOURCES))
        of = best.instruction_set
        wrong = _Quick(f"{of.name} with a fault", of.machine, of.needed, of.architecture, shipped_in=folder)
        build.compile_to(wrong.prebuilt, [compiler], wrong)
        return load_library(wrong)


def test_the_next_library_computes_where_one_has_other_bits(
    broken: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    x, one = numbers(5, INPUTS, seed=2), sample_range(usual_shape("gguf:Q8_0", INPUTS), OUTPUTS)
    assert set(failing_int8(broken)) == set(SAMPLES)
    for _ in range(2):
        linear = StoredLinear(StoredMatrix((one,)), None, offered=(broken, *native_libraries()))
        assert linear.stored is not None
        linear.round_inputs()
        assert torch.equal(linear(x), int8_product(x, integers_of(one), None))
    wrong, right = (library.instruction_set.name for library in (broken, next(native_libraries())))
    assert caplog.messages == [
        f"the compiled code of 8-bit products of gguf:Q8_0 for {wrong} has other bits here, and is not used: "
        f"that of {right} takes its place, and longer"
    ]
    with pytest.raises(SelfCheckError, match="compiled layers run on"):
        describe_linear(StoredLinear(StoredMatrix((one,)), None, offered=(broken,)))


def test_without_right_compiled_code_8_bit_products_are_refused(broken: NativeLibrary) -> None:
    one = sample_range(usual_shape("gguf:Q8_0", INPUTS), OUTPUTS)
    linear = StoredLinear(StoredMatrix((one,)), None, offered=(broken,))
    with pytest.raises(
        SelfCheckError, match=r"8-bit products of .* have other bits here for the form gguf:Q8_0"
    ):
        linear.round_inputs()
    # The exact products do not round rows.
    assert torch.equal(
        linear(numbers(3, INPUTS)), StoredLinear(StoredMatrix((one,)), None)(numbers(3, INPUTS))
    )


def test_doctor_says_which_8_bit_products_another_instruction_set_computes(
    broken: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (why_no_int8(), slow_int8()) == ("", "")
    for others, why_not in (((), True), ((next(native_libraries()),), False)):
        monkeypatch.setattr(registry, "native_libraries", lambda others=others: iter((broken, *others)))
        monkeypatch.setattr(registry, "native_library", lambda: broken)
        why_no_int8.cache_clear()
        assert bool(why_no_int8()) == why_not
        assert bool(slow_int8()) != why_not
    monkeypatch.undo()
    why_no_int8.cache_clear()


def test_groups_that_cross_those_of_rows_are_multiplied_exactly() -> None:
    assert not rounds_inputs(sample_range(usual_shape("I8", 40), 8))
    assert not rounds_inputs(sample_range(usual_shape("F16", 64), 8))


def test_float_weights_are_refused_with_what_to_do(models: Models) -> None:
    with pytest.raises(ModelError, match="8-bit products are for rounded weights") as caught:
        models.chain("even", kernel="int8-stored")
    assert (
        caught.value.hint
        == "add --quantize q8 or q4 (convoy verify: --kernel exact-q8), or leave out --compute int8"
    )


def last_layers_rounded(writer: Writer) -> None:
    """Round the linears of all layers but the first two. `compressed` leaves `lm_head` as it is."""
    first = {
        name: writer.state.pop(name)
        for name in list(writer.state)
        if name.startswith(("model.layers.0.", "model.layers.1."))
    }
    compressed(8, 32)(writer)
    writer.state.update(first)


def test_a_cut_between_plain_and_rounded_layers_changes_no_value(
    tmp_path: Path, prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    # Another test of this process may have read the warning.
    warn_of_exact_forms.cache_clear()
    source = ModelSource.resolve(str(write(tmp_path, "llama", last_layers_rounded).quantised))
    options = StageOptions(kernel="int8-stored", require_tags=False)
    found = []
    # The first stage of the second cut holds plain layers alone, and so does the last of the third.
    for cuts in ((), (2,), (1, source.spec.num_layers)):
        limits = list(pairwise((0, *cuts, source.spec.num_layers)))
        stages = [
            HostStage.load(source, StageAssignment(f"m{i}", *span, i == 0, i == len(limits) - 1), options)
            for i, span in enumerate(limits)
        ]
        found.append(Chain(stages).run((0, prompt(40)))[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert any("F32" in said and "exact" in said for said in caplog.messages)


def test_8_bit_products_are_offered_last_and_only_asked_for_by_name() -> None:
    assert choose_kernel("auto", 1) not in INT8_KERNELS
    assert available_kernels("auto", 1)[-3:] == list(INT8_KERNELS)
    assert available_kernels("int8-stored", 1) == ["int8-stored"]


def test_compute_joins_a_kernel_of_exact_mode() -> None:
    asked = ("auto", "exact-f32", "exact-q8", "exact-q4", "int8-q4")
    assert [computing_kernel(one, "int8") for one in asked] == [
        *("int8-stored",) * 2,
        "int8-q8",
        *("int8-q4",) * 2,
    ]
    assert computing_kernel("plain-f32", "exact") == "plain-f32"
    with pytest.raises(UsageError, match=r"compute is int8, and .model. kernel is plain-f32"):
        computing_kernel("plain-f32", "int8")
    with pytest.raises(UsageError, match="compute is 'fast', expected exact, int8 or fp8"):
        computing_kernel("auto", "fast")


@pytest.mark.parametrize("kernel", INT8_KERNELS)
def test_an_exact_computation_is_not_asked_of_a_rounding_kernel(kernel: str) -> None:
    with pytest.raises(UsageError, match=f"--compute is exact, and .model. kernel is {kernel}"):
        kernel_for(None, kernel, "exact")
    assert kernel_for(None, kernel, None) == kernel
