/* Define the vector operations with AVX2, FMA and F16C: see `vector.h`, which includes this file. */

#define LANES 8
#define FUSED_ROWS 1 /* rows for which weights are unpacked in registers; for more, a tile at a time */
#define QUERY_VECTORS 2 /* vectors of queries of a part of an attention: their sums stay in registers */

typedef __m256 V;
typedef __m256i I;
typedef struct {
  __m256 low, high;
} Table; /* the values of 4-bit codes */
typedef __m256 Steps; /* the value of the 5-bit code 0 */

/* Return the vectors of a panel that are computed together for so many rows. There are 16 registers: up to 12 hold
   sums, and the others a weight, its parts and an input. */
INLINE int vectors_at_once(const int rows, const int plain) {
  if (rows <= 1) return plain ? 8 : 4;
  return plain && rows <= 3 ? 4 : 2;
}

INLINE V v_set(float x) { return _mm256_set1_ps(x); }
INLINE V v_load(const void *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(void *p, V a) { _mm256_storeu_ps(p, a); }
INLINE V v_add(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V v_sub(V a, V b) { return _mm256_sub_ps(a, b); }
INLINE V v_mul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V v_fma(V a, V b, V sum) { return _mm256_fmadd_ps(a, b, sum); }
INLINE V v_div(V a, V b) { return _mm256_div_ps(a, b); }
INLINE V v_max(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V v_min(V a, V b) { return _mm256_min_ps(a, b); }
INLINE V v_abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE float v_greatest(V a) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE int v_has_nan(V a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
/* Put zeros in the place of NaNs. */
INLINE V v_without_nan(V a) { return _mm256_and_ps(_mm256_cmp_ps(a, a, _CMP_ORD_Q), a); }
INLINE V v_bits(I a) { return _mm256_castsi256_ps(a); }
INLINE I v_as_int(V a) { return _mm256_castps_si256(a); }
INLINE V v_int(I a) { return _mm256_cvtepi32_ps(a); }

/* Widen stored numbers: halves, bfloat16, unsigned and signed bytes. */
INLINE V v_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE V v_bf16(const void *p) { return v_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16)); }
INLINE I i_bytes(const void *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
INLINE I i_signed(const void *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }

INLINE I i_set(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE I i_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void i_store(void *p, I a) { _mm256_storeu_si256(p, a); }
INLINE I i_add(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I i_and(I a, I b) { return _mm256_and_si256(a, b); }
INLINE I i_or(I a, I b) { return _mm256_or_si256(a, b); }
INLINE I i_sub(I a, I b) { return _mm256_sub_epi32(a, b); }
/* Shift right by a number that is not known when this is compiled. */
INLINE I i_shifted(I a, int bits) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(bits)); }
#define i_left(a, bits) _mm256_slli_epi32(a, bits)
#define i_right(a, bits) _mm256_srli_epi32(a, bits)

/* Take the bits of `a` where `mask` has ones, and those of `b` elsewhere. */
INLINE I i_merge(I mask, I a, I b) { return i_or(i_and(mask, a), _mm256_andnot_si256(mask, b)); }

/* Look nibble `which` of each lane up in a table of 16. Its highest bit chooses one of two tables of eight. */
INLINE Table t_load(const float *values) { return (Table){v_load(values), v_load(values + LANES)}; }
#define v_look(table, codes, which) v_chosen(table, i_right(codes, 4 * (which)), i_left(codes, 28 - 4 * (which)))
INLINE V v_chosen(Table table, I code, I highest) {
  V low = _mm256_permutevar8x32_ps(table.low, code), high = _mm256_permutevar8x32_ps(table.high, code);
  return _mm256_blendv_ps(low, high, v_bits(highest));
}

/* The same for values that count up from `first`, without the table. */
#define v_count(table, codes, which, first) v_counted(i_and(i_right(codes, 4 * (which)), i_set(15)), first)
INLINE V v_counted(I number, const int first) {
  return first ? v_add(v_int(number), v_set((float)first)) : v_int(number);
}

/* Return the values of the lowest five bits, whole numbers that follow each other. */
INLINE Steps t_steps(const float *values) { return v_set(values[0]); }
INLINE V v_step(Steps steps, I code) { return v_add(v_int(i_and(code, i_set(31))), steps); }

/* Return the numbers of a table at some places. */
INLINE V v_gather(const float *table, I places) { return _mm256_i32gather_ps(table, places, 4); }

/* Round to the nearest half, ties to even. */
INLINE V v_round_half(V a) { return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }

/* Return byte `which` of each lane as a float. */
INLINE V v_byte(I a, int which) {
  I place = _mm256_add_epi32(_mm256_set_epi32(12, 8, 4, 0, 12, 8, 4, 0), i_set(0x80808000 + (uint32_t)which));
  return v_int(_mm256_shuffle_epi8(a, place));
}

/* Widen floats of 8 bits, E4M3, and divide them by 256: the bits are a half's. There is no NaN among them. */
INLINE V v_e4m3(const void *p) {
  __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xbf80)));
}

/* Return half of each power of two of an exponent byte, E8M0, as ggml does. */
INLINE V v_half_power(const void *p) {
  I e = i_bytes(p), tiny = _mm256_sllv_epi32(i_set(0x00200000), e);
  I usual = i_left(i_sub(e, i_set(1)), 23);
  return v_bits(_mm256_blendv_epi8(usual, tiny, _mm256_cmpgt_epi32(i_set(2), e)));
}

