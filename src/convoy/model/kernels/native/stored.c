/* Multiply by matrices in the form of the model's file: codes and scales are unpacked in registers, or a tile at a
   time in the cache.

   The sums are those of the unpacked matrix in the order of docs/exact.md, to the bit: one chain of fused
   multiply-adds for each output in the order of the inputs, in runs that are added in order. A weight is unpacked with
   the operations of the format's reader, each rounded by itself. */

#include "ranges.h"

#define CHUNK 128      /* inputs for which some outputs are computed before the others of a panel */
#define MOST_TILE 256  /* inputs that are unpacked together, at most: TILE and two steps, or a super-block */
#define BLOCK_ROWS 120 /* rows for which a tile is unpacked once */

static const int64_t steps[NUM_FUSED] = {1, 2, 1, 8, 8, 8, 8, 32, 32, 1, 1, 1, 64, 64, 32};

/* Return the inputs of a tile. A block that is looked up in grids is read once. */
INLINE int64_t tile_inputs(int64_t kind) { return kind == GRIDS ? SUPER : TILE; }
INLINE int is_plain(int64_t kind) { return kind <= F16; }
/* Return whether so many rows are computed in passes that unpack in registers. With AVX-512, widening a float costs
   less than reading it from a tile. */
INLINE int fits_passes(int64_t kind, int64_t rows) {
  return rows <= FUSED_ROWS || (FUSED_ROWS == MOST_ROWS && is_plain(kind));
}

/* ---- unpacking: each weight is used for some rows at once, or kept in a tile if `rows` is 0 ---- */

/* The inputs [k, end) of a panel, and its outputs from `lane` on. `x` and `tile` are those of input k. */
typedef struct {
  const StoredRange *of;
  const uint8_t *panel;
  int64_t k, end, lane;
  const float *x;
  int64_t stride;
  float *tile;
  const uint8_t *next; /* memory that is needed soon: `step` bytes for each input */
  int64_t step;
} Walk;

INLINE void use(const int rows, const Walk *walk, int64_t at, V (*s)[VECTORS], int v, V w) {
  if (!rows) v_store(walk->tile + at * PANEL + walk->lane + LANES * v, w);
  UNROLL for (int r = 0; r < rows; r++) s[r][v] = v_fma(v_set(walk->x[r * walk->stride + at]), w, s[r][v]);
}

INLINE void walk_f32(const int rows, const int vectors, const int ahead, const Walk *walk, V (*s)[VECTORS]) {
  const uint8_t *p = walk->panel + walk->k * 4 * PANEL + 4 * walk->lane;
  int64_t n = walk->end - walk->k;
  for (int64_t at = 0; at < n; at++, p += 4 * PANEL) {
    for (int64_t b = 0; !ahead && b < walk->step; b += LINE) prefetch(walk->next + at * walk->step + b);
    V w[VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) {
      if (ahead) v_prefetch(rows, p, v, 4 * LANES);
      w[v] = v_load(p + 4 * LANES * v);
      if (!rows) v_store(walk->tile + at * PANEL + walk->lane + LANES * v, w[v]);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      V f = v_set(walk->x[r * walk->stride + at]);
      UNROLL for (int v = 0; v < vectors; v++) s[r][v] = v_fma(f, w[v], s[r][v]);
    }
  }
}

INLINE void walk_bf16(const int rows, const int vectors, const Walk *walk, V (*s)[VECTORS]) {
  const uint8_t *p = walk->panel + walk->k * 2 * PANEL + 4 * walk->lane;
  int64_t n = walk->end - walk->k;
  for (int64_t at = 0; at < n; at += 2, p += 4 * PANEL) {
    UNROLL for (int v = 0; v < vectors; v++) {
      v_prefetch(rows, p, v, 4 * LANES);
      use(rows, walk, at, s, v, v_bits(i_left(i_load(p + 4 * LANES * v), 16)));
    }
    UNROLL for (int v = 0; v < vectors; v++)
      use(rows, walk, at + 1, s, v, v_bits(i_and(i_load(p + 4 * LANES * v), i_set(0xffff0000))));
  }
}

INLINE void walk_f16(const int rows, const int vectors, const Walk *walk, V (*s)[VECTORS]) {
  const uint8_t *p = walk->panel + walk->k * 2 * PANEL + 2 * walk->lane;
  int64_t n = walk->end - walk->k;
  for (int64_t at = 0; at < n; at++, p += 2 * PANEL) {
    UNROLL for (int v = 0; v < vectors; v++) {
      v_prefetch(rows, p, v, 2 * LANES);
      use(rows, walk, at, s, v, v_half(p + 2 * LANES * v));
    }
  }
}

