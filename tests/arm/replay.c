/* Repeat recorded calls of the compiled code, and compare what they write with what was recorded, byte by byte.

   The file is one that `support.recorded` writes: a sequence of steps over regions of memory. Output: a line for each
   kind of call with the number of calls, the bytes they wrote and their digest (64-bit FNV-1a); then "equal" or the
   first differences. The exit status is 0, 1 for a difference, and 2 for a file that cannot be read. */

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_ARGUMENTS 16
#define MOST_SHOWN 10

typedef struct {
  unsigned char *bytes;
  int64_t size;
} Region;

typedef union {
  int64_t number;
  void *address;
  double real;
} Argument;

/* ---- the functions ---- */

int64_t convoy_stored_panel_bytes(void *, int64_t);
void convoy_stored_pack(void *, void *, int64_t, void *, int64_t);
void convoy_stored_linear(void *, void *, int64_t, void *, int64_t, int64_t, int64_t);
int convoy_int8_linear(void *, void *, int64_t, void *, int64_t, int64_t, int64_t);
void convoy_stored_unpack(void *, int64_t, void *, int64_t, int64_t, void *);
void convoy_f32_linear(void *, void *, int64_t, void *, int64_t, int64_t);
void convoy_norm(void *, void *, float, void *, int64_t, int64_t, int64_t);
int convoy_layer_begin(void *, void *, void *);
int convoy_layers(void *, int64_t);
void convoy_layer_end(void *, void *);
int convoy_experts(void *, void *);
void convoy_rotate(void *, void *, void *, void *, int64_t, void *, void *, void *, int64_t, int64_t);
void convoy_attend(void *, int64_t);
void convoy_round(void *, void *, int64_t);
void convoy_apply(void *, int64_t, int64_t, int64_t);
void convoy_activate(void *, void *, int64_t, void *, int64_t, void *, int64_t, int64_t, int64_t);

#define A(i) a[i].address
#define N(i) a[i].number
/* The place of a function is its number in the file. */
#define FUNCTIONS(RESULT, NOTHING)                                                                    \
  RESULT(stored_panel_bytes, A(0), N(1))                                                              \
  NOTHING(stored_pack, A(0), A(1), N(2), A(3), N(4))                                                  \
  NOTHING(stored_linear, A(0), A(1), N(2), A(3), N(4), N(5), N(6))                                    \
  RESULT(int8_linear, A(0), A(1), N(2), A(3), N(4), N(5), N(6))                                       \
  NOTHING(stored_unpack, A(0), N(1), A(2), N(3), N(4), A(5))                                          \
  NOTHING(f32_linear, A(0), A(1), N(2), A(3), N(4), N(5))                                             \
  NOTHING(norm, A(0), A(1), (float)a[2].real, A(3), N(4), N(5), N(6))                                 \
  RESULT(layer_begin, A(0), A(1), A(2))                                                               \
  RESULT(layers, A(0), N(1))                                                                          \
  NOTHING(layer_end, A(0), A(1))                                                                      \
  RESULT(experts, A(0), A(1))                                                                         \
  NOTHING(rotate, A(0), A(1), A(2), A(3), N(4), A(5), A(6), A(7), N(8), N(9))                         \
  NOTHING(attend, A(0), N(1))                                                                         \
  NOTHING(round, A(0), A(1), N(2))                                                                    \
  NOTHING(apply, A(0), N(1), N(2), N(3))                                                              \
  NOTHING(activate, A(0), A(1), N(2), A(3), N(4), A(5), N(6), N(7), N(8))

#define RESULT(NAME, ...) \
  static int64_t call_##NAME(const Argument *a) { return convoy_##NAME(__VA_ARGS__); }
#define NOTHING(NAME, ...)                        \
  static int64_t call_##NAME(const Argument *a) { \
    convoy_##NAME(__VA_ARGS__);                   \
    return 0;                                     \
  }
FUNCTIONS(RESULT, NOTHING)

typedef struct {
  const char *name;
  int64_t (*call)(const Argument *);
  int64_t calls, bytes;
  uint64_t digest;
} Function;

#define ROW(NAME, ...) {#NAME, call_##NAME, 0, 0, 0xcbf29ce484222325},
static Function functions[] = {FUNCTIONS(ROW, ROW)};
#define NUM_FUNCTIONS ((int64_t)(sizeof functions / sizeof *functions))

/* ---- the file ---- */

