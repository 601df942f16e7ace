/* Run the parts of a decode step that torch runs in too many calls, or too slowly for few rows.

   Every function gives the bits of the torch operators that it replaces. Each output is one chain of single
   operations, in an order that does not depend on other rows, threads or panels. The package compares the functions
   with torch on this machine before it uses one. Build with -ffp-contract=off. */

#include <float.h>
#include <math.h>

#include "activation.h"
#include "exp.h"
#include "kernels.h"

#define MOST_DIM 256
#define WAITING 128  /* inputs after which sums wait for other outputs */

/* ---- float32 linears over oneDNN's own packed weights: panels of [inputs padded to 16][64 outputs] ---- */

/* The inputs come in one or two parts, each packed by itself. A part's products are added in order, in runs of `run`.
   The runs are added in order, with the bias behind the runs of the first part. */
struct F32Linear {
  const float *weight[2];
  int64_t inputs[2], run[2];
  const float *bias;
  int64_t outputs;
};

/* Compute one run's chains, and add them to `total` if `add` is not 0. Where a panel's outputs do not all have
   registers, sums wait in memory while those of other outputs go on. */
INLINE void chain(const int rows, const float *x, int64_t stride, const float *w, int64_t n, float *total, int add) {
  const int vectors = vectors_at_once(rows, 1);
  const int64_t step = vectors == VECTORS ? n : WAITING;
  float waiting[MOST_ROWS * PANEL];
  for (int64_t from = 0; from < n; from += step)
    for (int lane = 0; lane < PANEL; lane += vectors * LANES) {
      int64_t end = least(n, from + step);
      const float *p = w + from * PANEL + lane;
      V s[MOST_ROWS][VECTORS];
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
          s[r][v] = from ? v_load(waiting + r * PANEL + lane + LANES * v) : v_set(0);
      for (int64_t k = from; k < end; k++, p += PANEL) {
        V own[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) {
          v_prefetch(rows, (const uint8_t *)p, v, 4 * LANES);
          own[v] = v_load(p + LANES * v);
        }
        UNROLL for (int r = 0; r < rows; r++) {
          V f = v_set(x[r * stride + k]);
          UNROLL for (int v = 0; v < vectors; v++) s[r][v] = v_fma(f, own[v], s[r][v]);
        }
      }
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) {
          float *t = total + r * PANEL + lane + LANES * v;
          if (end < n) v_store(waiting + r * PANEL + lane + LANES * v, s[r][v]);
          else v_store(t, add ? v_add(v_load(t), s[r][v]) : s[r][v]);
        }
    }
}
#define CHAIN(ROWS)                                                                                            \
  static void chain_##ROWS(const float *x, int64_t stride, const float *w, int64_t n, float *total, int add) { \
    chain(ROWS, x, stride, w, n, total, add);                                                                  \
  }
CHAIN(1) CHAIN(2) CHAIN(3) CHAIN(4) CHAIN(5) CHAIN(6)

typedef void (*chain_fn)(const float *, int64_t, const float *, int64_t, float *, int);
static const chain_fn chains[MOST_ROWS] = {chain_1, chain_2, chain_3, chain_4, chain_5, chain_6};

