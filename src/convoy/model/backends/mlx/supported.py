"""Tell whether stages on MLX run a model, from its configuration and the headers of its tensors alone.

A head asks this for members on MLX, so nothing here imports MLX.
"""

from __future__ import annotations

import re

from convoy.errors import ModelError
from convoy.model.checkpoints.formats.arrange import Composed, Plain
from convoy.model.checkpoints.formats.fp8 import WordFloats
from convoy.model.checkpoints.formats.mlx import AffineRows
from convoy.model.checkpoints.formats.mxfp4 import RowFloats, TurnedFloats
from convoy.model.checkpoints.formats.nvfp4 import GroupedFloats
from convoy.model.checkpoints.formats.unpacking import JoinedRows, Unpacking
from convoy.model.checkpoints.names import decoder_name
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.matrix import GGUF
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.registry import FAMILIES
from convoy.plan.spec.sharding import WHOLE, Shard
from convoy.wire.messages.control import StageAssignment

ON_CPU = 'set device = "cpu" for this member: its exact mode runs this model'
# The groups that `quantized_matmul` takes, best first where several fit.
GROUPS = (128, 64, 32)
# The words of activations in config.json that `layers.matrices` computes.
ACTIVATION_WORDS = frozenset({"silu", "swish", "gelu_pytorch_tanh"})
# The forms that `codes` lays out: bits of a code by form, and the types of GGUF whose groups MLX has.
CENTRED = {f"centred{bits}": bits for bits in (2, 4, 8)}
BLOCK = 32
BLOCK_FORMS = frozenset(f"{GGUF}{name}" for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K"))
# The linears of which ranks have some inputs each.
INPUT_SLICES = frozenset({"o_proj", "down_proj"})
OTHER_RANKS = "ask for another number of ranks with --ranks, or hold whole layers: --parallel pipeline"
LAYER = re.compile(r"model\.layers\.([0-9]+)\.", re.ASCII)
_ACTIVATION_KEYS = ("hidden_activation", "hidden_act")
# Codes that are small floats. `quantized_matmul` takes their codes and scales as they are.
FloatCodes = RowFloats | WordFloats | GroupedFloats
# Floats of a GGUF file.
FLOAT_FORMS = frozenset({"F32", "F16", "BF16"})
# The arrangements of which a stack of experts is taken apart again.
_STACKED = frozenset({"alternating columns", "transposed"})
# The arrangements that are unpacked: no linear multiplies by them as they are stored.
_UNPACKED = frozenset({"latents", "alternating", "less one", "one row", "taps", "decays"})


def check_supported(source: ModelSource) -> None:
    """Raise ModelError, naming the part, for a model that no stage on MLX runs. Reads no weights."""
    if reason := why_not(source):
        raise ModelError(f"{source.name} does not run on mlx: {reason}", hint=ON_CPU)


def why_not(source: ModelSource) -> str:
    """Return what no stage on MLX runs of this model, or ""."""
    spec = source.spec
    if FAMILIES[spec.family].mlx is None:
        known = ", ".join(sorted(name for name, row in FAMILIES.items() if row.mlx is not None))
        return f"model type {spec.family} has other layers than {known}"
    reader = ConfigReader(source.config, source.name)
    activation = next((word for key in _ACTIVATION_KEYS if (word := reader.word(key))), "")
    if activation and activation not in ACTIVATION_WORDS:
        return f"the activation is {activation}, expected {', '.join(sorted(ACTIVATION_WORDS))}"
    if reader.get("attn_logit_softcapping") is not None:
        return "its scores of attention have a bound (attn_logit_softcapping)"
    if spec.layer_input_size:
        return "its layers have inputs of their own, from token ids"
    if spec.kv_sources:
        return "some layers read the K/V of another"
    reasons = (_why_not_form(name, whole) for name, whole in source.layout.made.items())
    return next((reason for reason in reasons if reason), "")


def _why_not_form(name: str, whole: Unpacking) -> str:
    """Return why `quantized_matmul` does not take a stored tensor, or ""."""
    is_unpacked = isinstance(whole, Composed) and whole.arrangement in _UNPACKED
    if isinstance(whole, GroupedFloats) and "factor" in whole.parts:
        return f"{name} has a factor beside its scales, which quantized_matmul does not take"
    is_taken = isinstance(whole, FloatCodes | TurnedFloats | Plain)
    if is_unpacked or is_taken or whole.kept_form in FLOAT_FORMS:
        return ""
    # mlx-lm's stacks of experts, which are arranged in another way in `transformers`.
    is_stack = isinstance(whole, JoinedRows) and len(whole.shape) == 3
    if is_stack or (isinstance(whole, Composed) and whole.arrangement in _STACKED):
        assert isinstance(whole, JoinedRows | Composed), "both have parts"
        return next((reason for one in whole.wholes if (reason := _why_not_form(name, one))), "")
    if not isinstance(whole, AffineRows):
        return _why_not_laid_out(name, whole)
    if whole.group_size not in GROUPS:
        return f"{name} has groups of {whole.group_size}, expected {', '.join(map(str, sorted(GROUPS)))}"
    return ""


def _why_not_laid_out(name: str, whole: Unpacking) -> str:
    """Return why MLX has no form for the codes of a stored tensor, or "". Reads headers alone."""
    form, width = whole.kept_form, whole.shape[-1]
    if form not in CENTRED and form not in BLOCK_FORMS:
        kind = form or type(whole).__name__
        return f"{name} is stored in a form ({kind}) that quantized_matmul does not take"
    if not _laid_out_group(whole):
        group = _stored_group(whole)
        return f"{name} has groups of {group} in rows of {width}, expected multiples of {GROUPS[-1]}"
    return ""


def _stored_group(whole: Unpacking) -> int:
    """Return the inputs of a group in the file; 0: one scale for a row. 1: the format's own row tells it."""
    if whole.kept_form in BLOCK_FORMS:
        return BLOCK
    return int(getattr(whole, "group_size", whole.kept_group)) or whole.shape[-1]


def _laid_out_group(whole: Unpacking) -> int:
    """Return the inputs of a group as `codes` lays it out, or 0 where MLX has no such group."""
    group, width = _stored_group(whole), whole.shape[-1]
    return next((size for size in GROUPS if min(group, width) % size == 0 == width % size), 0)


def check_slices(source: ModelSource, assignment: StageAssignment, shard: Shard) -> None:
    """Raise ModelError, naming the tensor, for ranks that would cut a group of codes. Reads headers alone."""
    if shard == WHOLE:
        return
    for stored, whole in source.layout.made.items():
        name = decoder_name(stored)
        layer = LAYER.match(name)
        is_own = layer is not None and assignment.start <= int(layer[1]) < assignment.end
        is_whole = ".experts." in name and shard.experts == "whole"
        if not is_own or is_whole or name.removesuffix(".weight").rpartition(".")[2] not in INPUT_SLICES:
            continue
        width, group = _inputs_of(whole), _group_of(whole)
        if width // shard.world_size % group:
            raise ModelError(
                f"{stored} has groups of {group} codes in rows of {width}, which {shard.world_size} ranks "
                "would cut",
                hint=OTHER_RANKS,
            )


def _inputs_of(whole: Unpacking) -> int:
    """Return the inputs of a matrix, or of those in a stack, however the file turns them."""
    if isinstance(whole, Composed):
        return whole.wholes[0].shape[-1]
    return whole.shape[-2 if isinstance(whole, TurnedFloats) else -1]


def _group_of(whole: Unpacking) -> int:
    """Return how many inputs share a scale on MLX; 1 for values without codes."""
    if isinstance(whole, Composed | JoinedRows) and not isinstance(whole, Plain):
        if isinstance(whole, Composed) and whole.arrangement in _UNPACKED:
            return 1
        return _group_of(whole.wholes[0])
    if isinstance(whole, Plain) or whole.kept_form in FLOAT_FORMS:
        return 1
    if isinstance(whole, AffineRows):
        return whole.group_size
    if isinstance(whole, FloatCodes | TurnedFloats):
        return 16 if isinstance(whole, GroupedFloats) else BLOCK
    return _laid_out_group(whole)
