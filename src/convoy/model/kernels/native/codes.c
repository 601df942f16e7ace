/* Unpack the forms that have no kernels of their own: a tile of some inputs at a time, which all rows then use.

   Codes of 2 to 8 bits under scales lie in panels, so that a vector has one input of several outputs. Blocks of ggml
   that are looked up in grids lie as the file has them. */

#include "ranges.h"

#define TOGETHER 32 /* inputs of which the codes of one output fill whole words */
#define UNROLL_32 _Pragma("GCC unroll 32")

/* ---- codes under scales ---- */

/* Bytes in front of the codes of a super-block, each for 64 outputs: `halves` floats, then `bytes`. */
typedef struct {
  int64_t inputs, size, halves, half_at[2], bytes, bytes_at, codes_at;
} Blocks;

static const Blocks blocks[] = {
    [PLAIN_ROWS] = {0},
    [Q2_K_BLOCKS] = {256, 84, 2, {80, 82}, 16, 0, 16},
    [Q3_K_BLOCKS] = {256, 110, 1, {108}, 12, 96, 0},
    [IQ4_XS_BLOCKS] = {256, 136, 1, {0}, 6, 2, 8},
    [TQ2_0_BLOCKS] = {256, 66, 1, {64}, 0, 0, 0},
    [NVFP4_BLOCKS] = {64, 36, 0, {0}, 4, 0, 4},
};

INLINE int64_t head_bytes_of(const Blocks *of) { return PANEL * (2 * of->halves + of->bytes); }
/* Return the bytes of the codes of a panel, which lie in front of all scales. */
INLINE int64_t codes_bytes(const StoredCodes *codes) {
  return round_up(codes->inputs, TOGETHER) * codes->bits * PANEL / 8;
}
/* Return how many second numbers a row has: of each group, or outer scales. */
INLINE int64_t num_seconds(const StoredCodes *codes) {
  return codes->outers ? codes->outers : codes->how == SCALED ? 0 : codes->groups;
}

int64_t codes_panel_bytes(const StoredRange *of) {
  const Blocks *stored = &blocks[of->codes->blocks];
  if (stored->inputs) return codes_bytes(of->codes) + of->codes->inputs / stored->inputs * head_bytes_of(stored);
  int64_t seconds = num_seconds(of->codes) * widths_of[of->second];
  return codes_bytes(of->codes) + PANEL * (of->codes->groups * widths_of[of->scale] + seconds);
}

/* Widen the numbers of some outputs, which lie at `numbers`. */
INLINE V widen(const StoredCodes *codes, int64_t type, const uint8_t *numbers, int64_t lane) {
  numbers += widths_of[type] * lane;
  switch (type) {
    case IN_HALVES: return v_half(numbers);
    case IN_BF16: return v_bf16(numbers);
    case IN_FLOATS: return v_load(numbers);
    case IN_SIGNED_BYTES: return v_int(i_signed(numbers));
    case IN_TABLE: return v_gather(codes->scale_values, i_bytes(numbers));
    default: return v_int(i_bytes(numbers));
  }
}

