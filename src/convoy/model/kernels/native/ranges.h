/* Declare what the files of stored forms share: ranges of outputs, and how their rows come from the file. */

#ifndef CONVOY_RANGES_H
#define CONVOY_RANGES_H

#include "vector.h"

enum {
  F32, BF16, F16, NIBBLES, CENTRED, NIBBLES_ADD, NIBBLES_LESS, FIVES, FIVES_ADD, SIGNED, BYTES_ADD, E4M3, Q4_K, Q5_K,
  Q6_K, NUM_FUSED, CODES = NUM_FUSED, GRIDS
};
enum { IN_HALVES, IN_BF16, IN_FLOATS, IN_HALF_POWERS, IN_BYTES, IN_SIGNED_BYTES, IN_TABLE };
/* How codes become values, and to what these are rounded. */
enum { SCALED, LESS_SCALED, SCALED_ADD, SCALED_LESS, AS_CODES };
enum { AS_FLOATS, TO_BF16, TO_HALVES };
/* How the file has the rows of codes: as words, or in blocks of ggml. */
enum { PLAIN_ROWS, Q2_K_BLOCKS, Q3_K_BLOCKS, IQ4_XS_BLOCKS, TQ2_0_BLOCKS, NVFP4_BLOCKS };

#define TILE 64        /* inputs of a tile: with 64 outputs 16 KiB of float32 */
#define SUPER 256      /* inputs of a super-block of ggml's K types */
#define PLANES 192     /* bytes of the scales and minima of 64 inputs of Q4_K and Q5_K: three planes */
#define FIFTHS 256     /* bytes of the fifth bits of 32 inputs: a lane of 32 bits for each output */
#define Q6_K_PART 1664 /* bytes of 32 inputs: two scales, then the highest bits, then the lowest */
#define Q6_K_BYTES (2 * PANEL + 8 * Q6_K_PART)

static const int64_t widths_of[] = {2, 2, 4, 1, 1, 1, 1};

/* What the kinds CODES and GRIDS have beside the rest of a range. */
typedef struct {
  const float *values;       /* of codes of 4 bits, or of 8 where they do not count up; a grid's rows */
  const float *scale_values; /* of scales in bytes */
  const int32_t *places;     /* the group of each input, where groups are not runs */
  int64_t bits, inputs, centre, how, blocks, rounded;
  int64_t groups, outers; /* scales of a row, and the numbers that scales in bytes are multiplied by */
  float offset[2];        /* the first is added to such a product */
} StoredCodes;

/* Outputs of one form, in panels of 64 outputs: `panel_bytes` each, and in each the blocks in the order of the inputs.
   Floats lie by input, then by output, but bfloat16 by pairs of inputs. A block has the scales of 64 outputs, then
   their second numbers (biases or zeros), then the codes of `group` inputs. Eight inputs of 4 bits lie in a lane of 32
   bits; bytes lie by input, then by output. Of 5 bits, the fifth bits of 32 inputs lie in a lane in front of the
   others. */
typedef struct {
  const uint8_t *packed;
  const float *table; /* the values of codes; of 5-bit codes, and of 4-bit ones but NIBBLES, they count up */
  const float *bias;
  int64_t kind, outputs, first; /* `first` is the place of the first output in a row of y */
  int64_t group, scale, second, panel_bytes;
  const StoredCodes *codes;
} StoredRange;

/* Rows of codes and of scales as the file has them. The numbers of one group lie `_step` bytes behind those of the
   group before. Of codes of 4 bits, the low ones of `span` bytes come first, then the high ones; 0 means that two
   inputs of a byte follow each other. For CODES, `span` says whether the halves of bytes are exchanged. Bytes are
   exclusive-ored with `flip`. */
typedef struct {
  const uint8_t *codes, *scales, *seconds, *fifths; /* `fifths` lie as codes do */
  int64_t codes_row, codes_step, scales_row, scales_step, seconds_row, seconds_step, span, flip;
} StoredSource;

