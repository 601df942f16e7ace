/* Run whole decoder layers for rows of one token, and the experts of few rows.

   A layer is a description: which norms it has and where, its linears, how its heads rotate, its activation and its
   residual factor. Every part has the bits of the operators that it replaces, and each operation is rounded by
   itself. Build with -ffp-contract=off. */

#include <math.h>

#include "activation.h"
#include "int8.h"
#include "kernels.h"
#include "ranges.h"

/* Weights in float32 or in stored forms, which are multiplied exactly, or in whole numbers with rounded rows. A matrix
   may have outputs of both. No pointer is set where a layer has no such linear. */
typedef struct {
  const F32Linear *f32;
  const StoredLinear *stored, *int8;
  int64_t outputs;
} Linear;

/* `size` numbers are normalised together. The weights of the next ones lie `step` behind: 0 for one weight for all. */
typedef struct {
  const float *weight;
  int64_t kind, size, step;
  float eps;
} Norm;

enum { NO_NORM, RMS_NORM, MEAN_NORM };
enum { BEFORE_ATTENTION, AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP, OF_QUERIES, OF_KEYS, NUM_NORMS };
/* SPREAD: by factors for all heads, see `rope.spread_over_heads`. The others have the factors of one head, and scale
   queries behind: HALVES turns a dimension with the one half a head behind, PAIRS with its neighbour by the factors
   of the first half, PAIRS_APART by factors of their own. */
enum { SPREAD, HALVES, PAIRS, PAIRS_APART, UNTURNED };
typedef struct {
  Norm norms[NUM_NORMS];
  Linear qkv[3], out, gate, up, down;
  const float *sinks;
  Activation activation;
  int64_t hidden, between, rotation, is_parallel;
  float scale, residual, cap; /* of queries, of what is added to a row, and of scores, or 0 */
} Layer;

/* The memory that the layers of a step share. The widths of [rows][..] are three times hidden, twice all heads, query
   heads, twice between and between. `shares` holds all chunks, one after the other, and `sunk` the sinks' shares. */
typedef struct {
  float *x, *normed, *made, *heads, *turned, *mixed, *both, *raised, *shares, *sunk;
  const float *cos, *sin;
  const int64_t *write_rows;
  const Heads *of;
  const Chunk *chunks;
  int64_t num_chunks, rows, tokens, threads;
} Work;

/* ---- linears side by side ---- */

typedef struct {
  share_fn share;
  union {
    LinearJob plain;
    Int8Job int8;
  } job;
} Task;

typedef struct {
  Task *tasks;
  int64_t count;
} Tasks;

static void tasks_share(void *p) {
  Tasks *all = p;
  for (int64_t i = 0; i < all->count; i++) all->tasks[i].share(&all->tasks[i].job);
}

/* Add the tasks of a linear: at most two. `rounded` has the rows of x, from `row` on, if the linear needs them. */
static void add_tasks(Tasks *all, const Linear *l, const float *x, int64_t stride, const RoundedRows *rounded,
                      int64_t row, float *y, int64_t y_stride, int64_t rows) {
  if (l->f32) {
    Task *task = all->tasks + all->count++;
    task->share = convoy_f32_share;
    task->job.plain = (LinearJob){l->f32, x, stride, y, y_stride, rows, 0};
  }
  if (l->stored) {
    Task *task = all->tasks + all->count++;
    task->share = convoy_stored_share;
    task->job.plain = (LinearJob){l->stored, x, stride, y, y_stride, rows, 0};
  }
  if (l->int8) {
    Task *task = all->tasks + all->count++;
    task->share = convoy_int8_share;
    task->job.int8 = (Int8Job){l->int8, *rounded, y, y_stride, row, rows, 0};
  }
}

/* Compute up to three linears of the same x, with their outputs side by side. Return 0 where there is no memory. */
static int linears(const Linear *each, int count, const float *x, int64_t stride, float *y, int64_t rows,
                   int64_t threads) {
  Task tasks[6];
  Tasks all = {tasks, 0};
  RoundedRows rounded = {0};
  int64_t y_stride = 0;
  for (int i = 0; i < count; i++) {
    y_stride += each[i].outputs;
    if (!each[i].int8 || rounded.memory) continue;
    if (!convoy_round_rows(x, stride, each[i].int8->inputs[0] + each[i].int8->inputs[1], rows, threads, &rounded))
      return 0;
  }
  for (int i = 0; i < count; y += each[i++].outputs)
    add_tasks(&all, each + i, x, stride, &rounded, 0, y, y_stride, rows);
  convoy_run(tasks_share, &all, threads);
  free(rounded.memory);
  return 1;
}

