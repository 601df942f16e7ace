/* Find codes of 4 or 8 bits and scales of a matrix, with the bits of `model.quantize.search`.

   A lane of a vector has a group: 32 neighbouring inputs of one output, which share a scale. So no sum crosses lanes,
   and each operation is one of the operators of torch. */

#include "vector.h"

#define GROUP 32
#define HALF 16
#define LEAST 1e-30f /* a smaller scale would lose its bits */
#define MOST_REACHES 8

/* `rows` is [outputs][inputs], with a weight for each input. All others have a row for each output, and in it for each
   group a scale of bfloat16, the weighted square of its values, that of its error, and that of the error without a
   search. */
typedef struct {
  const float *rows, *weights;
  uint16_t *scales;
  float *squares, *errors, *nearest;
  int64_t outputs, inputs, bits, num_reaches;
  /* codes onto which the first scales map the value of greatest magnitude */
  float reaches[MOST_REACHES];
} Rounding;

typedef struct {
  const Rounding *of;
  int8_t *codes;
  int64_t next;
} RoundingJob;

/* A value of each group, for each place in a group. */
typedef struct {
  V at[GROUP];
} Groups;

/* Load the groups from `first` on, of which there are `count`. Lanes behind them have zeros. */
INLINE void load_groups(const float *row, int64_t first, int64_t count, Groups *found) {
  for (int block = 0; block < GROUP; block += LANES) {
    V *some = found->at + block;
    for (int lane = 0; lane < LANES; lane++)
      some[lane] = lane < count ? v_load(row + (first + lane) * GROUP + block) : v_set(0);
    v_transpose(some);
  }
}

/* Sums of the numbers of two places of each group: of i and of i + HALF. */
typedef struct {
  V at[HALF];
} Pairs;

/* Add the two halves of the sums, until one is left. */
INLINE V halved_sum(const Pairs *pairs) {
  V sums[8];
  UNROLL for (int i = 0; i < 8; i++) sums[i] = v_add(pairs->at[i], pairs->at[i + 8]);
  UNROLL for (int i = 0; i < 4; i++) sums[i] = v_add(sums[i], sums[i + 4]);
  return v_add(v_add(sums[0], sums[2]), v_add(sums[1], sums[3]));
}

INLINE V safe(V scales) { return v_where_less(v_set(LEAST), v_abs(scales), scales, v_set(1)); }

/* A code is cut off before it is rounded, which is the same: the last codes are whole. */
INLINE V nearest(V values, V scales, V half) {
  V cut = v_min(v_max(v_div(values, scales), v_sub(v_set(0), half)), v_sub(half, v_set(1)));
  return v_int(i_rounded(cut));
}

INLINE V weighted_square(V value, V weight) { return v_mul(v_mul(value, value), weight); }

/* Compute the codes under some scales, and the weighted squares of the errors. */
INLINE V round_groups(const Groups *values, const Groups *weights, V scales, V half, Groups *codes) {
  Pairs squares;
  for (int i = 0; i < HALF; i++) {
    V both[2];
    UNROLL for (int j = 0; j < 2; j++) {
      int at = i + j * HALF;
      codes->at[at] = nearest(values->at[at], scales, half);
      V error = v_sub(v_mul(codes->at[at], scales), values->at[at]);
      both[j] = weighted_square(error, weights->at[at]);
    }
    squares.at[i] = v_add(both[0], both[1]);
  }
  return halved_sum(&squares);
}

