/* Multiply by matrices in the form of the model's file in whole numbers: rows are rounded to 8 bits in groups of 32
   inputs, and codes stay as the file has them.

   A step of 16 or 32 inputs has one sum of products of whole numbers, which is exact in any order. The steps of an
   output are one chain of fused multiply-adds in the order of the inputs: docs/exact.md has it in full. The panels are
   those of `stored.c`. Build with -ffp-contract=off. */

#include <float.h>
#include <math.h>

#include "int8.h"
#include "ranges.h"

#define FOUR 4          /* vectors of outputs that few rows use at a time */
#define FUSED_PARTS (PANEL / LANES / FOUR) /* times that many vectors in a panel */
#define TILE_GROUPS 8   /* groups that are unpacked together */
#define BLOCK_ROWS 96   /* rows for which a tile is unpacked once */
#define LEAST_TOP 0x1p-100f /* below it all numbers of a group are 0: 127 over it is finite */
#define STEPS(KIND) ((KIND) == Q6_K ? 2 : 1) /* steps of a group */

/* ---- rows ---- */

typedef struct {
  const float *x;
  int64_t stride, inputs, rows, threads;
  int8_t *codes, *paired;
  RoundedGroup *groups;
} RoundJob;

/* Round a group of a row. A group with a number that is not finite has the scale NaN, so its results are NaN. */
static void round_group(const float *x, int8_t *codes, int8_t *paired, RoundedGroup *group) {
  V greatest = v_set(0);
  int none = 0;
  for (int k = 0; k < ROUNDED_GROUP; k += LANES) {
    V some = v_load(x + k);
    none |= v_has_nan(some);
    greatest = v_max(greatest, v_abs(some));
  }
  float top = v_greatest(greatest);
  int is_finite = !none && top <= FLT_MAX;
  V factor = v_set(is_finite && top >= LEAST_TOP ? 127.0f / top : 0.0f);
  memset(codes, 0, ROUNDED_GROUP);
  if (is_finite)
    for (int k = 0; k < ROUNDED_GROUP; k += LANES) i_store_bytes(codes + k, i_rounded(v_mul(v_load(x + k), factor)));
  i_pair_bytes(codes, paired, group->sums);
  group->scale = is_finite ? top / 127.0f : NAN;
  group->weighted = group->scale * (float)(group->sums[0] + group->sums[1]);
}

static void round_share(void *p) {
  const RoundJob *job = p;
  int64_t row, end;
  convoy_my_part(job->threads, job->rows, &row, &end);
  for (; row < end; row++)
    for (int64_t k = 0; k < job->inputs; k += ROUNDED_GROUP) {
      int64_t group = k / ROUNDED_GROUP * job->rows + row, at = group * ROUNDED_GROUP;
      round_group(job->x + row * job->stride + k, job->codes + at, job->paired + at, job->groups + group);
    }
}

int convoy_round_rows(const float *x, int64_t stride, int64_t inputs, int64_t rows, int64_t threads, RoundedRows *to) {
  int64_t count = rows * inputs, bytes = count / ROUNDED_GROUP * (int64_t)sizeof(RoundedGroup);
  uint8_t *memory = aligned_alloc(64, round_up(2 * count + bytes, 64));
  if (!memory) return 0;
  int8_t *codes = (int8_t *)memory + bytes;
  RoundJob job = {x, stride, inputs, rows, rows > 4 ? threads : 1, codes, codes + count, (RoundedGroup *)memory};
  convoy_run(round_share, &job, job.threads);
  *to = (RoundedRows){codes, codes + count, job.groups, inputs, rows, memory};
  return 1;
}

/* ---- forms ---- */

INLINE int is_pairs(const int kind) { return code_bytes(kind) < PANEL || is_super(kind); }
/* Return whether codes lie in bytes, and whether they are signed bytes once they are unpacked. */
INLINE int is_bytes(const int kind) { return kind == SIGNED || kind == BYTES_ADD; }
INLINE int is_signed(const int kind) { return is_bytes(kind) || kind == NIBBLES; }
INLINE int has_shift(const int kind) { return has_second(kind) || is_super(kind); }
/* Return what is added to the code of each weight before it is multiplied, as a whole number times the sum of x. */
INLINE int32_t centre(const int kind) {
  if (kind == SIGNED || kind == NIBBLES) return -BYTES_FROM;
  if (kind == BYTES_ADD) return 128 - BYTES_FROM;
  return kind == CENTRED ? -8 : kind == FIVES ? -16 : kind == Q6_K ? -32 : 0;
}

