/* Declare attention over pools of keys and values, see `attention.c`. */

#ifndef CONVOY_ATTENTION_H
#define CONVOY_ATTENTION_H

#include "shared.h"

#define KEYS 64 /* keys of a key block, `model.kv.packed.KEY_BLOCK` */

enum { KV_F32, KV_BF16, KV_F16 };

/* `kv_dtype` is the type of the numbers in the pools, and `value_stride` the distance of two values in numbers. Where K
   and V are joined in one pool, the runs of V follow those of K. */
typedef struct {
  int64_t num_heads, kv_heads, dim, value_dim, value_stride, block_size, kv_dtype, joined;
} Shape;

/* The tiles and their pairs with key blocks, as `packed.TileChunk` describes them. */
typedef struct {
  const int64_t *query_rows, *kv_runs, *bag_pairs, *bag_starts;
  const uint8_t *hidden;
  int64_t num_tiles, num_pairs, num_masked, longest, tile_tokens;
} Tiles;

/* The scaled queries of a token, [num_heads][dim], begin `stride` floats behind those of the token before. `sinks` may
   be null. `cap` bounds the scores through tanh, unless it is 0. `memory` has convoy_attend_floats numbers for each
   thread. `out` is [tokens][num_heads][value_dim]. */
typedef struct {
  const Shape *shape;
  const Tiles *tiles;
  int64_t num_tiles; /* descriptions of tiles of one size */
  const float *queries;
  int64_t stride;
  const void *keys, *values;
  const float *sinks;
  float *memory, *out;
  float cap;
} Attention;

void convoy_rotate(const Shape *shape, const float *x, const float *cos, const float *sin, int64_t rotary_dim,
                   float *turned, void *pool, const int64_t *write_rows, int64_t tokens, int64_t threads);
int64_t convoy_attend_floats(const Shape *shape, const Tiles *tiles, int64_t num_tiles);
void convoy_attend(const Attention *a, int64_t threads);

#endif
