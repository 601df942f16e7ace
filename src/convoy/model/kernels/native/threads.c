/* Run jobs on the threads of the OpenMP that torch runs on. They already wait for work; further threads would compete
   with them for cores. */

#include "shared.h"

typedef void (*parallel_fn)(share_fn, void *, unsigned, unsigned);
typedef int (*number_fn)(void);

static parallel_fn on_threads;
static number_fn thread_number, num_threads_now;

/* Take the functions of that OpenMP. */
void convoy_init(void *parallel, void *number, void *count) {
  on_threads = (parallel_fn)parallel;
  thread_number = (number_fn)number;
  num_threads_now = (number_fn)count;
}

void convoy_run(share_fn share, void *job, int64_t threads) {
  if (threads > 1) on_threads(share, job, (unsigned)threads, 0);
  else share(job);
}

void convoy_my_part(int64_t threads, int64_t count, int64_t *start, int64_t *end) {
  int64_t number = threads > 1 ? thread_number() : 0, all = threads > 1 ? num_threads_now() : 1;
  *start = count * number / all;
  *end = count * (number + 1) / all;
}
