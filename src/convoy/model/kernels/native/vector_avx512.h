/* Define the vector operations with AVX-512: see `vector.h`, which includes this file. */

#define LANES 16
#define FUSED_ROWS 6 /* rows for which weights are unpacked in registers; for more, a tile at a time */
#define QUERY_VECTORS 4 /* vectors of queries of a part of an attention: their sums stay in registers */

typedef __m512 V;
typedef __m512i I;
typedef __m512 Table; /* the values of 4-bit codes */
typedef struct {
  __m512 low, high;
} Steps; /* the values of 5-bit codes */

/* Return the vectors of a panel that are computed together for so many rows. Scales and codes of 64 outputs need
   registers beside the sums, so several rows use 32 outputs at a time. */
INLINE int vectors_at_once(const int rows, const int plain) { return plain || rows < 4 ? 4 : 2; }

/* Broadcast as a whole number: on Zen 4, loading one float into all lanes takes a unit of arithmetic, and loading a
   whole number takes none. */
INLINE V v_set(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
}
INLINE V v_load(const void *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(void *p, V a) { _mm512_storeu_ps(p, a); }
INLINE V v_add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V v_fma(V a, V b, V sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE V v_div(V a, V b) { return _mm512_div_ps(a, b); }
INLINE V v_max(V a, V b) { return _mm512_max_ps(a, b); }
INLINE V v_min(V a, V b) { return _mm512_min_ps(a, b); }
INLINE V v_abs(V a) { return _mm512_abs_ps(a); }
INLINE float v_greatest(V a) { return _mm512_reduce_max_ps(a); }
INLINE int v_has_nan(V a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
/* Put zeros in the place of NaNs. */
INLINE V v_without_nan(V a) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a); }
INLINE V v_bits(I a) { return _mm512_castsi512_ps(a); }
INLINE I v_as_int(V a) { return _mm512_castps_si512(a); }
INLINE V v_int(I a) { return _mm512_cvtepi32_ps(a); }

/* Widen stored numbers: halves, bfloat16, unsigned and signed bytes. */
INLINE V v_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE V v_bf16(const void *p) { return v_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16)); }
INLINE I i_bytes(const void *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
INLINE I i_signed(const void *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }

INLINE I i_set(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE I i_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void i_store(void *p, I a) { _mm512_storeu_si512(p, a); }
INLINE I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I i_and(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I i_or(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
/* Shift right by a number that is not known when this is compiled. */
INLINE I i_shifted(I a, int bits) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(bits)); }
#define i_left(a, bits) _mm512_slli_epi32(a, bits)
#define i_right(a, bits) _mm512_srli_epi32(a, bits)

/* Take the bits of `a` where `mask` has ones, and those of `b` elsewhere. */
INLINE I i_merge(I mask, I a, I b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

/* Look nibble `which` of each lane up in a table of 16. */
INLINE Table t_load(const float *values) { return v_load(values); }
#define v_look(table, codes, which) _mm512_permutexvar_ps(i_right(codes, 4 * (which)), table)

/* The same for values that count up from `first`. */
#define v_count(table, codes, which, first) v_look(table, codes, which)

/* Return the values of the lowest five bits, whole numbers that follow each other. */
INLINE Steps t_steps(const float *values) { return (Steps){v_load(values), v_load(values + LANES)}; }
INLINE V v_step(Steps steps, I code) { return _mm512_permutex2var_ps(steps.low, code, steps.high); }

/* Return the numbers of a table at some places. */
INLINE V v_gather(const float *table, I places) { return _mm512_i32gather_ps(places, table, 4); }

/* Round to the nearest half, ties to even. */
INLINE V v_round_half(V a) { return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }

/* Return byte `which` of each lane as a float. */
INLINE V v_byte(I a, int which) {
  I place = _mm512_add_epi32(_mm512_set4_epi32(12, 8, 4, 0), _mm512_set1_epi32(which));
  return v_int(_mm512_maskz_shuffle_epi8(0x1111111111111111, a, place));
}

/* Widen floats of 8 bits, E4M3, and divide them by 256: the bits are a half's. There is no NaN among them. */
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

/* Round to the nearest whole numbers, ties to even. */
INLINE I i_rounded(V a) { return _mm512_cvtps_epi32(a); }

/* Write the lowest byte of each lane. */
INLINE void i_store_bytes(void *p, I a) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(a)); }

/* Write floats of 16 bits, rounded to the nearest, ties to even. There is no NaN among them. */
INLINE void v_store_half(void *p, V a) {
  _mm256_storeu_si256(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void v_store_bf16(void *p, V a) {
  I bits = _mm512_castps_si512(a), odd = i_and(i_right(bits, 16), i_set(1));
  bits = i_add(bits, i_add(odd, i_set(0x7fff)));
  _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(i_right(bits, 16)));
}

/* Make rows columns. */
INLINE void v_transpose(V *a) {
  V b[LANES];
  UNROLL_ALL for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  UNROLL_ALL for (int i = 0; i < 16; i += 4)
    UNROLL_ALL for (int j = 0; j < 2; j++) {
      __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  UNROLL_ALL for (int i = 0; i < 16; i += 8)
    UNROLL_ALL for (int j = 0; j < 4; j++) {
      b[i + j] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0xdd);
    }
  UNROLL_ALL for (int j = 0; j < 8; j++) {
    a[j] = _mm512_shuffle_f32x4(b[j], b[j + 8], 0x88);
    a[j + 8] = _mm512_shuffle_f32x4(b[j], b[j + 8], 0xdd);
  }
}

/* Take `yes` where a < b, and `no` elsewhere. */
INLINE V v_where_less(V a, V b, V yes, V no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
}

/* Return a * 2^q for whole numbers q, rounded once. */
INLINE V v_scale(V a, V q) { return _mm512_scalef_ps(a, q); }

/* ---- products of whole numbers, for `int8.c` ---- */

#define DOT_ROWS 3     /* rows of which sums of products and floats have registers, for DOT_VECTORS vectors of outputs */
#define DOT_VECTORS 4
#define ROWS_OF_DOT 1  /* rows of one product */
#define FUSED_DOTS 3   /* rows for which codes are unpacked in registers; for more, a tile at a time */
#define BYTES_FROM 128 /* added to signed bytes of weights before `i_dots_bytes` */

INLINE I i_xor(I a, I b) { return _mm512_xor_si512(a, b); }
INLINE I i_mul(I a, I b) { return _mm512_mullo_epi32(a, b); }

/* Take 16 bytes as a table, and look up each byte from 0 to 15. */
INLINE I i_table(const uint8_t *values) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)values)); }
INLINE I i_look(I table, I bytes) { return _mm512_shuffle_epi8(table, bytes); }