static void f32_panel(const LinearJob *job, int64_t panel, int64_t row, int64_t rows) {
  const F32Linear *l = job->linear;
  float *y = job->y + row * job->y_stride;
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

void convoy_f32_share(void *p) {
  LinearJob *job = p;
  const F32Linear *linear = job->linear;
  int64_t panel, end = num_panels(linear->outputs), passes = num_passes(job->rows);
  while ((panel = take(&job->next)) < end)
    for (int64_t pass = 0; pass < passes; pass++) {
      int64_t row = job->rows * pass / passes;
      f32_panel(job, panel, row, job->rows * (pass + 1) / passes - row);
    }
}

/* Compute y[rows][outputs] from x[rows][inputs]. Rows of x begin `stride` floats apart. */
void convoy_f32_linear(const F32Linear *linear, const float *x, int64_t stride, float *y, int64_t rows, int64_t threads) {
  LinearJob job = {linear, x, stride, y, linear->outputs, rows, 0};
  convoy_run(convoy_f32_share, &job, threads);
}

/* ---- RMS norm ---- */

static int64_t ceil_log2(int64_t n) {
  int64_t bits = 0;
  while (((int64_t)1 << bits) < n) bits++;
  return bits;
}

INLINE Eight eight(const float *x, int squared) {
  Eight v = e_load(x);
  return squared ? e_mul(v, v) : v;
}

/* Return the sum of n floats, or of their squares, in the order in which ATen adds a contiguous row (SumKernel.cpp):
   four runs of vectors of eight, side by side, in four levels. */
INLINE float row_sum(const float *x, int64_t n, int squared) {
  int64_t vectors = n / 8, steps = vectors / 4, power = ceil_log2(steps) / 4, i = 0;
  if (power < 4) power = 4;
  Eight acc[4][4];
  for (int level = 0; level < 4; level++)
    for (int k = 0; k < 4; k++) acc[level][k] = e_zero();
  while (i + ((int64_t)1 << power) <= steps) {
    for (int64_t j = 0; j < (int64_t)1 << power; j++, i++)
      for (int k = 0; k < 4; k++) acc[0][k] = e_add(acc[0][k], eight(x + 32 * i + 8 * k, squared));
    for (int level = 1; level < 4; level++) {
      for (int k = 0; k < 4; k++) {
        acc[level][k] = e_add(acc[level][k], acc[level - 1][k]);
        acc[level - 1][k] = e_zero();
      }
      if (i & ((((int64_t)1 << power) - 1) << (level * power))) break;
    }
  }
  for (; i < steps; i++)
    for (int k = 0; k < 4; k++) acc[0][k] = e_add(acc[0][k], eight(x + 32 * i + 8 * k, squared));
  for (int level = 1; level < 4; level++)
    for (int k = 0; k < 4; k++) acc[0][k] = e_add(acc[0][k], acc[level][k]);
  for (i = 4 * steps; i < vectors; i++) acc[0][0] = e_add(acc[0][0], eight(x + 8 * i, squared));
  for (int k = 1; k < 4; k++) acc[0][0] = e_add(acc[0][0], acc[0][k]);
  float total = 0, parts[8];
  for (i = 8 * vectors; i < n; i++) total += squared ? x[i] * x[i] : x[i];
  e_store(parts, acc[0][0]);
  for (int k = 0; k < 8; k++) total += parts[k];
  return total;
}

typedef struct {
  const float *x, *weight;
  float *y;
  int64_t rows, size, threads;
  float eps;
} NormJob;

float convoy_row_sum(const float *x, int64_t n, int squared) { return squared ? row_sum(x, n, 1) : row_sum(x, n, 0); }

void convoy_norm_row(const float *x, const float *weight, float eps, float *y, int64_t n) {
  float scale = 1.0f / sqrtf(row_sum(x, n, 1) / (float)n + eps);
  if (weight)
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
  else
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale;
}

static void norm_share(void *p) {
  const NormJob *job = p;
  int64_t row, end, n = job->size;
  convoy_my_part(job->threads, job->rows, &row, &end);
  for (; row < end; row++)
    convoy_norm_row(job->x + row * n, job->weight, job->eps, job->y + row * n, n);
}

/* Divide x[rows][size] by its root mean square, and multiply by the weight unless that is null. */
void convoy_norm(const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t size, int64_t threads) {
  NormJob job = {x, weight, y, rows, size, rows > 8 ? threads : 1, eps};
  convoy_run(norm_share, &job, job.threads);
}

/* ---- attention of tiles of one token, see `model.kv.packed` ---- */

enum { KV_F32, KV_BF16, KV_F16 };

/* Return numbers of a pool from element `at` on. Widening is exact. */
INLINE V load_kv(const void *pool, int64_t at, int64_t kv_dtype) {
  if (kv_dtype == KV_F32) return v_load((const float *)pool + at);
  const uint16_t *halves = (const uint16_t *)pool + at;
  return kv_dtype == KV_F16 ? v_half(halves) : v_bf16(halves);
}

/* Write numbers, made finite in the pool's type and rounded to the nearest, ties to even. */
static void store_kv(void *pool, int64_t at, int64_t kv_dtype, V x) {
  float most = kv_dtype == KV_F32 ? FLT_MAX : kv_dtype == KV_F16 ? 65504.0f : 0x1.fep127f;
  x = v_min(v_max(v_without_nan(x), v_set(-most)), v_set(most));
  if (kv_dtype == KV_F32) v_store((float *)pool + at, x);
  else if (kv_dtype == KV_F16) v_store_half((uint16_t *)pool + at, x);
  else v_store_bf16((uint16_t *)pool + at, x);
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
  convoy_write_kv(h, turned, pool, write_rows, tokens);
}

void convoy_write_kv(const Heads *h, const float *turned, void *pool, const int64_t *write_rows, int64_t tokens) {
  int64_t all = h->num_heads + 2 * h->kv_heads;
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t kv = 0; kv < 2 * h->kv_heads; kv++) {
      const float *t = turned + (token * all + h->num_heads + kv) * h->dim;
      int64_t to = write_rows[token * 2 * h->kv_heads + kv] * h->dim;
      for (int64_t i = 0; i < h->dim; i += LANES) store_kv(pool, to + i, h->kv_dtype, v_load(t + i));
    }
}

