/* Multiply by matrices in the form of the model's file: codes and scales are unpacked in registers, or a tile at a
   time in the cache.

   The sums are those of `convoy_f32_linear` over the unpacked matrix, to the bit: one chain of fused multiply-adds for
   each output in the order of the inputs, in runs that are added in order. A weight is unpacked with the operations
   of the format's reader, each rounded by itself. */

#include "vector.h"

enum {
  BF16, F16, NIBBLES, NIBBLES_ADD, NIBBLES_LESS, FIVES, FIVES_ADD, SIGNED, BYTES_ADD, E4M3, Q4_K, Q5_K, Q6_K, NUM_KINDS
};
enum { IN_HALVES, IN_BF16, IN_FLOATS, IN_HALF_POWERS, IN_BYTES };

#define TILE 64        /* inputs of a tile: with 64 outputs 16 KiB of float32 */
#define CHUNK 128      /* inputs for which 32 outputs are computed before the other 32 */
#define SPLIT_ROWS 4   /* rows from which on outputs are split so */
#define MOST_STEP 64   /* inputs that a form unpacks together, at most */
#define BLOCK_ROWS 120 /* rows for which a tile is unpacked once */
#define SUPER 256      /* inputs of a super-block of ggml's K types */
#define PLANES 192     /* bytes of the scales and minima of 64 inputs of Q4_K and Q5_K: three planes */
#define FIFTHS 256     /* bytes of the fifth bits of 32 inputs: a lane of 32 bits for each output */
#define Q6_K_PART 1664 /* bytes of 32 inputs: two scales, then the highest bits, then the lowest */
#define Q6_K_BYTES (2 * PANEL + 8 * Q6_K_PART)

#define UNROLL _Pragma("GCC unroll 8")

/* Outputs of one form, in panels of 64 outputs: `panel_bytes` each, and in each the blocks in the order of the inputs.
   A block has the scales of 64 outputs, then their second numbers (biases or zeros), then the codes of `group` inputs.
   Eight inputs of 4 bits lie in a lane of 32 bits; bytes lie by input, then by output. Of 5 bits, the fifth bits of
   32 inputs lie in a lane in front of the others. */
typedef struct {
  const uint8_t *packed;
  const float *table; /* the values of 4-bit codes */
  const float *bias;
  int64_t kind, outputs, first; /* `first` is the place of the first output in a row of y */
  int64_t group, scale, second, panel_bytes;
} StoredRange;

/* The inputs come in one or two parts, as those of F32Linear do. */
typedef struct StoredLinear {
  const StoredRange *ranges;
  int64_t num_ranges, inputs[2], run[2];
} StoredLinear;

static const int64_t widths[] = {2, 2, 4, 1, 1};
static const int64_t steps[NUM_KINDS] = {2, 1, 8, 8, 8, 32, 32, 1, 1, 1, 64, 64, 32};

/* Return whether so many rows are computed in passes that unpack in registers. Widening a float costs less than
   reading it from a tile. */
INLINE int fits_passes(int64_t kind, int64_t rows) { return rows <= MOST_ROWS || kind == BF16 || kind == F16; }

INLINE int has_second(int64_t kind) {
  return kind == NIBBLES_ADD || kind == NIBBLES_LESS || kind == FIVES_ADD || kind == BYTES_ADD;
}
INLINE int has_fifths(int64_t kind) { return kind == FIVES || kind == FIVES_ADD || kind == Q5_K; }
INLINE int64_t code_bytes(int64_t kind) { return kind >= NIBBLES && kind <= FIVES_ADD ? PANEL / 2 : PANEL; }
/* Return the bytes in front of the codes of a block. */
INLINE int64_t head_bytes(const StoredRange *of) {
  int64_t seconds = has_second(of->kind) ? widths[of->second] : 0;
  return PANEL * (widths[of->scale] + seconds) + (has_fifths(of->kind) ? FIFTHS : 0);
}
/* Return the bytes of 64 inputs of Q4_K or Q5_K, and of a super-block. */
INLINE int64_t half_bytes(int64_t kind) { return PLANES + 32 * PANEL + (kind == Q5_K ? 2 * FIFTHS : 0); }
INLINE int64_t super_bytes(int64_t kind) { return kind == Q6_K ? Q6_K_BYTES : 4 * PANEL + 4 * half_bytes(kind); }

