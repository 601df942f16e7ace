"""Repeat recorded calls of the compiled code on each instruction set, and compare all that they write.

Python records on this machine what compiled code reads and writes. A program without Python repeats it:
here, and compiled for ARM under qemu.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from convoy.config.kernels import EXACT, INT8, KEPT_FORMS
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.native.activation import (
    Activation,
    exp_library,
    exp_sample,
    native_activate,
    native_apply,
)
from convoy.model.kernels.native.build import (
    INSTRUCTION_SETS,
    NEON,
    NEON_DOT,
    NEON_I8MM,
    SOURCES,
    InstructionSet,
    find_compiler,
    missing_features,
)
from convoy.model.kernels.native.formulas import FORMULAS
from convoy.model.kernels.native.library import NativeLibrary, native_library
from convoy.model.kernels.native.norm import native_norm
from convoy.model.kernels.stored.int8 import failing_int8
from convoy.model.kernels.stored.packed import failing_forms, floats_hold, kernel_holds
from convoy.model.kernels.stored.sample import usual_shape
from convoy.model.quantize.search import round_by_library, rounding_sample
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.quantised_models import Quantise, awq, gptq, mlx, write
from support.recorded import Recorder
from support.tiny_models import Chain, build_model

CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
# Processors of qemu that have the features of an instruction set, and of no better one.
PROCESSORS = {NEON_I8MM.name: "max", NEON_DOT.name: "neoverse-n1", NEON.name: "cortex-a53"}
WARNINGS = ("-Wall", "-Wextra")
TOOK_S = 600


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compiled(folder: Path, of: InstructionSet) -> list[str]:
    """Return the command that runs `replay.c` with the kernels for an instruction set."""
    is_arm = of.machine == "arm64"
    compiler = CROSS if is_arm else find_compiler()
    assert compiler is not None
    program = folder / of.name.replace(" ", "-")
    sources = [str(path) for path in (Path(__file__).with_name("replay.c"), *SOURCES)]
    done = subprocess.run(
        [compiler, "-static", *of.options, *WARNINGS, "-o", str(program), *sources, "-lm"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{of.name}: {done.stderr}"
    return [QEMU, "-cpu", PROCESSORS[of.name], str(program)] if is_arm else [str(program)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the commands by the names of the instruction sets: ARM's, and those of this machine."""
    assert shutil.which(QEMU), "tests/arm/install.sh installs qemu-user"
    folder = tmp_path_factory.mktemp("programs")
    sets = [one for one in INSTRUCTION_SETS if one.machine == "arm64" or not missing_features(one)]
    with ThreadPoolExecutor(2) as pool:
        commands = pool.map(lambda one: compiled(folder, one), sets)
        return {one.name: command for one, command in zip(sets, commands, strict=True)}


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    found = native_library()
    assert found is not None
    return found


def record_forms(recorder: Recorder, library: NativeLibrary) -> None:
    with recorder.recording():
        assert floats_hold(library)
        assert failing_forms((library,)) == []
        # Several runs, and groups that do not begin with a run.
        assert all(kernel_holds(library, usual_shape(form, 1280)) for form in sorted(KEPT_FORMS))


def record_parts(recorder: Recorder, library: NativeLibrary) -> None:
    y, rows = numbers(9, 105, seed=1), rounding_sample()
    assert exp_library() is library
    with recorder.recording():
        for size in (2, 40, 64, 105, 1031, 5120):
            native_norm(library, numbers(33, size), numbers(size, seed=1), 1e-5)
            native_norm(library, numbers(3, size), None, 1e-6)
        for function in FORMULAS:
            # `expm1` is for numbers of at most 88.
            native_apply(
                library, function, exp_sample().clamp(max=88.0 if function == "expm1" else torch.inf)
            )
        for name in ("silu", "gelu", "gelu_pytorch_tanh"):
            assert native_activate(numbers(3, 20_001), Activation(name))
            assert native_activate(y, Activation(name), numbers(9, 105))
        for bits in (4, 8):
            round_by_library(library, rows, torch.linspace(0.5, 1.5, rows.shape[1]), bits)


def record_int8(recorder: Recorder, library: NativeLibrary, folder: Path) -> None:
    with recorder.recording():
        assert failing_int8(library) == []
    record_models(recorder, folder, [("llama", gptq(4, 32), "f32")], INT8)


def build(path: Path, kind: str, dtype: torch.dtype) -> Path:
    """Write a tiny model with heads of whole vectors."""
    build_model(kind, hidden_size=64, head_dim=16).to(dtype).save_pretrained(path)
    return path


