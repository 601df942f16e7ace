"""Compiled code against torch's operators, bit for bit, and what happens where there is none."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.errors import SelfCheckError, StepError
from convoy.model.backends.host.checks.attention_check import attention_holds
from convoy.model.backends.host.checks.selfcheck import check_linears
from convoy.model.kernels.linear import PackedLinear, pad_rows
from convoy.model.kernels.native import build, library
from convoy.model.kernels.native.attention import NativeGroup
from convoy.model.kernels.native.linears import MAX_F32_ROWS, f32_library
from convoy.model.kernels.native.norm import norm_library, rms_norm
from convoy.model.kernels.stored.linear import StoredLinear, float_linear
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.packed import add_in_order
from convoy.model.kernels.stored.sample import sample_range, usual_shape
from convoy.model.kv.packed import HeadShape, describe_group
from convoy.model.kv.pool import KvPool
from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row
from support.compiled import faulty, nothing_compiled
from support.tiny_models import Threads

SHAPES = ((40, 105), (44, 40), (256, 704), (704, 256), (1024, 1536), (2816, 64), (1031, 33), (2, 2))
needs_native = pytest.mark.skipif(
    library.native_library() is None, reason=f"nothing is compiled here: {library.why_no_native()}"
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def without_compiled_code(linear: PackedLinear) -> PackedLinear:
    plain = PackedLinear(*linear.dense())
    plain.leave_native()
    return plain


@needs_native
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_has_the_same_bits_beside_any_others_on_any_threads(
    width: int, outputs: int, with_bias: bool, threads: Threads
) -> None:
    linear = float_linear(numbers(outputs, width), numbers(outputs, seed=1) if with_bias else None)
    assert linear.takes_lone_rows
    x = numbers(64, width, seed=2)
    # oneDNN is the reference where it adds in the written order. With AVX2 it does not for some widths.
    has_written_order = type(linear) is PackedLinear
    expected = without_compiled_code(linear)(x) if has_written_order else linear(x)
    for count, every in ((1, range(1, 65)), (2, (1, 2, 3, 8, 17, 32, 33, 63, 64))):
        threads(count)
        for rows in every:
            start = rows % (65 - rows)
            assert torch.equal(linear(x[start : start + rows]), expected[start : start + rows])
    assert MAX_F32_ROWS < 64  # so that both were met


@needs_native
def test_products_are_added_in_the_order_of_the_inputs() -> None:
    # With few bits of each input the slow sums are rounded once.
    weight, bias, x = numbers(70, 96), numbers(70, seed=1), numbers(3, 96, seed=2).bfloat16().float()
    assert torch.equal(PackedLinear(weight, bias)(x), add_in_order(x, weight, bias))


@needs_native
def test_rows_that_do_not_lie_side_by_side_are_multiplied_as_others_are() -> None:
    linear = PackedLinear(numbers(70, 96), None)
    rounded = StoredLinear(StoredMatrix((sample_range(usual_shape("centred8", 96), 70),)), None)
    rounded.round_inputs()
    x = numbers(3, 200, seed=2)
    for of in (linear, rounded):
        assert torch.equal(of(x[:, 50:146]), of(x[:, 50:146].contiguous()))
        assert torch.equal(of(x.t()[:96].t()), of(x[:, :96].contiguous()))
        assert torch.equal(of(x[None, :, :96])[0], of(x[:, :96].contiguous()))


@needs_native
@pytest.mark.parametrize("size", [2, 40, 64, 105, 1024, 1031, 5120])
def test_a_norm_has_the_written_order_and_torchs_bits(size: int, threads: Threads) -> None:
    for compiled in library.native_libraries():
        assert norm_library(size, (compiled,)) is compiled
    x, weight = numbers(33, size), numbers(size, seed=1)
    expected = nn.functional.rms_norm(x, (size,), weight, 1e-5)
    for count in (1, 2):
        threads(count)
        for rows in (1, 2, 9, 33):
            assert torch.equal(rms_norm(x[:rows], weight, 1e-5), expected[:rows])


@needs_native
@pytest.mark.parametrize("heads", [(16, 4, 64), (4, 2, 16), (3, 3, 32), (14, 2, 64), (8, 1, 128)])
@pytest.mark.parametrize("window", [None, 70])
def test_attention_of_lone_rows_has_torchs_bits(heads: tuple[int, int, int], window: int | None) -> None:
    assert attention_holds(HeadShape(*heads, 16, 100, window, least_rows=4))


@needs_native
def test_heads_of_another_shape_than_the_batchs_are_refused_before_an_address_is_taken() -> None:
    shape = HeadShape(4, 2, 16, 16, 1)
    group = describe_group([(Row(0, 0, 1, 0), BlockTable([[0]]))], 0, shape)
    native, pool = NativeGroup(group), KvPool(1, 2, 16, 16)
    right, long = numbers(1, 8, 16), numbers(1, 8, 32)
    for heads, factors, turned in (
        (right, right, 32),
        (long, right, 16),
        (right, long, 16),
        (right[:0],) * 2 + (16,),
    ):
        with pytest.raises(StepError, match="heads come as"):
            native.attend(heads, factors, factors, turned, pool)
    assert native.attend(right, right, right, 16, pool).shape == (1, 4, 16)


@needs_native
def test_the_check_draws_the_same_numbers_each_time_and_none_of_anybody_elses() -> None:
    before = torch.get_rng_state()
    # No other test checks this window, so the answer is not kept from before.
    assert attention_holds(HeadShape(4, 2, 16, 16, 100, 71, least_rows=4))
    assert torch.equal(before, torch.get_rng_state())


@needs_native
def test_a_head_that_is_no_whole_number_of_vectors_is_left_to_torch() -> None:
    assert not attention_holds(HeadShape(4, 2, 20, 16, 100))
    assert not attention_holds(HeadShape(4, 2, 32, 8, 100))


@needs_native
def test_linears_whose_compiled_bits_differ_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = PackedLinear(numbers(70, 96), None)
    native = linear.native
    assert native is not None
    right = type(native).__call__
    with monkeypatch.context() as wrong:
        wrong.setattr(type(native), "__call__", lambda self, x: right(self, x) + 1)
        check_linears([linear])
    assert not linear.takes_lone_rows
    assert torch.equal(linear(pad_rows(numbers(1, 96)))[:1], native(numbers(1, 96)))


@needs_native
def test_parts_with_other_bits_go_to_the_next_library() -> None:
    right = list(library.native_libraries())
    parts: dict[str, Callable[[tuple[library.NativeLibrary, ...]], library.NativeLibrary | None]] = {
        "convoy_norm": partial(norm_library, 96),
        "convoy_f32_linear": partial(f32_library, 96, 64),
    }
    for name, choose in parts.items():
        wrong = faulty(right[0], name, output=3)
        assert choose((wrong, right[-1])) is right[-1]
        assert choose((wrong,)) is None


def test_without_a_compiler_torch_does_it_all_with_the_same_bits() -> None:
    weight, x = numbers(256, 704), numbers(5, 704, seed=2)
    with nothing_compiled():
        linear = PackedLinear(weight, None)
        assert not linear.takes_lone_rows
        assert library.why_no_native()
        assert not library.keeps_stored()
        assert type(float_linear(weight, None)) is PackedLinear
        assert torch.equal(linear(x), linear(torch.cat((x, x)))[:5])


WRITES_LIB = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo lib > "$2"; shift; done'


def compiler(folder: Path, script: str) -> str:
    """A program that takes a compiler's place."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    path.chmod(0o700)
    return str(path)


