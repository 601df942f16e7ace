/* Compute e^x and functions made of it, by single multiplications and additions of float32. No operation is fused, so
   torch's operators give the same bits: see `formulas.py`, which has the same steps and their sources. */

#ifndef CONVOY_EXP_H
#define CONVOY_EXP_H

#include "vector.h"

/* x = q ln 2 + s, where q is a whole number, and `grown` is e^s - 1. */
typedef struct {
  V q, grown;
} Reduced;

INLINE Reduced v_reduce(V x) {
  /* Numbers of this size have no fraction, so adding it rounds to the nearest whole number, ties to even. */
  const V whole = v_set(12582912.0f);
  V q = v_sub(v_add(v_mul(x, v_set(1.442695f)), whole), whole);
  V s = v_sub(x, v_mul(q, v_set(0.69314575f)));
  s = v_sub(s, v_mul(q, v_set(1.4286068e-06f)));
  V p = v_add(v_mul(v_set(0.0013814599f), s), v_set(0.008368717f));
  p = v_add(v_mul(p, s), v_set(0.04166839f));
  p = v_add(v_mul(p, s), v_set(0.16666521f));
  p = v_add(v_mul(p, s), v_set(0.49999994f));
  return (Reduced){q, v_add(s, v_mul(v_mul(s, s), p))};
}

/* Below -104 the result is 0, and over 89 it is infinite. The second operand of a bound is its result if it is NaN. */
INLINE V v_exp(V x) {
  Reduced r = v_reduce(v_min(v_set(89.0f), v_max(v_set(-104.0f), x)));
  return v_scale(v_add(v_set(1.0f), r.grown), r.q);
}

/* Compute e^x - 1 for x of at most 88. */
INLINE V v_expm1(V x) {
  Reduced r = v_reduce(v_max(v_set(-104.0f), x));
  return v_add(v_scale(r.grown, r.q), v_sub(v_scale(v_set(1.0f), r.q), v_set(1.0f)));
}

INLINE V v_with_sign(V size, V sign) { return v_bits(i_or(v_as_int(size), i_and(v_as_int(sign), i_set(0x80000000)))); }

/* tanh |x| = -m / (m + 2), where m = e^(-2 |x|) - 1. */
INLINE V v_tanh(V x) {
  V m = v_expm1(v_mul(v_abs(x), v_set(-2.0f)));
  return v_with_sign(v_div(v_abs(m), v_add(m, v_set(2.0f))), x);
}

/* x + x p(x^2) near 0, and 1 - e^(-q(|x|)) beyond. */
INLINE V v_erf(V x) {
  V size = v_abs(x), z = v_mul(x, x), t = v_min(v_set(4.0f), size);
  V p = v_add(v_mul(v_set(-5.953742e-04f), z), v_set(0.0049859406f));
  p = v_add(v_mul(p, z), v_set(-0.02676172f));
  p = v_add(v_mul(p, z), v_set(0.112816826f));
  p = v_add(v_mul(p, z), v_set(-0.3761248f));
  p = v_add(v_mul(p, z), v_set(0.12837915f));
  V q = v_add(v_mul(v_set(2.1398494e-04f), t), v_set(-0.0032149556f));
  q = v_add(v_mul(q, t), v_set(0.022889964f));
  q = v_add(v_mul(q, t), v_set(-0.10526184f));
  q = v_add(v_mul(q, t), v_set(-0.63571835f));
  q = v_add(v_mul(q, t), v_set(-1.1285144f));
  V beyond = v_with_sign(v_sub(v_set(1.0f), v_exp(v_mul(q, t))), x);
  return v_where_less(v_set(0.925f), size, beyond, v_add(x, v_mul(x, p)));
}

#endif