/* Compute the scale and the second number of a group, for the outputs from `lane` on. */
INLINE void load_factors(const StoredRange *of, const uint8_t *heads, int64_t group, int64_t lane, V *scale,
                         V *second) {
  const StoredCodes *codes = of->codes;
  const Blocks *stored = &blocks[codes->blocks];
  if (codes->blocks == Q2_K_BLOCKS) {
    const uint8_t *head = heads + group / 16 * head_bytes_of(stored);
    I both = i_bytes(head + 4 * PANEL + group % 16 * PANEL + lane);
    *scale = v_mul(v_half(head + 2 * lane), v_int(i_and(both, i_set(15))));
    *second = v_mul(v_half(head + 2 * PANEL + 2 * lane), v_int(i_right(both, 4)));
  } else if (codes->blocks == Q3_K_BLOCKS) {
    const uint8_t *head = heads + group / 16 * head_bytes_of(stored), *bytes = head + 2 * PANEL + lane;
    int j = (int)(group % 16);
    I low = i_and(i_shifted(i_bytes(bytes + j % 8 * PANEL), j / 8 * 4), i_set(15));
    I high = i_and(i_shifted(i_bytes(bytes + (8 + j % 4) * PANEL), j / 4 * 2), i_set(3));
    *scale = v_mul(v_half(head + 2 * lane), v_int(i_sub(i_or(low, i_left(high, 4)), i_set(32))));
  } else if (codes->blocks == IQ4_XS_BLOCKS) {
    const uint8_t *head = heads + group / 8 * head_bytes_of(stored), *bytes = head + 2 * PANEL + lane;
    int j = (int)(group % 8);
    I low = i_and(i_shifted(i_bytes(bytes + (2 + j / 2) * PANEL), j % 2 * 4), i_set(15));
    I high = i_and(i_shifted(i_bytes(bytes + j / 4 * PANEL), j % 4 * 2), i_set(3));
    *scale = v_mul(v_half(head + 2 * lane), v_int(i_sub(i_or(low, i_left(high, 4)), i_set(32))));
  } else {
    *scale = widen(codes, of->scale, heads + group * PANEL * widths_of[of->scale], lane);
    int64_t count = num_seconds(codes);
    if (!count) return;
    const uint8_t *seconds = heads + codes->groups * PANEL * widths_of[of->scale];
    *second = widen(codes, of->second, seconds + group * count / codes->groups * PANEL * widths_of[of->second], lane);
    if (codes->outers) *scale = v_add(v_mul(*scale, *second), v_set(codes->offset[0]));
  }
}

INLINE V scaled(const int how, V w, V scale, V second) {
  if (how == AS_CODES) return w;
  if (how == LESS_SCALED) w = v_sub(w, second);
  w = v_mul(w, scale);
  if (how == SCALED_ADD) w = v_add(w, second);
  if (how == SCALED_LESS) w = v_sub(w, second);
  return w;
}

/* Unpack the inputs [k, k + 32) of a panel: their codes, or the values that these are looked up in. They are scaled
   too unless `how` is AS_CODES. Each 16 have one scale. */
INLINE void unpack_codes(const int bits, const int looked, const int how, const StoredRange *of, const uint8_t *panel,
                         int64_t k, float *tile) {
  const StoredCodes *codes = of->codes;
  const uint8_t *p = panel + k * bits * PANEL / 8, *heads = panel + codes_bytes(codes);
  int64_t last = (codes->inputs - 1) / of->group, group = k / of->group, other = least((k + 16) / of->group, last);
  Table table;
  if (bits == 4) table = t_load(codes->values);
  V centre = v_set((float)codes->centre);
  for (int v = 0; v < VECTORS; v++) {
    I words[8];
    V scale[2], second[2];
    UNROLL for (int i = 0; i < bits; i++) words[i] = i_load(p + 4 * (i * PANEL + v * LANES));
    scale[0] = scale[1] = second[0] = second[1] = v_set(0);
    if (how != AS_CODES) {
      load_factors(of, heads, group, v * LANES, scale, second);
      scale[1] = scale[0], second[1] = second[0];
      if (other != group) load_factors(of, heads, other, v * LANES, scale + 1, second + 1);
    }
    UNROLL_32 for (int j = 0; j < TOGETHER; j++) {
      V w;
      if (bits == 4) {
        w = v_look(table, words[j / 8], j % 8);
      } else {
        int at = j * bits / 32, shift = j * bits % 32;
        I code = i_right(words[at], shift);
        if (shift + bits > 32) code = i_or(code, i_left(words[(at + 1) % 8], (32 - shift) % 32));
        code = i_and(code, i_set((1u << bits) - 1));
        w = looked ? v_gather(codes->values, code) : v_sub(v_int(code), centre);
      }
      v_store(tile + j * PANEL + v * LANES, scaled(how, w, scale[j / 16], second[j / 16]));
    }
  }
}