def test_a_compiler_that_fails_is_reported_with_its_first_line(tmp_path: Path) -> None:
    broken = compiler(
        tmp_path, '[ "$1" = --version ] && exit 0\necho "no such option" >&2; echo more >&2; exit 3'
    )
    with pytest.raises(SelfCheckError, match=r"could not compile kernels\.c: no such option"):
        build.compile_into(tmp_path / "native", broken, build.AVX512)
    assert list((tmp_path / "native").iterdir()) == []


def test_what_was_compiled_once_is_taken_from_the_cache(tmp_path: Path) -> None:
    script = f'echo x >> "$(dirname "$0")/runs"\n{WRITES_LIB}'
    fake = compiler(tmp_path, script)
    first = build.compile_into(tmp_path / "native", fake, build.AVX512)
    assert build.compile_into(tmp_path / "native", fake, build.AVX512) == first
    assert first.read_text() == "lib\n"
    assert (tmp_path / "runs").read_text().count("x") == len(
        build.SOURCES
    ) + 2  # of them one for its version, and one to link
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700


def test_members_that_start_together_compile_once(tmp_path: Path) -> None:
    script = f'echo x >> "$(dirname "$0")/runs"\n{WRITES_LIB}'
    fake = compiler(tmp_path, script)
    together = threading.Barrier(2)

    def made(_number: int) -> Path:
        together.wait(30)
        return build.compile_into(tmp_path / "native", fake, build.AVX512)

    with ThreadPoolExecutor(2) as runs:
        first, second = runs.map(made, range(2))
    assert first == second
    # Each may have asked for the compiler's version, and one has linked.
    assert (tmp_path / "runs").read_text().count("x") <= len(build.SOURCES) + 3


@pytest.mark.skipif(bool(build.missing_features(build.AVX2)), reason="nothing is compiled for this machine")
def test_the_wheels_file_is_taken_if_its_name_has_the_digest_of_the_sources(tmp_path: Path) -> None:
    shipped = replace(build.AVX2, shipped_in=tmp_path)
    (tmp_path / "kernels-of-other-sources.so").write_bytes(b"other")
    assert not shipped.prebuilt.exists()
    build.compile_to(shipped.prebuilt, [compiler(tmp_path, WRITES_LIB)], shipped)
    assert build.built_library(shipped) == shipped.prebuilt
    assert shipped.prebuilt.name == build.AVX2.prebuilt.name != build.AVX512.prebuilt.name