/* ---- unpacking: each weight is used for some rows at once, or kept in a tile if `rows` is 0 ---- */

/* The inputs [k, end) of a panel, and its outputs from `lane` on. `x` and `tile` are those of input k. */
typedef struct {
  const StoredRange *of;
  const uint8_t *panel;
  int64_t k, end, lane;
  const float *x;
  int64_t stride;
  float *tile;
} Walk;

INLINE void use(const int rows, const Walk *walk, int64_t at, V (*s)[4], int v, V w) {
  if (!rows) v_store(walk->tile + at * PANEL + LANES * v, w);
  UNROLL for (int r = 0; r < rows; r++) s[r][v] = v_fma(v_set(walk->x[r * walk->stride + at]), w, s[r][v]);
}

/* Widen the numbers of 16 outputs from `lane` on. */
INLINE V widened(int64_t type, const uint8_t *numbers, int64_t lane) {
  switch (type) {
    case IN_HALVES: return v_half(numbers + 2 * lane);
    case IN_BF16: return v_bf16(numbers + 2 * lane);
    case IN_FLOATS: return v_load(numbers + 4 * lane);
    case IN_HALF_POWERS: return v_half_power(numbers + lane);
    default: return v_int(i_bytes(numbers + lane));
  }
}

INLINE void walk_bf16(const int rows, const Walk *walk, V (*s)[4]) {
  const uint8_t *p = walk->panel + walk->k * 2 * PANEL;
  int64_t n = walk->end - walk->k;
  for (int64_t at = 0; at < n; at += 2, p += 4 * PANEL) {
    UNROLL for (int v = 0; v < 4; v++) {
      v_prefetch(p + 64 * v);
      use(rows, walk, at, s, v, v_bits(i_left(i_load(p + 64 * v), 16)));
    }
    UNROLL for (int v = 0; v < 4; v++)
      use(rows, walk, at + 1, s, v, v_bits(i_and(i_load(p + 64 * v), i_set(0xffff0000))));
  }
}

INLINE void walk_f16(const int rows, const Walk *walk, V (*s)[4]) {
  const uint8_t *p = walk->panel + walk->k * 2 * PANEL;
  int64_t n = walk->end - walk->k;
  for (int64_t at = 0; at < n; at++, p += 2 * PANEL) {
    v_prefetch(p);
    v_prefetch(p + 64);
    UNROLL for (int v = 0; v < 4; v++) use(rows, walk, at, s, v, v_half(p + 2 * LANES * v));
  }
}

/* Use eight inputs: the codes of 4 bits at `p`, looked up and scaled. The lowest eight bits of `fifths` are their fifth
   bits, if the kind has them. */
INLINE void use_nibbles(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[4], int64_t at,
                        const uint8_t *p, const V *table, const I *fifths, const V *scale, const V *second) {
  I codes[4];
  UNROLL for (int v = 0; v < vectors; v++) {
    v_prefetch(p + 4 * LANES * v);
    codes[v] = i_load(p + 4 * LANES * v);
  }
  UNROLL for (int j = 0; j < 8; j++)
    UNROLL for (int v = 0; v < vectors; v++) {
      V w;
      if (has_fifths(kind)) {
        I fifth = j < 4 ? i_left(fifths[v], 4 - (j & 3)) : i_right(fifths[v], j & 3);
        w = v_look_32(table[0], table[1], i_merge(i_set(15), i_right(codes[v], 4 * j), fifth));
      } else
        w = v_look(table[0], i_right(codes[v], 4 * j));
      if (kind == NIBBLES_LESS) w = v_sub(w, second[v]);
      w = v_mul(w, scale[v]);
      if (kind == NIBBLES_ADD || kind == FIVES_ADD) w = v_add(w, second[v]);
      if (kind == Q4_K || kind == Q5_K) w = v_sub(w, second[v]);
      use(rows, walk, at + j, s, v, w);
    }
}