/* Return the values of the codes of NIBBLES, which are whole numbers, as `i_dots_bytes` takes them. */
INLINE I values_of(const int kind, const StoredRange *of) {
  if (kind != NIBBLES) return i_set(0);
  uint8_t values[16];
  for (int code = 0; code < 16; code++) values[code] = (uint8_t)((int)of->table[code] + BYTES_FROM);
  return i_table(values);
}

/* Return how far ahead memory is asked for where codes are unpacked in registers: one or two rows of bytes take less
   time here than in `stored.c`. */
INLINE int far_ahead(const int kind, const int rows) { return is_pairs(kind) || rows > 2 ? AHEAD : 2 * AHEAD; }

/* Return whether codes for so many rows are unpacked in registers: for more, a tile at a time costs less. That of Q6_K,
   whose codes lie in two places, costs less for two. */
INLINE int fits_registers(int64_t kind, int64_t rows) { return rows <= (kind == Q6_K ? 1 : FUSED_DOTS); }

/* A group of 32 inputs: the codes of outputs from some lane on, and the numbers of its steps. A weight is
   factor * code + shift. */
typedef struct {
  const uint8_t *codes, *high;
  V factor[2][FOUR], shift[FOUR];
} Group;

INLINE Group group_at(const int kind, const StoredRange *of, const uint8_t *panel, int64_t number, int64_t lane,
                      const int vectors) {
  Group g;
  int64_t k = number * ROUNDED_GROUP;
  if (is_super(kind)) {
    const uint8_t *block = panel + k / SUPER * super_bytes(kind);
    const uint8_t *planes = block + 4 * PANEL + k % SUPER / 64 * half_bytes(kind);
    int64_t half = k % 64 / 32, fifths = kind == Q5_K ? FIFTHS : 0;
    g.high = planes + PLANES + half * (16 * PANEL + fifths) + 4 * lane;
    g.codes = g.high + fifths;
    UNROLL for (int v = 0; v < vectors; v++) {
      const uint8_t *own = planes + lane + LANES * v, *halves = block + 2 * (lane + LANES * v);
      I b = i_bytes(own + PANEL), c = i_bytes(own + 2 * PANEL), low = i_set(63), scale, least;
      if (half) {
        I a = i_bytes(own);
        scale = i_and(c, low);
        least = i_or(i_right(a, 6), i_or(i_left(i_right(b, 6), 2), i_left(i_right(c, 6), 4)));
      } else {
        scale = i_and(i_bytes(own), low);
        least = i_and(b, low);
      }
      g.factor[0][v] = v_mul(v_half(halves), v_int(scale));
      g.shift[v] = v_sub(v_set(0), v_mul(v_half(halves + 2 * PANEL), v_int(least)));
    }
    return g;
  }
  if (kind == Q6_K) {
    const uint8_t *block = panel + k / SUPER * Q6_K_BYTES, *part = block + 2 * PANEL + k % SUPER / 32 * Q6_K_PART;
    g.high = part + 2 * PANEL + 4 * lane;
    g.codes = part + 10 * PANEL + 4 * lane;
    UNROLL for (int half = 0; half < 2; half++)
      UNROLL for (int v = 0; v < vectors; v++) {
        int64_t own = lane + LANES * v;
        g.factor[half][v] = v_mul(v_half(block + 2 * own), v_int(i_signed(part + half * PANEL + own)));
      }
    return g;
  }
  int64_t of_group = (uint32_t)k / (uint32_t)of->group, head = head_bytes(of), bytes = code_bytes(kind);
  const uint8_t *block = panel + of_group * (head + of->group * bytes);
  g.codes = block + head + (k - of_group * of->group) * bytes + lane * (bytes < PANEL ? 4 : 1);
  g.high = block + head - FIFTHS + 4 * lane;
  UNROLL for (int v = 0; v < vectors; v++) {
    g.factor[0][v] = widened(of->scale, block, lane + LANES * v);
    if (!has_second(kind)) continue;
    V second = widened(of->second, block + PANEL * widths_of[of->scale], lane + LANES * v);
    g.shift[v] = kind == NIBBLES_LESS ? v_sub(v_set(0), v_mul(second, g.factor[0][v])) : second;
  }
  return g;
}

