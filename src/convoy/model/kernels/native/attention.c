/* Compute attention over tiles of queries and blocks of 64 keys, in the order of docs/exact.md. Keys and values are
   read in place. Tiles of many queries have one query in each lane, and those of few queries one key. A sum's order is
   the same with both, so tiles and threads change no bit. */

#include <float.h>
#include <math.h>

#include "activation.h"
#include "attention.h"
#include "exp.h"

#define RUN 16               /* keys that lie side by side in a pool, at least */
#define MOST_FEW (LANES == 16 ? 8 : 4) /* queries of a part with a key in each lane; more have a query in each */
#define SQUARES 4            /* vectors of keys that become columns together */
#define TILE (QUERY_VECTORS * LANES) /* queries of a part */
#define LONG 64      /* key blocks: the scores of so many queries would leave the caches with more */
#define FEW_PAIRS 4  /* starting a second thread takes longer than so few pairs */

/* ---- pools ---- */

INLINE V load_kv(const void *pool, int64_t at, int64_t kv_dtype) {
  if (kv_dtype == KV_F32) return v_load((const float *)pool + at);
  const uint16_t *half = (const uint16_t *)pool + at;
  return kv_dtype == KV_F16 ? v_half(half) : v_bf16(half);
}

/* Write numbers, made finite in the pool's type and rounded to the nearest, ties to even. */
INLINE void store_kv(void *pool, int64_t at, int64_t kv_dtype, V x) {
  V most = v_set(kv_dtype == KV_F32 ? FLT_MAX : kv_dtype == KV_F16 ? 65504.0f : 0x1.fep127f);
  x = v_min(v_max(v_without_nan(x), v_sub(v_set(0.0f), most)), most);
  if (kv_dtype == KV_F32) v_store((float *)pool + at, x);
  else if (kv_dtype == KV_F16) v_store_half((uint16_t *)pool + at, x);
  else v_store_bf16((uint16_t *)pool + at, x);
}

/* The keys or values of a block: runs of 16 rows, each row `stride` numbers behind the one before. */
typedef struct {
  const void *runs[KEYS / RUN];
  int64_t stride;
} Block;

INLINE Block find_block(const Shape *h, const void *pool, const int64_t *runs, int64_t stride) {
  Block block = {{0}, stride};
  for (int64_t key = 0; key < KEYS; key += RUN) {
    int64_t at = (runs[key / h->block_size] * h->block_size + key % h->block_size) * stride;
    block.runs[key / RUN] = (const char *)pool + at * (h->kv_dtype == KV_F32 ? 4 : 2);
  }
  return block;
}

/* Return `width` numbers of each row as float32, which is exact. Shorter numbers are widened into `wide`. */
INLINE Block widened(const Shape *h, Block block, int64_t width, float *wide) {
  if (h->kv_dtype == KV_F32) return block;
  for (int64_t run = 0; run < KEYS / RUN; run++) {
    float *to = wide + run * RUN * width;
    for (int64_t row = 0; row < RUN; row++)
      for (int64_t i = 0; i < width; i += LANES) {
        int64_t at = row * block.stride + i;
        V x = h->kv_dtype == KV_F16 ? load_kv(block.runs[run], at, KV_F16) : load_kv(block.runs[run], at, KV_BF16);
        v_store(to + row * width + i, x);
      }
    block.runs[run] = to;
  }
  block.stride = width;
  return block;
}

typedef struct {
  const Shape *shape;
  const float *x, *cos, *sin;
  int64_t rotary_dim;
  float *turned;
  void *pool;
  const int64_t *write_rows;
  int64_t tokens, threads;
} RotateJob;

