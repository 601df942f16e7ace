"""Describe decoder layers to compiled code, from their modules and their family's `LayerForm`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.native.activation import Activation
from convoy.model.kernels.native.library import LayerStruct, LinearStruct, NormStruct
from convoy.model.kernels.native.norm import norm_library
from convoy.model.layers.compiled import (
    ELSEWHERE,
    describe_linear,
    gated_activation,
    plain_activation,
)
from convoy.model.layers.exact import ExactAttention, ExactMlp, ExactNorm
from convoy.model.layers.experts import ExactExperts
from convoy.plan.spec.family import LayerForm

# The numbers of `layers.c`.
_NO_NORM, _RMS_NORM, _MEAN_NORM = range(3)
_SPREAD, _HALVES, _PAIRS, _PAIRS_APART, _UNTURNED = range(5)
_ROTATIONS = {"halves": _HALVES, "pairs": _PAIRS, "pairs apart": _PAIRS_APART}
# The modules of attention as the library has it. Another module would be work that compiled code leaves out.
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
# Modules that do nothing when a model is not trained.
_IDLE = (nn.Dropout, nn.Identity)


class LayerDescription:
    """Hold one layer in the structs that compiled code reads.

    They have the addresses of the layer's weights, and are valid while these stay in place. Raises
    SelfCheckError, with the reason, for layers with parts that compiled code does not know.
    """

    def __init__(self, layer: Any, form: LayerForm, *, has_window: bool) -> None:
        attention = layer.self_attn
        _check_parts(layer, form)
        norms = [_norm(getattr(layer, name, None), form) if name else NormStruct() for name in form.norms]
        # The bound that tanh puts on scores.
        cap: float | None = None
        scale, sinks = 1.0, None
        if type(attention) is ExactAttention:
            if attention.gate is not None:
                raise SelfCheckError("compiled layers have no gate behind attention")
            qkv, out = [attention.qkv], attention.out
            self.rotation, sinks = _SPREAD, attention.sinks
        else:
            qkv, out = _library_linears(attention)
            turns = getattr(attention, "use_rope", True) and (has_window or not form.full_unturned)
            self.rotation = _ROTATIONS[form.rotation] if turns else _UNTURNED
            cap, scale = getattr(attention, "attn_logit_softcapping", None), float(attention.scaling)
        self.has_sinks = sinks is not None
        # The linears of an MLP, or the module that runs instead of one.
        self.activation, mlp, self.between, self.elsewhere = _feed_forward(layer.mlp)
        # Linears of one output, for example, have no compiled form, and give a lone row other bits.
        self.pads_rows = self.elsewhere is not None and not all(
            part.takes_lone_rows for part in self.elsewhere.modules() if isinstance(part, PackedLinear)
        )
        self.hidden = int(qkv[0].in_features)
        heads = [_norm_of_heads(attention, name, form) for name in ("q_norm", "k_norm")]
        missing = [LinearStruct()] * (3 - len(qkv))
        self.struct = LayerStruct(
            (NormStruct * 6)(*norms, *heads),
            (LinearStruct * 3)(*map(describe_linear, qkv), *missing),
            *(describe_linear(out), *mlp),
            *(None if sinks is None else sinks.data_ptr(), self.activation.struct),
            *(self.hidden, self.between, self.rotation, form.parallel),
            *(scale, float(getattr(layer, "residual_multiplier", 1.0)), cap or 0.0),
        )
        self.pointer = ctypes.pointer(self.struct)
        # Kept alive with everything below it.
        self.layer = layer
        kinds = tuple((norm.kind, norm.size, norm.step) for norm in (*norms, *heads))
        parts = tuple(type(part) for part in (attention, layer.mlp))
        # Layers that are alike in it run the same code.
        self.alike = (
            kinds,
            self.rotation,
            cap,
            self.has_sinks,
            self.activation.name,
            self.between,
            parts,
        )

    @property
    def is_spread(self) -> bool:
        """Return whether the rotation's factors are laid out over all heads."""
        return self.rotation == _SPREAD

    def rotary_dim(self, cos: torch.Tensor) -> int:
        """Return the number of dimensions of a head that turn by factors ``cos``."""
        return int(self.layer.self_attn.rotary_dim if self.is_spread else cos.shape[-1])

    def run_elsewhere(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the output of the experts for normalised rows [T, hidden]."""
        assert self.elsewhere is not None, "the MLP is compiled"
        found = self.elsewhere(rows[None])
        # Some families return their router's scores beside it.
        made: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return made[0]


def _check_parts(layer: Any, form: LayerForm) -> None:
    """Check that the layer has the parts of its form, and no others."""
    known = {"self_attn", "mlp", *form.norms} - {""}
    found = {name for name, part in layer.named_children() if not isinstance(part, _IDLE)}
    own = [name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
    if found != known or own:
        odd = sorted(found ^ known) or own
        raise SelfCheckError(
            f"compiled layers have other parts than {type(layer).__name__}: {', '.join(odd)}"
        )


def _library_linears(attention: Any) -> tuple[list[Any], Any]:
    parts = {name for name, part in attention.named_children() if not isinstance(part, _IDLE)}
    if not parts <= _ATTENTION_PARTS or list(attention.parameters(recurse=False)):
        raise SelfCheckError(f"compiled layers have no parts of {type(attention).__name__}")
    if getattr(attention.config, "clip_qkv", None) is not None:
        raise SelfCheckError("compiled layers do not clip queries, keys and values")
    return [attention.q_proj, attention.k_proj, attention.v_proj], attention.o_proj


def _norm(norm: Any, form: LayerForm) -> NormStruct:
    """Describe a norm of whole rows, or of all heads at once."""
    weight = getattr(norm, "weight", None)
    if weight is None or norm_library(weight.shape[-1]) is None:
        raise SelfCheckError(f"compiled layers have no {type(norm).__name__}")
    if not form.mean_norms:
        if type(norm) is not ExactNorm:
            raise SelfCheckError(f"compiled layers have no {type(norm).__name__}")
        return NormStruct(weight.data_ptr(), _RMS_NORM, weight.shape[-1], 0, norm.eps)
    # A matrix has a weight for each head.
    step = weight.shape[-1] if weight.ndim > 1 else 0
    return NormStruct(weight.data_ptr(), _MEAN_NORM, weight.shape[-1], step, norm.variance_epsilon)


def _norm_of_heads(attention: Any, name: str, form: LayerForm) -> NormStruct:
    norm = getattr(attention, name, None)
    return NormStruct() if norm is None else _norm(norm, form)


def _feed_forward(mlp: Any) -> tuple[Activation, tuple[LinearStruct, ...], int, nn.Module | None]:
    """Return an MLP's activation, its linears gate, up and down, and their width; or the module that runs."""
    if type(mlp) is ExactMlp:
        linears = describe_linear(mlp.gate), describe_linear(mlp.up), describe_linear(mlp.down)
        return gated_activation(mlp.gate.activation), linears, mlp.gate.out_features, None
    if {"up_proj", "down_proj"} == {name for name, _ in mlp.named_children()} - {"act_fn"}:
        activation = plain_activation(str(mlp.config.hidden_act), mlp.act_fn)
        linears = describe_linear(mlp.up_proj), LinearStruct(), describe_linear(mlp.down_proj)
        return activation, linears, mlp.up_proj.out_features, None
    if any(isinstance(part, ExactExperts) for part in mlp.modules()):
        return ELSEWHERE, (LinearStruct(), LinearStruct(), LinearStruct()), 0, mlp
    raise SelfCheckError(f"compiled layers have no {type(mlp).__name__}")
