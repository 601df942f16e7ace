/* Run the parts of a decode step that torch runs in too many calls, or too slowly for few rows. For x86-64 with
   AVX-512.

   Every function gives the bits of the torch operators that it replaces. Each output is one chain of single
   operations, in an order that does not depend on other rows, threads or panels. The package compares the functions
   with torch on this machine before it uses one. Build with -ffp-contract=off. */

#include <float.h>
#include <immintrin.h>
#include <math.h>

#include "shared.h"

#define KEYS 64     /* keys of a key block, `model.kv.packed.KEY_BLOCK` */
#define MOST_DIM 256
#define FEW_PAIRS 4 /* starting a second thread takes longer than so few pairs */

typedef void (*parallel_fn)(share_fn, void *, unsigned, unsigned);
typedef int (*number_fn)(void);

/* Functions of the OpenMP that torch runs on. Its threads already wait for work; further threads would compete with
   them for cores. */
static parallel_fn on_threads;
static number_fn thread_number, num_threads_now;

void convoy_init(void *parallel, void *number, void *count) {
  on_threads = (parallel_fn)parallel;
  thread_number = (number_fn)number;
  num_threads_now = (number_fn)count;
}

void convoy_run(share_fn share, void *job, int64_t threads) {
  if (threads > 1) on_threads(share, job, (unsigned)threads, 0);
  else share(job);
}

/* Compute this thread's part [start, end) of `count`. `threads` is the number that the job was started with. */
static void my_part(int64_t threads, int64_t count, int64_t *start, int64_t *end) {
  int64_t number = threads > 1 ? thread_number() : 0, all = threads > 1 ? num_threads_now() : 1;
  *start = count * number / all;
  *end = count * (number + 1) / all;
}

/* ---- float32 linears over oneDNN's own packed weights: panels of [inputs padded to 16][64 outputs] ---- */

/* The inputs come in one or two parts, each packed by itself. A part's products are added in order, in runs of `run`.
   The runs are added in order, with the bias behind the runs of the first part. */
typedef struct {
  const float *weight[2];
  int64_t inputs[2], run[2];
  const float *bias;
  int64_t outputs;
} F32Linear;

/* One linear, or two of the same x with outputs side by side. */
typedef struct {
  const F32Linear *linear[2];
  const float *x;
  int64_t stride;
  float *y;
  int64_t y_stride, rows, next;
} F32Job;

#define CHAIN(ROWS)                                                                                           \
  static void chain_##ROWS(const float *x, int64_t stride, const float *w, int64_t n, float *total, int add) { \
    __m512 s[ROWS][4];                                                                                        \
    for (int r = 0; r < ROWS; r++)                                                                            \
      for (int v = 0; v < 4; v++) s[r][v] = _mm512_setzero_ps();                                              \
    for (int64_t k = 0; k < n; k++, w += PANEL) {                                                             \
      for (int v = 0; v < 4; v++) _mm_prefetch((const char *)(w + 16 * v) + AHEAD, _MM_HINT_T0);              \
      __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + 16);                                           \
      __m512 w2 = _mm512_loadu_ps(w + 32), w3 = _mm512_loadu_ps(w + 48);                                      \
      for (int r = 0; r < ROWS; r++) {                                                                        \
        __m512 f = _mm512_set1_ps(x[r * stride + k]);                                                         \
        s[r][0] = _mm512_fmadd_ps(f, w0, s[r][0]);                                                            \
        s[r][1] = _mm512_fmadd_ps(f, w1, s[r][1]);                                                            \
        s[r][2] = _mm512_fmadd_ps(f, w2, s[r][2]);                                                            \
        s[r][3] = _mm512_fmadd_ps(f, w3, s[r][3]);                                                            \
      }                                                                                                       \
    }                                                                                                         \
    for (int r = 0; r < ROWS; r++)                                                                            \
      for (int v = 0; v < 4; v++) {                                                                           \
        float *t = total + r * PANEL + 16 * v;                                                                \
        _mm512_storeu_ps(t, add ? _mm512_add_ps(_mm512_loadu_ps(t), s[r][v]) : s[r][v]);                      \
      }                                                                                                       \
  }
CHAIN(1) CHAIN(2) CHAIN(3) CHAIN(4) CHAIN(5) CHAIN(6)

typedef void (*chain_fn)(const float *, int64_t, const float *, int64_t, float *, int);
static const chain_fn chains[MOST_ROWS] = {chain_1, chain_2, chain_3, chain_4, chain_5, chain_6};