def record_models(
    recorder: Recorder,
    folder: Path,
    models: Sequence[tuple[str, torch.dtype | Quantise, str]],
    kernel: str = EXACT,
) -> None:
    """Record a prefill, decodes and a chunk of each (kind, dtype or form, dtype of K and V)."""
    for number, (kind, form, kv_dtype) in enumerate(models):
        path = folder / str(number)
        if isinstance(form, torch.dtype):
            build(path, kind, form)
        else:
            path = Path(write(path, kind, form).quantised)
        source = ModelSource.resolve(str(path))
        whole = StageAssignment("m", 0, source.spec.num_layers, embed=True, output=True)
        stage = HostStage.load(
            source, whole, StageOptions(kernel=kernel, require_tags=False, kv_dtype=kv_dtype)
        )
        torch.set_num_threads(1 + number % 3)
        chain = Chain([stage])
        with recorder.recording():
            chain.run((0, list(range(1, 71))), (1, list(range(5, 14))))
            chain.run((0, [3]))
            chain.run((0, [4]), (1, [5]))
            chain.run((0, [6, 7, 8]))
        torch.set_num_threads(1)


# Each way in which a layer is described, each form of linears that differ, and each dtype of K and V.
FLOATS = [
    ("mixed", torch.float32, "f32"),
    ("phi3", torch.bfloat16, "bf16"),
    ("gemma2", torch.float16, "f16"),
    ("cohere2", torch.bfloat16, "f32"),
    ("apertus", torch.float32, "bf16"),
    ("gpt_oss", torch.bfloat16, "f16"),
    ("qwen3_moe", torch.float32, "f32"),
]
QUANTISED = [("llama", mlx(4, 32), "f32"), ("llama", gptq(4, 32), "bf16"), ("llama", awq(32), "f16")]


@pytest.fixture(scope="module")
def recorded(
    library: NativeLibrary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[Path, Recorder]]]:
    """Return a function that records the calls of one of `SUBJECTS`, once."""
    folder, made = tmp_path_factory.mktemp("recorded"), dict[str, tuple[Path, Recorder]]()

    def record(subject: str) -> tuple[Path, Recorder]:
        if subject not in made:
            path = folder / subject
            with path.open("wb") as file, pytest.MonkeyPatch.context() as patch:
                recorder = Recorder(library, file, patch)
                SUBJECTS[subject](recorder, library, folder)
            made[subject] = path, recorder
        return made[subject]

    yield record
    for path, _ in made.values():
        path.unlink()


SUBJECTS: dict[str, Callable[[Recorder, NativeLibrary, Path], None]] = {
    "forms": lambda recorder, library, _: record_forms(recorder, library),
    "parts": lambda recorder, library, _: record_parts(recorder, library),
    "int8": lambda recorder, library, folder: record_int8(recorder, library, folder / "i"),
    "floats": lambda recorder, _, folder: record_models(recorder, folder / "f", FLOATS),
    "quantised": lambda recorder, _, folder: record_models(recorder, folder / "q", QUANTISED),
}
# The functions that a subject must reach, so that a change which avoids them is seen.
REACHED = {
    "forms": {"stored_pack", "stored_linear", "stored_unpack"},
    "parts": {"norm", "apply", "activate", "round"},
    "int8": {"int8_linear", "layers"},
    "floats": {
        "layers",
        "layer_begin",
        "layer_end",
        "rotate",
        "attend",
        "f32_linear",
        "experts",
    },
    "quantised": {"layers", "rotate", "attend", "stored_linear"},
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_byte_that_compiled_code_writes_is_the_same_on_each_instruction_set(
    subject: str, recorded: Callable[[str], tuple[Path, Recorder]], programs: dict[str, list[str]]
) -> None:
    path, recorder = recorded(subject)
    assert {name for name, count in recorder.counts.items() if count} >= REACHED[subject]
    said = {
        name: subprocess.run(
            [*command, str(path)], capture_output=True, text=True, check=False, timeout=TOOK_S
        )
        for name, command in programs.items()
    }
    for name, done in said.items():
        print(name, path.stat().st_size, done.stdout, sep="\n")
        assert done.stdout.endswith("\nequal\n"), f"{name}: {done.stdout}{done.stderr}"
    assert len({done.stdout for done in said.values()}) == 1
    assert len(said) >= 3


def test_products_of_matrices_are_those_of_i8mm(
    recorded: Callable[[str], tuple[Path, Recorder]], programs: dict[str, list[str]]
) -> None:
    path, _ = recorded("int8")
    program = programs[NEON_I8MM.name][-1]
    done = subprocess.run(
        [QEMU, "-cpu", PROCESSORS[NEON_DOT.name], program, str(path)],
        capture_output=True,
        check=False,
        timeout=TOOK_S,
    )
    assert done.returncode == -signal.SIGILL
