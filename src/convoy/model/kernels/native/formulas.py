"""Compute e^x and functions made of it by torch's operators, in the written order of docs/exact.md.

A formula has only multiplications, additions, divisions and bounds of float32, and each is rounded by itself.
Its bits therefore depend on no library, processor or place in a tensor. Compiled code has the same steps
(`exp.h`), and is compared with these functions before it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Cody and Waite's reduction ("Software Manual for the Elementary Functions", 1980, chapter 6). The first part
# of ln 2 has 16 bits, so that its products with whole numbers are exact. The parts are SLEEF's (Shibata and
# Petrogalli 2020).
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.442695, 0.69314575, 1.4286068e-06
# Numbers of this size have no fraction, so adding it rounds to the nearest whole number, ties to even.
_WHOLE = 12582912.0
# The polynomials are minimax fits of relative error, by Lawson's iteration on 4,000 Chebyshev nodes.
# p: e^s = 1 + s + s^2 p(s) for |s| <= ln(2) / 2, to 3.1e-9.
_EXP = (0.0013814599, 0.008368717, 0.04166839, 0.16666521, 0.49999994)
# p: erf(x) = x + x p(x^2) for |x| <= 0.93, to 1.7e-8.
_ERF = (-5.953742e-04, 0.0049859406, -0.02676172, 0.112816826, -0.3761248, 0.12837915)
# p: erf(x) = 1 - exp(x p(x)) for 0.92 <= x <= 4, to 3e-9.
_ERFC = (2.1398494e-04, -0.0032149556, 0.022889964, -0.10526184, -0.63571835, -1.1285144)
# From here on the first polynomial of erf ends, and from there on erf is 1.
_NEAR, _FAR = 0.925, 4.0
# Below, e^x is 0 in float32. Above, it is infinite.
_LOWEST, _HIGHEST = -104.0, 89.0


def exp(x: torch.Tensor) -> torch.Tensor:
    """Return e^x of float32 numbers. The error is at most 0.98 units in the last place."""
    whole, grown = _reduced(x.clamp(_LOWEST, _HIGHEST))
    return _scaled(grown.add_(1.0), whole)


def expm1(x: torch.Tensor) -> torch.Tensor:
    """Return e^x - 1 of float32 numbers of at most 88. The error is at most 1.6 units in the last place."""
    whole, grown = _reduced(x.clamp(min=_LOWEST))
    return _scaled(grown, whole).add_(_scaled(torch.ones_like(whole), whole).sub_(1.0))


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the tangent: tanh |x| = -m / (m + 2), where m = e^(-2 |x|) - 1.

    The error is at most 2.5 units in the last place.
    """
    below = expm1(x.abs().mul_(-2.0))
    return below.abs().div_(below + 2.0).copysign_(x)


def erf(x: torch.Tensor) -> torch.Tensor:
    """Return the error function. The error is at most 1.4 units in the last place."""
    size = x.abs()
    near = _polynomial(_ERF, x * x).mul_(x).add_(x)
    bounded = size.clamp(max=_FAR)
    beyond = exp(_polynomial(_ERFC, bounded).mul_(bounded)).neg_().add_(1.0).copysign_(x)
    return torch.where(size > _NEAR, beyond, near)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + e^x) of float32 ``x`` in float64, which the caller rounds.

    It is max(x, 0) + log(1 + u), where u = e^-|x|, and log(1 + u) = 2 artanh(u / (2 + u)) as a series.
    """
    power = exp(x.abs().neg_()).to(torch.float64)
    ratio = power / (power + 2.0)
    # The ratio is at most 1/3, so the first term that is left out is below 2^-44 of the sum.
    terms = [1.0 / (2 * k + 1) for k in reversed(range(14))]
    return _polynomial(terms, ratio * ratio).mul_(ratio).mul_(2.0).add_(x.clamp(min=0.0))


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": exp,
    "expm1": expm1,
    "tanh": tanh,
    "erf": erf,
}


def _reduced(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers q, and e^s - 1, where x = q ln 2 + s."""
    whole = x.mul(_LOG2_E).add_(_WHOLE).sub_(_WHOLE)
    rest = x.sub(whole * _LN2_HIGH).sub_(whole * _LN2_LOW)
    # No operator that multiplies and adds at once: some builds of torch round it once, and others twice.
    return whole, (rest * rest).mul_(_polynomial(_EXP, rest)).add_(rest)


def _scaled(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return x times a power of two, rounded once: the first of two products is exact."""
    exponent = whole.to(torch.int32)
    half = exponent >> 1
    first, second = (((part + 127) << 23).view(torch.float32) for part in (half, exponent - half))
    return x.mul_(first).mul_(second)


def _polynomial(factors: tuple[float, ...] | list[float], x: torch.Tensor) -> torch.Tensor:
    total = x.mul(factors[0]).add_(factors[1])
    for factor in factors[2:]:
        total.mul_(x).add_(factor)
    return total