static void f32_panel(const F32Job *job, int which, int64_t panel, int64_t row, int64_t rows) {
  const F32Linear *l = job->linear[which];
  float *y = job->y + (which ? job->linear[0]->outputs : 0) + row * job->y_stride;
  const float *x = job->x + row * job->stride;
  int64_t first = panel * PANEL, width = least(PANEL, l->outputs - first);
  float total[MOST_ROWS * PANEL];
  int add = 0;
  for (int part = 0; part < 2 && l->inputs[part]; part++) {
    const float *w = l->weight[part] + panel * round_up(l->inputs[part], 16) * PANEL;
    for (int64_t k = 0; k < l->inputs[part]; k += l->run[part], add = 1)
      chains[rows - 1](x + k, job->stride, w + k * PANEL, least(l->run[part], l->inputs[part] - k), total, add);
    if (l->bias && part == 0)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < width; j++) total[r * PANEL + j] += l->bias[first + j];
    x += l->inputs[part];
  }
  for (int64_t r = 0; r < rows; r++) memcpy(y + r * job->y_stride + first, total + r * PANEL, 4 * width);
}

static void f32_share(void *p) {
  F32Job *job = p;
  int64_t panel, first = num_panels(job->linear[0]->outputs), passes = num_passes(job->rows);
  int64_t end = first + (job->linear[1] ? num_panels(job->linear[1]->outputs) : 0);
  while ((panel = take(&job->next)) < end)
    for (int64_t pass = 0; pass < passes; pass++) {
      int64_t row = job->rows * pass / passes;
      f32_panel(job, panel >= first, panel >= first ? panel - first : panel, row, job->rows * (pass + 1) / passes - row);
    }
}

/* Compute y[rows][outputs] from x[rows][inputs]. Rows of x begin `stride` floats apart. */
void convoy_f32_linear(const F32Linear *linear, const float *x, int64_t stride, float *y, int64_t rows, int64_t threads) {
  F32Job job = {{linear, 0}, x, stride, y, linear->outputs, rows, 0};
  convoy_run(f32_share, &job, threads);
}

/* ---- linears of 8-bit weights and activations: panels of [inputs padded to 16, by four][64 outputs][4] ---- */

typedef struct {
  const int8_t *weight;
  const float *scale;   /* scale of each output, over 127 */
  const int32_t *start; /* initial value of each output's sum: activations are stored with 128 added */
  const float *bias;
  int64_t inputs, outputs;
} I8Linear;

typedef struct {
  const I8Linear *linear;
  const float *x;
  int64_t stride;
  float *y;
  int64_t rows, threads, next, padded;
  uint8_t *rounded;
  float *greatest;
} I8Job;

int64_t convoy_i8_size(int64_t inputs, int64_t outputs) { return round_up(inputs, 16) * round_up(outputs, PANEL); }

/* Pack the weights. `packed` has convoy_i8_size bytes, `start` the outputs padded to 64. Both must be zeros. */
void convoy_i8_pack(const int8_t *weight, int64_t inputs, int64_t outputs, int8_t *packed, int32_t *start) {
  int64_t padded = round_up(inputs, 16);
  for (int64_t o = 0; o < outputs; o++) {
    int8_t *panel = packed + o / PANEL * padded * PANEL + o % PANEL * 4;
    int32_t sum = 0;
    for (int64_t k = 0; k < inputs; k++) {
      panel[k / 4 * 4 * PANEL + k % 4] = weight[o * inputs + k];
      sum += weight[o * inputs + k];
    }
    start[o] = -128 * sum;
  }
}

/* Round a row as `quantized.quantize_rows` does: times 127, over the greatest, to the nearest whole number. A row
   that has a NaN, or a number that becomes infinite times 127, gets the greatest NaN, so its results are NaN. */
