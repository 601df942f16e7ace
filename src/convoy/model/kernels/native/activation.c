/* Compute the functions of `exp.h` and the activations made of them, with the bits of `formulas.py`. */

#include "activation.h"
#include "exp.h"

#define SHARE 16384 /* numbers that a thread takes at once; fewer are not worth a second thread */

/* By the numbers of `activation.py`. */
enum { EXP, EXPM1, TANH, ERF };

/* ---- functions ---- */

INLINE V function_of(const int64_t function, V x) {
  return function == EXP ? v_exp(x) : function == EXPM1 ? v_expm1(x) : function == TANH ? v_tanh(x) : v_erf(x);
}

INLINE void apply_of(const int64_t function, float *x, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) v_store(x + i, function_of(function, v_load(x + i)));
  float rest[LANES] = {0};
  memcpy(rest, x + i, 4 * (n - i));
  v_store(rest, function_of(function, v_load(rest)));
  memcpy(x + i, rest, 4 * (n - i));
}

typedef struct {
  float *x;
  int64_t n, function, next;
} ApplyJob;

static void apply_share(void *p) {
  ApplyJob *job = p;
  int64_t part;
  while ((part = take(&job->next)) * SHARE < job->n) {
    float *x = job->x + part * SHARE;
    int64_t n = least(SHARE, job->n - part * SHARE);
    switch (job->function) {
      case EXP: apply_of(EXP, x, n); break;
      case EXPM1: apply_of(EXPM1, x, n); break;
      case TANH: apply_of(TANH, x, n); break;
      case ERF: apply_of(ERF, x, n);
    }
  }
}

/* Replace x[n] by one of the functions. */
void convoy_apply(float *x, int64_t n, int64_t function, int64_t threads) {
  ApplyJob job = {x, n, function, 0};
  convoy_run(apply_share, &job, n > SHARE ? threads : 1);
}

void convoy_bound(float *x, int64_t n, float cap) {
  V most = v_set(cap);
  for (int64_t i = 0; i < n; i += LANES) v_store(x + i, v_mul(v_tanh(v_div(v_load(x + i), most)), most));
}

/* ---- activations ---- */

INLINE V v_sigmoid(V x) {
  V one = v_set(1.0f);
  return v_div(one, v_add(v_exp(v_sub(v_set(0.0f), x)), one));
}

/* Gelu's tanh form is x / (1 + e^-2u), where tanh(u) is the one in its formula. */
INLINE V activated(const Activation *of, const int64_t kind, V x, V factor) {
  const V zero = v_set(0.0f), one = v_set(1.0f);
  V limit = v_set(of->numbers[0]), lowest = v_sub(zero, limit), second = v_set(of->numbers[1]);
  switch (kind) {
    case SILU: return v_mul(v_div(x, v_add(v_exp(v_sub(zero, x)), one)), factor);
    case GELU:
      return v_mul(v_mul(x, v_mul(v_add(v_erf(v_mul(x, v_set(0.7071067811865476f))), one), v_set(0.5f))), factor);
    case GELU_TANH: {
      V inner = v_mul(v_add(v_mul(v_mul(x, x), v_set(0.044715f)), one), x);
      return v_mul(v_div(x, v_add(v_exp(v_mul(inner, v_set((float)(-2 * 0.7978845608028654)))), one)), factor);
    }
    case RELU: return v_mul(v_where_less(x, zero, zero, x), factor);
    case RELU_SQUARED: return v_where_less(x, zero, zero, v_mul(x, x));
    case XIELU: {
      V slope = v_set(of->numbers[2]), bound = v_set(of->numbers[3]), rest = v_mul(slope, x);
      V above = v_add(v_mul(v_mul(limit, x), x), rest);
      V below = v_add(v_mul(v_sub(v_expm1(v_min(bound, x)), x), second), rest);
      return v_where_less(zero, x, above, below);
    }
  }
  x = v_where_less(limit, x, limit, x);
  factor = v_where_less(limit, factor, limit, v_where_less(factor, lowest, lowest, factor));
  if (kind == LIMITED) return v_mul(factor, v_mul(x, v_sigmoid(x)));
  return v_mul(v_add(factor, one), v_mul(x, v_sigmoid(v_mul(x, second))));
}

INLINE void activate_of(const Activation *of, const int64_t kind, const float *x, const float *factor, float *y,
                        int64_t n) {
  const V one = v_set(1.0f);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    v_store(y + i, activated(of, kind, v_load(x + i), factor ? v_load(factor + i) : one));
  float rest[LANES] = {0}, by[LANES] = {0};
  memcpy(rest, x + i, 4 * (n - i));
  if (factor) memcpy(by, factor + i, 4 * (n - i));
  v_store(rest, activated(of, kind, v_load(rest), factor ? v_load(by) : one));
  memcpy(y + i, rest, 4 * (n - i));
}

void convoy_activate_row(const Activation *of, const float *x, const float *factor, float *y, int64_t n) {
  switch (of->kind) {
    case SILU: activate_of(of, SILU, x, factor, y, n); return;
    case GELU: activate_of(of, GELU, x, factor, y, n); return;
    case GELU_TANH: activate_of(of, GELU_TANH, x, factor, y, n); return;
    case RELU: activate_of(of, RELU, x, factor, y, n); return;
    case RELU_SQUARED: activate_of(of, RELU_SQUARED, x, factor, y, n); return;
    case XIELU: activate_of(of, XIELU, x, factor, y, n); return;
    case CLAMPED: activate_of(of, CLAMPED, x, factor, y, n); return;
    case LIMITED: activate_of(of, LIMITED, x, factor, y, n);
  }
}

/* Rows of x and of the factor begin `stride` and `factor_stride` floats apart, those of y side by side. */
typedef struct {
  const Activation *of;
  const float *x, *factor;
  float *y;
  int64_t stride, factor_stride, rows, width, next;
} ActivationJob;

static void activation_share(void *p) {
  ActivationJob *job = p;
  int64_t parts = (job->width + SHARE - 1) / SHARE, part;
  while ((part = take(&job->next)) < job->rows * parts) {
    int64_t row = part / parts, first = part % parts * SHARE;
    const float *factor = job->factor ? job->factor + row * job->factor_stride + first : 0;
    convoy_activate_row(job->of, job->x + row * job->stride + first, factor, job->y + row * job->width + first,
                        least(SHARE, job->width - first));
  }
}

/* Compute y = activation(x) for x[rows][width], times the factor unless that is null. `y` may be `x` or the factor. */
void convoy_activate(const Activation *of, const float *x, int64_t stride, const float *factor, int64_t factor_stride,
                     float *y, int64_t rows, int64_t width, int64_t threads) {
  ActivationJob job = {of, x, factor, y, stride, factor_stride, rows, width, 0};
  convoy_run(activation_share, &job, rows * width > SHARE ? threads : 1);
}