/* Products of four bytes of each lane: codes from 0 to 127, or any bytes of weights with BYTES_FROM added, and signed
   bytes of `x` from -127 to 127. They are added to `sum` at once. */
INLINE int dots_at_once(const int top) { return (void)top, 8; }
INLINE I i_begin_dots(I sum) { return sum; }
INLINE I i_dots(I part, I codes, I x) { return _mm512_dpbusd_epi32(part, codes, x); }
INLINE I i_dots_bytes(I part, I bytes, I x) { return _mm512_dpbusd_epi32(part, bytes, x); }
INLINE I i_end_dots(I part, I sum) { return (void)sum, part; }

/* Make four vectors with four bytes of each output, from bytes of 4 * LANES outputs in four rows PANEL bytes apart.
   `i_in_order` puts the outputs in order: once for sums costs less than for codes. */
INLINE void i_quads(const uint8_t *p, I *out) {
  I a = i_load(p), b = i_load(p + PANEL), c = i_load(p + 2 * PANEL), d = i_load(p + 3 * PANEL);
  I low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
  I second_low = _mm512_unpacklo_epi8(c, d), second_high = _mm512_unpackhi_epi8(c, d);
  out[0] = _mm512_unpacklo_epi16(low, second_low), out[1] = _mm512_unpackhi_epi16(low, second_low);
  out[2] = _mm512_unpacklo_epi16(high, second_high), out[3] = _mm512_unpackhi_epi16(high, second_high);
}
INLINE void i_in_order(I *quads) {
  I even[2] = {_mm512_shuffle_i32x4(quads[0], quads[1], 0x44), _mm512_shuffle_i32x4(quads[0], quads[1], 0xee)};
  I odd[2] = {_mm512_shuffle_i32x4(quads[2], quads[3], 0x44), _mm512_shuffle_i32x4(quads[2], quads[3], 0xee)};
  UNROLL for (int i = 0; i < 2; i++) {
    quads[2 * i] = _mm512_shuffle_i32x4(even[i], odd[i], 0x88);
    quads[2 * i + 1] = _mm512_shuffle_i32x4(even[i], odd[i], 0xdd);
  }
}
