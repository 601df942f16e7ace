/* Compute e^x as SLEEF's expf does, with an error of at most 1.0 units in the last place (Shibata and Petrogalli 2020,
   sleefsimdsp.c). It has the bits of torch's `exp` where torch was built without MKL. */

#ifndef CONVOY_EXP_H
#define CONVOY_EXP_H

#include <math.h>

#include "vector.h"

INLINE V v_power_of_two(I e) { return v_bits(i_left(i_add(e, i_set(127)), 23)); }

/* x = q ln 2 + s, and e^s is a polynomial. Below -104 the result is 0, and over 100 infinite. */
INLINE V v_exp(V x) {
  I q = i_rounded(v_mul(x, v_set(1.442695040888963407f)));
  V whole = v_int(q);
  V s = v_fma(whole, v_set(-0.693145751953125f), x);
  s = v_fma(whole, v_set(-1.428606765330187045e-06f), s);
  V u = v_set(0.000198527617612853646278381f);
  u = v_fma(u, s, v_set(0.00139304355252534151077271f));
  u = v_fma(u, s, v_set(0.00833336077630519866943359f));
  u = v_fma(u, s, v_set(0.0416664853692054748535156f));
  u = v_fma(u, s, v_set(0.166666671633720397949219f));
  u = v_fma(u, s, v_set(0.5f));
  u = v_add(v_set(1.0f), v_fma(v_mul(s, s), u, s));
  /* Two steps, because 2^q may be no float32 where the result is one. */
  I half = i_halved(q);
  u = v_mul(v_mul(u, v_power_of_two(half)), v_power_of_two(i_sub(q, half)));
  u = v_where_less(x, v_set(-104.0f), v_set(0.0f), u);
  return v_where_less(v_set(100.0f), x, v_set(INFINITY), u);
}

/* Replace x[n] by e^x, with the bits of torch's `exp`: see `activation.c`. */
HIDDEN void convoy_exp(float *x, int64_t n);

#endif