static FILE *file;
static Region *regions;
static int64_t num_regions, num_differences;

static void refuse(const char *why) {
  fprintf(stderr, "replay: %s\n", why);
  exit(2);
}

static void read_bytes(void *to, int64_t size) {
  if (size < 0 || fread(to, 1, (size_t)size, file) != (size_t)size) refuse("the file ends too soon");
}

static int64_t read_number(void) {
  int64_t number;
  read_bytes(&number, sizeof number);
  return number;
}

static unsigned char *new_bytes(int64_t size) {
  unsigned char *bytes = size < 0 ? 0 : malloc((size_t)size + 1);
  if (!bytes) refuse("there is no memory for a region");
  return bytes;
}

/* Read a region's number and a place in it, and return the address of `size` bytes there. */
static unsigned char *read_place(int64_t size) {
  int64_t number = read_number(), at = read_number();
  if (number < 0 || number >= num_regions) refuse("a region is named that does not exist");
  if (at < 0 || size < 0 || at > regions[number].size - size) refuse("a place lies outside its region");
  return regions[number].bytes + at;
}

static void make_region(void) {
  int64_t size = read_number();
  regions = realloc(regions, (size_t)(num_regions + 1) * sizeof *regions);
  if (!regions) refuse("there is no memory for the regions");
  regions[num_regions++] = (Region){new_bytes(size), size};
  memset(regions[num_regions - 1].bytes, 0, (size_t)size);
}

static void fill(void) {
  int64_t size = read_number();
  read_bytes(read_place(size), size);
}

static void point(void) {
  unsigned char *place = read_place(8), *target = read_place(0);
  memcpy(place, &target, 8);
}

static void compare(Function *of, const char *what, const unsigned char *found, const unsigned char *expected,
                    int64_t size) {
  for (int64_t i = 0; i < size; i++) of->digest = (of->digest ^ found[i]) * 0x100000001b3;
  of->bytes += size;
  if (!memcmp(found, expected, (size_t)size)) return;
  int64_t at = 0;
  while (found[at] == expected[at]) at++;
  if (num_differences++ < MOST_SHOWN) {
    uint32_t one = 0, other = 0;
    int64_t word = at / 4 * 4, wide = size - word < 4 ? size - word : 4;
    memcpy(&one, found + word, (size_t)wide);
    memcpy(&other, expected + word, (size_t)wide);
    printf("differs: call %" PRId64 " of %s, %s, byte %" PRId64 " of %" PRId64 ": %08x, expected %08x\n", of->calls,
           of->name, what, at, size, one, other);
  }
}

/* Read a call, run it, and compare its result and the memory that it wrote. */
static void call(void) {
  Argument arguments[MOST_ARGUMENTS] = {{0}};
  int64_t number = read_number(), count = read_number();
  if (number < 0 || number >= NUM_FUNCTIONS || count < 0 || count > MOST_ARGUMENTS) refuse("a call is none of ours");
  Function *of = functions + number;
  for (int64_t i = 0; i < count; i++) switch (read_number()) {
      case 0: arguments[i].number = read_number(); break;
      case 1: arguments[i].address = read_place(0); break;
      case 2: read_bytes(&arguments[i].real, 8); break;
      default: refuse("an argument is of no known kind");
    }
  of->calls++;
  int64_t result = of->call(arguments), expected = read_number();
  compare(of, "result", (unsigned char *)&result, (unsigned char *)&expected, sizeof result);
  for (int64_t left = read_number(); left > 0; left--) {
    int64_t size = read_number();
    unsigned char *found = read_place(size), *bytes = new_bytes(size);
    read_bytes(bytes, size);
    compare(of, "memory", found, bytes, size);
    free(bytes);
  }
}

int main(int count, char **arguments) {
  if (count != 2 || !(file = fopen(arguments[1], "rb"))) refuse("give it a file of recorded calls");
  for (int step; (step = getc(file)) != EOF;) {
    if (step == 'R') make_region();
    else if (step == 'F') fill();
    else if (step == 'P') point();
    else if (step == 'C') call();
    else refuse("a step is of no known kind");
  }
  for (Function *of = functions; of < functions + NUM_FUNCTIONS; of++)
    if (of->calls)
      printf("%s %" PRId64 " %" PRId64 " %016" PRIx64 "\n", of->name, of->calls, of->bytes, of->digest);
  printf(num_differences ? "%" PRId64 " differences\n" : "equal\n", num_differences);
  return num_differences != 0;
}