/* Round to the nearest whole numbers, ties to even. */
INLINE I i_rounded(V a) { return _mm256_cvtps_epi32(a); }

/* Return the two halves of a vector as 16-bit numbers. Those of 32 bits are all below 65536. */
INLINE __m128i i_narrow(I a) { return _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)); }

/* Write the lowest byte of each lane. */
INLINE void i_store_bytes(void *p, I a) {
  __m128i narrow = i_narrow(i_and(a, i_set(255)));
  _mm_storel_epi64(p, _mm_packus_epi16(narrow, narrow));
}

/* Write floats of 16 bits, rounded to the nearest, ties to even. There is no NaN among them. */
INLINE void v_store_half(void *p, V a) {
  _mm_storeu_si128(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void v_store_bf16(void *p, V a) {
  I bits = _mm256_castps_si256(a), odd = i_and(i_right(bits, 16), i_set(1));
  bits = i_add(bits, i_add(odd, i_set(0x7fff)));
  _mm_storeu_si128(p, i_narrow(i_right(bits, 16)));
}

/* Make rows columns. */
INLINE void v_transpose(V *a) {
  V b[LANES];
  UNROLL for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4)
    UNROLL for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
      a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
    }
  UNROLL for (int j = 0; j < 4; j++) {
    b[j] = _mm256_permute2f128_ps(a[j], a[j + 4], 0x20);
    b[j + 4] = _mm256_permute2f128_ps(a[j], a[j + 4], 0x31);
  }
  UNROLL for (int i = 0; i < 8; i++) a[i] = b[i];
}

/* Take `yes` where a < b, and `no` elsewhere. */
INLINE V v_where_less(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }

/* Return a * 2^q for whole numbers q from -150 to 129, rounded once. The first product is exact: two steps, because 2^q
   may be no float32 where the result is one. */
INLINE V v_scale(V a, V q) {
  I all = i_rounded(q), half = _mm256_srai_epi32(all, 1);
  V first = v_bits(i_left(i_add(half, i_set(127)), 23)), second = v_bits(i_left(i_add(i_sub(all, half), i_set(127)), 23));
  return v_mul(v_mul(a, first), second);
}

/* ---- products of whole numbers, for `int8.c` ---- */

#define DOT_ROWS 4   /* rows of which sums of products have registers, for DOT_VECTORS vectors of outputs */
#define DOT_VECTORS 2
#define ROWS_OF_DOT 1 /* rows of one product */
#define FUSED_DOTS 1 /* rows for which codes are unpacked in registers; for more, a tile at a time */
#define BYTES_FROM 0 /* added to signed bytes of weights before `i_dots_bytes` */

INLINE I i_xor(I a, I b) { return _mm256_xor_si256(a, b); }
INLINE I i_mul(I a, I b) { return _mm256_mullo_epi32(a, b); }

/* Take 16 bytes as a table, and look up each byte from 0 to 15. */
INLINE I i_table(const uint8_t *values) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values)); }
INLINE I i_look(I table, I bytes) { return _mm256_shuffle_epi8(table, bytes); }

/* Products of four bytes of each lane: codes from 0 to 127, or any signed bytes of weights, and signed bytes of `x` from
   -127 to 127. Two of them fit 16 bits. So many fours are added to 16 bits, and then to `sum`, as fit there for codes up
   to `top`. The compiler regroups sums of whole numbers, and then has no registers for all parts: `i_kept` stops it. */
INLINE int dots_at_once(const int top) { return top > 63 ? 1 : top > 31 ? 2 : top > 15 ? 4 : 8; }
INLINE I i_kept(I a) {
  __asm__("" : "+x"(a));
  return a;
}
INLINE I i_begin_dots(I sum) {
  (void)sum;
  return _mm256_setzero_si256();
}
INLINE I i_dots(I part, I codes, I x) { return i_kept(_mm256_add_epi16(part, _mm256_maddubs_epi16(codes, x))); }
INLINE I i_dots_bytes(I part, I bytes, I x) { return i_dots(part, _mm256_abs_epi8(bytes), _mm256_sign_epi8(x, bytes)); }
INLINE I i_end_dots(I part, I sum) { return i_kept(i_add(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)))); }

/* Make four vectors with four bytes of each output, from bytes of 4 * LANES outputs in four rows PANEL bytes apart.
   `i_in_order` puts the outputs in order: once for sums costs less than for codes. */
INLINE void i_quads(const uint8_t *p, I *out) {
  I a = i_load(p), b = i_load(p + PANEL), c = i_load(p + 2 * PANEL), d = i_load(p + 3 * PANEL);
  I low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
  I second_low = _mm256_unpacklo_epi8(c, d), second_high = _mm256_unpackhi_epi8(c, d);
  out[0] = _mm256_unpacklo_epi16(low, second_low), out[1] = _mm256_unpackhi_epi16(low, second_low);
  out[2] = _mm256_unpacklo_epi16(high, second_high), out[3] = _mm256_unpackhi_epi16(high, second_high);
}
INLINE void i_in_order(I *quads) {
  I own[4] = {quads[0], quads[1], quads[2], quads[3]};
  UNROLL for (int i = 0; i < 2; i++) {
    quads[i] = _mm256_permute2x128_si256(own[2 * i], own[2 * i + 1], 0x20);
    quads[2 + i] = _mm256_permute2x128_si256(own[2 * i], own[2 * i + 1], 0x31);
  }
}