static void rotate_share(void *p) {
  const RotateJob *job = p;
  const Shape *h = job->shape;
  int64_t token, end, all = h->num_heads + 2 * h->kv_heads, half = job->rotary_dim / 2;
  convoy_my_part(job->threads, job->tokens, &token, &end);
  for (; token < end; token++)
    for (int64_t head = token * all; head < (token + 1) * all; head++) {
      const float *a = job->x + head * h->dim, *c = job->cos + head * h->dim, *s = job->sin + head * h->dim;
      float *t = job->turned + head * h->dim;
      for (int64_t i = 0; i < half; i++) t[i] = a[i] * c[i] + a[i + half] * s[i];
      for (int64_t i = half; i < 2 * half; i++) t[i] = a[i] * c[i] + a[i - half] * s[i];
      for (int64_t i = 2 * half; i < h->dim; i++) t[i] = a[i] * c[i] + a[i] * s[i];
      int64_t kv = head - token * all - h->num_heads;
      if (kv < 0) continue;
      int64_t to = job->write_rows[token * 2 * h->kv_heads + kv] * h->dim;
      for (int64_t i = 0; i < h->dim; i += LANES) store_kv(job->pool, to + i, h->kv_dtype, v_load(t + i));
    }
}

/* Rotate the heads [tokens][all heads]: each x times `cos`, plus the other half of its rotary part times `sin`. Then
   write keys and values to their rows of the pool, which is a joined one. `write_rows` is [tokens][2 * kv_heads]. */
void convoy_rotate(const Shape *shape, const float *x, const float *cos, const float *sin, int64_t rotary_dim,
                   float *turned, void *pool, const int64_t *write_rows, int64_t tokens, int64_t threads) {
  RotateJob job = {shape, x, cos, sin, rotary_dim, turned, pool, write_rows, tokens, tokens > 4 ? threads : 1};
  convoy_run(rotate_share, &job, job.threads);
}

/* ---- tiles ---- */

/* Some queries of a tile, the rows [first, first + count) of [tile_tokens][group], and those of the tile's key blocks
   that one of them sees. */
typedef struct {
  const Attention *a;
  const Tiles *tiles;
  int64_t tile, first, count, first_block, blocks;
  float *memory;
} Part;

INLINE int64_t group_of(const Shape *h) { return h->num_heads / h->kv_heads; }

/* Return the dimensions of a head that are added one after the other. The sums of such runs are added in order. */
INLINE int64_t run_of(int64_t dim) {
  if (dim <= 192) return dim;
  return dim <= 384 ? (dim + 1) / 2 : 192;
}

INLINE int64_t num_blocks(const Tiles *c, int64_t tile) {
  return (tile + 1 < c->num_tiles ? c->bag_starts[tile + 1] : c->num_pairs) - c->bag_starts[tile];
}

INLINE int64_t pair_of(const Part *p, int64_t block) {
  return p->tiles->bag_pairs[p->tiles->bag_starts[p->tile] + p->first_block + block];
}

/* Return a query's place among all [tokens][num_heads], or -1 where it is padding: a repeated last token. */
INLINE int64_t place_of(const Part *p, int64_t row) {
  int64_t group = group_of(p->a->shape), token = row / group;
  const int64_t *rows = p->tiles->query_rows + p->tile * p->tiles->tile_tokens;
  return token && rows[token] == rows[token - 1] ? -1 : rows[token] * group + row % group;
}

INLINE const float *query_of(const Part *p, int64_t row) {
  int64_t place = place_of(p, row), heads = p->a->shape->num_heads;
  return p->a->queries + place / heads * p->a->stride + place % heads * p->a->shape->dim;
}

INLINE Block find_keys(const Part *p, int64_t block) {
  const Shape *h = p->a->shape;
  const int64_t *runs = p->tiles->kv_runs + pair_of(p, block) * (KEYS / h->block_size);
  return find_block(h, p->a->keys, runs, h->dim);
}

INLINE Block find_values(const Part *p, int64_t block) {
  const Shape *h = p->a->shape;
  int64_t pair = pair_of(p, block) + (h->joined ? p->tiles->num_pairs : 0);
  const int64_t *runs = p->tiles->kv_runs + pair * (KEYS / h->block_size);
  return find_block(h, p->a->values, runs, h->value_stride);
}

/* Tell whether no query sees a key of the block. */
static int is_hidden(const Part *p, int64_t block) {
  int64_t pair = pair_of(p, block), group = group_of(p->a->shape);
  if (pair >= p->tiles->num_masked) return 0;
  const uint8_t *hidden = p->tiles->hidden + pair * p->tiles->tile_tokens * KEYS;
  int64_t first = p->first / group, end = (p->first + p->count - 1) / group + 1;
  return !memchr(hidden + first * KEYS, 0, (end - first) * KEYS);
}

