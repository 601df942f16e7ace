/* Declare what `kernels.c` offers to the other C files: linears, norms, and attention of rows of one token. */

#ifndef CONVOY_KERNELS_H
#define CONVOY_KERNELS_H

#include "shared.h"

#define KEYS 64     /* keys of a key block, `model.kv.packed.KEY_BLOCK` */
#define FEW_PAIRS 4 /* starting a second thread takes longer than so few pairs */

typedef struct F32Linear F32Linear;

HIDDEN void convoy_f32_share(void *job);

/* Return the sum of n floats, or of their squares, in ATen's order. */
HIDDEN float convoy_row_sum(const float *x, int64_t n, int squared);

/* Normalise one row. `y` may be `x`. */
HIDDEN void convoy_norm_row(const float *x, const float *weight, float eps, float *y, int64_t n);

/* The heads of a token lie side by side, [num_heads + 2 * kv_heads][dim]: queries, keys, values. `kv_dtype` is the
   type of the numbers in the pool. */
typedef struct {
  int64_t num_heads, kv_heads, dim, rotary_dim, block_size, kv_dtype;
} Heads;

/* The tiles and their pairs with key blocks, as `packed.TileChunk` describes them. */
typedef struct {
  const int64_t *query_rows, *kv_runs, *bag_pairs, *bag_starts;
  const uint8_t *hidden;
  int64_t num_tiles, num_pairs, num_masked, longest;
} Chunk;

/* `shares` is [pairs][group][KEYS], and `out` [tokens][num_heads][dim]. With `sinks`, a score of each query head, a
   tile's heads have their sinks' shares in `sunk`, [tiles][group]. `cap` bounds the scores through tanh, unless it is
   0. */
typedef struct {
  const Heads *heads;
  const Chunk *chunk;
  const float *turned;
  const void *pool;
  float *shares, *out;
  int64_t threads;
  const float *sinks;
  float *sunk, cap;
} AttendJob;

HIDDEN void convoy_shares_share(void *job);
HIDDEN void convoy_mix_share(void *job);

void convoy_turn(const Heads *h, const float *x, const float *cos, const float *sin, float *turned, void *pool,
                 const int64_t *write_rows, int64_t tokens);

/* Write keys and values to their rows of the pool. */
HIDDEN void convoy_write_kv(const Heads *h, const float *turned, void *pool, const int64_t *write_rows, int64_t tokens);

#endif