static int64_t bag_end(const Chunk *c, int64_t tile) {
  return tile + 1 < c->num_tiles ? c->bag_starts[tile + 1] : c->num_pairs;
}

/* Write as many rows of a pool as a vector has lanes, from element `first` on, as columns. */
INLINE void transpose_of(const void *pool, int64_t first, int64_t dim, float *to, int64_t kv_dtype) {
  for (int64_t d = 0; d < dim; d += LANES) {
    V a[LANES];
    UNROLL_ALL for (int i = 0; i < LANES; i++) a[i] = load_kv(pool, first + i * dim + d, kv_dtype);
    v_transpose(a);
    UNROLL_ALL for (int i = 0; i < LANES; i++) v_store(to + (d + i) * LANES, a[i]);
  }
}

static void transpose(const void *pool, int64_t first, int64_t dim, float *to, int64_t kv_dtype) {
  if (kv_dtype == KV_F32) transpose_of(pool, first, dim, to, KV_F32);
  else if (kv_dtype == KV_F16) transpose_of(pool, first, dim, to, KV_F16);
  else transpose_of(pool, first, dim, to, KV_BF16);
}

/* Compute the scores of `group` queries with the keys of a vector, given as columns. Each is a chain over the head's
   dimensions. */
static void score(const float *queries, int64_t group, int64_t dim, const float *columns, float *scores) {
  int64_t r = 0;
  for (; r + 4 <= group; r += 4) {
    V s[4] = {v_set(0), v_set(0), v_set(0), v_set(0)};
    for (int64_t d = 0; d < dim; d++) {
      V k = v_load(columns + LANES * d);
      for (int j = 0; j < 4; j++) s[j] = v_fma(v_set(queries[(r + j) * dim + d]), k, s[j]);
    }
    for (int j = 0; j < 4; j++) v_store(scores + (r + j) * KEYS, s[j]);
  }
  for (; r < group; r++) {
    V s = v_set(0);
    for (int64_t d = 0; d < dim; d++) s = v_fma(v_set(queries[r * dim + d]), v_load(columns + LANES * d), s);
    v_store(scores + r * KEYS, s);
  }
}

static void score_pair(const AttendJob *job, int64_t pair, const float *queries) {
  const Heads *h = job->heads;
  int64_t group = h->num_heads / h->kv_heads, runs = KEYS / h->block_size;
  float columns[MOST_DIM * LANES], *scores = job->shares + pair * group * KEYS;
  for (int64_t key = 0; key < KEYS; key += LANES) {
    int64_t at = job->chunk->kv_runs[pair * runs + key / h->block_size];
    transpose(job->pool, (at * h->block_size + key % h->block_size) * h->dim, h->dim, columns, h->kv_dtype);
    score(queries, group, h->dim, columns, scores + key);
  }
}

/* Give hidden keys the lowest score. */
static void hide_keys(const AttendJob *job, int64_t pair) {
  if (pair >= job->chunk->num_masked) return;
  int64_t group = job->heads->num_heads / job->heads->kv_heads;
  float *scores = job->shares + pair * group * KEYS;
  const uint8_t *hidden = job->chunk->hidden + pair * KEYS;
  for (int64_t r = 0; r < group; r++)
    for (int64_t key = 0; key < KEYS; key++)
      if (hidden[key]) scores[r * KEYS + key] = -INFINITY;
}