INLINE void use_bytes(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[4], int64_t at,
                      const uint8_t *p, const V *scale, const V *second) {
  v_prefetch(p);
  UNROLL for (int v = 0; v < vectors; v++) {
    const uint8_t *q = p + LANES * v;
    V w = v_mul(kind == E4M3 ? v_e4m3(q) : v_int(kind == SIGNED ? i_signed(q) : i_bytes(q)), scale[v]);
    if (kind == BYTES_ADD) w = v_add(w, second[v]);
    use(rows, walk, at, s, v, w);
  }
}

/* Load the values of the codes, 16 or 32. */
INLINE void load_table(const int kind, const StoredRange *of, V *table) {
  if (of->table) table[0] = v_load(of->table);
  if (has_fifths(kind)) table[1] = v_load(of->table + LANES);
}

INLINE void walk_groups(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[4]) {
  const StoredRange *of = walk->of;
  int64_t head = head_bytes(of), bytes = code_bytes(kind), group = of->group, number = (uint32_t)walk->k / (uint32_t)group;
  int64_t in = walk->k - number * group, lane = walk->lane, n = walk->end - walk->k, at = 0;
  const uint8_t *block = walk->panel + number * (head + group * bytes);
  V table[2] = {v_set(0), v_set(0)}, scale[4], second[4];
  I fifths[4];
  load_table(kind, of, table);
  for (; at < n; block += head + group * bytes, in = 0) {
    UNROLL for (int v = 0; v < vectors; v++) {
      scale[v] = widened(of->scale, block, lane + LANES * v);
      /* `v_e4m3` has divided by 256. */
      if (kind == E4M3) scale[v] = v_mul(scale[v], v_set(256));
      if (has_second(kind)) second[v] = widened(of->second, block + PANEL * widths[of->scale], lane + LANES * v);
      if (has_fifths(kind)) fifths[v] = i_load(block + head - FIFTHS + 4 * (lane + LANES * v));
    }
    const uint8_t *p = block + head + in * bytes + lane * (bytes < PANEL ? 4 : 1);
    int64_t stop = least(n, at + group - in);
    if (bytes < PANEL)
      for (; at < stop; at += 8, p += 8 * bytes) {
        use_nibbles(rows, vectors, kind, walk, s, at, p, table, fifths, scale, second);
        UNROLL for (int v = 0; v < vectors && has_fifths(kind); v++) fifths[v] = i_right(fifths[v], 8);
      }
    else
      for (; at < stop; at++, p += bytes) use_bytes(rows, vectors, kind, walk, s, at, p, scale, second);
  }
}

/* Use 64 inputs of a super-block at a time. Each 32 have a scale and a minimum of 6 bits, in three planes of bytes: the
   third has the second scale, and the highest two bits of all hold the second minimum. */
INLINE void walk_q4_k(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[4]) {
  V table[2], scale[4], second[4];
  I fifths[4];
  load_table(kind, walk->of, table);
  int64_t n = walk->end - walk->k, lane = walk->lane;
  for (int64_t at = 0; at < n;) {
    int64_t k = walk->k + at;
    const uint8_t *block = walk->panel + k / SUPER * super_bytes(kind);
    const uint8_t *planes = block + 4 * PANEL + k % SUPER / 64 * half_bytes(kind), *p = planes + PLANES + 4 * lane;
    for (int half = 0; half < 2; half++) {
      UNROLL for (int v = 0; v < vectors; v++) {
        const uint8_t *own = planes + lane + LANES * v, *halves = block + 2 * (lane + LANES * v);
        I a = i_bytes(own), b = i_bytes(own + PANEL), c = i_bytes(own + 2 * PANEL), low = i_set(63);
        I high = i_or(i_right(a, 6), i_or(i_left(i_right(b, 6), 2), i_left(i_right(c, 6), 4)));
        scale[v] = v_mul(v_half(halves), v_int(i_and(half ? c : a, low)));
        second[v] = v_mul(v_half(halves + 2 * PANEL), v_int(half ? high : i_and(b, low)));
        if (has_fifths(kind)) fifths[v] = i_load(p + 4 * LANES * v);
      }
      if (has_fifths(kind)) p += FIFTHS;
      for (int unit = 0; unit < 4; unit++, at += 8, p += 4 * PANEL) {
        use_nibbles(rows, vectors, kind, walk, s, at, p, table, fifths, scale, second);
        UNROLL for (int v = 0; v < vectors && has_fifths(kind); v++) fifths[v] = i_right(fifths[v], 8);
      }
    }
  }
}