/* The values of a kind's codes. */
typedef struct {
  Table nibbles;
  Steps fives;
} Values;

INLINE Values load_values(const int kind, const StoredRange *of) {
  Values values;
  /* Kinds of bytes use none. */
  memset(&values, 0, sizeof values);
  if (has_fifths(kind)) values.fives = t_steps(of->table);
  else if (of->table) values.nibbles = t_load(of->table);
  return values;
}

/* What turns codes into weights, for the inputs that share a scale. A weight is code * scale + second. */
typedef struct {
  V scale[VECTORS], second[VECTORS];
  I fifths[VECTORS]; /* the lowest eight bits are used next */
} Factors;

/* Use eight inputs: the codes of 4 bits at `p`, looked up and scaled. A scale has 11 bits that count, or 17 after a
   product with one of 6 bits, so its product with a code is exact in 24 bits. A fused sum then rounds as the reader's
   two operations do. */
INLINE void use_nibbles(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[VECTORS],
                        int64_t at, const uint8_t *p, Values values, const Factors *by) {
  I codes[VECTORS];
  UNROLL for (int v = 0; v < vectors; v++) {
    v_prefetch(rows, p, v, 4 * LANES);
    codes[v] = i_load(p + 4 * LANES * v);
  }
  UNROLL for (int j = 0; j < 8; j++)
    UNROLL for (int v = 0; v < vectors; v++) {
      V w;
      if (has_fifths(kind)) {
        I fifth = j < 4 ? i_left(by->fifths[v], 4 - (j & 3)) : i_right(by->fifths[v], j & 3);
        w = v_step(values.fives, i_merge(i_set(15), i_right(codes[v], 4 * j), fifth));
      } else
        w = kind == NIBBLES ? v_look(values.nibbles, codes[v], j)
                            : v_count(values.nibbles, codes[v], j, kind == CENTRED ? -8 : 0);
      w = has_second(kind) || is_super(kind) ? v_fma(w, by->scale[v], by->second[v]) : v_mul(w, by->scale[v]);
      use(rows, walk, at + j, s, v, w);
    }
}

/* Use `units` times eight inputs under the same scales. */
INLINE void use_units(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[VECTORS], int64_t at,
                      const uint8_t *p, int64_t units, Values values, Factors *by) {
  for (int64_t end = at + 8 * units; at < end; at += 8, p += 4 * PANEL) {
    use_nibbles(rows, vectors, kind, walk, s, at, p, values, by);
    if (has_fifths(kind))
      UNROLL for (int v = 0; v < vectors; v++) by->fifths[v] = i_right(by->fifths[v], 8);
  }
}

INLINE void use_bytes(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[VECTORS],
                      int64_t at, const uint8_t *p, const V *scale, const V *second) {
  UNROLL for (int v = 0; v < vectors; v++) {
    const uint8_t *q = p + LANES * v;
    v_prefetch(rows, p, v, LANES);
    V w = v_mul(kind == E4M3 ? v_e4m3(q) : v_int(kind == SIGNED ? i_signed(q) : i_bytes(q)), scale[v]);
    if (kind == BYTES_ADD) w = v_add(w, second[v]);
    use(rows, walk, at, s, v, w);
  }
}

INLINE void walk_groups(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[VECTORS]) {
  const StoredRange *of = walk->of;
  int64_t head = head_bytes(of), bytes = code_bytes(kind), group = of->group, number = (uint32_t)walk->k / (uint32_t)group;
  int64_t in = walk->k - number * group, lane = walk->lane, n = walk->end - walk->k, at = 0;
  const uint8_t *block = walk->panel + number * (head + group * bytes);
  Values values = load_values(kind, of);
  Factors by;
  for (; at < n; block += head + group * bytes, in = 0) {
    UNROLL for (int v = 0; v < vectors; v++) {
      by.scale[v] = widened(of->scale, block, lane + LANES * v);
      /* `v_e4m3` has divided by 256. */
      if (kind == E4M3) by.scale[v] = v_mul(by.scale[v], v_set(256));
      if (has_second(kind)) by.second[v] = widened(of->second, block + PANEL * widths_of[of->scale], lane + LANES * v);
      if (has_fifths(kind)) by.fifths[v] = i_load(block + head - FIFTHS + 4 * (lane + LANES * v));
      /* The zero is a whole number of 8 bits, so that scale * code - scale * zero has two exact products. */
      if (kind == NIBBLES_LESS) by.second[v] = v_mul(by.scale[v], v_sub(v_set(0), by.second[v]));
    }
    const uint8_t *p = block + head + in * bytes + lane * (bytes < PANEL ? 4 : 1);
    int64_t stop = least(n, at + group - in);
    if (bytes < PANEL) {
      use_units(rows, vectors, kind, walk, s, at, p, (stop - at) / 8, values, &by);
      at = stop;
    } else
      for (; at < stop; at++, p += bytes) use_bytes(rows, vectors, kind, walk, s, at, p, by.scale, by.second);
  }
}

