/* Choose the vector operations of the instruction set that the compiler was told. All headers define the same names,
   over `LANES` lanes of float32 or of 32-bit integers. Each operation on floats rounds once, and `v_fma` rounds its
   sum alone. So a number has the same bits with any of them. */

#ifndef CONVOY_VECTOR_H
#define CONVOY_VECTOR_H

#include "shared.h"

#ifdef __aarch64__
#include <arm_neon.h>

#include "vector_neon.h"
#else
#include <immintrin.h>

#ifdef __AVX512F__
#include "vector_avx512.h"
#else
#include "vector_avx2.h"
#endif

/* Eight lanes, for sums whose order is that of eight lanes. */
typedef __m256 Eight;
INLINE Eight e_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void e_store(float *p, Eight a) { _mm256_storeu_ps(p, a); }
INLINE Eight e_zero(void) { return _mm256_setzero_ps(); }
INLINE Eight e_add(Eight a, Eight b) { return _mm256_add_ps(a, b); }
INLINE Eight e_mul(Eight a, Eight b) { return _mm256_mul_ps(a, b); }

/* Put the four even bytes of each eight in front of the odd ones, of 32 bytes, and add the bytes of each half. */
INLINE void i_pair_bytes(const int8_t *from, int8_t *to, int32_t *sums) {
  const __m128i places = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  UNROLL for (int half = 0; half < 2; half++) {
    __m128i a = _mm_loadu_si128((const __m128i *)(from + 16 * half));
    _mm_storeu_si128((__m128i *)(to + 16 * half), _mm_shuffle_epi8(a, places));
    __m128i fours = _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), a), _mm_set1_epi16(1));
    __m128i eights = _mm_add_epi32(fours, _mm_shuffle_epi32(fours, 0x4e));
    sums[half] = _mm_cvtsi128_si32(_mm_add_epi32(eights, _mm_shuffle_epi32(eights, 0xb1)));
  }
}
#endif

#define VECTORS (PANEL / LANES) /* vectors of a panel */
#define LINE 64                 /* bytes of a line of the cache */

/* Round to the nearest bfloat16, ties to even. A NaN stays one: rounding could carry its bits into another number. */
INLINE V v_round_bf16(V a) {
  I bits = v_as_int(a), odd = i_and(i_right(bits, 16), i_set(1));
  I rounded = i_add(i_add(bits, odd), i_set(0x7fff));
  /* All bits of a mask are set where the magnitude is greater than infinity. */
  I below = i_sub(i_set(0x7f800000), i_and(bits, i_set(0x7fffffff)));
  I is_nan = i_sub(i_set(0), i_right(below, 31));
  return v_bits(i_and(i_merge(is_nan, i_or(bits, i_set(0x00400000)), rounded), i_set(0xffff0000)));
}

/* Ask for a line of memory that is read soon. */
INLINE void prefetch(const uint8_t *p) { __builtin_prefetch(p, 0, 3); }

/* Prefetch the line of vector v, of `bytes` bytes each, unless it begins inside one. One row of numbers takes less
   time than the memory needs to bring the next page, so that two pages have to be on their way. */
INLINE void v_prefetch(const int rows, const uint8_t *p, const int v, const int bytes) {
  if (v * bytes % LINE == 0) prefetch(p + v * bytes + (rows == 1 ? 2 * AHEAD : AHEAD));
}

#endif