/* Ask for the line of vector v of codes, `far` bytes ahead, if that is not 0. */
INLINE void fetch(const uint8_t *p, const int v, const int far) {
  if (far && 4 * LANES * v % LINE == 0) prefetch(p + 4 * LANES * v + far);
}

/* Unpack the codes of eight inputs, `unit` of four in a group, to four bytes in each lane. Outputs of bytes are then in
   an order that `i_in_order` undoes. */
INLINE void eight_codes(const int kind, const int far, const Group *g, I values, const int unit, const int vectors,
                        I *first, I *second) {
  if (is_bytes(kind)) {
    const uint8_t *p = g->codes + unit * 8 * PANEL;
    UNROLL for (int k = 0; k < 8 && far; k++) prefetch(p + k * PANEL + far);
    i_quads(p, first);
    i_quads(p + 4 * PANEL, second);
    int flips = kind == SIGNED ? BYTES_FROM != 0 : BYTES_FROM == 0;
    UNROLL for (int v = 0; v < vectors && flips; v++) {
      first[v] = i_xor(first[v], i_set(0x80808080));
      second[v] = i_xor(second[v], i_set(0x80808080));
    }
    return;
  }
  I low = i_set(0x0f0f0f0f);
  if (kind == Q6_K) {
    const uint8_t *p = g->codes + unit * 4 * PANEL, *q = g->high + unit / 2 * 4 * PANEL;
    UNROLL for (int v = 0; v < vectors; v++) {
      fetch(p, v, far);
      if (unit % 2 == 0) fetch(q, v, far);
      /* Bits 4 and 5 of each byte are those of four inputs. */
      I lows = i_load(p + 4 * LANES * v), highs = i_right(i_load(q + 4 * LANES * v), 4 * (unit % 2));
      I highest = i_set(0x30303030);
      first[v] = i_or(i_and(lows, low), i_and(i_left(highs, 4), highest));
      second[v] = i_or(i_and(i_right(lows, 4), low), i_and(i_left(highs, 2), highest));
    }
    return;
  }
  const uint8_t *p = g->codes + unit * 4 * PANEL;
  UNROLL for (int v = 0; v < vectors; v++) {
    fetch(p, v, far);
    I codes = i_load(p + 4 * LANES * v);
    first[v] = i_and(codes, low);
    second[v] = i_and(i_right(codes, 4), low);
    if (kind == NIBBLES) first[v] = i_look(values, first[v]), second[v] = i_look(values, second[v]);
    if (!has_fifths(kind)) continue;
    if (unit == 0) fetch(g->high, v, far);
    /* Of eight bits, those of even and of odd inputs go to bit 4 of four bytes. The product has each of them there:
       no other sum of places is one of these, and what two bits add up to ends one place higher. */
    I fifths = i_right(i_load(g->high + 4 * LANES * v), 8 * unit), place = i_set(0x10101010);
    first[v] = i_or(first[v], i_and(i_mul(i_and(fifths, i_set(0x55)), i_set(0x41041 << 4)), place));
    second[v] = i_or(second[v], i_and(i_mul(i_and(fifths, i_set(0xaa)), i_set(0x41041 << 3)), place));
  }
}

INLINE uint32_t four_at(const int8_t *x) {
  uint32_t four;
  memcpy(&four, x, 4);
  return four;
}

INLINE int32_t sum_of(const RoundedGroup *x, const int steps, const int step) {
  return steps == 2 ? x->sums[step] : x->sums[0] + x->sums[1];
}