static void round_row(const I8Job *job, int64_t row) {
  const float *x = job->x + row * job->stride;
  int64_t n = job->linear->inputs;
  __m512 greatest = _mm512_setzero_ps();
  __mmask16 none = 0; /* NaNs, which a maximum would drop */
  for (int64_t k = 0; k < n; k += 16) {
    __mmask16 mask = n - k >= 16 ? 0xffff : (__mmask16)((1u << (n - k)) - 1);
    __m512 some = _mm512_maskz_loadu_ps(mask, x + k);
    none |= _mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q);
    greatest = _mm512_max_ps(greatest, _mm512_abs_ps(some));
  }
  float top = _mm512_reduce_max_ps(greatest);
  job->greatest[row] = none || top > FLT_MAX / 127 ? NAN : top;
  __m512 most = _mm512_set1_ps(127.0f), divisor = _mm512_set1_ps(top);
  for (int64_t k = 0; k < job->padded; k += 16) {
    __mmask16 mask = n - k >= 16 ? 0xffff : (__mmask16)((1u << (n - k)) - 1);
    __m512 whole = _mm512_div_ps(_mm512_mul_ps(most, _mm512_maskz_loadu_ps(mask, x + k)), divisor);
    __m512i shifted = _mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(128));
    _mm_storeu_si128((__m128i *)(job->rounded + row * job->padded + k), _mm512_cvtepi32_epi8(shifted));
  }
}

#define DOTS(ROWS)                                                                                              \
  static void dots_##ROWS(const uint8_t *q, const int8_t *w, int64_t n, const int32_t *start, int32_t *total) { \
    __m512i s[ROWS][4];                                                                                         \
    for (int r = 0; r < ROWS; r++)                                                                              \
      for (int v = 0; v < 4; v++) s[r][v] = _mm512_loadu_si512(start + 16 * v);                                 \
    for (int64_t k = 0; k < n; k += 4, w += 4 * PANEL) {                                                        \
      for (int v = 0; v < 4; v++) _mm_prefetch((const char *)w + 64 * v + AHEAD, _MM_HINT_T0);                  \
      __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);                                      \
      __m512i w2 = _mm512_loadu_si512(w + 128), w3 = _mm512_loadu_si512(w + 192);                               \
      for (int r = 0; r < ROWS; r++) {                                                                          \
        int32_t four;                                                                                           \
        memcpy(&four, q + r * n + k, 4);                                                                        \
        __m512i f = _mm512_set1_epi32(four);                                                                    \
        s[r][0] = _mm512_dpbusd_epi32(s[r][0], f, w0);                                                          \
        s[r][1] = _mm512_dpbusd_epi32(s[r][1], f, w1);                                                          \
        s[r][2] = _mm512_dpbusd_epi32(s[r][2], f, w2);                                                          \
        s[r][3] = _mm512_dpbusd_epi32(s[r][3], f, w3);                                                          \
      }                                                                                                         \
    }                                                                                                           \
    for (int r = 0; r < ROWS; r++)                                                                              \
      for (int v = 0; v < 4; v++) _mm512_storeu_si512(total + r * PANEL + 16 * v, s[r][v]);                     \
  }
DOTS(1) DOTS(2) DOTS(3) DOTS(4) DOTS(5) DOTS(6)

typedef void (*dots_fn)(const uint8_t *, const int8_t *, int64_t, const int32_t *, int32_t *);
static const dots_fn all_dots[MOST_ROWS] = {dots_1, dots_2, dots_3, dots_4, dots_5, dots_6};

static void i8_panel(const I8Job *job, int64_t panel, int64_t row, int64_t rows) {
  const I8Linear *l = job->linear;
  int32_t total[MOST_ROWS * PANEL];
  const int8_t *w = l->weight + panel * job->padded * PANEL;
  all_dots[rows - 1](job->rounded + row * job->padded, w, job->padded, l->start + panel * PANEL, total);
  int64_t first = panel * PANEL, width = least(PANEL, l->outputs - first);
  const float *scale = l->scale + first;
  for (int64_t r = 0; r < rows; r++) {
    float *y = job->y + (row + r) * l->outputs + first, greatest = job->greatest[row + r];
    for (int64_t j = 0; j < width; j++) y[j] = (float)total[r * PANEL + j] * scale[j] * greatest;
    if (l->bias)
      for (int64_t j = 0; j < width; j++) y[j] += l->bias[first + j];
  }
}

static void round_share(void *p) {
  const I8Job *job = p;
  int64_t row, end;
  my_part(job->threads, job->rows, &row, &end);
  for (; row < end; row++) round_row(job, row);
}

static void i8_share(void *p) {
  I8Job *job = p;
  int64_t panel, end = num_panels(job->linear->outputs), passes = num_passes(job->rows);
  while ((panel = take(&job->next)) < end)
    for (int64_t pass = 0; pass < passes; pass++) {
      int64_t row = job->rows * pass / passes;
      i8_panel(job, panel, row, job->rows * (pass + 1) / passes - row);
    }
}