/* The inputs come in one or two parts, and those of a part in runs. The bias stands behind the first part. */
struct StoredLinear {
  const StoredRange *ranges;
  int64_t num_ranges, inputs[2], run[2];
};

/* ---- the work of a linear ---- */

typedef void (*rows_fn)(const void *job, const StoredRange *of, int64_t panel, int64_t row, int64_t rows);

/* Take panels until none is left, and compute each for all rows, at most `most` at a time. */
INLINE void take_panels(const StoredLinear *linear, int64_t *next, int64_t rows, int64_t most, rows_fn compute,
                        const void *job) {
  int64_t blocks = (rows + most - 1) / most;
  for (;;) {
    int64_t panel = take(next);
    const StoredRange *of = linear->ranges, *end = of + linear->num_ranges;
    for (; of < end && panel >= num_panels(of->outputs); of++) panel -= num_panels(of->outputs);
    if (of == end) return;
    for (int64_t block = 0; block < blocks; block++) {
      int64_t row = rows * block / blocks;
      compute(job, of, panel, row, rows * (block + 1) / blocks - row);
    }
  }
}

/* ---- the layout of panels ---- */

INLINE int has_second(int64_t kind) {
  return kind == NIBBLES_ADD || kind == NIBBLES_LESS || kind == FIVES_ADD || kind == BYTES_ADD;
}
INLINE int is_super(int64_t kind) { return kind == Q4_K || kind == Q5_K; }
INLINE int has_fifths(int64_t kind) { return kind == FIVES || kind == FIVES_ADD || kind == Q5_K; }
INLINE int64_t code_bytes(int64_t kind) { return kind >= NIBBLES && kind <= FIVES_ADD ? PANEL / 2 : PANEL; }
/* Return the bytes in front of the codes of a block. */
INLINE int64_t head_bytes(const StoredRange *of) {
  int64_t seconds = has_second(of->kind) ? widths_of[of->second] : 0;
  return PANEL * (widths_of[of->scale] + seconds) + (has_fifths(of->kind) ? FIFTHS : 0);
}
/* Return the bytes of 64 inputs of Q4_K or Q5_K, and of a super-block. */
INLINE int64_t half_bytes(int64_t kind) { return PLANES + 32 * PANEL + (kind == Q5_K ? 2 * FIFTHS : 0); }
INLINE int64_t super_bytes(int64_t kind) { return kind == Q6_K ? Q6_K_BYTES : 4 * PANEL + 4 * half_bytes(kind); }

/* Widen the numbers of a vector of outputs from `lane` on. */
INLINE V widened(int64_t type, const uint8_t *numbers, int64_t lane) {
  switch (type) {
    case IN_HALVES: return v_half(numbers + 2 * lane);
    case IN_BF16: return v_bf16(numbers + 2 * lane);
    case IN_FLOATS: return v_load(numbers + 4 * lane);
    case IN_HALF_POWERS: return v_half_power(numbers + lane);
    default: return v_int(i_bytes(numbers + lane));
  }
}

/* Of each of the two kinds: compute the bytes of a panel; pack `width` outputs from `first` on into a panel; unpack
   the inputs [k, end) of a panel to a tile. For CODES both are multiples of 32. */
HIDDEN int64_t codes_panel_bytes(const StoredRange *of);
HIDDEN int64_t grids_panel_bytes(const StoredRange *of);
HIDDEN void codes_pack(const StoredRange *of, const StoredSource *from, int64_t first, int64_t width, uint8_t *panel);
HIDDEN void grids_pack(const StoredRange *of, const StoredSource *from, int64_t first, int64_t width, uint8_t *panel);
HIDDEN void codes_tile(const StoredRange *of, const uint8_t *panel, int64_t k, int64_t end, float *tile);
/* Unpack one output. */
HIDDEN void grids_row(const StoredRange *of, int64_t output, float *out);
HIDDEN void grids_tile(const StoredRange *of, const uint8_t *panel, int64_t k, int64_t end, float *tile);

#endif