/* ---- norms and activations ---- */

/* Normalise n numbers of x, `size` at a time. `y` may be `x`. */
static void norm(const Norm *norm, const float *x, float *y, int64_t n) {
  const float *weight = norm->weight;
  int64_t size = norm->size;
  for (; n > 0; n -= size, x += size, y += size, weight += norm->step) {
    if (norm->kind == RMS_NORM) {
      convoy_norm_row(x, weight, norm->eps, y, size);
      continue;
    }
    float mean = convoy_row_sum(x, size, 0) / (float)size;
    for (int64_t i = 0; i < size; i++) y[i] = x[i] - mean;
    float scale = 1.0f / sqrtf(convoy_row_sum(y, size, 1) / (float)size + norm->eps);
    for (int64_t i = 0; i < size; i++) y[i] = weight[i] * (y[i] * scale);
  }
}

/* Normalise rows of n numbers, which begin `stride` floats apart in x and in y, or copy them without a norm. */
static void norm_rows(const Norm *of, const float *x, float *y, int64_t rows, int64_t n, int64_t stride) {
  for (int64_t row = 0; row < rows; row++, x += stride, y += stride) {
    if (of->kind != NO_NORM) norm(of, x, y, n);
    else if (x != y) memcpy(y, x, 4 * n);
  }
}

/* Rows of `both` have n gates, and behind them n factors if the activation is gated. */
typedef struct {
  const Activation *activation;
  const float *both;
  float *raised;
  int64_t rows, n, threads;
} ActivationJob;

static void activation_share(void *p) {
  const ActivationJob *job = p;
  int64_t row, end, n = job->n, stride = is_gated(job->activation) ? 2 * n : n;
  convoy_my_part(job->threads, job->rows, &row, &end);
  for (; row < end; row++) {
    const float *gate = job->both + row * stride;
    convoy_activate_row(job->activation, gate, stride > n ? gate + n : 0, job->raised + row * n, n);
  }
}

static void run_activation(const Activation *activation, const float *both, float *raised, int64_t rows, int64_t n,
                           int64_t threads) {
  ActivationJob job = {activation, both, raised, rows, n, rows > 4 ? threads : 1};
  convoy_run(activation_share, &job, job.threads);
}

/* ---- attention ---- */

/* Rotate one head by the factors of its rotary part. */
static void turn_head(int64_t rotation, const float *a, const float *cos, const float *sin, int64_t rotary,
                      int64_t dim, float *t) {
  int64_t half = rotation == UNTURNED ? 0 : rotary / 2;
  for (int64_t i = 0; i < half; i++) {
    int64_t first = rotation == HALVES ? i : 2 * i, second = rotation == HALVES ? i + half : first + 1;
    int64_t c = rotation == PAIRS ? i : first, d = rotation == PAIRS ? i : second;
    float x = a[first], y = a[second];
    t[first] = x * cos[c] + -y * sin[c];
    t[second] = y * cos[d] + x * sin[d];
  }
  for (int64_t i = 2 * half; i < dim; i++) t[i] = a[i];
}

/* Rotate the heads by factors [tokens][rotary_dim], scale the queries, and write keys and values to the pool. */
static void turn(const Layer *l, const Work *w, void *pool) {
  const Heads *of = w->of;
  int64_t all = of->num_heads + 2 * of->kv_heads, turned = of->num_heads + of->kv_heads, dim = of->dim;
  for (int64_t token = 0; token < w->tokens; token++) {
    const float *cos = w->cos + token * of->rotary_dim, *sin = w->sin + token * of->rotary_dim;
    for (int64_t head = 0; head < all; head++) {
      float *t = w->turned + (token * all + head) * dim;
      turn_head(head < turned ? l->rotation : UNTURNED, w->heads + (token * all + head) * dim, cos, sin, of->rotary_dim,
                dim, t);
      for (int64_t i = 0; i < dim && head < of->num_heads; i++) t[i] *= l->scale;
    }
  }
  convoy_write_kv(of, w->turned, pool, w->write_rows, w->tokens);
}