/* Use 64 inputs of a super-block at a time. Each 32 have a scale and a minimum of 6 bits, in three planes of bytes: the
   third has the second scale, and the highest two bits of all hold the second minimum. */
INLINE void walk_q4_k(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[VECTORS]) {
  Values values = load_values(kind, walk->of);
  Factors by;
  V halves[VECTORS], minima[VECTORS];
  int64_t n = walk->end - walk->k, lane = walk->lane;
  for (int64_t at = 0; at < n;) {
    int64_t k = walk->k + at;
    const uint8_t *block = walk->panel + k / SUPER * super_bytes(kind);
    const uint8_t *planes = block + 4 * PANEL + k % SUPER / 64 * half_bytes(kind), *p = planes + PLANES + 4 * lane;
    if (at == 0 || k % SUPER == 0)
      UNROLL for (int v = 0; v < vectors; v++) {
        halves[v] = v_half(block + 2 * (lane + LANES * v));
        minima[v] = v_sub(v_set(0), v_half(block + 2 * PANEL + 2 * (lane + LANES * v)));
      }
    for (int half = 0; half < 2; half++, at += 32, p += 16 * PANEL) {
      UNROLL for (int v = 0; v < vectors; v++) {
        const uint8_t *own = planes + lane + LANES * v;
        I a = i_bytes(own), b = i_bytes(own + PANEL), c = i_bytes(own + 2 * PANEL), low = i_set(63);
        I high = i_or(i_right(a, 6), i_or(i_left(i_right(b, 6), 2), i_left(i_right(c, 6), 4)));
        by.scale[v] = v_mul(halves[v], v_int(i_and(half ? c : a, low)));
        by.second[v] = v_mul(minima[v], v_int(half ? high : i_and(b, low)));
        if (has_fifths(kind)) by.fifths[v] = i_load(p + 4 * LANES * v);
      }
      if (has_fifths(kind)) p += FIFTHS;
      use_units(rows, vectors, kind, walk, s, at, p, 4, values, &by);
    }
  }
}

/* Use 16 inputs at a time, which share a scale. Their highest two bits lie in one lane, their lowest four in two. A
   scale times a signed byte has 18 bits, so that its product with a code has 24 at most, and is exact. */
INLINE void walk_q6_k(const int rows, const int vectors, const Walk *walk, V (*s)[VECTORS]) {
  int64_t n = walk->end - walk->k, lane = walk->lane;
  V scale[VECTORS], centre[VECTORS];
  for (int64_t at = 0; at < n; at += 16) {
    int64_t k = walk->k + at, half = k / 16 % 2;
    const uint8_t *block = walk->panel + k / SUPER * Q6_K_BYTES;
    const uint8_t *part = block + 2 * PANEL + k % SUPER / 32 * Q6_K_PART;
    const uint8_t *high = part + 2 * PANEL + half * 4 * PANEL + 4 * lane;
    const uint8_t *low = part + 10 * PANEL + half * 8 * PANEL + 4 * lane;
    I highs[VECTORS], lows[VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) {
      int64_t own = lane + LANES * v;
      scale[v] = v_mul(v_half(block + 2 * own), v_int(i_signed(part + half * PANEL + own)));
      centre[v] = v_mul(scale[v], v_set(-32));
      /* Bits 4 and 5 of each byte are those of four inputs. */
      highs[v] = i_load(high + 4 * LANES * v);
      v_prefetch(rows, high, v, 4 * LANES);
    }
    for (int pair = 0; pair < 2; pair++, low += 4 * PANEL) {
      UNROLL for (int v = 0; v < vectors; v++) {
        v_prefetch(rows, low, v, 4 * LANES);
        lows[v] = i_load(low + 4 * LANES * v);
      }
      UNROLL for (int quad = 0; quad < 2; quad++) {
        I codes[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) {
          I both = i_merge(i_set(0x0f0f0f0f), i_right(lows[v], 4 * quad), i_left(highs[v], 4 - 2 * quad));
          codes[v] = i_and(both, i_set(0x3f3f3f3f));
        }
        UNROLL for (int j = 0; j < 4; j++)
          UNROLL for (int v = 0; v < vectors; v++)
            use(rows, walk, at + 8 * pair + 4 * quad + j, s, v, v_fma(v_byte(codes[v], j), scale[v], centre[v]));
      }
      UNROLL for (int v = 0; v < vectors; v++) highs[v] = i_right(highs[v], 4);
    }
  }
}

