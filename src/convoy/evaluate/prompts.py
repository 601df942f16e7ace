"""Prompts for a certificate: drawn from a seed, in lengths around every boundary, or a person's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from convoy.errors import InputError
from convoy.model.text import Tokenizer
from convoy.plan.spec import ModelSpec

# around tiles, blocks and key blocks; the first few already differ in all of that
LENGTHS = (70, 17, 1, 40, 130, 16, 65, 3)
_SEED = 5
_REACHED_WINDOW = 1024  # the longest window for which a prompt is made longer than it
_BEYOND = 40  # tokens
_MAX_FILE_BYTES = 1 << 20


def draw_prompts(spec: ModelSpec, count: int, num_tokens: int) -> list[list[int]]:
    """``count`` prompts of random ids, the same each time; ``num_tokens`` are to fit behind each.

    Raises InputError where the model's context has no room.
    """
    room = spec.max_context - num_tokens
    if room < 1:
        raise InputError(f"{num_tokens} tokens are to be decoded, and the context has {spec.max_context}")
    windows = [window for window in _windows(spec) if window <= _REACHED_WINDOW]
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(count)]
    lengths[0] = max([lengths[0], *(window + _BEYOND for window in windows)])
    random = np.random.default_rng(_SEED)
    return [random.integers(0, spec.vocab_size, min(length, room)).tolist() for length in lengths]


def read_prompts(path: Path, tokenizer: Tokenizer, spec: ModelSpec, num_tokens: int) -> list[list[int]]:
    """One prompt per line that is not blank. Raises InputError for none, and for one that is too long."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes, expected at most {_MAX_FILE_BYTES}")
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read prompts from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}, expected lines of text") from error
    prompts = [tokenizer.encode(line) for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path} holds no prompts, expected at least one line")
    longest = max(map(len, prompts)) + num_tokens
    if longest > spec.max_context:
        raise InputError(
            f"a prompt of {path} takes {longest} tokens with its answer, the context has {spec.max_context}"
        )
    return prompts


def unreached_windows(spec: ModelSpec, prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The attention windows, in tokens, that hide nothing from any position of these prompts."""
    longest = max(map(len, prompts))
    return tuple(window for window in _windows(spec) if window >= longest)


def _windows(spec: ModelSpec) -> list[int]:
    return sorted({group.window for group in spec.cache_groups if group.window is not None})