/* Compute as convoy_f32_linear does. Return 0 where there is no memory for the rounded rows. */
int convoy_i8_linear(const I8Linear *linear, const float *x, int64_t stride, float *y, int64_t rows, int64_t threads) {
  int64_t padded = round_up(linear->inputs, 16), before = round_up(4 * rows, 64);
  uint8_t *memory = aligned_alloc(64, before + round_up(rows * padded, 64));
  if (!memory) return 0;
  I8Job job = {linear, x, stride, y, rows, rows > 4 ? threads : 1, 0, padded, memory + before, (float *)memory};
  convoy_run(round_share, &job, job.threads);
  convoy_run(i8_share, &job, threads);
  free(memory);
  return 1;
}

/* ---- RMS norm ---- */

static int64_t ceil_log2(int64_t n) {
  int64_t bits = 0;
  while (((int64_t)1 << bits) < n) bits++;
  return bits;
}

static inline __m256 eight(const float *x, int squared) {
  __m256 v = _mm256_loadu_ps(x);
  return squared ? _mm256_mul_ps(v, v) : v;
}

/* Return the sum of n floats, or of their squares, in the order in which ATen adds a contiguous row (SumKernel.cpp):
   four runs of vectors of eight, side by side, in four levels. */
static inline __attribute__((always_inline)) float row_sum(const float *x, int64_t n, int squared) {
  int64_t vectors = n / 8, steps = vectors / 4, power = ceil_log2(steps) / 4, i = 0;
  if (power < 4) power = 4;
  __m256 acc[4][4];
  for (int level = 0; level < 4; level++)
    for (int k = 0; k < 4; k++) acc[level][k] = _mm256_setzero_ps();
  while (i + ((int64_t)1 << power) <= steps) {
    for (int64_t j = 0; j < (int64_t)1 << power; j++, i++)
      for (int k = 0; k < 4; k++) acc[0][k] = _mm256_add_ps(acc[0][k], eight(x + 32 * i + 8 * k, squared));
    for (int level = 1; level < 4; level++) {
      for (int k = 0; k < 4; k++) {
        acc[level][k] = _mm256_add_ps(acc[level][k], acc[level - 1][k]);
        acc[level - 1][k] = _mm256_setzero_ps();
      }
      if (i & ((((int64_t)1 << power) - 1) << (level * power))) break;
    }
  }
  for (; i < steps; i++)
    for (int k = 0; k < 4; k++) acc[0][k] = _mm256_add_ps(acc[0][k], eight(x + 32 * i + 8 * k, squared));
  for (int level = 1; level < 4; level++)
    for (int k = 0; k < 4; k++) acc[0][k] = _mm256_add_ps(acc[0][k], acc[level][k]);
  for (i = 4 * steps; i < vectors; i++) acc[0][0] = _mm256_add_ps(acc[0][0], eight(x + 8 * i, squared));
  for (int k = 1; k < 4; k++) acc[0][0] = _mm256_add_ps(acc[0][0], acc[0][k]);
  float total = 0, parts[8];
  for (i = 8 * vectors; i < n; i++) total += squared ? x[i] * x[i] : x[i];
  _mm256_storeu_ps(parts, acc[0][0]);
  for (int k = 0; k < 8; k++) total += parts[k];
  return total;
}

typedef struct {
  const float *x, *weight;
  float *y;
  int64_t rows, size, threads;
  float eps;
} NormJob;

/* Normalise one row. `y` may be `x`. */
static void norm_row(const float *x, const float *weight, float eps, float *y, int64_t n) {
  float scale = 1.0f / sqrtf(row_sum(x, n, 1) / (float)n + eps);
  if (weight)
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
  else
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale;
}

static void norm_share(void *p) {
  const NormJob *job = p;
  int64_t row, end, n = job->size;
  my_part(job->threads, job->rows, &row, &end);
  for (; row < end; row++)
    norm_row(job->x + row * n, job->weight, job->eps, job->y + row * n, n);
}

/* Divide x[rows][size] by its root mean square, and multiply by the weight unless that is null. */
void convoy_norm(const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t size, int64_t threads) {
  NormJob job = {x, weight, y, rows, size, rows > 8 ? threads : 1, eps};
  convoy_run(norm_share, &job, job.threads);
}

/* ---- attention of tiles of one token, see `model.kv.packed` ---- */

/* The heads of a token lie side by side, [num_heads + 2 * kv_heads][dim]: queries, keys, values. `kv_dtype` is the
   type of the numbers in the pool. */