INLINE void walk_kind(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[VECTORS]) {
  if (kind == F32) walk_f32(rows, vectors, 1, walk, s);
  else if (kind == BF16) walk_bf16(rows, vectors, walk, s);
  else if (kind == F16) walk_f16(rows, vectors, walk, s);
  else if (kind == Q4_K || kind == Q5_K) walk_q4_k(rows, vectors, kind, walk, s);
  else if (kind == Q6_K) walk_q6_k(rows, vectors, walk, s);
  else walk_groups(rows, vectors, kind, walk, s);
}

/* ---- the functions of each kind: a run's chain for 1 to 6 rows, and unpacking to a tile ---- */

/* Compute one run's chains, and add them to `total` if `add` is not 0. Where a panel's outputs do not all have
   registers, sums wait in memory while those of other outputs go on. */
INLINE void fuse(const int rows, const int kind, const Walk *walk, float *total, int add) {
  const int vectors = vectors_at_once(rows, is_plain(kind));
  V s[MOST_ROWS][VECTORS];
  if (vectors == VECTORS) {
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < VECTORS; v++) s[r][v] = v_set(0);
    walk_kind(rows, VECTORS, kind, walk, s);
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < VECTORS; v++) {
        float *t = total + r * PANEL + LANES * v;
        v_store(t, add ? v_add(v_load(t), s[r][v]) : s[r][v]);
      }
    return;
  }
  V sums[VECTORS][MOST_ROWS];
  Walk some = *walk;
  for (int64_t k = walk->k; k < walk->end; k += CHUNK) {
    some.k = k, some.end = least(walk->end, k + CHUNK), some.x = walk->x + (k - walk->k);
    for (int first = 0; first < VECTORS; first += vectors) {
      some.lane = first * LANES;
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) s[r][v] = k > walk->k ? sums[first + v][r] : v_set(0);
      walk_kind(rows, vectors, kind, &some, s);
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) sums[first + v][r] = s[r][v];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < VECTORS; v++) {
      float *t = total + r * PANEL + LANES * v;
      v_store(t, add ? v_add(v_load(t), sums[v][r]) : sums[v][r]);
    }
}

/* Unpack all outputs of a panel to a tile. */
INLINE void unpack(const int kind, const Walk *walk) {
  const int vectors = vectors_at_once(0, is_plain(kind));
  Walk some = *walk;
  for (; some.lane < PANEL; some.lane += vectors * LANES) walk_kind(0, vectors, kind, &some, 0);
}

#define FUSED(KIND, ROWS)                                                      \
  static void fused_##KIND##_##ROWS(const Walk *walk, float *total, int add) { \
    fuse(ROWS, KIND, walk, total, add);                                        \
  }
#if FUSED_ROWS == 6
#define ALL_FUSED(KIND) FUSED(KIND, 1) FUSED(KIND, 2) FUSED(KIND, 3) FUSED(KIND, 4) FUSED(KIND, 5) FUSED(KIND, 6)
#define ALL(KIND) {fused_##KIND##_1, fused_##KIND##_2, fused_##KIND##_3, \
                   fused_##KIND##_4, fused_##KIND##_5, fused_##KIND##_6}
#else
#define ALL_FUSED(KIND) FUSED(KIND, 1)
#define ALL(KIND) {fused_##KIND##_1}
#endif
#define KIND(NAME) \
  ALL_FUSED(NAME)  \
  static void unpack_##NAME(const Walk *walk) { unpack(NAME, walk); }
KIND(F32) KIND(BF16) KIND(F16) KIND(NIBBLES) KIND(CENTRED) KIND(NIBBLES_ADD) KIND(NIBBLES_LESS) KIND(FIVES)
KIND(FIVES_ADD) KIND(SIGNED) KIND(BYTES_ADD) KIND(E4M3) KIND(Q4_K) KIND(Q5_K) KIND(Q6_K)

typedef void (*fused_fn)(const Walk *, float *, int);
typedef void (*unpack_fn)(const Walk *);
static const fused_fn fused[NUM_FUSED][FUSED_ROWS] = {
    ALL(F32), ALL(BF16), ALL(F16), ALL(NIBBLES), ALL(CENTRED), ALL(NIBBLES_ADD), ALL(NIBBLES_LESS), ALL(FIVES),
    ALL(FIVES_ADD), ALL(SIGNED), ALL(BYTES_ADD), ALL(E4M3), ALL(Q4_K), ALL(Q5_K), ALL(Q6_K)};