/* Use 16 inputs at a time, which share a scale. Their highest two bits lie in one lane, their lowest four in two. */
INLINE void walk_q6_k(const int rows, const int vectors, const Walk *walk, V (*s)[4]) {
  int64_t n = walk->end - walk->k, lane = walk->lane;
  V raised = v_set(8388608.0f + 32.0f), scale[4];
  for (int64_t at = 0; at < n; at += 16) {
    int64_t k = walk->k + at, half = k / 16 % 2;
    const uint8_t *block = walk->panel + k / SUPER * Q6_K_BYTES;
    const uint8_t *part = block + 2 * PANEL + k % SUPER / 32 * Q6_K_PART;
    const uint8_t *high = part + 2 * PANEL + half * 4 * PANEL + 4 * lane;
    const uint8_t *low = part + 10 * PANEL + half * 8 * PANEL + 4 * lane;
    I highs[4], lows[4];
    UNROLL for (int v = 0; v < vectors; v++) {
      int64_t own = lane + LANES * v;
      scale[v] = v_mul(v_half(block + 2 * own), v_int(i_signed(part + half * PANEL + own)));
      /* Bits 4 and 5 of each byte are those of four inputs. */
      highs[v] = i_load(high + 4 * LANES * v);
      v_prefetch(high + 4 * LANES * v);
    }
    for (int pair = 0; pair < 2; pair++, low += 4 * PANEL) {
      UNROLL for (int v = 0; v < vectors; v++) {
        v_prefetch(low + 4 * LANES * v);
        lows[v] = i_load(low + 4 * LANES * v);
      }
      UNROLL for (int quad = 0; quad < 2; quad++) {
        I codes[4];
        UNROLL for (int v = 0; v < vectors; v++) {
          I both = i_merge(i_set(0x0f0f0f0f), i_right(lows[v], 4 * quad), i_left(highs[v], 4 - 2 * quad));
          codes[v] = i_and(both, i_set(0x3f3f3f3f));
        }
        UNROLL for (int j = 0; j < 4; j++)
          UNROLL for (int v = 0; v < vectors; v++)
            use(rows, walk, at + 8 * pair + 4 * quad + j, s, v,
                v_mul(v_sub(v_raised_byte(codes[v], j), raised), scale[v]));
      }
      UNROLL for (int v = 0; v < vectors; v++) highs[v] = i_right(highs[v], 4);
    }
  }
}

INLINE void walk_kind(const int rows, const int vectors, const int kind, const Walk *walk, V (*s)[4]) {
  if (kind == BF16) walk_bf16(rows, walk, s);
  else if (kind == F16) walk_f16(rows, walk, s);
  else if (kind == Q4_K || kind == Q5_K) walk_q4_k(rows, vectors, kind, walk, s);
  else if (kind == Q6_K) walk_q6_k(rows, vectors, walk, s);
  else walk_groups(rows, vectors, kind, walk, s);
}

/* ---- the functions of each kind: a run's chain for 1 to 6 rows, and unpacking to a tile ---- */

INLINE void clear(const int rows, const int vectors, V (*s)[4]) {
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < vectors; v++) s[r][v] = v_set(0);
}

