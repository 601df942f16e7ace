/* Compute e^x and the activations made of it, with the bits of `model.kernels.activation`. */

#include "exp.h"

#define SHARE 16384 /* numbers that a thread takes at once; fewer are not worth a second thread */
#define SOME 1024   /* numbers between two calls, which stay in the nearest cache */

enum { EXP, SILU, GELU_TANH };

/* MKL's e^x of n numbers. The mode asks for high accuracy, for denormal numbers, and for no errors, as torch does. */
typedef void (*mkl_fn)(int, const float *, float *, int64_t);
#define MKL_MODE (0x2 | 0x140000 | 0x100)

static mkl_fn mkl_exp;

/* Take MKL's function, or null for the one of `exp.h`. */
void convoy_use_exp(void *mkl) { mkl_exp = (mkl_fn)mkl; }

void convoy_exp(float *x, int64_t n) {
  if (mkl_exp) {
    for (int64_t i = 0; i < n; i += SHARE) mkl_exp((int)least(SHARE, n - i), x + i, x + i, MKL_MODE);
    return;
  }
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) v_store(x + i, v_exp(v_load(x + i)));
  if (i == n) return;
  float rest[LANES] = {0};
  memcpy(rest, x + i, 4 * (n - i));
  v_store(rest, v_exp(v_load(rest)));
  memcpy(x + i, rest, 4 * (n - i));
}

/* Rows of x and of the factor begin `stride` and `factor_stride` floats apart, those of y side by side. */
typedef struct {
  const float *x, *factor;
  float *y;
  int64_t stride, factor_stride, rows, width, kind, next;
} ActivationJob;

/* silu(y) = y / (1 + e^-y). Gelu's tanh form is y / (1 + e^-2u), where tanh(u) is the one in its formula. */
static void some(const ActivationJob *job, int64_t row, int64_t first, int64_t n) {
  const float *x = job->x + row * job->stride + first;
  float *y = job->y + row * job->width + first, raised[SOME];
  const float slope = -2 * 0.7978845608028654, cube = 0.044715;
  if (job->kind == EXP) memcpy(raised, x, 4 * n);
  else if (job->kind == SILU)
    for (int64_t i = 0; i < n; i++) raised[i] = -x[i];
  else
    for (int64_t i = 0; i < n; i++) raised[i] = (x[i] * x[i] * cube + 1.0f) * x[i] * slope;
  convoy_exp(raised, n);
  const float *factor = job->factor ? job->factor + row * job->factor_stride + first : 0;
  if (job->kind == EXP) memcpy(y, raised, 4 * n);
  else if (factor)
    for (int64_t i = 0; i < n; i++) y[i] = x[i] / (raised[i] + 1.0f) * factor[i];
  else
    for (int64_t i = 0; i < n; i++) y[i] = x[i] / (raised[i] + 1.0f);
}

static void activation_share(void *p) {
  ActivationJob *job = p;
  int64_t parts = (job->width + SHARE - 1) / SHARE, part;
  while ((part = take(&job->next)) < job->rows * parts) {
    int64_t first = part % parts * SHARE, end = least(job->width, first + SHARE);
    for (; first < end; first += SOME) some(job, part / parts, first, least(SOME, end - first));
  }
}

/* Compute y = activation(x) for x[rows][width], times the factor unless that is null; e^x has none. `y` may be `x` or
   the factor. */
void convoy_activate(const float *x, int64_t stride, const float *factor, int64_t factor_stride, float *y, int64_t rows,
                     int64_t width, int64_t kind, int64_t threads) {
  ActivationJob job = {x, factor, y, stride, factor_stride, rows, width, kind, 0};
  convoy_run(activation_share, &job, rows * width > SHARE ? threads : 1);
}