typedef struct {
  int64_t num_heads, kv_heads, dim, rotary_dim, block_size, kv_dtype;
} Heads;

enum { KV_F32, KV_BF16, KV_F16 };

#define INLINE static inline __attribute__((always_inline))

/* Return 16 numbers of a pool from element `at` on. Widening is exact. */
INLINE __m512 load_kv(const void *pool, int64_t at, int64_t kv_dtype) {
  if (kv_dtype == KV_F32) return _mm512_loadu_ps((const float *)pool + at);
  __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)pool + at));
  if (kv_dtype == KV_F16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Write 16 numbers, made finite in the pool's type and rounded to the nearest, ties to even. */
static void store_kv(void *pool, int64_t at, int64_t kv_dtype, __m512 x) {
  float most = kv_dtype == KV_F32 ? FLT_MAX : kv_dtype == KV_F16 ? 65504.0f : 0x1.fep127f;
  x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-most)), _mm512_set1_ps(most));
  if (kv_dtype == KV_F32) {
    _mm512_storeu_ps((float *)pool + at, x);
    return;
  }
  __m256i half;
  if (kv_dtype == KV_F16) {
    half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
  }
  _mm256_storeu_si256((__m256i *)((uint16_t *)pool + at), half);
}

/* Rotate the heads [tokens][all heads]: each x times `cos`, plus the other half of its rotary part times `sin`. Then
   write keys and values to their rows of the pool. `write_rows` is [tokens][2 * kv_heads]. */
void convoy_turn(const Heads *h, const float *x, const float *cos, const float *sin, float *turned, void *pool,
                 const int64_t *write_rows, int64_t tokens) {
  int64_t all = h->num_heads + 2 * h->kv_heads, half = h->rotary_dim / 2;
  for (int64_t head = 0; head < tokens * all; head++) {
    const float *a = x + head * h->dim, *c = cos + head * h->dim, *s = sin + head * h->dim;
    float *t = turned + head * h->dim;
    for (int64_t i = 0; i < half; i++) t[i] = a[i] * c[i] + a[i + half] * s[i];
    for (int64_t i = half; i < 2 * half; i++) t[i] = a[i] * c[i] + a[i - half] * s[i];
    for (int64_t i = 2 * half; i < h->dim; i++) t[i] = a[i] * c[i] + a[i] * s[i];
  }
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t kv = 0; kv < 2 * h->kv_heads; kv++) {
      const float *t = turned + (token * all + h->num_heads + kv) * h->dim;
      int64_t to = write_rows[token * 2 * h->kv_heads + kv] * h->dim;
      for (int64_t i = 0; i < h->dim; i += 16) store_kv(pool, to + i, h->kv_dtype, _mm512_loadu_ps(t + i));
    }
}

/* The tiles and their pairs with key blocks, as `packed.TileChunk` describes them. */
typedef struct {
  const int64_t *query_rows, *kv_runs, *bag_pairs, *bag_starts;
  const uint8_t *hidden;
  int64_t num_tiles, num_pairs, num_masked, longest;
} Chunk;

typedef struct {
  const Heads *heads;
  const Chunk *chunk;
  const float *turned;
  const void *pool;
  float *shares, *out; /* [pairs][group][KEYS], and [tokens][num_heads][dim] */
  int64_t threads;
} AttendJob;

static int64_t bag_end(const Chunk *c, int64_t tile) {
  return tile + 1 < c->num_tiles ? c->bag_starts[tile + 1] : c->num_pairs;
}

/* Write 16 rows of a pool, from element `first` on, as columns: `dim` rows of 16. */
INLINE void transpose_of(const void *pool, int64_t first, int64_t dim, float *to, int64_t kv_dtype) {
  for (int64_t d = 0; d < dim; d += 16) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = load_kv(pool, first + i * dim + d, kv_dtype);
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int j = 0; j < 2; j++) {
        __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
        a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
        a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
      }
    for (int i = 0; i < 16; i += 8)
      for (int j = 0; j < 4; j++) {
        b[i + j] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0x88);
        b[i + j + 4] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0xdd);
      }
    for (int j = 0; j < 8; j++) {
      _mm512_storeu_ps(to + (d + j) * 16, _mm512_shuffle_f32x4(b[j], b[j + 8], 0x88));
      _mm512_storeu_ps(to + (d + j + 8) * 16, _mm512_shuffle_f32x4(b[j], b[j + 8], 0xdd));
    }
  }
}