/* Return the greatest code, or the greatest magnitude of signed bytes. */
INLINE int top_of(const int kind) { return is_signed(kind) ? 128 : has_fifths(kind) ? 31 : kind == Q6_K ? 63 : 15; }

/* Add the products of four codes in each lane, the `number`-th four of a step, and four of a row. Sums are whole after
   the last one. `parts` hold what is not in them yet. */
INLINE void add_four(const int kind, const int number, const I *codes, const I x, const int vectors, I *parts, I *sums) {
  const int most = dots_at_once(top_of(kind)), run = STEPS(kind) == 2 && most > 4 ? 4 : most;
  UNROLL for (int v = 0; v < vectors; v++) {
    if (number % run == 0) parts[v] = i_begin_dots(sums[v]);
    parts[v] = is_signed(kind) ? i_dots_bytes(parts[v], codes[v], x) : i_dots(parts[v], codes[v], x);
    if (number % run == run - 1) sums[v] = i_end_dots(parts[v], sums[v]);
  }
}

/* ---- few rows: codes are unpacked in registers ---- */

/* Add the products of a group of some rows to the sums of the outputs from `lane` on. */
INLINE void fuse_group(const int rows, const int kind, const StoredRange *of, const uint8_t *panel, int64_t number,
                       int64_t lane, I values, const int8_t *codes, const RoundedGroup *groups, V (*sums)[FOUR]) {
  const int steps = STEPS(kind);
  Group g = group_at(kind, of, panel, number, lane, FOUR);
  UNROLL for (int step = 0; step < steps; step++) {
    I s[FUSED_DOTS][FOUR], parts[FUSED_DOTS][FOUR];
    UNROLL for (int r = 0; r < rows; r++) {
      I start = i_set((uint32_t)(centre(kind) * sum_of(groups + r, steps, step)));
      UNROLL for (int v = 0; v < FOUR; v++) s[r][v] = start;
    }
    UNROLL for (int at = 0; at < 4 / steps; at++) {
      const int unit = step * 4 / steps + at;
      I first[FOUR], second[FOUR];
      eight_codes(kind, far_ahead(kind, rows), &g, values, unit, FOUR, first, second);
      UNROLL for (int r = 0; r < rows; r++) {
        const int8_t *own = codes + r * ROUNDED_GROUP + unit * 8;
        add_four(kind, 2 * at, first, i_set(four_at(own)), FOUR, parts[r], s[r]);
        add_four(kind, 2 * at + 1, second, i_set(four_at(own + 4)), FOUR, parts[r], s[r]);
      }
    }
    UNROLL for (int r = 0; r < rows; r++) {
      if (is_bytes(kind)) i_in_order(s[r]);
      V scale = v_set(groups[r].scale);
      UNROLL for (int v = 0; v < FOUR; v++)
        sums[r][v] = v_fma(v_mul(scale, g.factor[step][v]), v_int(s[r][v]), sums[r][v]);
    }
  }
  if (has_shift(kind)) UNROLL for (int r = 0; r < rows; r++) {
    V weighted = v_set(groups[r].weighted);
    UNROLL for (int v = 0; v < FOUR; v++) sums[r][v] = v_fma(weighted, g.shift[v], sums[r][v]);
  }
}

/* Compute some rows of a panel. All outputs of a group come before the next one, so that memory is read in its order:
   the sums that registers cannot hold lie in the nearest cache. */