static const unpack_fn unpacks[NUM_FUSED] = {
    unpack_F32, unpack_BF16, unpack_F16, unpack_NIBBLES, unpack_CENTRED, unpack_NIBBLES_ADD, unpack_NIBBLES_LESS,
    unpack_FIVES, unpack_FIVES_ADD, unpack_SIGNED, unpack_BYTES_ADD, unpack_E4M3, unpack_Q4_K, unpack_Q5_K,
    unpack_Q6_K};

/* Go on with the chains of some rows over n inputs of a tile, and prefetch the packed `bytes` of the tile behind it.
   Reading memory then takes no time of its own. */
INLINE void go_on(const int rows, const float *x, int64_t stride, const float *tile, int64_t n, float *sums,
                  const uint8_t *next, int64_t bytes) {
  const int vectors = vectors_at_once(rows, 1);
  int64_t step = bytes * vectors / VECTORS / n;
  Walk walk = {0, (const uint8_t *)tile, 0, n, 0, x, stride, 0, next, step};
  for (; walk.lane < PANEL; walk.lane += vectors * LANES, walk.next += n * step) {
    V s[MOST_ROWS][VECTORS];
    float *own = sums + walk.lane;
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < vectors; v++) s[r][v] = v_load(own + r * PANEL + LANES * v);
    walk_f32(rows, vectors, 0, &walk, s);
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < vectors; v++) v_store(own + r * PANEL + LANES * v, s[r][v]);
  }
}
#define GO_ON(ROWS)                                                                                    \
  static void go_on_##ROWS(const float *x, int64_t stride, const float *tile, int64_t n, float *sums, \
                           const uint8_t *next, int64_t bytes) {                                      \
    go_on(ROWS, x, stride, tile, n, sums, next, bytes);                                                \
  }
GO_ON(1) GO_ON(2) GO_ON(3) GO_ON(4) GO_ON(5) GO_ON(6)
typedef void (*go_on_fn)(const float *, int64_t, const float *, int64_t, float *, const uint8_t *, int64_t);
static const go_on_fn go_ons[MOST_ROWS] = {go_on_1, go_on_2, go_on_3, go_on_4, go_on_5, go_on_6};

/* ---- linears ---- */

/* Return whether halves and runs begin and end with whole steps, so that few rows need no tile. */
static int is_fused(const StoredLinear *l, int64_t step) {
  int64_t start = 0;
  for (int part = 0; part < 2 && l->inputs[part]; start += l->inputs[part++])
    if (start % step || (start + l->inputs[part]) % step || (l->run[part] < l->inputs[part] && l->run[part] % step))
      return 0;
  return 1;
}

/* Unpack the inputs [k, end) of a panel into `memory`, and return the place of input k. */
static const float *unpack_tile(const StoredRange *of, int64_t panel, int64_t k, int64_t end, float *memory) {
  const uint8_t *packed = of->packed + panel * of->panel_bytes;
  if (of->kind == GRIDS) {
    grids_tile(of, packed, k, end, memory);
    return memory;
  }
  int64_t step = of->kind == CODES ? 32 : steps[of->kind], from = k / step * step;
  if (of->kind == CODES) {
    codes_tile(of, packed, from, round_up(end, step), memory);
  } else {
    Walk walk = {of, packed, from, round_up(end, step), 0, 0, 0, memory, 0, 0};
    unpacks[of->kind](&walk);
  }
  return memory + (k - from) * PANEL;
}

/* Add the bias to some rows of 64 sums. */
static void add_bias(float *total, const float *bias, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < width; j++) total[r * PANEL + j] += bias[j];
}

/* Compute some rows of one run, and add them to `total` if `add` is not 0. */
static void fused_run(const LinearJob *job, const StoredRange *of, int64_t panel, int64_t k, int64_t end,
                      const float *x, int64_t rows, float *total, int add) {
  int64_t passes = num_passes(rows);
  for (int64_t pass = 0; pass < passes; pass++) {
    int64_t r = rows * pass / passes, count = rows * (pass + 1) / passes - r;
    const float *own = x + r * job->stride + k;
    Walk walk = {of, of->packed + panel * of->panel_bytes, k, end, 0, own, job->stride, 0, 0, 0};
    fused[of->kind][count - 1](&walk, total + r * PANEL, add);
  }
}

