"""Errors about kernels name the flags that were given, or the keys of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.transcript import run_here

MODEL = "synthetic:llama-250m"


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("plan MODEL --quantize q5", "--quantize is 'q5', expected q8 or q4", "--quantize q8 rounds"),
        (
            "verify MODEL --kernel plain-f32 --compute int8",
            "--compute is int8, and --kernel is plain-f32",
            "leave out --kernel, or --compute",
        ),
        (
            "run MODEL --prompt x --kernel plain-f32 --quantize q4",
            "--quantize q4 runs the kernel exact-q4, and --kernel is plain-f32",
            "leave out --quantize, or --kernel",
        ),
        (
            "plan MODEL --config plain.toml --compute int8",
            "--compute is int8, and [model] kernel is plain-f32",
            "leave out [model] kernel, or --compute",
        ),
        (
            "plan MODEL --device gpu=cuda:12GB --quantize q4 --compute int8",
            "kernel int8-q4 does not run on cuda",
            "leave out --compute int8, or compute on cpu",
        ),
        (
            "plan MODEL --config int8.toml --device gpu=cuda:12GB",
            "kernel int8-stored does not run on cuda",
            "leave out [model] compute, or compute on cpu",
        ),
        ("plan --fit --members 1 --quantize q4", "--fit plans every form", "leave out --quantize q4"),
        ("plan --fit --members 1 --compute int8", "--fit plans every form", "leave out --compute int8"),
    ],
)
def test_an_error_names_what_the_user_gave(tmp_path: Path, command: str, message: str, hint: str) -> None:
    (tmp_path / "plain.toml").write_text('[model]\nkernel = "plain-f32"\n')
    (tmp_path / "int8.toml").write_text('[model]\ncompute = "int8"\n')
    done = run_here(command.replace("MODEL", MODEL).split(), tmp_path)
    assert done.returncode == 2
    error, advice = done.stderr.splitlines()[-2:]
    assert error.startswith(f"error: {message}")
    assert advice.startswith(f"hint: {hint}")