static void transpose(const void *pool, int64_t first, int64_t dim, float *to, int64_t kv_dtype) {
  if (kv_dtype == KV_F32) transpose_of(pool, first, dim, to, KV_F32);
  else if (kv_dtype == KV_F16) transpose_of(pool, first, dim, to, KV_F16);
  else transpose_of(pool, first, dim, to, KV_BF16);
}

/* Compute the scores of `group` queries with 16 keys, given as columns. Each is a chain over the head's dimensions. */
static void score(const float *queries, int64_t group, int64_t dim, const float *columns, float *scores) {
  int64_t r = 0;
  for (; r + 4 <= group; r += 4) {
    __m512 s[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t d = 0; d < dim; d++) {
      __m512 k = _mm512_loadu_ps(columns + 16 * d);
      for (int j = 0; j < 4; j++) s[j] = _mm512_fmadd_ps(_mm512_set1_ps(queries[(r + j) * dim + d]), k, s[j]);
    }
    for (int j = 0; j < 4; j++) _mm512_storeu_ps(scores + (r + j) * KEYS, s[j]);
  }
  for (; r < group; r++) {
    __m512 s = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d++)
      s = _mm512_fmadd_ps(_mm512_set1_ps(queries[r * dim + d]), _mm512_loadu_ps(columns + 16 * d), s);
    _mm512_storeu_ps(scores + r * KEYS, s);
  }
}

static void score_pair(const AttendJob *job, int64_t pair, const float *queries) {
  const Heads *h = job->heads;
  int64_t group = h->num_heads / h->kv_heads, runs = KEYS / h->block_size;
  float columns[MOST_DIM * 16], *scores = job->shares + pair * group * KEYS;
  for (int64_t key = 0; key < KEYS; key += 16) {
    int64_t at = job->chunk->kv_runs[pair * runs + key / h->block_size];
    transpose(job->pool, (at * h->block_size + key % h->block_size) * h->dim, h->dim, columns, h->kv_dtype);
    score(queries, group, h->dim, columns, scores + key);
  }
  if (pair >= job->chunk->num_masked) return;
  const uint8_t *hidden = job->chunk->hidden + pair * KEYS;
  for (int64_t r = 0; r < group; r++)
    for (int64_t key = 0; key < KEYS; key++)
      if (hidden[key]) scores[r * KEYS + key] = -INFINITY;
}

static void scores_share(void *p) {
  const AttendJob *job = p;
  const Heads *h = job->heads;
  const Chunk *c = job->chunk;
  int64_t tile, end, group = h->num_heads / h->kv_heads, all = h->num_heads + 2 * h->kv_heads;
  my_part(job->threads, c->num_tiles, &tile, &end);
  for (; tile < end; tile++) {
    int64_t token = c->query_rows[tile] / h->kv_heads, head = c->query_rows[tile] % h->kv_heads * group;
    const float *queries = job->turned + (token * all + head) * h->dim;
    int64_t first = c->bag_starts[tile], last = bag_end(c, tile);
    for (int64_t b = first; b < last; b++) score_pair(job, c->bag_pairs[b], queries);
    for (int64_t r = 0; r < group; r++) {
      __m512 top = _mm512_set1_ps(-INFINITY);
      for (int64_t b = first; b < last; b++)
        for (int v = 0; v < 4; v++)
          top = _mm512_max_ps(top, _mm512_loadu_ps(job->shares + (c->bag_pairs[b] * group + r) * KEYS + 16 * v));
      __m512 greatest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
      for (int64_t b = first; b < last; b++)
        for (int v = 0; v < 4; v++) {
          float *s = job->shares + (c->bag_pairs[b] * group + r) * KEYS + 16 * v;
          _mm512_storeu_ps(s, _mm512_sub_ps(_mm512_loadu_ps(s), greatest));
        }
    }
  }
}

/* Multiply one query's shares by the values of a key block, 16 dimensions at a time. Each sum is a chain over the
   keys. */