/* Leave out the blocks in front and behind that add only zeros. */
static void trim(Part *p) {
  while (p->blocks > 1 && is_hidden(p, p->blocks - 1)) p->blocks--;
  for (; p->blocks > 1 && is_hidden(p, 0); p->blocks--) p->first_block++;
}

/* Hide the keys that a query must not see. The scores of query `row` begin at `row * by_row`, those of a key at
   `key * by_key`. */
static void hide(const Part *p, int64_t block, float *scores, int64_t by_row, int64_t by_key) {
  int64_t pair = pair_of(p, block), group = group_of(p->a->shape);
  if (pair >= p->tiles->num_masked) return;
  const uint8_t *hidden = p->tiles->hidden + pair * p->tiles->tile_tokens * KEYS;
  for (int64_t row = 0; row < p->count; row++) {
    const uint8_t *of_row = hidden + (p->first + row) / group * KEYS;
    for (int64_t key = 0; key < KEYS; key++)
      if (of_row[key]) scores[row * by_row + key * by_key] = -INFINITY;
  }
}

/* ---- few queries: one key in each lane ---- */

/* Compute the scores of `rows` queries with some vectors of keys, given as columns, [vectors][dim][LANES]. Each is a
   chain over a run of the head's dimensions, and the runs are added. */
INLINE void few_scores(const float *const *queries, int64_t dim, const float *columns, float *scores, const int rows,
                       const int vectors) {
  for (int64_t run = run_of(dim), first = 0; first < dim; first += run) {
    V s[4][SQUARES];
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < vectors; v++) s[r][v] = v_set(0.0f);
    for (int64_t d = first; d < least(dim, first + run); d++)
      UNROLL for (int v = 0; v < vectors; v++) {
        V k = v_load(columns + (v * dim + d) * LANES);
        UNROLL for (int r = 0; r < rows; r++) s[r][v] = v_fma(v_set(queries[r][d]), k, s[r][v]);
      }
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < vectors; v++) {
        float *to = scores + r * KEYS + v * LANES;
        v_store(to, first ? v_add(v_load(to), s[r][v]) : s[r][v]);
      }
  }
}

INLINE void few_scores_of(const float *const *queries, int64_t dim, const float *columns, float *scores,
                          const int rows) {
  const int vectors = rows <= 2 ? SQUARES : SQUARES / 2;
  for (int v = 0; v < SQUARES; v += vectors)
    few_scores(queries, dim, columns + v * dim * LANES, scores + v * LANES, rows, vectors);
}

INLINE void few_block_scores(const Part *p, int64_t block, const float *const *queries, float *scores, float *columns,
                             const int64_t kv_dtype) {
  Block keys = find_keys(p, block);
  int64_t dim = p->a->shape->dim;
  for (int64_t key = 0; key < KEYS; key += SQUARES * LANES) {
    for (int64_t v = 0, at = key; v < SQUARES; v++, at += LANES)
      for (int64_t d = 0; d < dim; d += LANES) {
        V square[LANES];
        UNROLL_ALL for (int i = 0; i < LANES; i++)
          square[i] = load_kv(keys.runs[at / RUN], (at % RUN + i) * keys.stride + d, kv_dtype);
        v_transpose(square);
        UNROLL_ALL for (int i = 0; i < LANES; i++) v_store(columns + (v * dim + d + i) * LANES, square[i]);
      }
    int64_t r = 0;
    for (; r + 4 <= p->count; r += 4) few_scores_of(queries + r, dim, columns, scores + r * KEYS + key, 4);
    for (; r + 2 <= p->count; r += 2) few_scores_of(queries + r, dim, columns, scores + r * KEYS + key, 2);
    if (r < p->count) few_scores_of(queries + r, dim, columns, scores + r * KEYS + key, 1);
  }
  if (p->a->cap > 0) convoy_bound(scores, p->count * KEYS, p->a->cap);
  hide(p, block, scores, KEYS, 1);
}