INLINE void fuse_dots(const int rows, const int kind, const StoredRange *of, const uint8_t *panel, const RoundedRows *x,
                      int64_t row, float *total) {
  int64_t count = x->inputs / ROUNDED_GROUP;
  const int8_t *codes = (is_pairs(kind) ? x->paired : x->codes) + row * ROUNDED_GROUP;
  const RoundedGroup *groups = x->groups + row;
  const I values = values_of(kind, of);
  V sums[FUSED_PARTS][FUSED_DOTS][FOUR];
  UNROLL for (int part = 0; part < FUSED_PARTS; part++)
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < FOUR; v++) sums[part][r][v] = v_set(0);
  if (kind == Q6_K) {
    /* Its codes take longer than their memory, so that its sums stay in registers for a super-block. */
    const int run = SUPER / ROUNDED_GROUP;
    for (int64_t first = 0; first < count; first += run)
      for (int part = 0; part < FUSED_PARTS; part++) {
        V own[FUSED_DOTS][FOUR];
        memcpy(own, sums[part], sizeof own);
        for (int64_t i = first; i < least(count, first + run); i++)
          fuse_group(rows, kind, of, panel, i, part * FOUR * LANES, values, codes + i * x->rows * ROUNDED_GROUP,
                     groups + i * x->rows, own);
        memcpy(sums[part], own, sizeof own);
      }
  } else {
    for (int64_t i = 0; i < count; i++, groups += x->rows, codes += x->rows * ROUNDED_GROUP)
      UNROLL for (int part = 0; part < FUSED_PARTS; part++)
        fuse_group(rows, kind, of, panel, i, part * FOUR * LANES, values, codes, groups, sums[part]);
  }
  UNROLL for (int part = 0; part < FUSED_PARTS; part++)
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < FOUR; v++)
        v_store(total + r * PANEL + part * FOUR * LANES + LANES * v, sums[part][r][v]);
}

/* ---- more rows: some groups of a panel are unpacked to a tile ---- */

typedef struct {
  uint8_t codes[TILE_GROUPS * ROUNDED_GROUP * PANEL]; /* by four inputs, then by output */
  float factors[2 * TILE_GROUPS * PANEL], shifts[TILE_GROUPS * PANEL];
} Tile;

/* With products of one row a tile has four inputs of each output together. With those of two rows it has eight of each
   of two outputs, and `s` the sums of both rows with these, until `order_sums` makes them sums of a row, or the
   reverse. `add_rows` does as `add_four` for some rows, from `own` on. */
#if ROWS_OF_DOT == 1
INLINE void lay_codes(I *first, I *second) { (void)first, (void)second; }
INLINE void order_sums(const int rows, I s[DOT_ROWS][DOT_VECTORS]) { (void)rows, (void)s; }
INLINE void add_rows(const int kind, const int rows, const int number, const I *codes, const int8_t *own,
                     I parts[DOT_ROWS][DOT_VECTORS], I s[DOT_ROWS][DOT_VECTORS]) {
  UNROLL for (int r = 0; r < rows; r++)
    add_four(kind, number, codes, i_set(four_at(own + r * ROUNDED_GROUP)), DOT_VECTORS, parts[r], s[r]);
}
#else
INLINE void lay_codes(I *first, I *second) {
  UNROLL for (int v = 0; v < FOUR; v++) i_by_turns(first + v, second + v);
}
INLINE void order_sums(const int rows, I s[DOT_ROWS][DOT_VECTORS]) {
  UNROLL for (int r = 0; r < rows; r += 2)
    UNROLL for (int v = 0; v < DOT_VECTORS; v++) i_exchange(&s[r][v], &s[r + 1][v]);
}
INLINE void add_rows(const int kind, const int rows, const int number, const I *codes, const int8_t *own,
                     I parts[DOT_ROWS][DOT_VECTORS], I s[DOT_ROWS][DOT_VECTORS]) {
  (void)kind, (void)parts;
  UNROLL for (int r = 0; r < rows; r += 2) {
    const int8_t *one = own + r * ROUNDED_GROUP - 4 * (number % 2);
    /* The last of an odd number of rows is multiplied twice. */
    const I eights = i_eights(one, r + 1 < rows ? one + ROUNDED_GROUP : one);
    UNROLL for (int v = 0; v < DOT_VECTORS; v++)
      s[r + number % 2][v] = i_dots_two(s[r + number % 2][v], eights, codes[v]);
  }
}
#endif