INLINE void mix_pair_of(const AttendJob *job, int64_t pair, int64_t r, float *out, int64_t kv_dtype) {
  const Heads *h = job->heads;
  int64_t group = h->num_heads / h->kv_heads, runs = KEYS / h->block_size;
  const int64_t *at = job->chunk->kv_runs + (job->chunk->num_pairs + pair) * runs;
  const float *shares = job->shares + (pair * group + r) * KEYS;
  for (int64_t d = 0; d < h->dim; d += 64) {
    int vectors = (int)least(4, (h->dim - d) / 16);
    __m512 s[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t key = 0; key < KEYS; key++) {
      int64_t v = (at[key / h->block_size] * h->block_size + key % h->block_size) * h->dim + d;
      __m512 f = _mm512_set1_ps(shares[key]);
      for (int i = 0; i < vectors; i++) s[i] = _mm512_fmadd_ps(f, load_kv(job->pool, v + 16 * i, kv_dtype), s[i]);
    }
    for (int i = 0; i < vectors; i++) _mm512_storeu_ps(out + d + 16 * i, s[i]);
  }
}

static void mix_pair(const AttendJob *job, int64_t pair, int64_t r, float *out) {
  if (job->heads->kv_dtype == KV_F32) mix_pair_of(job, pair, r, out, KV_F32);
  else if (job->heads->kv_dtype == KV_F16) mix_pair_of(job, pair, r, out, KV_F16);
  else mix_pair_of(job, pair, r, out, KV_BF16);
}

static void mix_tile(const AttendJob *job, int64_t tile, int64_t r, float *out) {
  const Chunk *c = job->chunk;
  int64_t group = job->heads->num_heads / job->heads->kv_heads, dim = job->heads->dim;
  float part[MOST_DIM], total[MOST_DIM], sum = 0;
  memset(total, 0, sizeof total);
  for (int64_t b = c->bag_starts[tile]; b < bag_end(c, tile); b++) {
    int64_t pair = c->bag_pairs[b];
    float of_pair = row_sum(job->shares + (pair * group + r) * KEYS, KEYS, 0);
    mix_pair(job, pair, r, part);
    if (c->longest == 1) {
      sum = of_pair;
      memcpy(total, part, 4 * dim);
      continue;
    }
    sum += of_pair;
    for (int64_t i = 0; i < dim; i++) total[i] += part[i];
  }
  for (int64_t i = 0; i < dim; i++) out[i] = total[i] / sum;
}

static void mix_share(void *p) {
  const AttendJob *job = p;
  int64_t tile, end, group = job->heads->num_heads / job->heads->kv_heads;
  my_part(job->threads, job->chunk->num_tiles, &tile, &end);
  for (; tile < end; tile++)
    for (int64_t r = 0; r < group; r++)
      mix_tile(job, tile, r, job->out + (job->chunk->query_rows[tile] * group + r) * job->heads->dim);
}

/* Write the scores, minus the greatest score of each query, to `shares`. */
void convoy_scores(const Heads *heads, const Chunk *chunk, const float *turned, const void *pool, float *shares,
                   int64_t threads) {
  AttendJob job = {heads, chunk, turned, pool, shares, 0, threads};
  convoy_run(scores_share, &job, threads);
}

/* Compute `out` from `shares`, to which the caller has applied exp. */
void convoy_mix(const Heads *heads, const Chunk *chunk, const void *pool, float *shares, float *out, int64_t threads) {
  AttendJob job = {heads, chunk, 0, pool, shares, out, threads};
  convoy_run(mix_share, &job, threads);
}

/* ---- whole layers for rows of one token: attention and a gated MLP, each behind a norm and with a residual ---- */

/* Exactly one of both is set. */
/* Exactly one of the three is set. */
typedef struct {
  const F32Linear *f32;
  const I8Linear *i8;
  const StoredLinear *stored;
  int64_t outputs;
} Linear;

/* `norms` are the norms before attention and before the MLP, then those of the heads' queries and keys, or null.
   Without `up`, `gate` has the outputs of `up` behind its own. */
typedef struct {
  const float *norms[4];
  Linear qkv, out, gate, up, down;
  float eps[4];
  int64_t hidden, between;
} Layer;

/* The memory that the layers of a step share. The widths of [rows][..] are hidden, hidden, all heads, all heads, query
   heads, 2 * between and between; `shares` holds all chunks, one after the other. */
typedef struct {
  float *x, *normed, *heads, *turned, *mixed, *both, *raised, *shares;
  const float *cos, *sin;
  const int64_t *write_rows;
  const Heads *of;
  const Chunk *chunks;
  int64_t num_chunks, rows, tokens, threads;
} Work;