/* Add a block's 64 shares in the order in which ATen adds them: four runs of vectors of eight, then these, then their
   lanes. */
INLINE float few_sum(const float *x) {
  float lanes[8], total = 0;
  Eight run[4];
  for (int k = 0; k < 4; k++) run[k] = e_add(e_load(x + 8 * k), e_load(x + 32 + 8 * k));
  e_store(lanes, e_add(e_add(e_add(run[0], run[1]), run[2]), run[3]));
  for (int k = 0; k < 8; k++) total += lanes[k];
  return total;
}

/* Add to `out` the products of `rows` queries' shares and some vectors of a block's values. Each is a chain over the
   keys. */
INLINE void few_mix(const float *shares, const Block *values, int64_t d, float *out, int64_t width, const int rows,
                    const int vectors, const int64_t kv_dtype) {
  V s[4][4];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < vectors; v++) s[r][v] = v_set(0.0f);
  for (int64_t run = 0; run < KEYS / RUN; run++)
    for (int64_t key = run * RUN, at = d; key < (run + 1) * RUN; key++, at += values->stride)
      UNROLL for (int v = 0; v < vectors; v++) {
        V x = load_kv(values->runs[run], at + LANES * v, kv_dtype);
        UNROLL for (int r = 0; r < rows; r++) s[r][v] = v_fma(v_set(shares[r * KEYS + key]), x, s[r][v]);
      }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) {
      float *to = out + r * width + d + LANES * v;
      v_store(to, v_add(v_load(to), s[r][v]));
    }
}

INLINE void few_mix_rows(const float *shares, const Block *values, float *out, int64_t width, const int rows,
                         const int64_t kv_dtype) {
  int64_t d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES) few_mix(shares, values, d, out, width, rows, 4, kv_dtype);
  for (; d < width; d += LANES) few_mix(shares, values, d, out, width, rows, 1, kv_dtype);
}

/* Return the greatest score of a query, with that of its sink. */
static float few_greatest(const Part *p, int64_t row, const float *scores, const float *sink) {
  V top = v_set(sink ? *sink : -INFINITY);
  for (int64_t b = 0; b < p->blocks; b++)
    for (int64_t key = 0; key < KEYS; key += LANES)
      top = v_max(top, v_load(scores + (b * p->count + row) * KEYS + key));
  float lanes[LANES], greatest = -INFINITY;
  v_store(lanes, top);
  for (int k = 0; k < LANES; k++) greatest = lanes[k] > greatest || isnan(lanes[k]) ? lanes[k] : greatest;
  return greatest;
}

static const float *sink_of(const Part *p, int64_t row) {
  const float *sinks = p->a->sinks;
  return sinks ? sinks + place_of(p, p->first + row) % p->a->shape->num_heads : 0;
}

INLINE void attend_few_of(const Part *p, const int64_t kv_dtype) {
  const Shape *h = p->a->shape;
  int64_t n = p->count, width = h->value_dim;
  float *scores = p->memory, *columns = scores + p->blocks * n * KEYS, *total = columns + SQUARES * h->dim * LANES;
  float greatest[MOST_FEW], sum[MOST_FEW] = {0};
  const float *queries[MOST_FEW];
  for (int64_t r = 0; r < n; r++) queries[r] = query_of(p, p->first + r);
  for (int64_t b = 0; b < p->blocks; b++) few_block_scores(p, b, queries, scores + b * n * KEYS, columns, kv_dtype);
  for (int64_t r = 0; r < n; r++) greatest[r] = few_greatest(p, r, scores, sink_of(p, r));
  for (int64_t b = 0; b < p->blocks; b++)
    for (int64_t r = 0; r < n; r++) {
      float *s = scores + (b * n + r) * KEYS;
      for (int64_t key = 0; key < KEYS; key += LANES)
        v_store(s + key, v_exp(v_sub(v_load(s + key), v_set(greatest[r]))));
    }
  memset(total, 0, 4 * n * width);
  for (int64_t b = 0; b < p->blocks; b++) {
    const float *shares = scores + b * n * KEYS;
    Block values = find_values(p, b);
    for (int64_t r = 0; r < n; r++) sum[r] += few_sum(shares + r * KEYS);
    int64_t r = 0;
    for (; r + 4 <= n; r += 4) few_mix_rows(shares + r * KEYS, &values, total + r * width, width, 4, kv_dtype);
    for (; r + 2 <= n; r += 2) few_mix_rows(shares + r * KEYS, &values, total + r * width, width, 2, kv_dtype);
    if (r < n) few_mix_rows(shares + r * KEYS, &values, total + r * width, width, 1, kv_dtype);
  }
  for (int64_t r = 0; r < n; r++) {
    float *out = p->a->out + place_of(p, p->first + r) * width;
    if (p->a->sinks) {
      float share[LANES];
      v_store(share, v_exp(v_set(*sink_of(p, r) - greatest[r])));
      sum[r] += share[0];
    }
    for (int64_t i = 0; i < width; i++) out[i] = total[r * width + i] / sum[r];
  }
}