INLINE void unpack_groups(const int kind, const StoredRange *of, const uint8_t *panel, int64_t first, int64_t count,
                          Tile *tile) {
  const I values = values_of(kind, of);
  for (int64_t i = 0; i < count; i++)
    for (int64_t lane = 0; lane < PANEL; lane += FOUR * LANES) {
      Group g = group_at(kind, of, panel, first + i, lane, FOUR);
      UNROLL for (int unit = 0; unit < 4; unit++) {
        I one[FOUR], two[FOUR];
        eight_codes(kind, 0, &g, values, unit, FOUR, one, two);
        if (is_bytes(kind)) i_in_order(one), i_in_order(two);
        lay_codes(one, two);
        uint8_t *to = tile->codes + (i * 4 + unit) * 8 * PANEL + 4 * lane;
        UNROLL for (int v = 0; v < FOUR; v++) {
          i_store(to + 4 * LANES * v, one[v]);
          i_store(to + 4 * PANEL + 4 * LANES * v, two[v]);
        }
      }
      UNROLL for (int v = 0; v < FOUR; v++) {
        for (int step = 0; step < STEPS(kind); step++)
          v_store(tile->factors + (i * STEPS(kind) + step) * PANEL + lane + LANES * v, g.factor[step][v]);
        if (has_shift(kind)) v_store(tile->shifts + i * PANEL + lane + LANES * v, g.shift[v]);
      }
    }
}

/* Go on with the chains of some rows over the groups of a tile. `codes` and `groups` are those of the first of them, and
   those of `all` rows lie side by side. The `ahead` bytes from `next` on are asked for meanwhile. */
INLINE void dot_tile(const int rows, const int kind, const Tile *tile, int64_t count, const int8_t *codes, int64_t all,
                     const RoundedGroup *groups, float *total, const uint8_t *next, int64_t ahead) {
  const int vectors = DOT_VECTORS, steps = STEPS(kind), all_rows = (int)round_up(rows, ROWS_OF_DOT);
  int64_t hop = ahead / count * vectors * LANES / PANEL;
  for (int64_t lane = 0; lane < PANEL; lane += vectors * LANES) {
    V sums[DOT_ROWS][DOT_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = v_load(total + r * PANEL + lane + LANES * v);
    const uint8_t *p = tile->codes + 4 * lane;
    for (int64_t i = 0; i < count; i++, next += hop) {
      for (int64_t b = 0; b < hop; b += LINE) __builtin_prefetch(next + b, 0, 2);
      const int8_t *own = codes + i * all * ROUNDED_GROUP;
      const RoundedGroup *group = groups + i * all;
      UNROLL for (int step = 0; step < steps; step++) {
        I s[DOT_ROWS][DOT_VECTORS], parts[DOT_ROWS][DOT_VECTORS];
        UNROLL for (int r = 0; r < all_rows; r++) {
          I start = i_set((uint32_t)(centre(kind) * sum_of(group + least(r, rows - 1), steps, step)));
          UNROLL for (int v = 0; v < vectors; v++) s[r][v] = start;
        }
        order_sums(rows, s);
        UNROLL for (int four = 0; four < 8 / steps; four++, p += 4 * PANEL, own += 4) {
          I w[DOT_VECTORS];
          UNROLL for (int v = 0; v < vectors; v++) w[v] = i_load(p + 4 * LANES * v);
          add_rows(kind, rows, four, w, own, parts, s);
        }
        order_sums(rows, s);
        const float *factors = tile->factors + (i * steps + step) * PANEL + lane;
        UNROLL for (int v = 0; v < vectors; v++) {
          V factor = v_load(factors + LANES * v);
          UNROLL for (int r = 0; r < rows; r++)
            sums[r][v] = v_fma(v_mul(v_set(group[r].scale), factor), v_int(s[r][v]), sums[r][v]);
        }
      }
      if (has_shift(kind)) UNROLL for (int v = 0; v < vectors; v++) {
        V shift = v_load(tile->shifts + i * PANEL + lane + LANES * v);
        UNROLL for (int r = 0; r < rows; r++) sums[r][v] = v_fma(v_set(group[r].weighted), shift, sums[r][v]);
      }
    }
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int v = 0; v < vectors; v++) v_store(total + r * PANEL + lane + LANES * v, sums[r][v]);
  }
}

/* ---- the functions of each kind ---- */