/* Compute a linear, and the outputs of another one of the same x behind its own. Return 0 where there is no memory. */
static int linear(Linear l, Linear beside, const float *x, int64_t stride, float *y, int64_t rows, int64_t threads) {
  if (l.i8) return convoy_i8_linear(l.i8, x, stride, y, rows, threads);
  int64_t y_stride = l.outputs + beside.outputs;
  if (!l.stored && !beside.stored) {
    F32Job job = {{l.f32, beside.f32}, x, stride, y, y_stride, rows, 0};
    convoy_run(f32_share, &job, threads);
    return 1;
  }
  const Linear *each[] = {&l, &beside};
  for (int i = 0; i < 2; y += each[i++]->outputs) {
    F32Job job = {{each[i]->f32, 0}, x, stride, y, y_stride, rows, 0};
    if (each[i]->stored) convoy_stored_linear(each[i]->stored, x, stride, y, y_stride, rows, threads);
    else if (each[i]->f32) convoy_run(f32_share, &job, threads);
  }
  return 1;
}

static const Linear nothing;

static void add(float *x, const float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

typedef struct {
  const Work *work;
  int64_t between, threads;
} ActJob;

/* Compute silu(gate) * up. `raised` holds exp(-gate) and gets the result. */
static void act_share(void *p) {
  const ActJob *job = p;
  int64_t row, end, n = job->between;
  my_part(job->threads, job->work->rows, &row, &end);
  for (; row < end; row++) {
    const float *gate = job->work->both + row * 2 * n, *up = gate + n;
    float *raised = job->work->raised + row * n;
    for (int64_t i = 0; i < n; i++) raised[i] = gate[i] / (raised[i] + 1.0f) * up[i];
  }
}

/* Finish the MLP of `before`, and begin the attention of `l`; either may be null. `x` gets the MLP's output added, and
   `shares` the scores of the attention. Return 0 where there is no memory. */
int convoy_layer_scores(const Layer *before, const Layer *l, const Work *w, void *pool) {
  int64_t rows = w->rows;
  if (before) {
    ActJob job = {w, before->between, rows > 4 ? w->threads : 1};
    convoy_run(act_share, &job, job.threads);
    if (!linear(before->down, nothing, w->raised, before->between, w->normed, rows, w->threads)) return 0;
    add(w->x, w->normed, rows * before->hidden);
  }
  if (!l) return 1;
  const Heads *of = w->of;
  int64_t all = of->num_heads + 2 * of->kv_heads, group = of->num_heads / of->kv_heads;
  convoy_norm(w->x, l->norms[0], l->eps[0], w->normed, rows, l->hidden, w->threads);
  if (!linear(l->qkv, nothing, w->normed, l->hidden, w->heads, rows, w->threads)) return 0;
  for (int64_t row = 0; row < rows && l->norms[2]; row++)
    for (int64_t head = 0; head < of->num_heads + of->kv_heads; head++) {
      float *x = w->heads + (row * all + head) * of->dim;
      int which = head < of->num_heads ? 2 : 3;
      norm_row(x, l->norms[which], l->eps[which], x, of->dim);
    }
  convoy_turn(of, w->heads, w->cos, w->sin, w->turned, pool, w->write_rows, w->tokens);
  float *shares = w->shares;
  for (const Chunk *c = w->chunks; c < w->chunks + w->num_chunks; shares += c++->num_pairs * group * KEYS)
    convoy_scores(of, c, w->turned, pool, shares, c->num_pairs > FEW_PAIRS ? w->threads : 1);
  return 1;
}

/* Go on from the scores after exp: fill `both` with gate and up, and `raised` with -gate. Return 0 as above. */
int convoy_layer_mix(const Layer *l, const Work *w, const void *pool) {
  const Heads *of = w->of;
  int64_t rows = w->rows, width = of->num_heads * of->dim, group = of->num_heads / of->kv_heads, n = l->between;
  float *shares = w->shares;
  memset(w->mixed + w->tokens * width, 0, 4 * (rows - w->tokens) * width);
  for (const Chunk *c = w->chunks; c < w->chunks + w->num_chunks; shares += c++->num_pairs * group * KEYS)
    convoy_mix(of, c, pool, shares, w->mixed, c->num_pairs > FEW_PAIRS ? w->threads : 1);
  if (!linear(l->out, nothing, w->mixed, width, w->normed, rows, w->threads)) return 0;
  add(w->x, w->normed, rows * l->hidden);
  convoy_norm(w->x, l->norms[1], l->eps[1], w->normed, rows, l->hidden, w->threads);
  if (!linear(l->gate, l->up, w->normed, l->hidden, w->both, rows, w->threads)) return 0;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < n; i++) w->raised[row * n + i] = -w->both[row * 2 * n + i];
  return 1;
}