static void attend_few(const Part *p) {
  if (p->a->shape->kv_dtype == KV_F32) attend_few_of(p, KV_F32);
  else if (p->a->shape->kv_dtype == KV_F16) attend_few_of(p, KV_F16);
  else attend_few_of(p, KV_BF16);
}

/* ---- many queries: one query in each lane, so everything lies as columns, [..][vectors * LANES] ---- */

/* Compute the scores of `keys` keys over `dim` dimensions, each one chain, and add them to earlier ones. */
INLINE void many_scores(const float *columns, const float *key, int64_t stride, int64_t dim, float *scores,
                        const int add, const int vectors, const int keys) {
  V s[8][4];
  UNROLL for (int k = 0; k < keys; k++)
    UNROLL for (int v = 0; v < vectors; v++) s[k][v] = v_set(0.0f);
  for (int64_t d = 0; d < dim; d++, columns += vectors * LANES) {
    V q[4];
    UNROLL for (int v = 0; v < vectors; v++) q[v] = v_load(columns + v * LANES);
    UNROLL for (int k = 0; k < keys; k++) {
      V x = v_set(key[k * stride + d]);
      UNROLL for (int v = 0; v < vectors; v++) s[k][v] = v_fma(q[v], x, s[k][v]);
    }
  }
  UNROLL for (int k = 0; k < keys; k++)
    UNROLL for (int v = 0; v < vectors; v++) {
      float *to = scores + (k * vectors + v) * LANES;
      v_store(to, add ? v_add(v_load(to), s[k][v]) : s[k][v]);
    }
}

/* Multiply shares by `dims` dimensions of a block's values, and add to `total`. Each product is a chain over the
   keys. */
INLINE void many_mix(const float *shares, const Block *values, int64_t d, float *total, const int vectors,
                     const int dims) {
  V s[8][4];
  UNROLL for (int i = 0; i < dims; i++)
    UNROLL for (int v = 0; v < vectors; v++) s[i][v] = v_set(0.0f);
  for (int64_t run = 0; run < KEYS / RUN; run++) {
    const float *value = (const float *)values->runs[run] + d;
    for (int64_t key = 0; key < RUN; key++, value += values->stride, shares += vectors * LANES) {
      V p[4];
      UNROLL for (int v = 0; v < vectors; v++) p[v] = v_load(shares + v * LANES);
      UNROLL for (int i = 0; i < dims; i++) {
        V x = v_set(value[i]);
        UNROLL for (int v = 0; v < vectors; v++) s[i][v] = v_fma(p[v], x, s[i][v]);
      }
    }
  }
  UNROLL for (int i = 0; i < dims; i++)
    UNROLL for (int v = 0; v < vectors; v++) {
      float *to = total + ((d + i) * vectors + v) * LANES;
      v_store(to, v_add(v_load(to), s[i][v]));
    }
}