/* Run the attention of all chunks: their shares, then their products with the values. */
static void attend(const Layer *l, const Work *w, const void *pool) {
  int64_t group = w->of->num_heads / w->of->kv_heads;
  float *shares = w->shares, *sunk = w->sunk;
  for (const Chunk *c = w->chunks; c < w->chunks + w->num_chunks; c++) {
    int64_t threads = c->num_pairs > FEW_PAIRS ? w->threads : 1;
    AttendJob job = {w->of, c, w->turned, pool, shares, w->mixed, threads, l->sinks, sunk, l->cap};
    convoy_run(convoy_shares_share, &job, threads);
    convoy_run(convoy_mix_share, &job, threads);
    shares += c->num_pairs * group * KEYS;
    sunk += c->num_tiles * group;
  }
}

/* ---- layers ---- */

/* Add what a part of the layer made to the rows. */
static void add_made(const Layer *l, const Work *w, int after) {
  int64_t n = w->rows * l->hidden;
  norm_rows(l->norms + after, w->made, w->made, w->rows, l->hidden, l->hidden);
  for (int64_t i = 0; i < n; i++) w->x[i] += w->made[i] * l->residual;
}

/* Run the attention of a layer, up to its MLP, whose input `normed` gets. Return 0 where there is no memory. */
int convoy_layer_begin(const Layer *l, const Work *w, void *pool) {
  const Heads *of = w->of;
  int64_t rows = w->rows, all = of->num_heads + 2 * of->kv_heads, width = of->num_heads * of->dim;
  int64_t queries = of->num_heads * of->dim, keys = of->kv_heads * of->dim;
  norm_rows(l->norms + BEFORE_ATTENTION, w->x, w->normed, rows, l->hidden, l->hidden);
  if (!linears(l->qkv, 3, w->normed, l->hidden, w->heads, rows, w->threads)) return 0;
  norm_rows(l->norms + OF_QUERIES, w->heads, w->heads, rows, queries, all * of->dim);
  norm_rows(l->norms + OF_KEYS, w->heads + queries, w->heads + queries, rows, keys, all * of->dim);
  if (l->rotation == SPREAD) convoy_turn(of, w->heads, w->cos, w->sin, w->turned, pool, w->write_rows, w->tokens);
  else turn(l, w, pool);
  memset(w->mixed + w->tokens * width, 0, 4 * (rows - w->tokens) * width);
  attend(l, w, pool);
  if (!linears(&l->out, 1, w->mixed, width, w->made, rows, w->threads)) return 0;
  add_made(l, w, AFTER_ATTENTION);
  /* A parallel MLP reads what the attention read. */
  if (!l->is_parallel) norm_rows(l->norms + BEFORE_MLP, w->x, w->normed, rows, l->hidden, l->hidden);
  return 1;
}

/* Go on from `made`, the output of the MLP: `x` gets the layer's result. */
void convoy_layer_end(const Layer *l, const Work *w) { add_made(l, w, AFTER_MLP); }

static int mlp(const Layer *l, const Work *w) {
  Linear both[2] = {l->gate, l->up};
  if (!linears(both, 2, w->normed, l->hidden, w->both, w->rows, w->threads)) return 0;
  run_activation(&l->activation, w->both, w->raised, w->rows, l->between, w->threads);
  return linears(&l->down, 1, w->raised, l->between, w->made, w->rows, w->threads);
}

typedef struct {
  const Layer *layer;
  const Work *work;
  void *pool;
} LayerRun;

/* Run layers that need nothing of the caller, one after the other. Return 0 as above. */
int convoy_layers(const LayerRun *runs, int64_t count) {
  for (const LayerRun *r = runs; r < runs + count; r++) {
    if (!convoy_layer_begin(r->layer, r->work, r->pool) || !mlp(r->layer, r->work)) return 0;
    convoy_layer_end(r->layer, r->work);
  }
  return 1;
}

/* ---- experts ---- */

typedef struct {
  Linear gate, up, down;
} Expert;

typedef struct {
  const Expert *each;
  Activation activation;
  int64_t num, hidden, between;
} Experts;

/* The experts of some rows, [rows][chosen]. `gathered` and `made` are [rows * chosen][hidden], `both` and `raised` as a
   layer's. `order` and `places` have a number for each of rows * chosen. */
typedef struct {
  const float *x, *weights;
  const int64_t *numbers;
  float *gathered, *both, *raised, *made, *y;
  int64_t *order, *places;
  int64_t rows, chosen, threads;
} Choice;

