"""Compile Convoy and the test files before workers begin, which would each compile all of them."""

from __future__ import annotations

import ast
import compileall
import importlib.util
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _write_pyc_fp, get_cache_dir, rewrite_asserts


def compile_ahead(config: pytest.Config) -> None:
    """Write the compiled form of each module that the workers of this run import.

    It takes 18 s of processor time from nothing, and four workers that do it side by side take 70.
    """
    if sys.dont_write_bytecode:
        return
    root = config.rootpath
    for folder in (root / "src", root / "tests" / "support"):
        compileall.compile_dir(folder, quiet=2, workers=0)
    stale = [file for file in _test_files(config) if not is_current(file)]
    if stale:
        with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
            list(pool.map(write_rewritten, stale, chunksize=8))


def _test_files(config: pytest.Config) -> list[Path]:
    patterns = ["conftest.py", *config.getini("python_files")]
    given = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    return [
        file
        for place in given
        for file in (place.rglob("*.py") if place.is_dir() else [place])
        if any(file.match(pattern) for pattern in patterns)
    ]


def compiled_file(file: Path) -> Path:
    """Return where pytest looks for ``file`` with its assertions rewritten."""
    return get_cache_dir(file) / (file.stem + PYC_TAIL)


def is_current(file: Path) -> bool:
    """Return whether what is kept of ``file`` was made from its present text by this Python."""
    place = compiled_file(file)
    if not place.exists():
        return False
    with place.open("rb") as kept:
        head = kept.read(16)
    digest = importlib.util.source_hash(file.read_bytes())
    return head[:4] == importlib.util.MAGIC_NUMBER and head[8:] == digest[:8]


def write_rewritten(file: Path) -> None:
    """Rewrite the assertions of ``file`` as pytest does, and keep the compiled module."""
    source = file.read_bytes()
    tree = ast.parse(source, filename=str(file))
    rewrite_asserts(tree, source, str(file))
    code = compile(tree, str(file), "exec", dont_inherit=True)
    place = compiled_file(file)
    place.parent.mkdir(exist_ok=True)
    # Another run may write the same file.
    partial = place.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as out:
        _write_pyc_fp(out, importlib.util.source_hash(source), code)
    partial.replace(place)
