/* Declare what `int8.c` offers to the other C files: rounded rows, and products with them. */

#ifndef CONVOY_INT8_H
#define CONVOY_INT8_H

#include "shared.h"

#define ROUNDED_GROUP 32 /* inputs of a row that share a scale */

/* A group of a row: its scale, the sum of its codes times that, and the sums of the codes of both halves. */
typedef struct {
  float scale, weighted;
  int32_t sums[2];
} RoundedGroup;

/* Rows of whole numbers from -127 to 127, [groups][rows][ROUNDED_GROUP], and their groups, [groups][rows]. Rows lie side
   by side because the same inputs of all rows are used together: whole rows would be some pages apart, and take each
   other's place in the cache. In `paired` the four even inputs of each eight come before the four odd ones: so two
   codes of 4 bits in each byte of the weights meet theirs. */
typedef struct {
  const int8_t *codes, *paired;
  const RoundedGroup *groups;
  int64_t inputs, rows;
  void *memory;
} RoundedRows;

/* Round rows of x, which begin `stride` floats apart. `inputs` is a multiple of a group. Return 0 where there is no
   memory. The caller frees `to->memory`. */
HIDDEN int convoy_round_rows(const float *x, int64_t stride, int64_t inputs, int64_t rows, int64_t threads,
                             RoundedRows *to);

/* Rows of y begin `y_stride` floats apart. `x` begins with `row`. */
typedef struct {
  const StoredLinear *linear;
  RoundedRows x;
  float *y;
  int64_t y_stride, row, rows, next;
} Int8Job;

HIDDEN void convoy_int8_share(void *job);

#endif