typedef void (*fuse_fn)(const StoredRange *, const uint8_t *, const RoundedRows *, int64_t, float *);
typedef void (*unpack_fn)(const StoredRange *, const uint8_t *, int64_t, int64_t, Tile *);
typedef void (*tile_fn)(const Tile *, int64_t, const int8_t *, int64_t, const RoundedGroup *, float *, const uint8_t *,
                        int64_t);

#define FUSE(KIND, ROWS)                                                                                           \
  static void fuse_##KIND##_##ROWS(const StoredRange *of, const uint8_t *panel, const RoundedRows *x, int64_t row, \
                                   float *total) {                                                                 \
    fuse_dots(ROWS, KIND, of, panel, x, row, total);                                                               \
  }
#define DOTS(KIND, ROWS)                                                                                           \
  static void tile_##KIND##_##ROWS(const Tile *tile, int64_t count, const int8_t *codes, int64_t all,              \
                                   const RoundedGroup *groups, float *total, const uint8_t *next, int64_t ahead) { \
    dot_tile(ROWS, KIND, tile, count, codes, all, groups, total, next, ahead);                                     \
  }
#define UNPACK(KIND)                                                                                           \
  static void groups_##KIND(const StoredRange *of, const uint8_t *panel, int64_t first, int64_t n, Tile *tile) { \
    unpack_groups(KIND, of, panel, first, n, tile);                                                            \
  }
#if FUSED_DOTS == 3
#define ALL_FUSE(KIND) FUSE(KIND, 1) FUSE(KIND, 2) FUSE(KIND, 3)
#define FUSES(KIND) {fuse_##KIND##_1, fuse_##KIND##_2, fuse_##KIND##_3}
#else
#define ALL_FUSE(KIND) FUSE(KIND, 1)
#define FUSES(KIND) {fuse_##KIND##_1}
#endif
#if DOT_ROWS == 4
#define ALL_DOTS(KIND) DOTS(KIND, 1) DOTS(KIND, 2) DOTS(KIND, 3) DOTS(KIND, 4)
#define TILES(KIND) {tile_##KIND##_1, tile_##KIND##_2, tile_##KIND##_3, tile_##KIND##_4}
#elif DOT_ROWS == 3
#define ALL_DOTS(KIND) DOTS(KIND, 1) DOTS(KIND, 2) DOTS(KIND, 3)
#define TILES(KIND) {tile_##KIND##_1, tile_##KIND##_2, tile_##KIND##_3}
#else
#define ALL_DOTS(KIND) DOTS(KIND, 1) DOTS(KIND, 2)
#define TILES(KIND) {tile_##KIND##_1, tile_##KIND##_2}
#endif
#define INT8_KIND(KIND) ALL_FUSE(KIND) ALL_DOTS(KIND) UNPACK(KIND)

INT8_KIND(CENTRED) INT8_KIND(NIBBLES_ADD) INT8_KIND(NIBBLES_LESS) INT8_KIND(SIGNED) INT8_KIND(BYTES_ADD)
INT8_KIND(Q4_K) INT8_KIND(Q6_K) INT8_KIND(NIBBLES) INT8_KIND(FIVES) INT8_KIND(FIVES_ADD) INT8_KIND(Q5_K)

static const struct {
  fuse_fn fuse[FUSED_DOTS];
  unpack_fn unpack;
  tile_fn tile[DOT_ROWS];
  int takes_pairs; /* whether nibbles of two inputs lie in a byte */
} functions[NUM_FUSED] = {
    [CENTRED] = {FUSES(CENTRED), groups_CENTRED, TILES(CENTRED), 1},
    [NIBBLES_ADD] = {FUSES(NIBBLES_ADD), groups_NIBBLES_ADD, TILES(NIBBLES_ADD), 1},
    [NIBBLES_LESS] = {FUSES(NIBBLES_LESS), groups_NIBBLES_LESS, TILES(NIBBLES_LESS), 1},
    [SIGNED] = {FUSES(SIGNED), groups_SIGNED, TILES(SIGNED), 0},
    [BYTES_ADD] = {FUSES(BYTES_ADD), groups_BYTES_ADD, TILES(BYTES_ADD), 0},
    [Q4_K] = {FUSES(Q4_K), groups_Q4_K, TILES(Q4_K), 1},
    [Q6_K] = {FUSES(Q6_K), groups_Q6_K, TILES(Q6_K), 0},
    [NIBBLES] = {FUSES(NIBBLES), groups_NIBBLES, TILES(NIBBLES), 1},
    [FIVES] = {FUSES(FIVES), groups_FIVES, TILES(FIVES), 1},
    [FIVES_ADD] = {FUSES(FIVES_ADD), groups_FIVES_ADD, TILES(FIVES_ADD), 1},
    [Q5_K] = {FUSES(Q5_K), groups_Q5_K, TILES(Q5_K), 1},
};