/* Compute some rows of one run by tiles. `sums` is [rows][64]. */
static void run_by_tiles(const StoredRange *of, int64_t inputs, int64_t panel, int64_t k, int64_t end, const float *x,
                         int64_t stride, float *sums, int64_t rows) {
  float memory[MOST_TILE * PANEL];
  memset(sums, 0, 4 * PANEL * rows);
  int64_t width = tile_inputs(of->kind), passes = num_passes(rows), bytes = width * of->panel_bytes / inputs;
  for (int64_t at = k; at < end; at += width) {
    int64_t n = least(width, end - at);
    const float *tile = unpack_tile(of, panel, at, at + n, memory);
    const uint8_t *next = of->packed + panel * of->panel_bytes + (at + n) * of->panel_bytes / inputs;
    for (int64_t pass = 0; pass < passes; pass++) {
      int64_t r = rows * pass / passes, count = rows * (pass + 1) / passes - r;
      go_ons[count - 1](x + r * stride + at, stride, tile, n, sums + r * PANEL, next, pass ? 0 : bytes);
    }
  }
}

/* Compute some rows of one panel, at most BLOCK_ROWS. */
static void stored_rows(const void *p, const StoredRange *of, int64_t panel, int64_t row, int64_t rows) {
  const LinearJob *job = p;
  const StoredLinear *l = job->linear;
  const float *x = job->x + row * job->stride;
  int64_t width = least(PANEL, of->outputs - panel * PANEL), k = 0;
  int few = of->kind < NUM_FUSED && fits_passes(of->kind, rows) && is_fused(l, steps[of->kind]), add = 0;
  float total[BLOCK_ROWS * PANEL], sums[BLOCK_ROWS * PANEL];
  for (int part = 0; part < 2 && l->inputs[part]; part++) {
    for (int64_t stop = k + l->inputs[part]; k < stop; add = 1) {
      int64_t end = least(stop, k + l->run[part]);
      if (few) {
        fused_run(job, of, panel, k, end, x, rows, total, add);
      } else {
        run_by_tiles(of, l->inputs[0] + l->inputs[1], panel, k, end, x, job->stride, add ? sums : total, rows);
        for (int64_t i = 0; add && i < rows * PANEL; i++) total[i] += sums[i];
      }
      k = end;
    }
    if (of->bias && part == 0) add_bias(total, of->bias + panel * PANEL, rows, width);
  }
  float *y = job->y + row * job->y_stride + of->first + panel * PANEL;
  for (int64_t r = 0; r < rows; r++) memcpy(y + r * job->y_stride, total + r * PANEL, 4 * width);
}

void convoy_stored_share(void *p) {
  LinearJob *job = p;
  take_panels(job->linear, &job->next, job->rows, BLOCK_ROWS, stored_rows, job);
}

/* Compute the outputs of all ranges, y[rows][y_stride] from x[rows][inputs]. Rows of x begin `stride` floats apart. */
void convoy_stored_linear(const StoredLinear *linear, const float *x, int64_t stride, float *y, int64_t y_stride,
                          int64_t rows, int64_t threads) {
  LinearJob job = {linear, x, stride, y, y_stride, rows, 0};
  convoy_run(convoy_stored_share, &job, threads);
}

/* Unpack outputs of a range to out[count][inputs]: those of `ids`, or those from `first` on if that is null. */
void convoy_stored_unpack(const StoredRange *of, int64_t inputs, const int64_t *ids, int64_t first, int64_t count,
                          float *out) {
  float memory[MOST_TILE * PANEL];
  for (int64_t done = 0, width; done < count; done += width) {
    int64_t output = ids ? ids[done] : first + done;
    if (of->kind == GRIDS) {
      grids_row(of, output, out + done * inputs);
      width = 1;
      continue;
    }
    width = ids ? 1 : least(PANEL - output % PANEL, count - done);
    for (int64_t k = 0, n; k < inputs; k += n) {
      n = least(tile_inputs(of->kind), inputs - k);
      const float *tile = unpack_tile(of, output / PANEL, k, k + n, memory) + output % PANEL;
      for (int64_t j = 0; j < width; j++)
        for (int64_t i = 0; i < n; i++) out[(done + j) * inputs + k + i] = tile[i * PANEL + j];
    }
  }
}

/* ---- packing ---- */

typedef struct {
  const StoredRange *of;
  const StoredSource *source;
  uint8_t *packed;
  int64_t inputs, next;
} PackJob;

