"""Describe linears and activations to compiled code, and run the experts of few rows there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from convoy.errors import SelfCheckError
from convoy.model.kernels.activation import ExactXielu
from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.native.activation import GATED_ACTIVATIONS, Activation, exp_library
from convoy.model.kernels.native.library import (
    ChoiceStruct,
    ExpertsStruct,
    ExpertStruct,
    LinearStruct,
    NativeLibrary,
)
from convoy.model.kernels.native.linears import MAX_F32_ROWS
from convoy.model.kernels.stored.linear import StoredLinear

# The activation of parts that are not compiled.
ELSEWHERE = Activation("elsewhere")


def gated_activation(name: str | None) -> Activation:
    """Return an MLP's activation. Raises SelfCheckError for one that compiled code does not know."""
    if name not in GATED_ACTIVATIONS:
        raise SelfCheckError(f"compiled layers have no activation {name!r}")
    return Activation(name)


def plain_activation(name: str, module: Any) -> Activation:
    """Return the activation of an MLP without a gate. Raises SelfCheckError for an unknown one.

    ``module`` is the layer's, with the numbers of an activation that learned some.
    """
    if name == "relu2":
        return Activation(name)
    if not isinstance(module, ExactXielu):
        raise SelfCheckError(f"compiled layers have no activation {name!r} without a gate")
    return module.compiled


def describe_linear(linear: Any) -> LinearStruct:
    """Return a linear in the form that compiled layers read.

    The struct is valid while the linear is alive and its weights stay in place. Raises SelfCheckError for a
    linear without a compiled form, and for one that the code of another instruction set computes.
    """
    if isinstance(linear, StoredLinear) and linear.stored is not None:
        exact, rounding = linear.stored
        _require_own(*(one.library for one in linear.stored if one is not None))
        return LinearStruct(
            stored=None if exact is None else ctypes.pointer(exact.described),
            int8=None if rounding is None else ctypes.pointer(rounding.described),
            outputs=linear.out_features,
        )
    if type(linear) is PackedLinear and linear.native is not None:
        _require_own(linear.native.library)
        return LinearStruct(f32=ctypes.pointer(linear.native.described), outputs=linear.out_features)
    raise SelfCheckError(f"compiled layers have no {type(linear).__name__} of {_shape(linear)}")


def _require_own(*libraries: NativeLibrary) -> None:
    """Raise SelfCheckError unless all are the library of compiled layers: its own code has other bits."""
    own = exp_library()
    for library in libraries:
        if library is not own:
            name, found = "none" if own is None else own.instruction_set.name, library.instruction_set.name
            raise SelfCheckError(f"compiled layers run on {name}, and this linear on {found}")


def _shape(linear: Any) -> str:
    outputs, inputs = (getattr(linear, name, "?") for name in ("out_features", "in_features"))
    return f"{outputs} x {inputs}"


class NativeExperts:
    """Compute the chosen experts of few rows, in one call."""

    max_rows = MAX_F32_ROWS

    def __init__(self, experts: Sequence[tuple[Any, Any, Any]], activation: Activation) -> None:
        """Describe the linears of each expert: gate, up and down.

        Raises SelfCheckError where nothing is compiled, and for linears and activations without a compiled
        form.
        """
        library = exp_library()
        if library is None:
            raise SelfCheckError("nothing is compiled here")
        gate = experts[0][0]
        each = (ExpertStruct * len(experts))(
            *(ExpertStruct(*map(describe_linear, linears)) for linears in experts)
        )
        self._hidden, self._between = gate.in_features, gate.out_features
        # Kept alive: compiled code has only the addresses of their weights.
        self._held = (list(experts), each)
        self._experts = ExpertsStruct(each, activation.struct, len(experts), self._hidden, self._between)
        self._library = library

    def can_run(self, numbers: torch.Tensor) -> bool:
        """Return whether so few rows are quicker here. ``numbers`` is [T, chosen]."""
        return 0 < len(numbers) <= self.max_rows

    def __call__(self, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map float32 [T, hidden] to the same shape, with int64 and float32 [T, chosen].

        Raises MemoryError.
        """
        rows, chosen = numbers.shape
        pairs, n, hidden = rows * chosen, self._between, self._hidden
        x, numbers, weights = x.contiguous(), numbers.contiguous(), weights.contiguous()
        assert x.shape == (rows, hidden)
        assert x.dtype == weights.dtype == torch.float32
        assert weights.shape == numbers.shape
        assert numbers.dtype == torch.int64
        raised, y = torch.empty(pairs, n), torch.empty(rows, hidden)
        work = torch.empty(pairs * (2 * hidden + 2 * n))
        places = torch.empty(2 * pairs, dtype=torch.int64)
        gathered, made, both = (work.data_ptr() + 4 * pairs * at for at in (0, hidden, 2 * hidden))
        choice = ChoiceStruct(
            *(x.data_ptr(), weights.data_ptr(), numbers.data_ptr()),
            *(gathered, both, raised.data_ptr(), made, y.data_ptr()),
            *(places.data_ptr(), places.data_ptr() + 8 * pairs, rows, chosen, torch.get_num_threads()),
        )
        done = self._library.convoy_experts(self._experts, choice)
        assert done >= 0, "routers choose experts that exist"
        if not done:
            raise MemoryError(f"there is no memory for the experts of {rows} rows")
        return y