/* Subtract the greatest scores, and leave shares. Add each query's shares to `sum`, in the order of `few_sum`. */
INLINE void many_shares(float *scores, const float *greatest, float *sum, const int vectors) {
  const int64_t step = vectors * LANES;
  for (int64_t key = 0; key < KEYS; key++)
    for (int v = 0; v < vectors; v++) {
      float *s = scores + key * step + v * LANES;
      v_store(s, v_exp(v_sub(v_load(s), v_load(greatest + v * LANES))));
    }
  for (int v = 0; v < vectors; v++) {
    const float *s = scores + v * LANES;
    V total = v_set(0.0f);
    for (int64_t lane = 0; lane < 8; lane++) {
      V part = v_add(v_load(s + lane * step), v_load(s + (lane + 32) * step));
      for (int64_t key = lane + 8; key < 32; key += 8)
        part = v_add(part, v_add(v_load(s + key * step), v_load(s + (key + 32) * step)));
      total = v_add(total, part);
    }
    v_store(sum + v * LANES, v_add(v_load(sum + v * LANES), total));
  }
}

/* Write the queries as columns, [dim][vectors * LANES]. Lanes without a query are zero. */
static void gather_queries(const Part *p, float *columns, int64_t vectors) {
  int64_t dim = p->a->shape->dim;
  for (int64_t v = 0; v < vectors; v++) {
    const float *rows[LANES];
    for (int64_t i = 0; i < LANES; i++) {
      int64_t row = v * LANES + i;
      rows[i] = row < p->count ? query_of(p, p->first + row) : 0;
    }
    for (int64_t d = 0; d < dim; d += LANES) {
      V square[LANES];
      for (int i = 0; i < LANES; i++) square[i] = rows[i] ? v_load(rows[i] + d) : v_set(0.0f);
      v_transpose(square);
      for (int i = 0; i < LANES; i++) v_store(columns + ((d + i) * vectors + v) * LANES, square[i]);
    }
  }
}

/* Divide `total`, which has columns, and write the rows. */
static void scatter_rows(const Part *p, const float *total, const float *sum, int64_t vectors) {
  int64_t width = p->a->shape->value_dim;
  for (int64_t v = 0; v < vectors; v++) {
    V divisor = v_load(sum + v * LANES);
    for (int64_t d = 0; d < width; d += LANES) {
      V square[LANES];
      for (int i = 0; i < LANES; i++) square[i] = v_div(v_load(total + ((d + i) * vectors + v) * LANES), divisor);
      v_transpose(square);
      for (int64_t i = 0; i < LANES && v * LANES + i < p->count; i++)
        v_store(p->a->out + place_of(p, p->first + v * LANES + i) * width + d, square[i]);
    }
  }
}

INLINE void attend_many_of(const Part *p, const int vectors) {
  const Shape *h = p->a->shape;
  const int64_t step = vectors * LANES, of_block = KEYS * step, run = run_of(h->dim);
  const int at_once = vectors <= 2 ? 8 : 4;
  float *scores = p->memory, *columns = scores + p->blocks * of_block, *total = columns + h->dim * step;
  float *wide = total + h->value_dim * step, greatest[TILE], sink[TILE], sum[TILE] = {0};
  gather_queries(p, columns, vectors);
  for (int64_t r = 0; r < step; r++) sink[r] = p->a->sinks && r < p->count ? *sink_of(p, r) : -INFINITY;
  memcpy(greatest, sink, sizeof greatest);
  for (int64_t b = 0; b < p->blocks; b++) {
    float *s = scores + b * of_block;
    Block keys = widened(h, find_keys(p, b), h->dim, wide);
    for (int64_t key = 0; key < KEYS; key += at_once) {
      const float *row = (const float *)keys.runs[key / RUN] + key % RUN * keys.stride;
      float *to = s + key * step;
      many_scores(columns, row, keys.stride, run, to, 0, vectors, at_once);
      for (int64_t d = run, n; d < h->dim; d += n) {
        n = least(run, h->dim - d);
        many_scores(columns + d * step, row + d, keys.stride, n, to, 1, vectors, at_once);
      }
    }
    if (p->a->cap > 0) convoy_bound(s, of_block, p->a->cap);
    hide(p, b, s, 1, step);
    for (int v = 0; v < vectors; v++) {
      V top = v_load(greatest + v * LANES);
      for (int64_t key = 0; key < KEYS; key++) top = v_max(top, v_load(s + key * step + v * LANES));
      v_store(greatest + v * LANES, top);
    }
  }
  memset(total, 0, 4 * h->value_dim * step);
  for (int64_t b = 0; b < p->blocks; b++) {
    float *s = scores + b * of_block;
    many_shares(s, greatest, sum, vectors);
    Block values = widened(h, find_values(p, b), h->value_dim, wide);
    for (int64_t d = 0; d < h->value_dim; d += at_once) many_mix(s, &values, d, total, vectors, at_once);
  }
  if (p->a->sinks) {
    for (int64_t r = 0; r < step; r++) sink[r] = r < p->count ? sink[r] - greatest[r] : 0.0f;
    for (int64_t r = 0; r < step; r += LANES) v_store(sum + r, v_add(v_load(sum + r), v_exp(v_load(sink + r))));
  }
  scatter_rows(p, total, sum, vectors);
}