/* Return the bytes of one panel. */
int64_t convoy_stored_panel_bytes(const StoredRange *of, int64_t inputs) {
  if (of->kind == CODES) return codes_panel_bytes(of);
  if (of->kind == GRIDS) return grids_panel_bytes(of);
  if (of->kind == F32) return inputs * 4 * PANEL;
  if (of->kind == BF16) return round_up(inputs, 2) * 2 * PANEL;
  if (of->kind == F16) return inputs * 2 * PANEL;
  if (of->kind >= Q4_K) return inputs / SUPER * super_bytes(of->kind);
  int64_t groups = (inputs + of->group - 1) / of->group;
  return groups * (head_bytes(of) + of->group * code_bytes(of->kind));
}

/* Join the low four bits of each byte: the first byte's become the lowest. */
INLINE uint32_t joined(uint64_t x) {
  x &= 0x0f0f0f0f0f0f0f0f;
  x = (x | x >> 4) & 0x00ff00ff00ff00ff;
  x = (x | x >> 8) & 0x0000ffff0000ffff;
  return (uint32_t)(x | x >> 16);
}

/* Pack n inputs of 4 bits of one output, `span` * `skipped` inputs behind the first: `to` is the output's lane of the
   first eight. */
static void pack_nibbles(const uint8_t *codes, int64_t n, int64_t span, int64_t skipped, uint8_t *to) {
  for (int64_t k = span * skipped; k < n + span * skipped; k += 8, to += 4 * PANEL) {
    uint32_t word;
    uint64_t eight;
    if (!span) memcpy(&word, codes + k / 2, 4);
    else {
      int64_t in = k % (2 * span);
      memcpy(&eight, codes + k / (2 * span) * span + in % span, 8);
      word = joined(in < span ? eight : eight >> 4);
    }
    memcpy(to, &word, 4);
  }
}

/* Pack numbers of `wide` bytes, so that `together` inputs of an output lie side by side. */
INLINE void pack_numbers(const int wide, const int together, const PackJob *job, int64_t first, int64_t width,
                         uint8_t *panel) {
  for (int64_t start = 0; start < job->inputs; start += TILE)
    for (int64_t o = 0; o < width; o++) {
      const uint8_t *row = job->source->codes + (first + o) * job->source->codes_row;
      for (int64_t k = start; k < least(start + TILE, job->inputs); k++)
        memcpy(panel + wide * ((k / together * PANEL + o) * together + k % together), row + wide * k, wide);
    }
}

static void pack_floats(const PackJob *job, int64_t first, int64_t width, uint8_t *panel) {
  if (job->of->kind == F32) pack_numbers(4, 1, job, first, width, panel);
  else if (job->of->kind == BF16) pack_numbers(2, 2, job, first, width, panel);
  else pack_numbers(2, 1, job, first, width, panel);
}

static void pack_groups(const PackJob *job, int64_t first, int64_t width, uint8_t *panel) {
  const StoredRange *of = job->of;
  const StoredSource *from = job->source;
  int64_t head = head_bytes(of), bytes = code_bytes(of->kind), group = of->group;
  int64_t wide = widths_of[of->scale], second = has_second(of->kind) ? widths_of[of->second] : 0;
  for (int64_t number = 0; number * group < job->inputs; number++) {
    uint8_t *block = panel + number * (head + group * bytes);
    int64_t n = least(group, job->inputs - number * group);
    for (int64_t o = 0; o < width; o++) {
      int64_t row = first + o;
      const uint8_t *codes = from->codes + row * from->codes_row + number * from->codes_step;
      memcpy(block + o * wide, from->scales + row * from->scales_row + number * from->scales_step, wide);
      if (second)
        memcpy(block + PANEL * wide + o * second, from->seconds + row * from->seconds_row + number * from->seconds_step,
               second);
      if (has_fifths(of->kind))
        memcpy(block + head - FIFTHS + 4 * o, from->fifths + row * from->codes_row + number * from->codes_step, 4);
      if (bytes < PANEL) pack_nibbles(codes, n, from->span, 0, block + head + 4 * o);
      else
        for (int64_t k = 0; k < n; k++) block[head + k * PANEL + o] = codes[k] ^ (uint8_t)from->flip;
    }
  }
}

/* Pack a super-block of one output: two halves, 12 bytes of scales and minima, 32 bytes of fifth bits for Q5_K, 128
   bytes of codes. */