/* Return the scale of least squares for the best codes of all first scales. */
INLINE V search(const Rounding *of, const Groups *values, const Groups *weights, V greatest, V half) {
  V best = v_set(0), best_gain = v_set(0);
  Groups weighted;
  for (int i = 0; i < GROUP; i++) weighted.at[i] = v_mul(values->at[i], weights->at[i]);
  for (int64_t reach = 0; reach < of->num_reaches; reach++) {
    Pairs products, squares;
    V scales = safe(v_div(greatest, v_set(-of->reaches[reach])));
    for (int i = 0; i < HALF; i++) {
      V first = nearest(values->at[i], scales, half), second = nearest(values->at[i + HALF], scales, half);
      products.at[i] = v_add(v_mul(weighted.at[i], first), v_mul(weighted.at[i + HALF], second));
      squares.at[i] = v_add(weighted_square(first, weights->at[i]), weighted_square(second, weights->at[i + HALF]));
    }
    V cross = halved_sum(&products), power = halved_sum(&squares);
    V gain = v_where_less(v_set(0), power, v_div(v_mul(cross, cross), power), v_set(0));
    best = v_where_less(best_gain, gain, v_div(cross, power), best);
    best_gain = v_where_less(best_gain, gain, gain, best_gain);
  }
  return best;
}

INLINE void store_some(void *to, const void *from, int64_t count, int64_t bytes) { memcpy(to, from, count * bytes); }

/* Round the groups of a row from `first` on, up to LANES. */
static void round_some(const Rounding *of, int8_t *codes, int64_t row, int64_t first) {
  int64_t num_groups = of->inputs / GROUP, count = least(LANES, num_groups - first), place = row * num_groups + first;
  Groups values, weights, plain_codes, best_codes;
  Pairs squares;
  load_groups(of->rows + row * of->inputs, first, count, &values);
  load_groups(of->weights, first, count, &weights);
  V most = values.at[0], lowest = values.at[0], half = v_set((float)(1 << (of->bits - 1)));
  for (int i = 1; i < GROUP; i++) {
    most = v_max(most, values.at[i]);
    lowest = v_min(lowest, values.at[i]);
  }
  V below = v_sub(v_set(0), lowest), magnitude = v_max(most, below);
  V greatest = v_where_less(most, below, lowest, most);
  V plain = v_round_bf16(safe(v_div(magnitude, v_sub(half, v_set(1)))));
  V best = v_round_bf16(safe(search(of, &values, &weights, greatest, half)));
  V plain_error = round_groups(&values, &weights, plain, half, &plain_codes);
  V best_error = round_groups(&values, &weights, best, half, &best_codes);
  for (int i = 0; i < GROUP; i++) {
    V code = v_where_less(best_error, plain_error, best_codes.at[i], plain_codes.at[i]);
    best_codes.at[i] = v_bits(i_rounded(code));
  }
  for (int i = 0; i < HALF; i++)
    squares.at[i] = v_add(weighted_square(values.at[i], weights.at[i]),
                          weighted_square(values.at[i + HALF], weights.at[i + HALF]));
  uint16_t scales[LANES];
  float numbers[3][LANES];
  v_store_bf16(scales, v_where_less(best_error, plain_error, best, plain));
  v_store(numbers[0], halved_sum(&squares));
  v_store(numbers[1], v_where_less(best_error, plain_error, best_error, plain_error));
  v_store(numbers[2], plain_error);
  store_some(of->scales + place, scales, count, sizeof *scales);
  float *const to[3] = {of->squares, of->errors, of->nearest};
  for (int i = 0; i < 3; i++) store_some(to[i] + place, numbers[i], count, sizeof(float));
  for (int block = 0; block < GROUP; block += LANES) {
    v_transpose(best_codes.at + block);
    for (int64_t lane = 0; lane < count; lane++)
      i_store_bytes(codes + (place + lane) * GROUP + block, v_as_int(best_codes.at[block + lane]));
  }
}

static void rounding_share(void *p) {
  RoundingJob *job = p;
  int64_t row;
  while ((row = take(&job->next)) < job->of->outputs)
    for (int64_t first = 0; first < job->of->inputs / GROUP; first += LANES) round_some(job->of, job->codes, row, first);
}

/* Write codes[outputs][inputs], and scales and errors of all rows. Inputs fill groups. */
void convoy_round(const Rounding *of, int8_t *codes, int64_t threads) {
  RoundingJob job = {of, codes, 0};
  convoy_run(rounding_share, &job, threads);
}