/* Compute one run's chains, and add them to `total` if `add` is not 0. */
INLINE void fuse(const int rows, const int kind, const Walk *walk, float *total, int add) {
  V s[MOST_ROWS][4];
  /* Scales and codes of 64 outputs need registers beside the sums. So several rows use 32 outputs at a time, and the
     sums wait in memory for the other 32. */
  if (rows < SPLIT_ROWS || kind == BF16 || kind == F16) {
    clear(rows, 4, s);
    walk_kind(rows, 4, kind, walk, s);
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < 4; v++) {
        float *t = total + r * PANEL + LANES * v;
        v_store(t, add ? v_add(v_load(t), s[r][v]) : s[r][v]);
      }
    return;
  }
  V sums[2][MOST_ROWS][2];
  Walk some = *walk;
  for (int64_t k = walk->k; k < walk->end; k += CHUNK) {
    some.k = k, some.end = least(walk->end, k + CHUNK), some.x = walk->x + (k - walk->k);
    for (int side = 0; side < 2; side++) {
      some.lane = side * PANEL / 2;
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2; v++) s[r][v] = k > walk->k ? sums[side][r][v] : v_set(0);
      walk_kind(rows, 2, kind, &some, s);
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2; v++) sums[side][r][v] = s[r][v];
    }
  }
  for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < 4; v++) {
      float *t = total + r * PANEL + LANES * v;
      v_store(t, add ? v_add(v_load(t), sums[v / 2][r][v % 2]) : sums[v / 2][r][v % 2]);
    }
}

#define FUSED(KIND, ROWS)                                                      \
  static void fused_##KIND##_##ROWS(const Walk *walk, float *total, int add) { \
    fuse(ROWS, KIND, walk, total, add);                                        \
  }
#define KIND(NAME)                                                                          \
  FUSED(NAME, 1) FUSED(NAME, 2) FUSED(NAME, 3) FUSED(NAME, 4) FUSED(NAME, 5) FUSED(NAME, 6) \
  static void unpack_##NAME(const Walk *walk) { walk_kind(0, 4, NAME, walk, 0); }
KIND(BF16) KIND(F16) KIND(NIBBLES) KIND(NIBBLES_ADD) KIND(NIBBLES_LESS) KIND(FIVES) KIND(FIVES_ADD)
KIND(SIGNED) KIND(BYTES_ADD) KIND(E4M3) KIND(Q4_K) KIND(Q5_K) KIND(Q6_K)

typedef void (*fused_fn)(const Walk *, float *, int);
typedef void (*unpack_fn)(const Walk *);
#define ALL(NAME) {fused_##NAME##_1, fused_##NAME##_2, fused_##NAME##_3, fused_##NAME##_4, fused_##NAME##_5, fused_##NAME##_6}
static const fused_fn fused[NUM_KINDS][MOST_ROWS] = {
    ALL(BF16), ALL(F16), ALL(NIBBLES), ALL(NIBBLES_ADD), ALL(NIBBLES_LESS), ALL(FIVES), ALL(FIVES_ADD),
    ALL(SIGNED), ALL(BYTES_ADD), ALL(E4M3), ALL(Q4_K), ALL(Q5_K), ALL(Q6_K)};
static const unpack_fn unpacks[NUM_KINDS] = {
    unpack_BF16, unpack_F16, unpack_NIBBLES, unpack_NIBBLES_ADD, unpack_NIBBLES_LESS, unpack_FIVES, unpack_FIVES_ADD,
    unpack_SIGNED, unpack_BYTES_ADD, unpack_E4M3, unpack_Q4_K, unpack_Q5_K, unpack_Q6_K};

/* Go on with the chains of some rows over n inputs of a tile. */
#define GO_ON(ROWS)                                                                                            \
  static void go_on_##ROWS(const float *x, int64_t stride, const float *w, int64_t n, float *sums) {            \
    V s[ROWS][4];                                                                                              \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                      \
      UNROLL for (int v = 0; v < 4; v++) s[r][v] = v_load(sums + r * PANEL + LANES * v);                       \
    for (int64_t k = 0; k < n; k++, w += PANEL) {                                                              \
      V w0 = v_load(w), w1 = v_load(w + LANES), w2 = v_load(w + 2 * LANES), w3 = v_load(w + 3 * LANES);        \
      UNROLL for (int r = 0; r < ROWS; r++) {                                                                  \
        V f = v_set(x[r * stride + k]);                                                                        \
        s[r][0] = v_fma(f, w0, s[r][0]);                                                                       \
        s[r][1] = v_fma(f, w1, s[r][1]);                                                                       \
        s[r][2] = v_fma(f, w2, s[r][2]);                                                                       \
        s[r][3] = v_fma(f, w3, s[r][3]);                                                                       \
      }                                                                                                        \
    }                                                                                                          \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                      \
      UNROLL for (int v = 0; v < 4; v++) v_store(sums + r * PANEL + LANES * v, s[r][v]);                       \
  }