/* ---- linears ---- */

/* Return the first row of a pass. Passes are as equal as possible, and all but the last one have whole products. */
INLINE int64_t pass_start(int64_t rows, int64_t pass, int64_t passes) {
  return least(rows, round_up(rows * pass / passes, ROWS_OF_DOT));
}

/* Compute some rows of one panel, at most BLOCK_ROWS. */
static void int8_rows(const void *p, const StoredRange *of, int64_t panel, int64_t row, int64_t rows) {
  const Int8Job *job = p;
  const RoundedRows *x = &job->x;
  const uint8_t *packed = of->packed + panel * of->panel_bytes;
  int64_t inputs = x->inputs, count = inputs / ROUNDED_GROUP, first = job->row + row;
  float total[BLOCK_ROWS * PANEL];
  if (fits_registers(of->kind, rows)) {
    functions[of->kind].fuse[rows - 1](of, packed, x, first, total);
  } else {
    Tile tile;
    const int8_t *codes = functions[of->kind].takes_pairs ? x->paired : x->codes;
    int64_t passes = (rows + DOT_ROWS - 1) / DOT_ROWS;
    memset(total, 0, 4 * PANEL * rows);
    for (int64_t g = 0; g < count; g += TILE_GROUPS) {
      int64_t n = least(TILE_GROUPS, count - g);
      functions[of->kind].unpack(of, packed, g, n, &tile);
      /* Each pass asks for a part of the next tile. Reading memory then takes no time of its own. */
      const uint8_t *next = packed + (g + n) * of->panel_bytes / count;
      int64_t ahead = TILE_GROUPS * of->panel_bytes / count / passes;
      for (int64_t pass = 0; pass < passes; pass++) {
        int64_t r = pass_start(rows, pass, passes), some = pass_start(rows, pass + 1, passes) - r;
        int64_t at = g * x->rows + first + r;
        functions[of->kind].tile[some - 1](&tile, n, codes + at * ROUNDED_GROUP, x->rows, x->groups + at,
                                           total + r * PANEL, next + pass * ahead, ahead);
      }
    }
  }
  int64_t width = least(PANEL, of->outputs - panel * PANEL);
  for (int64_t r = 0; r < rows; r++) {
    float *y = job->y + (row + r) * job->y_stride + of->first + panel * PANEL;
    /* A copy of some bytes is an instruction that takes long to begin. */
    if (width == PANEL)
      UNROLL for (int v = 0; v < VECTORS; v++) v_store(y + LANES * v, v_load(total + r * PANEL + LANES * v));
    else
      memcpy(y, total + r * PANEL, 4 * width);
    for (int64_t j = 0; j < width && of->bias; j++) y[j] += of->bias[panel * PANEL + j];
  }
}

void convoy_int8_share(void *p) {
  Int8Job *job = p;
  take_panels(job->linear, &job->next, job->rows, BLOCK_ROWS, int8_rows, job);
}

/* Compute as convoy_stored_linear does, with rounded rows. Return 0 where there is no memory for these. */
int convoy_int8_linear(const StoredLinear *linear, const float *x, int64_t stride, float *y, int64_t y_stride,
                       int64_t rows, int64_t threads) {
  RoundedRows rounded;
  if (!convoy_round_rows(x, stride, linear->inputs[0] + linear->inputs[1], rows, threads, &rounded)) return 0;
  Int8Job job = {linear, rounded, y, y_stride, 0, rows, 0};
  convoy_run(convoy_int8_share, &job, threads);
  free(rounded.memory);
  return 1;
}