def test_a_library_is_on_the_disk_before_it_has_its_name_and_its_name_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "native"
    synced: list[tuple[int, list[str]]] = []

    def sync(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, [path.suffix for path in folder.iterdir()]))

    monkeypatch.setattr(os, "fsync", sync)
    made = build.compile_into(folder, compiler(tmp_path, WRITES_LIB), build.AVX512)
    assert synced == [(made.stat().st_ino, [".part"]), (folder.stat().st_ino, [".so"])]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_nothing_is_compiled_into_a_directory_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SelfCheckError, match="others may write to"):
        build.compile_into(folder, compiler(tmp_path, "exit 0"), build.AVX512)


def test_a_library_that_others_may_write_to_is_not_loaded(tmp_path: Path) -> None:
    fake = compiler(tmp_path, WRITES_LIB)
    build.compile_into(tmp_path / "native", fake, build.AVX512).chmod(0o722)
    with pytest.raises(SelfCheckError, match="others may write to"):
        build.compile_into(tmp_path / "native", fake, build.AVX512)


def test_a_directory_below_one_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    with pytest.raises(SelfCheckError, match="others may write to"):
        build.compile_into(tmp_path / "home" / "native", compiler(tmp_path, "exit 0"), build.AVX512)


def test_directories_that_are_made_are_nobody_elses_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        made = build.compile_into(
            tmp_path / "cache" / "convoy" / "native", compiler(tmp_path, WRITES_LIB), build.AVX512
        )
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in list(made.parents)[:3]] == [0o700] * 3


def test_a_user_without_a_home_directory_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "missing_features", lambda _of: [])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(build, "FOLDER", Path("~nobody-of-this-name/native"))
    with pytest.raises(SelfCheckError, match="no home directory"):
        build.built_library.__wrapped__(build.AVX2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(SelfCheckError, match="belongs to another user"):
        build.compile_into(folder, compiler(tmp_path, "exit 0"), build.AVX512)


def test_a_cpu_without_the_vectors_is_named_by_what_it_lacks(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fma avx2 avx512f avx512bw avx512vl avx512dq\n", encoding="ascii")
    found = build.missing_features(build.AVX512, info)
    assert found in (["avx512_vnni"], ["processor of x86-64"])
    assert build.missing_features(build.AVX2, info) in (["f16c"], ["processor of x86-64"])


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_an_arm_processor_is_offered_neon_alone(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert build.own_sets() == (build.NEON_I8MM, build.NEON_DOT, build.NEON)
    assert build.missing_features(build.AVX2) == ["processor of x86-64"]
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr("sys.platform", "linux")
    info.write_text("processor : 0\nFeatures : fp asimd aes\n", encoding="ascii")
    assert build.missing_features(build.NEON_I8MM, info) == ["asimddp", "i8mm"]
    assert build.missing_features(build.NEON_DOT, info) == ["asimddp"]
    assert build.missing_features(build.NEON, info) == []
    info.write_text("processor : 0\nFeatures : fp asimd asimddp svei8mm i8mm\n", encoding="ascii")
    assert build.missing_features(build.NEON_I8MM, info) == []


@pytest.mark.parametrize(
    ("says", "missing"), [("echo 1", []), ("echo 0", ["i8mm"]), ("echo unknown oid >&2; exit 1", ["i8mm"])]
)
def test_a_mac_is_asked_for_i8mm_alone(
    says: str, missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("sys.platform", "darwin")
    sysctl = tmp_path / "sysctl"
    sysctl.write_text(
        f'#!/bin/sh\n[ "$*" = "-n hw.optional.arm.FEAT_I8MM" ] || exit 2\n{says}\n', encoding="ascii"
    )
    sysctl.chmod(0o700)
    assert build.missing_features(build.NEON_I8MM, sysctl=sysctl) == missing
    assert build.missing_features(build.NEON_I8MM, sysctl=tmp_path / "none") == ["i8mm"]
    assert build.missing_features(build.NEON_DOT, sysctl=tmp_path / "none") == []


@needs_native
def test_a_better_library_that_does_not_load_is_named_once_and_the_next_one_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = library.native_library()
    assert found is not None
    used = found.instruction_set
    assert library.skipped_sets(used) == []
    broken = replace(used, name="wide", shipped_in=tmp_path)
    broken.prebuilt.write_bytes(b"a file for another processor")
    lacking = replace(broken, name="wider", needed=("none",))
    monkeypatch.setattr(library, "own_sets", lambda: (lacking, broken, used))
    assert library.native_library.__wrapped__() is found
    (said,) = library.skipped_sets(used)
    assert said.startswith("the code for wide is not used: the compiled kernels cannot be loaded: ")
    assert said.endswith(f"; that for {used.name} takes its place, and longer")
    assert caplog.messages == [said]


def test_a_processor_without_code_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with nothing_compiled():
        assert library.why_no_native() == "there is no compiled code for riscv64"
