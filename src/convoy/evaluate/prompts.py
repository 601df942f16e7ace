"""Make prompts for a certificate: text for models that read, random ids for others, or a person's own text.

On ids that no text would have, a trained model's logits are as hard to compute as they get. The library's
float32 is then further from its own float64 than a certificate allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from convoy.errors import InputError
from convoy.model.text.tokens import Tokenizer
from convoy.plan.spec.model import ModelSpec

_REMEDY = "give a file with one prompt on each line"

# Lengths around the sizes of tiles, blocks and key blocks. The first few already differ in all of these.
LENGTHS = (70, 17, 1, 40, 130, 16, 65, 3)
TEXTS = (
    "Once upon a time there was a quick fox who lived by the river. Every morning she went to the market, "
    "where a goat sold apples, bread and lamps. One day the goat was not there. The fox asked everybody, but "
    "nobody knew where he had gone.",
    "What is 27+58? Answer with just the number.",
    "The",
    "A long time ago, in a small town by the sea, people told each other the same story every evening.",
    "def add(first, second):\n    return first + second\n",
    "Red, green and",
    "My friend asked me which animals sleep at night, which of them sleep in the day, and which do not sleep "
    "at all. I said: cats sleep when they like, owls sleep in the day, and fish sleep with open eyes. She "
    "laughed, and wrote it all down in her little book, with a picture of each animal beside its name.",
    "Monday, Tuesday, Wednesday,",
)
_SEED = 5
# The longest window that the first prompt is made to exceed.
_REACHED_WINDOW = 1024
# By this many tokens.
_BEYOND = 40
_MAX_FILE_BYTES = 1 << 20


def text_prompts(tokenizer: Tokenizer, spec: ModelSpec, count: int, num_tokens: int) -> list[list[int]]:
    """Return the ids of the first ``count`` of `TEXTS`. The first repeats until it is longer than short
    windows.

    Each prompt leaves room for ``num_tokens``. Raises InputError if the model's context has no room, or if
    the tokeniser makes no token of a text.
    """
    room = _room(spec, num_tokens)
    prompts = [_encoded(tokenizer, text) for text in TEXTS[:count]]
    while len(prompts[0]) < min(_least_first(spec), room):
        prompts[0] += prompts[0]
    return [prompt[:room] for prompt in prompts]


def draw_prompts(spec: ModelSpec, count: int, num_tokens: int) -> list[list[int]]:
    """Return ``count`` prompts of random ids of `LENGTHS`, the same each time; else as `text_prompts`."""
    room = _room(spec, num_tokens)
    lengths = list(LENGTHS[:count])
    lengths[0] = max(lengths[0], _least_first(spec))
    random = np.random.default_rng(_SEED)
    return [random.integers(0, spec.vocab_size, min(length, room)).tolist() for length in lengths]


def read_prompts(path: Path, tokenizer: Tokenizer, spec: ModelSpec, num_tokens: int) -> list[list[int]]:
    """Return one prompt per line that is not blank.

    Raises InputError for none, and for one that is too long.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes, expected at most {_MAX_FILE_BYTES}")
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read prompts from {path}: {error.strerror}", hint=_REMEDY) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 at byte {error.start}, expected lines of text", hint=_REMEDY
        ) from error
    prompts = [_encoded(tokenizer, line) for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path} holds no prompts, expected at least one line", hint=_REMEDY)
    longest = max(map(len, prompts)) + num_tokens
    if longest > spec.max_context:
        raise InputError(
            f"a prompt of {path} takes {longest} tokens with its answer, the context has {spec.max_context}"
        )
    return prompts


def unreached_windows(spec: ModelSpec, prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the attention windows, in tokens, that hide nothing from any position of these prompts."""
    longest = max(map(len, prompts))
    return tuple(window for window in _windows(spec) if window >= longest)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError(f"the tokeniser makes no token of a text of {len(text)} characters")
    return ids


def _room(spec: ModelSpec, num_tokens: int) -> int:
    room = spec.max_context - num_tokens
    if room < 1:
        raise InputError(f"{num_tokens} tokens are to be decoded, and the context has {spec.max_context}")
    return room


def _least_first(spec: ModelSpec) -> int:
    return max((window + _BEYOND for window in _windows(spec) if window <= _REACHED_WINDOW), default=1)


def _windows(spec: ModelSpec) -> list[int]:
    return sorted({group.window for group in spec.cache_groups if group.window is not None})
