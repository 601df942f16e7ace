/* Declare activations, see `activation.c`. */

#ifndef CONVOY_ACTIVATION_H
#define CONVOY_ACTIVATION_H

#include "shared.h"

/* By the numbers of `activation.py`. ELSEWHERE: the caller computes what lies between the norm before an MLP and the one
   behind. RELU_SQUARED and XIELU have no factor. CLAMPED and LIMITED are those of GPT-OSS's and DeepSeek V4's experts. */
enum { ELSEWHERE, SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, XIELU, CLAMPED, LIMITED };

typedef struct {
  int64_t kind;
  float numbers[4];
} Activation;

INLINE int is_gated(const Activation *of) { return of->kind != RELU_SQUARED && of->kind != XIELU; }

/* Compute y[n] = activation(x) times the factor, unless that is null. `y` may be `x` or the factor. */
HIDDEN void convoy_activate_row(const Activation *of, const float *x, const float *factor, float *y, int64_t n);

/* Bound x[n] by cap * tanh(x / cap). */
HIDDEN void convoy_bound(float *x, int64_t n, float cap);

#endif