/* Sort the pairs of a row and an expert by expert, and by row within one. Return 0 for an expert that does not exist. */
static int sort_pairs(const Experts *of, const Choice *c) {
  for (int64_t i = 0; i < c->rows * c->chosen; i++) {
    int64_t number = c->numbers[i], at = i;
    if (number < 0 || number >= of->num) return 0;
    for (; at && c->numbers[c->order[at - 1]] > number; at--) c->order[at] = c->order[at - 1];
    c->order[at] = i;
  }
  for (int64_t at = 0; at < c->rows * c->chosen; at++) c->places[c->order[at]] = at;
  return 1;
}

/* Return the end of the pairs that have the expert of pair `at`. */
static int64_t end_of_expert(const Choice *c, int64_t at) {
  int64_t number = c->numbers[c->order[at]], end = at;
  while (end < c->rows * c->chosen && c->numbers[c->order[end]] == number) end++;
  return end;
}

/* Add each row's experts in the order of its choice. */
static void add_experts(const Choice *c, int64_t hidden) {
  for (int64_t i = 0; i < c->rows * c->chosen; i++) {
    const float *made = c->made + c->places[i] * hidden;
    float *y = c->y + i / c->chosen * hidden, weight = c->weights[i];
    if (i % c->chosen == 0)
      for (int64_t j = 0; j < hidden; j++) y[j] = made[j] * weight;
    else
      for (int64_t j = 0; j < hidden; j++) y[j] += made[j] * weight;
  }
}

/* Make the memory of the tasks of all pairs, and round the rows of all pairs if any expert needs them. `down` says
   which linears of the experts are meant. Return 0 where there is no memory. */
static int begin_tasks(const Experts *of, int down, const float *x, int64_t pairs, int64_t threads, Tasks *all,
                       RoundedRows *rounded) {
  int64_t inputs = down ? of->between : of->hidden;
  int rounds = 0;
  for (const Expert *one = of->each; one < of->each + of->num; one++)
    rounds |= down ? one->down.int8 != 0 : one->gate.int8 || one->up.int8;
  *rounded = (RoundedRows){0};
  *all = (Tasks){malloc(4 * pairs * sizeof(Task)), 0};
  if (!all->tasks) return 0;
  if (!rounds || convoy_round_rows(x, inputs, inputs, pairs, threads, rounded)) return 1;
  free(all->tasks);
  return 0;
}

static void run_tasks(Tasks *all, RoundedRows *rounded, int64_t threads) {
  convoy_run(tasks_share, all, threads);
  free(all->tasks);
  free(rounded->memory);
}

/* Run experts. Return 0 where there is no memory, -1 for an expert that does not exist. */
int convoy_experts(const Experts *of, const Choice *c) {
  int64_t pairs = c->rows * c->chosen, n = of->between, hidden = of->hidden;
  if (!sort_pairs(of, c)) return -1;
  for (int64_t at = 0; at < pairs; at++)
    memcpy(c->gathered + at * hidden, c->x + c->order[at] / c->chosen * hidden, 4 * hidden);
  Tasks all;
  RoundedRows rounded;
  if (!begin_tasks(of, 0, c->gathered, pairs, c->threads, &all, &rounded)) return 0;
  for (int64_t at = 0, end; at < pairs; at = end) {
    const Expert *expert = of->each + c->numbers[c->order[at]];
    end = end_of_expert(c, at);
    const float *x = c->gathered + at * hidden;
    float *both = c->both + at * 2 * n;
    add_tasks(&all, &expert->gate, x, hidden, &rounded, at, both, 2 * n, end - at);
    add_tasks(&all, &expert->up, x, hidden, &rounded, at, both + n, 2 * n, end - at);
  }
  run_tasks(&all, &rounded, c->threads);
  run_activation(&of->activation, c->both, c->raised, pairs, n, c->threads);
  if (!begin_tasks(of, 1, c->raised, pairs, c->threads, &all, &rounded)) return 0;
  for (int64_t at = 0, end; at < pairs; at = end) {
    const Expert *expert = of->each + c->numbers[c->order[at]];
    end = end_of_expert(c, at);
    float *made = c->made + at * hidden;
    add_tasks(&all, &expert->down, c->raised + at * n, n, &rounded, at, made, hidden, end - at);
  }
  run_tasks(&all, &rounded, c->threads);
  add_experts(c, hidden);
  return 1;
}
