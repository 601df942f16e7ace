"""Measure linears over weights in the form of a file beside float32 ones, in half a second.

`layer_speed` measures layers of float32. In exact mode a linear reads the codes of its file and unpacks them,
so its speed is another one for each form. Calls of both take turns, so other load disturbs them alike.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from convoy.config.kernels import KEPT_FORMS
from convoy.model.backends.host.layer_speed import uncached_bytes
from convoy.model.checkpoints.names import decoder_name, is_matrix
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.stored.linear import StoredLinear
from convoy.model.kernels.stored.matrix import GGUF, StoredMatrix
from convoy.model.kernels.stored.sample import Shape, sample_range, usual_shape
from convoy.model.quantize.load import stored_range
from convoy.model.quantize.search import GROUP
from convoy.plan.speed import FEW_ROWS, MANY_ROWS, Speed

_OUTPUTS, _INPUTS = 2048, 2048
# At least so many rounds and so long, for each number of rows.
_ROUNDS, _MEASURE_S = 5, 0.1
# Begins the word of weights that are rounded as they are loaded; their bits follow.
_ROUNDED = "rounded"
_HALVES = ("BF16", "F16")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")


def main_form(source: ModelSource) -> str:
    """Return the form of most weights, a word of `KEPT_FORMS`; "" for float32.

    Forms that differ in their scales alone count as the usual one of as many bits.
    """
    sizes: Counter[str] = Counter()
    for name, tensor in source.tensors.items():
        is_plain = name not in source.layout.made and source.layout.whole(name) == name
        if is_plain and is_matrix(decoder_name(name), tensor.shape):
            sizes[tensor.dtype if tensor.dtype in _HALVES else ""] += math.prod(tensor.shape)
    for whole in source.layout.made.values():
        if not is_matrix(decoder_name(whole.name), whole.shape):
            continue
        elements = math.prod(whole.shape)
        dtypes = {source.tensors[part.name].dtype for part in whole.parts.values()}
        sizes[_word(dtypes, 8 * whole.kept_bytes / elements)] += elements
    return max(sizes, key=lambda word: sizes[word], default="")


def _word(dtypes: set[str], bits: float) -> str:
    """Return the form of parts with these dtypes, which take ``bits`` for each weight; 0: not kept."""
    if not bits:
        return ""
    known = (f"{GGUF}{dtype}" for dtype in dtypes if f"{GGUF}{dtype}" in KEPT_FORMS)
    plain = (dtype for dtype in dtypes if dtype in (*_HALVES, *_FLOAT8))
    usual = min((2, 3, 4, 5, 6, 8), key=lambda one: abs(one + 0.5 - bits))
    return next(known, None) or next(plain, None) or f"affine{usual}"


def in_form(speed: Speed, form: str, *, rounds: bool = False) -> Speed:
    """Return ``speed``, which was measured with float32 linears, with linears in ``form`` instead.

    ``form`` is a word of `config.kernels.KEPT_FORMS`, or ``rounded4`` or ``rounded8`` for weights that are
    rounded as they are loaded. With ``rounds``, rows are rounded to 8 bits, as ``--compute int8`` does.
    """
    ratios, bytes_share = _compare(form, rounds=rounds)
    one, few, many = (ratios[rows] for rows in (1, FEW_ROWS, MANY_ROWS))
    return replace(
        speed,
        read_bytes_per_s=speed.read_bytes_per_s * bytes_share / one,
        flop_per_s=speed.flop_per_s / many,
        few_flop_per_s=None if speed.few_flop_per_s is None else speed.few_flop_per_s / few,
        # K/V keep their own speed.
        cache_bytes_per_s=speed.cache_bytes_per_s or speed.read_bytes_per_s,
        attention_flop_per_s=speed.attention_flop_per_s or speed.flop_per_s,
    )


@torch.inference_mode()
def _compare(form: str, *, rounds: bool) -> tuple[dict[int, float], float]:
    """Return the time over float32's by the number of rows, and the bytes over float32's."""
    weight = torch.randn(_OUTPUTS, _INPUTS)
    one = sample_range(_shape(form), _OUTPUTS)
    copied = uncached_bytes()
    plain = [PackedLinear(weight, None) for _ in range(-(-copied // (4 * weight.numel())))]
    stored = [StoredLinear(StoredMatrix((one,)), None) for _ in range(-(-copied // one.num_bytes))]
    if rounds:
        for linear in stored:
            linear.round_inputs()
    ratios = {rows: _ratio(plain, stored, torch.randn(rows, _INPUTS)) for rows in (1, FEW_ROWS, MANY_ROWS)}
    return ratios, stored[0].weight_bytes / (4 * weight.numel())


def _shape(form: str) -> Shape:
    """Return the shape of a matrix in a form, as `in_form` takes it."""
    bits = form.removeprefix(_ROUNDED)
    if bits == form:
        return usual_shape(form, _INPUTS)
    codes = torch.zeros(1, _INPUTS * int(bits) // 32, dtype=torch.int32)
    scales = torch.zeros(1, _INPUTS // GROUP, dtype=torch.bfloat16)
    return Shape.of(stored_range(codes, scales, int(bits)))


def _ratio(plain: Sequence[torch.nn.Module], stored: Sequence[torch.nn.Module], x: torch.Tensor) -> float:
    """Return the median over rounds of the seconds with ``stored`` over those with ``plain``."""
    rounds, until_s = [], time.perf_counter() + _MEASURE_S
    for before, after in zip(itertools.cycle(plain), itertools.cycle(stored), strict=False):
        times = []
        for linear in (before, after):
            began_s = time.perf_counter()
            linear(x)
            times.append(time.perf_counter() - began_s)
        rounds.append(times[1] / times[0])
        if len(rounds) >= _ROUNDS and time.perf_counter() >= until_s:
            break
    return statistics.median(rounds)