GO_ON(1) GO_ON(2) GO_ON(3) GO_ON(4) GO_ON(5) GO_ON(6)
typedef void (*go_on_fn)(const float *, int64_t, const float *, int64_t, float *);
static const go_on_fn go_on[MOST_ROWS] = {go_on_1, go_on_2, go_on_3, go_on_4, go_on_5, go_on_6};

/* ---- linears ---- */

typedef struct {
  const StoredLinear *linear;
  const float *x;
  int64_t stride;
  float *y;
  int64_t y_stride, rows, next;
} StoredJob;

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
  int64_t step = steps[of->kind], from = k / step * step;
  Walk walk = {of, of->packed + panel * of->panel_bytes, from, round_up(end, step), 0, 0, 0, memory};
  unpacks[of->kind](&walk);
  return memory + (k - from) * PANEL;
}

/* Add the bias to some rows of 64 sums. */
static void add_bias(float *total, const float *bias, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < width; j++) total[r * PANEL + j] += bias[j];
}

/* Compute some rows of one run, and add them to `total` if `add` is not 0. */
static void fused_run(const StoredJob *job, const StoredRange *of, int64_t panel, int64_t k, int64_t end,
                      const float *x, int64_t rows, float *total, int add) {
  int64_t passes = num_passes(rows);
  for (int64_t pass = 0; pass < passes; pass++) {
    int64_t r = rows * pass / passes, count = rows * (pass + 1) / passes - r;
    const float *own = x + r * job->stride + k;
    Walk walk = {of, of->packed + panel * of->panel_bytes, k, end, 0, own, job->stride, 0};
    fused[of->kind][count - 1](&walk, total + r * PANEL, add);
  }
}

/* Compute some rows of one run by tiles. `sums` is [rows][64]. */
static void run_by_tiles(const StoredRange *of, int64_t panel, int64_t k, int64_t end, const float *x, int64_t stride,
                         float *sums, int64_t rows) {
  float memory[(TILE + 2 * MOST_STEP) * PANEL];
  memset(sums, 0, 4 * PANEL * rows);
  int64_t passes = num_passes(rows);
  for (int64_t at = k; at < end; at += TILE) {
    int64_t n = least(TILE, end - at);
    const float *tile = unpack_tile(of, panel, at, at + n, memory);
    for (int64_t pass = 0; pass < passes; pass++) {
      int64_t r = rows * pass / passes, count = rows * (pass + 1) / passes - r;
      go_on[count - 1](x + r * stride + at, stride, tile, n, sums + r * PANEL);
    }
  }
}

/* Compute some rows of one panel, at most BLOCK_ROWS. */
static void stored_rows(const StoredJob *job, const StoredRange *of, int64_t panel, int64_t row, int64_t rows) {
  const StoredLinear *l = job->linear;
  const float *x = job->x + row * job->stride;
  int64_t width = least(PANEL, of->outputs - panel * PANEL), k = 0;
  int few = fits_passes(of->kind, rows) && is_fused(l, steps[of->kind]), add = 0;
  float total[BLOCK_ROWS * PANEL], sums[BLOCK_ROWS * PANEL];
  for (int part = 0; part < 2 && l->inputs[part]; part++) {
    for (int64_t stop = k + l->inputs[part]; k < stop; add = 1) {
      int64_t end = least(stop, k + l->run[part]);
      if (few) {
        fused_run(job, of, panel, k, end, x, rows, total, add);
      } else {
        run_by_tiles(of, panel, k, end, x, job->stride, add ? sums : total, rows);
        for (int64_t i = 0; add && i < rows * PANEL; i++) total[i] += sums[i];
      }
      k = end;
    }
    if (of->bias && part == 0) add_bias(total, of->bias + panel * PANEL, rows, width);
  }
  float *y = job->y + row * job->y_stride + of->first + panel * PANEL;
  for (int64_t r = 0; r < rows; r++) memcpy(y + r * job->y_stride, total + r * PANEL, 4 * width);
}

