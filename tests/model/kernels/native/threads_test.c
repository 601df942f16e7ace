/* Run jobs on the threads of `threads.c`: one after the other, from several callers at once, and in a forked process.
   The exit status is 0 if every part of every job ran exactly once. */

#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shared.h"

#define MOST 1000
#define JOBS 3000

typedef struct {
  int64_t threads, count, next;
  int fixed[MOST], taken[MOST]; /* how often each part ran, of both kinds of shares */
} Job;

static void share(void *p) {
  Job *job = p;
  int64_t i, end;
  convoy_my_part(job->threads, job->count, &i, &end);
  for (; i < end; i++) __atomic_fetch_add(job->fixed + i, 1, __ATOMIC_RELAXED);
  while ((i = take(&job->next)) < job->count) __atomic_fetch_add(job->taken + i, 1, __ATOMIC_RELAXED);
}

/* Return the number of parts that did not run exactly once. */
static int64_t run_jobs(int64_t seed) {
  int64_t wrong = 0;
  Job *job = malloc(sizeof *job);
  for (int64_t i = 0; i < JOBS; i++) {
    memset(job, 0, sizeof *job);
    job->threads = 1 + (seed + i) % 5, job->count = (seed + 37 * i) % MOST;
    convoy_run(share, job, job->threads);
    for (int64_t k = 0; k < MOST; k++) wrong += (k < job->count) != job->fixed[k] || (k < job->count) != job->taken[k];
  }
  free(job);
  return wrong;
}

static void *caller(void *seed) { return (void *)run_jobs((int64_t)seed); }

int main(void) {
  int64_t wrong = run_jobs(1);
  pthread_t callers[3];
  for (int64_t i = 0; i < 3; i++) pthread_create(callers + i, 0, caller, (void *)i);
  for (int i = 0; i < 3; i++) {
    void *found;
    pthread_join(callers[i], &found);
    wrong += (int64_t)found;
  }
  int status = 0;
  pid_t child = fork();
  if (!child) _exit(run_jobs(2) != 0);
  waitpid(child, &status, 0);
  printf("%lld parts did not run once, and the child ended with %d\n", (long long)wrong, status);
  return wrong != 0 || status != 0;
}