typedef void (*unpack_fn)(const StoredRange *, const uint8_t *, int64_t, float *);
#define UNPACK(NAME, BITS, LOOKED, HOW)                                                                 \
  static void unpack_##NAME(const StoredRange *of, const uint8_t *panel, int64_t k, float *tile) {     \
    unpack_codes(BITS, LOOKED, HOW, of, panel, k, tile);                                                \
  }
#define ALL_OF(NAME, BITS, LOOKED)                                                                      \
  UNPACK(NAME, BITS, LOOKED, AS_CODES) UNPACK(NAME##_scaled, BITS, LOOKED, SCALED)                      \
  UNPACK(NAME##_less_scaled, BITS, LOOKED, LESS_SCALED) UNPACK(NAME##_scaled_add, BITS, LOOKED, SCALED_ADD)
ALL_OF(2, 2, 0) ALL_OF(4, 4, 1) ALL_OF(8, 8, 0) UNPACK(2_scaled_less, 2, 0, SCALED_LESS)
UNPACK(3, 3, 0, AS_CODES) UNPACK(3_scaled, 3, 0, SCALED) UNPACK(3_scaled_add, 3, 0, SCALED_ADD)
UNPACK(5, 5, 0, AS_CODES) UNPACK(5_scaled_add, 5, 0, SCALED_ADD)
UNPACK(6, 6, 0, AS_CODES) UNPACK(6_scaled_add, 6, 0, SCALED_ADD)
UNPACK(looked, 8, 1, AS_CODES) UNPACK(looked_scaled, 8, 1, SCALED)

#define EACH(NAME) {unpack_##NAME##_scaled, unpack_##NAME##_less_scaled, unpack_##NAME##_scaled_add, 0, unpack_##NAME}
/* By the bits of a code, then by how it is scaled. Forms have no others. */
static const unpack_fn unpacks[9][AS_CODES + 1] = {
    [2] = {unpack_2_scaled, unpack_2_less_scaled, unpack_2_scaled_add, unpack_2_scaled_less, unpack_2},
    [3] = {unpack_3_scaled, 0, unpack_3_scaled_add, 0, unpack_3},
    [4] = EACH(4),
    [5] = {0, 0, unpack_5_scaled_add, 0, unpack_5},
    [6] = {0, 0, unpack_6_scaled_add, 0, unpack_6},
    [8] = EACH(8)};

/* Scale the inputs [k, end) of a tile of codes. */
INLINE void scale_tile(const int how, const StoredRange *of, const uint8_t *heads, int64_t k, int64_t end, float *tile) {
  const int32_t *places = of->codes->places;
  for (int64_t at = k, stop; at < end; at = stop) {
    int64_t group = places ? places[at] : at / of->group;
    stop = places ? at + 1 : least(end, (group + 1) * of->group);
    for (int v = 0; v < VECTORS; v++) {
      V scale = v_set(0), second = v_set(0);
      load_factors(of, heads, group, v * LANES, &scale, &second);
      float *t = tile + (at - k) * PANEL + v * LANES;
      for (int64_t i = at; i < stop; i++, t += PANEL) v_store(t, scaled(how, v_load(t), scale, second));
    }
  }
}

/* The same where each input has a group of its own, so that its numbers are read for it alone. */
INLINE void scale_placed(const int type, const int how, const StoredRange *of, const uint8_t *heads, int64_t k,
                         int64_t end, float *tile) {
  const StoredCodes *codes = of->codes;
  const uint8_t *zeros = heads + codes->groups * PANEL * widths_of[type];
  for (int64_t at = k; at < end; at++) {
    int64_t first = codes->places[at] * PANEL;
    UNROLL for (int v = 0; v < VECTORS; v++) {
      float *t = tile + (at - k) * PANEL + v * LANES;
      V w = v_load(t);
      if (how == LESS_SCALED) w = v_sub(w, v_int(i_bytes(zeros + first + v * LANES)));
      v_store(t, v_mul(w, widen(codes, type, heads + first * widths_of[type], v * LANES)));
    }
  }
}

/* Return whether `scale_placed` has scaled the inputs [k, end). */
static int is_scaled_by_place(const StoredRange *of, const uint8_t *heads, int64_t k, int64_t end, float *tile) {
  int how = (int)of->codes->how;
  if (!of->codes->places || (how == LESS_SCALED && of->second != IN_BYTES)) return 0;
  if (how == SCALED && of->scale == IN_HALVES) scale_placed(IN_HALVES, SCALED, of, heads, k, end, tile);
  else if (how == SCALED && of->scale == IN_BF16) scale_placed(IN_BF16, SCALED, of, heads, k, end, tile);
  else if (how == SCALED && of->scale == IN_FLOATS) scale_placed(IN_FLOATS, SCALED, of, heads, k, end, tile);
  else if (how == LESS_SCALED && of->scale == IN_HALVES) scale_placed(IN_HALVES, LESS_SCALED, of, heads, k, end, tile);
  else if (how == LESS_SCALED && of->scale == IN_BF16) scale_placed(IN_BF16, LESS_SCALED, of, heads, k, end, tile);
  else if (how == LESS_SCALED && of->scale == IN_FLOATS) scale_placed(IN_FLOATS, LESS_SCALED, of, heads, k, end, tile);
  else return 0;
  return 1;
}

void codes_tile(const StoredRange *of, const uint8_t *panel, int64_t k, int64_t end, float *tile) {
  const StoredCodes *codes = of->codes;
  int at_once = !codes->places && of->group % 16 == 0, how = at_once ? (int)codes->how : AS_CODES;
  unpack_fn unpack = unpacks[codes->bits][how];
  if (codes->bits == 8 && codes->values) unpack = at_once ? unpack_looked_scaled : unpack_looked;
  for (int64_t at = k; at < end; at += TOGETHER) unpack(of, panel, at, tile + (at - k) * PANEL);
  if (!at_once) {
    const uint8_t *heads = panel + codes_bytes(codes);
    /* The inputs behind the last one have no group. */
    int64_t stop = least(end, codes->inputs);
    if (is_scaled_by_place(of, heads, k, stop, tile)) return;
    if (codes->how == SCALED) scale_tile(SCALED, of, heads, k, stop, tile);
    else if (codes->how == SCALED_ADD) scale_tile(SCALED_ADD, of, heads, k, stop, tile);
    else scale_tile(LESS_SCALED, of, heads, k, stop, tile);
  }
  if (codes->rounded == TO_BF16)
    for (float *t = tile; t < tile + (end - k) * PANEL; t += LANES) v_store(t, v_round_bf16(v_load(t)));
  if (codes->rounded == TO_HALVES)
    for (float *t = tile; t < tile + (end - k) * PANEL; t += LANES) v_store(t, v_round_half(v_load(t)));
}

/* ---- packing codes ---- */

/* Write codes as words, of `bits` each, one word of each output behind the other: `to` is the output's first. */
static void put_codes(const uint8_t *codes, int64_t n, int64_t bits, uint8_t *to) {
  for (int64_t k = 0; k < n; k += TOGETHER, to += 4 * bits * PANEL) {
    uint32_t words[9] = {0};
    for (int64_t j = 0; j < TOGETHER; j++) {
      uint64_t code = (uint64_t)codes[k + j] << j * bits % 32;
      words[j * bits / 32] |= (uint32_t)code;
      words[j * bits / 32 + 1] |= (uint32_t)(code >> 32);
    }
    for (int64_t i = 0; i < bits; i++) memcpy(to + 4 * i * PANEL, words + i, 4);
  }
}

/* Take the codes of a block of ggml's in the order of the inputs. */
static void block_codes(int64_t type, const uint8_t *from, uint8_t *codes) {
  from += blocks[type].codes_at;
  if (type == IQ4_XS_BLOCKS || type == NVFP4_BLOCKS) {
    int64_t span = type == NVFP4_BLOCKS ? 8 : 16;
    for (int64_t k = 0; k < blocks[type].inputs; k++)
      codes[k] = from[k / (2 * span) * span + k % span] >> (k / span % 2 * 4) & 15;
    return;
  }
  /* Q3_K has its highest bits in front, bit j of 32 bytes for the inputs of run j. */
  const uint8_t *low = type == Q3_K_BLOCKS ? from + 32 : from;
  for (int64_t k = 0; k < SUPER; k++) {
    codes[k] = low[k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2) & 3;
    if (type == Q3_K_BLOCKS) codes[k] |= (from[k % 32] >> k / 32 & 1) << 2;
  }
}

static void pack_blocks(const StoredRange *of, const StoredSource *from, int64_t row, int64_t o, uint8_t *panel) {
  const StoredCodes *codes = of->codes;
  const Blocks *stored = &blocks[codes->blocks];
  uint8_t found[SUPER];
  for (int64_t number = 0; number < codes->inputs / stored->inputs; number++) {
    const uint8_t *block = from->codes + row * from->codes_row + number * stored->size;
    block_codes(codes->blocks, block, found);
    put_codes(found, stored->inputs, codes->bits, panel + number * stored->inputs * codes->bits * PANEL / 8 + 4 * o);
    uint8_t *head = panel + codes_bytes(codes) + number * head_bytes_of(stored);
    for (int64_t i = 0; i < stored->halves; i++, head += 2 * PANEL) memcpy(head + 2 * o, block + stored->half_at[i], 2);
    for (int64_t i = 0; i < stored->bytes; i++) head[i * PANEL + o] = block[stored->bytes_at + i];
  }
}

void codes_pack(const StoredRange *of, const StoredSource *from, int64_t first, int64_t width, uint8_t *panel) {
  const StoredCodes *codes = of->codes;
  int64_t row_bytes = codes->inputs * codes->bits / 8, groups = codes->groups;
  int64_t wide = widths_of[of->scale], second = widths_of[of->second];
  for (int64_t o = 0; o < width; o++) {
    int64_t row = first + o;
    if (codes->blocks != PLAIN_ROWS) {
      pack_blocks(of, from, row, o, panel);
      continue;
    }
    const uint8_t *own = from->codes + row * from->codes_row;
    for (int64_t at = 0; at < row_bytes; at += 4) {
      uint8_t *to = panel + at * PANEL + 4 * o;
      int64_t n = least(4, row_bytes - at);
      for (int64_t i = 0; i < n; i++) {
        uint8_t byte = own[at + i] ^ (uint8_t)from->flip;
        to[i] = from->span ? (uint8_t)(byte << 4 | byte >> 4) : byte;
      }
    }
    uint8_t *scales = panel + codes_bytes(codes), *seconds = scales + groups * PANEL * wide;
    for (int64_t g = 0; g < groups; g++)
      memcpy(scales + (g * PANEL + o) * wide, from->scales + row * from->scales_row + g * wide, wide);
    for (int64_t g = 0; g < num_seconds(codes); g++)
      memcpy(seconds + (g * PANEL + o) * second, from->seconds + row * from->seconds_row + g * second, second);
  }
}

/* ---- blocks that are looked up in grids ---- */

/* Widen a half. */
INLINE float half_at(const uint8_t *p) {
  uint16_t both[LANES] = {0};
  float wide[LANES];
  memcpy(both, p, 2);
  v_store(wide, v_half(both));
  return wide[0];
}
INLINE uint16_t u16_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
INLINE uint32_t u32_at(const uint8_t *p) { return u16_at(p) | (uint32_t)u16_at(p + 2) << 16; }

/* Return the eight signs of a code of seven: the last makes their number even. */
INLINE uint32_t even_signs(uint32_t code) {
  code &= 127;
  return code | (uint32_t)__builtin_parity(code) << 7;
}

/* Write `n` values of a row of a grid, times `scale`, with the signs of the lowest bits. */
INLINE void put_signed(const int n, float scale, const float *row, uint32_t signs, float *out) {
  for (int i = 0; i < n; i++) {
    float value = scale * row[i];
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits ^= signs >> i << 31;
    memcpy(out + i, &bits, 4);
  }
}
INLINE void put_shifted(float scale, const float *row, float delta, float *out) {
  for (int i = 0; i < 8; i++) out[i] = scale * (row[i] + delta);
}
INLINE uint32_t nibble(const uint8_t *p, int64_t at) { return p[at / 2] >> at % 2 * 4 & 15; }

static void read_iq2_xxs(const uint8_t *p, const float *grid, float *out) {
  float d = half_at(p);
  for (int g = 0; g < 8; g++) {
    const uint8_t *own = p + 2 + 8 * g;
    uint32_t last = u32_at(own + 4);
    float scale = d * (0.5f + (float)(last >> 28)) * 0.25f;
    for (int l = 0; l < 4; l++) put_signed(8, scale, grid + 8 * own[l], even_signs(last >> 7 * l), out + 32 * g + 8 * l);
  }
}

static void read_iq2_xs(const uint8_t *p, const float *grid, float *out) {
  float d = half_at(p);
  for (int i = 0; i < 32; i++) {
    uint32_t code = u16_at(p + 2 + 2 * i);
    float scale = d * (0.5f + (float)nibble(p + 66, i / 2)) * 0.25f;
    put_signed(8, scale, grid + 8 * (code & 511), even_signs(code >> 9), out + 8 * i);
  }
}

static void read_iq2_s(const uint8_t *p, const float *grid, float *out) {
  float d = half_at(p);
  for (int i = 0; i < 32; i++) {
    uint32_t code = p[2 + i] | (p[66 + i / 4] >> i % 4 * 2 & 3u) << 8;
    float scale = d * (0.5f + (float)nibble(p + 74, i / 2)) * 0.25f;
    put_signed(8, scale, grid + 8 * code, p[34 + i], out + 8 * i);
  }
}

static void read_iq3_xxs(const uint8_t *p, const float *grid, float *out) {
  float d = half_at(p);
  for (int i = 0; i < 64; i++) {
    uint32_t last = u32_at(p + 66 + i / 8 * 4);
    float scale = d * (0.5f + (float)(last >> 28)) * 0.5f;
    uint32_t signs = even_signs(last >> i / 2 % 4 * 7) >> i % 2 * 4;
    put_signed(4, scale, grid + 4 * p[2 + i], signs, out + 4 * i);
  }
}

static void read_iq3_s(const uint8_t *p, const float *grid, float *out) {
  float d = half_at(p);
  for (int i = 0; i < 64; i++) {
    uint32_t code = p[2 + i] | (p[66 + i / 8] >> i % 8 & 1u) << 8;
    float scale = d * (float)(1 + 2 * nibble(p + 106, i / 8));
    put_signed(4, scale, grid + 4 * code, p[74 + i / 2] >> i % 2 * 4, out + 4 * i);
  }
}

static void read_iq1_s(const uint8_t *p, const float *grid, float *out) {
  float d = half_at(p);
  for (int i = 0; i < 32; i++) {
    uint32_t high = u16_at(p + 34 + i / 4 * 2), code = p[2 + i] | (high >> i % 4 * 3 & 7) << 8;
    float scale = d * (float)(2 * (high >> 12 & 7) + 1);
    put_shifted(scale, grid + 8 * code, high & 0x8000 ? -0.125f : 0.125f, out + 8 * i);
  }
}

static void read_iq1_m(const uint8_t *p, const float *grid, float *out) {
  uint16_t parts = 0;
  for (int i = 0; i < 4; i++) parts |= (uint16_t)(u16_at(p + 48 + 2 * i) >> 12 << 4 * i);
  float d = half_at((const uint8_t *)&parts);
  for (int i = 0; i < 32; i++) {
    uint32_t high = nibble(p + 32, i), code = p[i] | (high & 7) << 8;
    uint32_t scale = u16_at(p + 48 + i / 8 * 2) >> i / 2 % 4 * 3 & 7;
    put_shifted(d * (float)(2 * scale + 1), grid + 8 * code, high & 8 ? -0.125f : 0.125f, out + 8 * i);
  }
}

/* Write the numbers of three values of `span` bytes: the first of each byte, then the second, and so on. A byte is a
   fraction of 256. */
INLINE void put_thirds(const int span, const int count, float scale, const uint8_t *p, float *out) {
  uint8_t power = 1;
  for (int j = 0; j < count; j++, power *= 3)
    for (int i = 0; i < span; i++) {
      int fraction = (uint8_t)(p[i] * power);
      out[j * span + i] = scale * (float)((fraction * 3 >> 8) - 1);
    }
}

static void read_tq1_0(const uint8_t *p, const float *grid, float *out) {
  float d = half_at(p + 52);
  (void)grid;
  put_thirds(32, 5, d, p, out);
  put_thirds(16, 5, d, p + 32, out + 160);
  put_thirds(4, 4, d, p + 48, out + 240);
}

typedef void (*read_fn)(const uint8_t *, const float *, float *);
static const struct {
  read_fn read;
  int64_t size;
} grids[] = {
    {read_iq1_s, 50}, {read_iq1_m, 56}, {read_iq2_xxs, 66}, {read_iq2_xs, 74}, {read_iq2_s, 82},
    {read_iq3_xxs, 98}, {read_iq3_s, 110}, {read_tq1_0, 54}};

int64_t grids_panel_bytes(const StoredRange *of) {
  return of->codes->inputs / SUPER * grids[of->codes->blocks].size * PANEL;
}

void grids_row(const StoredRange *of, int64_t output, float *out) {
  const StoredCodes *codes = of->codes;
  int64_t size = grids[codes->blocks].size, num = codes->inputs / SUPER;
  const uint8_t *row = of->packed + output * num * size;
  for (int64_t i = 0; i < num; i++) grids[codes->blocks].read(row + i * size, codes->values, out + i * SUPER);
}

void grids_tile(const StoredRange *of, const uint8_t *panel, int64_t k, int64_t end, float *tile) {
  const StoredCodes *codes = of->codes;
  int64_t size = grids[codes->blocks].size, row = codes->inputs / SUPER * size;
  float some[LANES][SUPER];
  for (int64_t number = k / SUPER; number * SUPER < end; number++) {
    int64_t start = number * SUPER, from = k > start ? k - start : 0, to = least(SUPER, end - start);
    for (int64_t o = 0; o < PANEL; o += LANES) {
      for (int j = 0; j < LANES; j++)
        grids[codes->blocks].read(panel + (o + j) * row + number * size, codes->values, some[j]);
      /* Tiles begin and end with whole vectors, as all inputs are multiples of 256. */
      for (int64_t i = from; i < to; i += LANES) {
        V columns[LANES];
        for (int j = 0; j < LANES; j++) columns[j] = v_load(some[j] + i);
        v_transpose(columns);
        for (int j = 0; j < LANES; j++) v_store(tile + (start + i + j - k) * PANEL + o, columns[j]);
      }
    }
  }
}

void grids_pack(const StoredRange *of, const StoredSource *from, int64_t first, int64_t width, uint8_t *panel) {
  int64_t row = of->codes->inputs / SUPER * grids[of->codes->blocks].size;
  for (int64_t o = 0; o < width; o++) memcpy(panel + o * row, from->codes + (first + o) * from->codes_row, row);
}
