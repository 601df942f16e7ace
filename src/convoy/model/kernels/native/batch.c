/* Describe a step of lone rows in one call: Python's part of a step lies between two reads of all weights, so that its
   code and data have left the caches.

   The results are whole numbers, or floats that are copied and multiplied once. They are those of
   `kv.packed.describe_group` and of `layers.rope.spread_over_heads`. */

#include "kernels.h"

/* Rows of one token each, at `positions`. The blocks of row r are tables[starts[r]], and `sizes[r]` of them. A pool has
   `num_blocks`, and all of K in front of V if it is joined. `window` is 0 for none. */
typedef struct {
  const int64_t *positions, *tables, *starts, *sizes;
  int64_t num_rows, num_blocks, kv_heads, block_size, window, joined;
} LoneRows;

/* A tile is a token and a K/V head. Pairs with hidden keys come first. See `kv.packed.TileChunk`. */
typedef struct {
  int64_t *write_rows, *query_rows, *kv_runs, *pair_tile, *bag_pairs, *bag_starts;
  uint8_t *hidden;
  int64_t num_pairs;
} LoneTiles;

/* Return the first key block of a position. */
INLINE int64_t first_block(const LoneRows *of, int64_t position) {
  return of->window && position >= of->window ? (position - of->window + 1) / KEYS : 0;
}

/* Return whether a position must not see some key of a block. */
INLINE int has_hidden(const LoneRows *of, int64_t position, int64_t block) {
  return block * KEYS + KEYS - 1 > position || (of->window && block * KEYS <= position - of->window);
}

/* Return the pairs of all tiles, and the number of those with hidden keys. */
static int64_t count_pairs(const LoneRows *of, int64_t *num_masked) {
  int64_t pairs = 0;
  *num_masked = 0;
  for (int64_t r = 0; r < of->num_rows; r++)
    for (int64_t block = first_block(of, of->positions[r]); block <= of->positions[r] / KEYS; block++) {
      pairs += of->kv_heads;
      *num_masked += has_hidden(of, of->positions[r], block) * of->kv_heads;
    }
  return pairs;
}

/* Write the places of one pair: where its keys and values lie in the pool. */
static void put_runs(const LoneRows *of, const LoneTiles *to, int64_t r, int64_t head, int64_t block, int64_t pair) {
  int64_t count = KEYS / of->block_size;
  for (int64_t i = 0; i < count; i++) {
    /* Past a table's end, places continue at its start. */
    int64_t entry = (block * count + i) % of->sizes[r];
    int64_t run = of->tables[of->starts[r] + entry] * of->kv_heads + head;
    to->kv_runs[pair * count + i] = run;
    if (of->joined) to->kv_runs[(to->num_pairs + pair) * count + i] = run + of->num_blocks * of->kv_heads;
  }
}

/* Write the rows of the pool that a token's keys and values get. */
static void put_writes(const LoneRows *of, int64_t r, int64_t *to) {
  int64_t position = of->positions[r], entry = position / of->block_size % of->sizes[r];
  int64_t run = of->tables[of->starts[r] + entry] * of->kv_heads, in = position % of->block_size;
  for (int64_t head = 0; head < of->kv_heads; head++) {
    to[head] = (run + head) * of->block_size + in;
    if (of->joined) to[of->kv_heads + head] = (run + of->num_blocks * of->kv_heads + head) * of->block_size + in;
  }
}

/* Describe the rows. Return the number of pairs with hidden keys, or -1 if the memory was made for other pairs, or for
   fewer such pairs than `most_masked`. */
int64_t convoy_describe_lone(const LoneRows *of, const LoneTiles *to, int64_t most_masked) {
  int64_t num_masked, masked = 0, writes = of->kv_heads * (of->joined ? 2 : 1), listed = 0;
  if (count_pairs(of, &num_masked) != to->num_pairs || num_masked > most_masked) return -1;
  int64_t plain = num_masked;
  for (int64_t r = 0; r < of->num_rows; r++) {
    int64_t position = of->positions[r];
    put_writes(of, r, to->write_rows + r * writes);
    for (int64_t head = 0; head < of->kv_heads; head++) {
      int64_t tile = r * of->kv_heads + head;
      to->query_rows[tile] = tile;
      to->bag_starts[tile] = listed;
      for (int64_t block = first_block(of, position); block <= position / KEYS; block++) {
        int64_t pair = has_hidden(of, position, block) ? masked++ : plain++;
        to->bag_pairs[listed++] = pair;
        to->pair_tile[pair] = tile;
        put_runs(of, to, r, head, block, pair);
        for (int64_t key = block * KEYS; pair < num_masked && key < block * KEYS + KEYS; key++)
          to->hidden[pair * KEYS + key % KEYS] = key > position || (of->window && key <= position - of->window);
      }
    }
  }
  return num_masked;
}

/* Write the factors of a head: those of its rotary dimensions, times `scaling`, and of the others that change nothing. */
static void put_factors(const float *cos, const float *sin, float scaling, int64_t rotary, int64_t dim, float *wide_cos,
                        float *wide_sin) {
  for (int64_t i = 0; i < rotary; i++) {
    wide_cos[i] = cos[i] * scaling;
    wide_sin[i] = (i < rotary / 2 ? -sin[i] : sin[i]) * scaling;
  }
  for (int64_t i = rotary; i < dim; i++) wide_cos[i] = scaling, wide_sin[i] = 0.0f * scaling;
}

/* Lay the factors of some tokens, [tokens][rotary_dim], out over all heads, [tokens][num_heads + 2 * kv_heads][dim]. */
void convoy_spread(const Heads *h, const float *cos, const float *sin, float scaling, int64_t tokens, float *wide_cos,
                   float *wide_sin) {
  int64_t dim = h->dim, turned = h->num_heads + h->kv_heads, all = turned + h->kv_heads;
  for (int64_t token = 0; token < tokens; token++, cos += h->rotary_dim, sin += h->rotary_dim)
    for (int64_t head = 0; head < all; head++, wide_cos += dim, wide_sin += dim) {
      if (head == 0) put_factors(cos, sin, scaling, h->rotary_dim, dim, wide_cos, wide_sin);
      else if (head == h->num_heads) put_factors(cos, sin, 1.0f, h->rotary_dim, dim, wide_cos, wide_sin);
      else if (head == turned) put_factors(cos, sin, 1.0f, 0, dim, wide_cos, wide_sin);
      else memcpy(wide_cos, wide_cos - dim, 4 * dim), memcpy(wide_sin, wide_sin - dim, 4 * dim);
    }
}