static void pack_q4_k(int64_t kind, const uint8_t *from, uint8_t *block, int64_t o) {
  const uint8_t *scales = from + 4, *codes = from + (kind == Q5_K ? 48 : 16);
  memcpy(block + 2 * o, from, 2);
  memcpy(block + 2 * PANEL + 2 * o, from + 2, 2);
  uint8_t scale[8], minimum[8];
  for (int i = 0; i < 4; i++) {
    scale[i] = scales[i] & 63;
    minimum[i] = scales[i + 4] & 63;
    scale[i + 4] = (scales[i + 8] & 15) | (scales[i] >> 6) << 4;
    minimum[i + 4] = scales[i + 8] >> 4 | (scales[i + 4] >> 6) << 4;
  }
  for (int i = 0; i < 4; i++) {
    uint8_t *planes = block + 4 * PANEL + i * half_bytes(kind) + o, last = minimum[2 * i + 1];
    planes[0] = (uint8_t)(scale[2 * i] | last << 6);
    planes[PANEL] = (uint8_t)(minimum[2 * i] | (last >> 2 & 3) << 6);
    planes[2 * PANEL] = (uint8_t)(scale[2 * i + 1] | last >> 4 << 6);
    uint8_t *to = block + 4 * PANEL + i * half_bytes(kind) + PLANES + 4 * o;
    for (int half = 0; half < 2; half++, to += 16 * PANEL) {
      if (kind == Q5_K) {
        /* Bit 2 * i + half of byte k is that of input k. */
        uint32_t fifths = 0;
        for (int k = 0; k < 32; k++) fifths |= (uint32_t)(from[16 + k] >> (2 * i + half) & 1) << k;
        memcpy(to, &fifths, 4);
        to += FIFTHS;
      }
      pack_nibbles(codes + 32 * i, 32, 32, half, to);
    }
  }
}

/* Pack a super-block of one output: 128 bytes of low bits, 64 of high bits, 16 scales, a half. */
static void pack_q6_k(const uint8_t *from, uint8_t *block, int64_t o) {
  memcpy(block + 2 * o, from + 208, 2);
  for (int part = 0; part < 8; part++) {
    const uint8_t *low = from + part / 4 * 64 + part % 2 * 32, *high = from + 128 + part / 4 * 32;
    uint8_t *to = block + 2 * PANEL + part * Q6_K_PART;
    to[o] = from[192 + 2 * part];
    to[PANEL + o] = from[192 + 2 * part + 1];
    for (int half = 0; half < 2; half++) {
      uint32_t lows[4], highs = 0, both;
      for (int quad = 0; quad < 4; quad++) {
        uint32_t four;
        memcpy(&four, low + 16 * half + 4 * quad, 4);
        lows[quad] = (part % 4 >= 2 ? four >> 4 : four) & 0x0f0f0f0f;
        memcpy(&four, high + 16 * half + 4 * quad, 4);
        highs |= (four >> 2 * (part % 4) & 0x03030303) << 2 * quad;
      }
      memcpy(to + 2 * PANEL + half * 4 * PANEL + 4 * o, &highs, 4);
      for (int pair = 0; pair < 2; pair++) {
        both = lows[2 * pair] | lows[2 * pair + 1] << 4;
        memcpy(to + 10 * PANEL + half * 8 * PANEL + pair * 4 * PANEL + 4 * o, &both, 4);
      }
    }
  }
}

static void pack_supers(const PackJob *job, int64_t first, int64_t width, uint8_t *panel) {
  int64_t kind = job->of->kind, size = kind == Q4_K ? 144 : kind == Q5_K ? 176 : 210;
  for (int64_t number = 0; number < job->inputs / SUPER; number++)
    for (int64_t o = 0; o < width; o++) {
      const uint8_t *from = job->source->codes + (first + o) * job->source->codes_row + number * size;
      uint8_t *block = panel + number * super_bytes(kind);
      if (kind == Q6_K) pack_q6_k(from, block, o);
      else pack_q4_k(kind, from, block, o);
    }
}

static void pack_share(void *p) {
  PackJob *job = p;
  const StoredRange *of = job->of;
  int64_t panel;
  while ((panel = take(&job->next)) < num_panels(of->outputs)) {
    uint8_t *to = job->packed + panel * of->panel_bytes;
    int64_t first = panel * PANEL, width = least(PANEL, of->outputs - first);
    memset(to, 0, of->panel_bytes);
    if (of->kind == CODES) codes_pack(of, job->source, first, width, to);
    else if (of->kind == GRIDS) grids_pack(of, job->source, first, width, to);
    else if (is_plain(of->kind)) pack_floats(job, first, width, to);
    else if (of->kind >= Q4_K) pack_supers(job, first, width, to);
    else pack_groups(job, first, width, to);
  }
}

/* Pack all outputs of a range from rows of codes and scales. */
void convoy_stored_pack(const StoredRange *of, const StoredSource *source, int64_t inputs, uint8_t *packed,
                        int64_t threads) {
  PackJob job = {of, source, packed, inputs, 0};
  convoy_run(pack_share, &job, threads);
}
