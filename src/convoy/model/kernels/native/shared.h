/* Declare what the C files share: panels of outputs, and the threads of torch's OpenMP. */

#ifndef CONVOY_SHARED_H
#define CONVOY_SHARED_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 64    /* outputs with weights that lie together */
#define MOST_ROWS 6 /* rows of one pass over a panel: their sums stay in registers */
#define AHEAD 4096  /* bytes: the processor's own prefetching ends with a page */

#define HIDDEN __attribute__((visibility("hidden")))
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL_ALL _Pragma("GCC unroll 16")

typedef void (*share_fn)(void *);

/* Run `share` on that many threads of the OpenMP that torch runs on. */
HIDDEN void convoy_run(share_fn share, void *job, int64_t threads);

/* Compute this thread's part [start, end) of `count`. `threads` is the number that the job was started with. */
HIDDEN void convoy_my_part(int64_t threads, int64_t count, int64_t *start, int64_t *end);

/* Matrices in the form of the model's file, see `stored.c`. */
typedef struct StoredLinear StoredLinear;
void convoy_stored_linear(const StoredLinear *linear, const float *x, int64_t stride, float *y, int64_t y_stride,
                          int64_t rows, int64_t threads);

/* A linear of the kind that its function multiplies by. Rows of x begin `stride` floats apart, and those of y
   `y_stride`. */
typedef struct {
  const void *linear;
  const float *x;
  int64_t stride;
  float *y;
  int64_t y_stride, rows, next;
} LinearJob;

HIDDEN void convoy_stored_share(void *job);

/* Return the next panel, for the thread that asks first. Fixed shares would wait for a thread that wakes late or
   loses its core. */
INLINE int64_t take(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t of) { return (n + of - 1) / of * of; }
INLINE int64_t num_panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* Return the number of passes. Passes are as equal as possible: 8 rows run as 4 and 4. */
INLINE int64_t num_passes(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

#endif