static void stored_share(void *p) {
  StoredJob *job = p;
  int64_t panel, blocks = (job->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (;;) {
    panel = take(&job->next);
    const StoredRange *of = job->linear->ranges, *end = of + job->linear->num_ranges;
    for (; of < end && panel >= num_panels(of->outputs); of++) panel -= num_panels(of->outputs);
    if (of == end) return;
    for (int64_t block = 0; block < blocks; block++) {
      int64_t row = job->rows * block / blocks;
      stored_rows(job, of, panel, row, job->rows * (block + 1) / blocks - row);
    }
  }
}

/* Compute the outputs of all ranges, y[rows][y_stride] from x[rows][inputs]. Rows of x begin `stride` floats apart. */
void convoy_stored_linear(const StoredLinear *linear, const float *x, int64_t stride, float *y, int64_t y_stride,
                          int64_t rows, int64_t threads) {
  StoredJob job = {linear, x, stride, y, y_stride, rows, 0};
  convoy_run(stored_share, &job, threads);
}

/* Unpack outputs of a range to out[count][inputs]: those of `ids`, or those from `first` on if that is null. */
void convoy_stored_unpack(const StoredRange *of, int64_t inputs, const int64_t *ids, int64_t first, int64_t count,
                          float *out) {
  float memory[(TILE + 2 * MOST_STEP) * PANEL];
  for (int64_t done = 0, width; done < count; done += width) {
    int64_t output = ids ? ids[done] : first + done;
    width = ids ? 1 : least(PANEL - output % PANEL, count - done);
    for (int64_t k = 0; k < inputs; k += TILE) {
      int64_t n = least(TILE, inputs - k);
      const float *tile = unpack_tile(of, output / PANEL, k, k + n, memory) + output % PANEL;
      for (int64_t j = 0; j < width; j++)
        for (int64_t i = 0; i < n; i++) out[(done + j) * inputs + k + i] = tile[i * PANEL + j];
    }
  }
}

/* ---- packing ---- */

/* Rows of codes and of scales as the file has them. The numbers of one group lie `_step` bytes behind those of the
   group before. Of codes of 4 bits, the low ones of `span` bytes come first, then the high ones; 0 means that two
   inputs of a byte follow each other. Bytes are exclusive-ored with `flip`. */
typedef struct {
  const uint8_t *codes, *scales, *seconds, *fifths; /* `fifths` lie as codes do */
  int64_t codes_row, codes_step, scales_row, scales_step, seconds_row, seconds_step, span, flip;
} StoredSource;

typedef struct {
  const StoredRange *of;
  const StoredSource *source;
  uint8_t *packed;
  int64_t inputs, next;
} PackJob;

/* Return the bytes of one panel. */
int64_t convoy_stored_panel_bytes(const StoredRange *of, int64_t inputs) {
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

static void pack_floats(const PackJob *job, int64_t first, int64_t width, uint8_t *panel) {
  uint16_t *to = (uint16_t *)panel;
  int together = job->of->kind == BF16 ? 2 : 1;
  for (int64_t start = 0; start < job->inputs; start += TILE)
    for (int64_t o = 0; o < width; o++) {
      const uint8_t *row = job->source->codes + (first + o) * job->source->codes_row;
      for (int64_t k = start; k < least(start + TILE, job->inputs); k++)
        memcpy(to + (k / together * PANEL + o) * together + k % together, row + 2 * k, 2);
    }
}

static void pack_groups(const PackJob *job, int64_t first, int64_t width, uint8_t *panel) {
  const StoredRange *of = job->of;
  const StoredSource *from = job->source;
  int64_t head = head_bytes(of), bytes = code_bytes(of->kind), group = of->group;
  int64_t wide = widths[of->scale], second = has_second(of->kind) ? widths[of->second] : 0;
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
    if (of->kind <= F16) pack_floats(job, first, width, to);
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
