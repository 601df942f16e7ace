/* Run jobs on the threads of the OpenMP that torch runs on. They already wait for work; further threads would compete
   with them for cores. Where torch has no such OpenMP, run them on threads of this file, which start with the first
   job and stay. */

#include <pthread.h>
#include <sched.h>

#include "shared.h"

#define MOST_WORKERS 255
#define SPINS 2000 /* looks for work before a thread sleeps: the layers of a step come one after the other */

typedef void (*parallel_fn)(share_fn, void *, unsigned, unsigned);
typedef int (*number_fn)(void);

/* ---- own threads ---- */

/* The number of this thread in the job that it runs, and how many run it. */
static _Thread_local int own_number, own_count = 1;

/* `lock` guards all but `left` and `jobs`, which threads read without it while they wait. `jobs` counts them, and
   `left` the workers that have not finished this one. */
static struct {
  pthread_mutex_t busy, lock;
  pthread_cond_t begun, ended;
  share_fn share;
  void *job;
  int threads, workers;
  int64_t jobs, left;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .begun = PTHREAD_COND_INITIALIZER,
          .ended = PTHREAD_COND_INITIALIZER};

static pthread_once_t once = PTHREAD_ONCE_INIT;

INLINE int64_t seen(const int64_t *number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }

/* Wait until `number` is `until`, or is no longer `until` if `is_left`. */
static void wait_for(const int64_t *number, int64_t until, int is_left, pthread_cond_t *changed) {
  for (int i = 0; i < SPINS; i++) {
    if ((seen(number) == until) != is_left) return;
    /* With fewer cores than threads, the one that is waited for runs now. */
    if (i % 64 == 63) sched_yield();
  }
  pthread_mutex_lock(&pool.lock);
  while ((seen(number) == until) == is_left) pthread_cond_wait(changed, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
}

/* Run this worker's part of each job that has one for it. It begins with the job behind number `done`. */
static void work(int number, int64_t done) {
  for (;;) {
    wait_for(&pool.jobs, done, 1, &pool.begun);
    pthread_mutex_lock(&pool.lock);
    share_fn share = pool.share;
    void *job = pool.job;
    int threads = pool.threads;
    done = pool.jobs;
    pthread_mutex_unlock(&pool.lock);
    if (number >= threads) continue;
    own_number = number, own_count = threads;
    share(job);
    if (__atomic_sub_fetch(&pool.left, 1, __ATOMIC_ACQ_REL)) continue;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_signal(&pool.ended);
    pthread_mutex_unlock(&pool.lock);
  }
}

typedef struct {
  int number;
  int64_t done;
} Start;

static void *begin_worker(void *p) {
  Start start = *(Start *)p;
  free(p);
  work(start.number, start.done);
  return 0;
}

/* Return how many workers there are, after starting up to `wanted`. The caller holds `busy`. */
static int start_workers(int wanted) {
  for (; pool.workers < wanted; pool.workers++) {
    Start *start = malloc(sizeof *start);
    pthread_t thread;
    if (!start) break;
    *start = (Start){pool.workers + 1, pool.jobs};
    if (pthread_create(&thread, 0, begin_worker, start)) {
      free(start);
      break;
    }
    pthread_detach(thread);
  }
  return pool.workers;
}

/* A process that was forked has none of the threads. */
static void forget_workers(void) {
  pool.workers = 0, pool.left = 0;
  pthread_mutex_init(&pool.busy, 0), pthread_mutex_init(&pool.lock, 0);
  pthread_cond_init(&pool.begun, 0), pthread_cond_init(&pool.ended, 0);
}

static void watch_forks(void) { pthread_atfork(0, 0, forget_workers); }

/* Run `share` on this thread and on workers. While another caller has them, this thread runs it alone. */
static void run_on_workers(share_fn share, void *job, unsigned threads, unsigned flags) {
  (void)flags;
  pthread_once(&once, watch_forks);
  if (pthread_mutex_trylock(&pool.busy)) {
    share(job);
    return;
  }
  int wanted = (int)least(threads, MOST_WORKERS + 1), all = 1 + (int)least(start_workers(wanted - 1), wanted - 1);
  pthread_mutex_lock(&pool.lock);
  pool.share = share, pool.job = job, pool.threads = all;
  __atomic_store_n(&pool.left, all - 1, __ATOMIC_RELEASE);
  __atomic_store_n(&pool.jobs, pool.jobs + 1, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&pool.begun);
  pthread_mutex_unlock(&pool.lock);
  own_count = all;
  share(job);
  own_count = 1;
  wait_for(&pool.left, 0, 0, &pool.ended);
  pthread_mutex_unlock(&pool.busy);
}

static int own_thread_number(void) { return own_number; }
static int own_num_threads(void) { return own_count; }

/* ---- either ---- */

static parallel_fn on_threads = run_on_workers;
static number_fn thread_number = own_thread_number, num_threads_now = own_num_threads;

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