/* Replace the scores of a tile's row by its shares: e^x of what they are below the greatest, its sink included. */
static void raise_scores(const AttendJob *job, int64_t tile, int64_t r) {
  const Heads *h = job->heads;
  const Chunk *c = job->chunk;
  int64_t group = h->num_heads / h->kv_heads, first = c->bag_starts[tile], last = bag_end(c, tile);
  V top = v_set(-INFINITY);
  for (int64_t b = first; b < last; b++)
    for (int v = 0; v < KEYS / LANES; v++)
      top = v_max(top, v_load(job->shares + (c->bag_pairs[b] * group + r) * KEYS + LANES * v));
  float most = v_greatest(top);
  if (job->sinks) {
    float sink = job->sinks[c->query_rows[tile] % h->kv_heads * group + r];
    most = sink > most ? sink : most;
    float share[LANES];
    v_store(share, v_exp(v_set(sink - most)));
    job->sunk[tile * group + r] = share[0];
  }
  V greatest = v_set(most);
  for (int64_t b = first; b < last; b++)
    for (int v = 0; v < KEYS / LANES; v++) {
      float *s = job->shares + (c->bag_pairs[b] * group + r) * KEYS + LANES * v;
      v_store(s, v_exp(v_sub(v_load(s), greatest)));
    }
}

void convoy_shares_share(void *p) {
  const AttendJob *job = p;
  const Heads *h = job->heads;
  const Chunk *c = job->chunk;
  int64_t tile, end, group = h->num_heads / h->kv_heads, all = h->num_heads + 2 * h->kv_heads;
  convoy_my_part(job->threads, c->num_tiles, &tile, &end);
  for (; tile < end; tile++) {
    int64_t token = c->query_rows[tile] / h->kv_heads, head = c->query_rows[tile] % h->kv_heads * group;
    const float *queries = job->turned + (token * all + head) * h->dim;
    int64_t first = c->bag_starts[tile], last = bag_end(c, tile);
    for (int64_t b = first; b < last; b++) {
      score_pair(job, c->bag_pairs[b], queries);
      if (job->cap > 0) convoy_bound(job->shares + c->bag_pairs[b] * group * KEYS, group * KEYS, job->cap);
      hide_keys(job, c->bag_pairs[b]);
    }
    for (int64_t r = 0; r < group; r++) raise_scores(job, tile, r);
  }
}

/* Multiply one query's shares by the values of a key block, a vector of dimensions at a time. Each sum is a chain over
   the keys. */
INLINE void mix_pair_of(const AttendJob *job, int64_t pair, int64_t r, float *out, int64_t kv_dtype) {
  const Heads *h = job->heads;
  int64_t group = h->num_heads / h->kv_heads, runs = KEYS / h->block_size;
  const int64_t *at = job->chunk->kv_runs + (job->chunk->num_pairs + pair) * runs;
  const float *shares = job->shares + (pair * group + r) * KEYS;
  for (int64_t d = 0; d < h->dim; d += 4 * LANES) {
    int vectors = (int)least(4, (h->dim - d) / LANES);
    V s[4] = {v_set(0), v_set(0), v_set(0), v_set(0)};
    for (int64_t key = 0; key < KEYS; key++) {
      int64_t v = (at[key / h->block_size] * h->block_size + key % h->block_size) * h->dim + d;
      V f = v_set(shares[key]);
      for (int i = 0; i < vectors; i++) s[i] = v_fma(f, load_kv(job->pool, v + LANES * i, kv_dtype), s[i]);
    }
    for (int i = 0; i < vectors; i++) v_store(out + d + LANES * i, s[i]);
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
  if (job->sinks) sum += job->sunk[tile * group + r];
  for (int64_t i = 0; i < dim; i++) out[i] = total[i] / sum;
}

void convoy_mix_share(void *p) {
  const AttendJob *job = p;
  int64_t tile, end, group = job->heads->num_heads / job->heads->kv_heads;
  convoy_my_part(job->threads, job->chunk->num_tiles, &tile, &end);
  for (; tile < end; tile++)
    for (int64_t r = 0; r < group; r++)
      mix_tile(job, tile, r, job->out + (job->chunk->query_rows[tile] * group + r) * job->heads->dim);
}
