/* Define the vector operations of the stored linears: 16 lanes of float32 or of 32-bit integers. Another instruction
   set defines the same names. Each operation on floats rounds once, and `v_fma` rounds its sum alone. */

#ifndef CONVOY_VECTOR_H
#define CONVOY_VECTOR_H

#include <immintrin.h>

#include "shared.h"

#define LANES 16

typedef __m512 V;
typedef __m512i I;

INLINE V v_set(float x) { return _mm512_set1_ps(x); }
INLINE V v_load(const void *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(void *p, V a) { _mm512_storeu_ps(p, a); }
INLINE V v_add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V v_fma(V a, V b, V sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE V v_bits(I a) { return _mm512_castsi512_ps(a); }
INLINE V v_int(I a) { return _mm512_cvtepi32_ps(a); }

/* Widen 16 stored numbers: halves, bfloat16, unsigned and signed bytes. */
INLINE V v_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE V v_bf16(const void *p) { return v_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16)); }
INLINE I i_bytes(const void *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
INLINE I i_signed(const void *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }

INLINE I i_set(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE I i_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE I i_and(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I i_or(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
#define i_left(a, bits) _mm512_slli_epi32(a, bits)
#define i_right(a, bits) _mm512_srli_epi32(a, bits)

/* Take the bits of `a` where `mask` has ones, and those of `b` elsewhere. */
INLINE I i_merge(I mask, I a, I b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

/* Look the lowest four bits of each lane up in a table of 16. */
INLINE V v_look(V table, I code) { return _mm512_permutexvar_ps(code, table); }

/* Look the lowest five bits up in two tables of 16. */
INLINE V v_look_32(V low, V high, I code) { return _mm512_permutex2var_ps(low, code, high); }

/* Return byte `which` of each lane plus 2^23, as floats. */
INLINE V v_raised_byte(I a, int which) {
  I place = _mm512_add_epi32(_mm512_set4_epi32(12, 8, 4, 0), _mm512_set1_epi32(which));
  return v_bits(_mm512_mask_shuffle_epi8(_mm512_set1_epi32(0x4b000000), 0x1111111111111111, a, place));
}

/* Widen 16 floats of 8 bits, E4M3, and divide them by 256: the bits are a half's. There is no NaN among them. */
INLINE V v_e4m3(const void *p) {
  __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80)));
}

/* Return half of each power of two of an exponent byte, E8M0, as ggml does. */
INLINE V v_half_power(const void *p) {
  I e = i_bytes(p), tiny = _mm512_sllv_epi32(i_set(0x00200000), e);
  I usual = i_left(i_sub(e, i_set(1)), 23);
  return v_bits(_mm512_mask_mov_epi32(usual, _mm512_cmplt_epu32_mask(e, i_set(2)), tiny));
}

INLINE void v_prefetch(const void *p) { _mm_prefetch((const char *)p + AHEAD, _MM_HINT_T0); }

#endif