static void attend_many(const Part *p) {
  int64_t vectors = (p->count + LANES - 1) / LANES;
  if (vectors == 1) attend_many_of(p, 1);
  else if (vectors == 2) attend_many_of(p, 2);
#if QUERY_VECTORS == 4
  else if (vectors == 3) attend_many_of(p, 3);
  else attend_many_of(p, 4);
#endif
}

/* ---- sharing between threads ---- */

/* Return the queries of a part: fewer for long contexts. */
INLINE int64_t part_rows(const Tiles *c) { return c->longest > LONG ? LANES : TILE; }

INLINE int64_t num_parts(const Shape *h, const Tiles *c) {
  int64_t rows = part_rows(c);
  return (c->tile_tokens * group_of(h) + rows - 1) / rows;
}

int64_t convoy_attend_floats(const Shape *h, const Tiles *tiles, int64_t num_tiles) {
  int64_t most = 0, widest = h->dim > h->value_dim ? h->dim : h->value_dim;
  for (const Tiles *c = tiles; c < tiles + num_tiles; c++) {
    int64_t rows = least(part_rows(c), round_up(c->tile_tokens * group_of(h), LANES));
    int64_t floats = rows * (c->longest * KEYS + h->dim + h->value_dim) + SQUARES * LANES * h->dim + KEYS * widest;
    if (floats > most) most = floats;
  }
  return round_up(most, 16);
}

typedef struct {
  const Attention *a;
  int64_t floats, parts, next, thread;
} AttendJob;

static void attend_share(void *pointer) {
  AttendJob *job = pointer;
  const Attention *a = job->a;
  float *memory = a->memory + take(&job->thread) * job->floats;
  int64_t number, group = group_of(a->shape);
  while ((number = take(&job->next)) < job->parts) {
    /* Later tiles have more keys. They come first, so that no thread begins a long one last. */
    int64_t at = job->parts - 1 - number;
    const Tiles *c = a->tiles;
    for (int64_t of; at >= (of = c->num_tiles * num_parts(a->shape, c)); c++) at -= of;
    int64_t parts = num_parts(a->shape, c), rows = part_rows(c);
    Part p = {a, c, at / parts, at % parts * rows, 0, 0, num_blocks(c, at / parts), memory};
    int64_t end = least(p.first + rows, c->tile_tokens * group);
    for (int64_t row = p.first; row < end && place_of(&p, row) >= 0; row++) p.count++;
    if (p.count) trim(&p);
    if (p.count > MOST_FEW) attend_many(&p);
    else if (p.count) attend_few(&p);
  }
}

/* Compute `out`. Rows of tokens that are in no tile stay as they are. */
void convoy_attend(const Attention *a, int64_t threads) {
  AttendJob job = {a, convoy_attend_floats(a->shape, a->tiles, a->num_tiles), 0, 0, 0};
  int64_t pairs = 0;
  for (const Tiles *c = a->tiles; c < a->tiles + a->num_tiles; c++) {
    job.parts += c->num_tiles * num_parts(a->shape, c);
    pairs += c->num_pairs;
  }
  convoy_run(attend_share, &job, pairs > FEW_PAIRS ? threads : 1);
}
