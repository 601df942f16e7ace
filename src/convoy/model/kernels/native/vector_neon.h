/* Define the vector operations with NEON, of any 64-bit ARM: see `vector.h`, which includes this file. */

#define LANES 4
#define FUSED_ROWS 1 /* rows for which weights are unpacked in registers; for more, a tile at a time */
#define QUERY_VECTORS 4 /* vectors of queries of a part of an attention: their sums stay in registers */

typedef float32x4_t V;
typedef uint32x4_t I;
typedef uint8x16x4_t Table; /* the bytes of the values of 4-bit codes */
typedef V Steps;            /* the value of the 5-bit code 0 */

/* Return the vectors of a panel that are computed together for so many rows. There are 32 registers: up to 24 hold
   sums, and the others a weight, its parts and an input. */
INLINE int vectors_at_once(const int rows, const int plain) {
  if (rows <= 2) return plain ? 8 : 4;
  return 4;
}

INLINE V v_bits(I a) { return vreinterpretq_f32_u32(a); }
INLINE I v_as_int(V a) { return vreinterpretq_u32_f32(a); }
/* Addresses need no alignment. */
INLINE I i_load(const void *p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
INLINE void i_store(void *p, I a) { vst1q_u8(p, vreinterpretq_u8_u32(a)); }

INLINE V v_set(float x) { return vdupq_n_f32(x); }
INLINE V v_load(const void *p) { return v_bits(i_load(p)); }
INLINE void v_store(void *p, V a) { i_store(p, v_as_int(a)); }
INLINE V v_add(V a, V b) { return vaddq_f32(a, b); }
INLINE V v_sub(V a, V b) { return vsubq_f32(a, b); }
INLINE V v_mul(V a, V b) { return vmulq_f32(a, b); }
INLINE V v_fma(V a, V b, V sum) { return vfmaq_f32(sum, a, b); }
INLINE V v_div(V a, V b) { return vdivq_f32(a, b); }
/* Of a NaN and a number, and of zeros of two signs, x86-64 takes the second. NEON's own maximum does not. */
INLINE V v_max(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE V v_min(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE V v_abs(V a) { return vabsq_f32(a); }
INLINE float v_greatest(V a) {
  V two = v_max(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(v_max(two, vextq_f32(two, two, 1)), 0);
}
INLINE int v_has_nan(V a) { return vminvq_u32(vceqq_f32(a, a)) == 0; }
/* Put zeros in the place of NaNs. */
INLINE V v_without_nan(V a) { return v_bits(vandq_u32(vceqq_f32(a, a), v_as_int(a))); }
INLINE V v_int(I a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }

/* Widen stored numbers: halves, bfloat16, unsigned and signed bytes. */
INLINE V v_half(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
INLINE V v_bf16(const void *p) { return v_bits(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16)); }
INLINE uint8x8_t four_bytes(const void *p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return vreinterpret_u8_u32(vdup_n_u32(four));
}
INLINE I i_bytes(const void *p) { return vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))); }
INLINE I i_signed(const void *p) {
  int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(four_bytes(p)));
  return vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(wide)));
}

INLINE I i_set(uint32_t x) { return vdupq_n_u32(x); }
INLINE I i_add(I a, I b) { return vaddq_u32(a, b); }
INLINE I i_and(I a, I b) { return vandq_u32(a, b); }
INLINE I i_or(I a, I b) { return vorrq_u32(a, b); }
INLINE I i_sub(I a, I b) { return vsubq_u32(a, b); }
/* Shift right by a number that is not known when this is compiled. */
INLINE I i_shifted(I a, int bits) { return vshlq_u32(a, vdupq_n_s32(-bits)); }
/* NEON's own functions take no 0. */
#define i_left(a, bits) ((a) << (bits))
#define i_right(a, bits) ((a) >> (bits))

/* Take the bits of `a` where `mask` has ones, and those of `b` elsewhere. */
INLINE I i_merge(I mask, I a, I b) { return vbslq_u32(mask, a, b); }

/* Look nibble `which` of each lane up in a table of 16: its four bytes, one by one. */
INLINE Table t_load(const float *values) { return vld1q_u8_x4((const uint8_t *)values); }
#define v_look(table, codes, which) v_found(table, i_and(i_right(codes, 4 * (which)), i_set(15)))
INLINE V v_found(Table table, I code) {
  I places = vmlaq_n_u32(i_set(0x03020100), code, 0x04040404);
  return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places)));
}

/* The same for values that count up from `first`, without the table. */
#define v_count(table, codes, which, first) v_counted(i_and(i_right(codes, 4 * (which)), i_set(15)), first)
INLINE V v_counted(I number, const int first) { return v_int(first ? i_add(number, i_set((uint32_t)first)) : number); }

/* Return the values of the lowest five bits, whole numbers that follow each other. */
INLINE Steps t_steps(const float *values) { return v_set(values[0]); }
INLINE V v_step(Steps steps, I code) { return v_add(v_int(i_and(code, i_set(31))), steps); }

/* Return the numbers of a table at some places. */
INLINE V v_gather(const float *table, I places) {
  V found = v_set(table[vgetq_lane_u32(places, 0)]);
  found = vsetq_lane_f32(table[vgetq_lane_u32(places, 1)], found, 1);
  found = vsetq_lane_f32(table[vgetq_lane_u32(places, 2)], found, 2);
  return vsetq_lane_f32(table[vgetq_lane_u32(places, 3)], found, 3);
}

/* Round to the nearest half, ties to even. */
INLINE V v_round_half(V a) { return vcvt_f32_f16(vcvt_f16_f32(a)); }

/* Return byte `which` of each lane as floats. */
INLINE V v_byte(I a, int which) { return v_int(i_and(i_right(a, 8 * which), i_set(255))); }

/* Widen floats of 8 bits, E4M3, and divide them by 256: the bits are a half's. There is no NaN among them. */
INLINE V v_e4m3(const void *p) {
  int16x4_t wide = vshl_n_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p)))), 7);
  return vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(wide, vdup_n_s16((short)0xbf80))));
}

/* Return half of each power of two of an exponent byte, E8M0, as ggml does. */
INLINE V v_half_power(const void *p) {
  I e = i_bytes(p), tiny = vshlq_u32(i_set(0x00200000), vreinterpretq_s32_u32(e));
  return v_bits(i_merge(vcltq_u32(e, i_set(2)), tiny, i_left(i_sub(e, i_set(1)), 23)));
}

/* Round to the nearest whole numbers, ties to even. Those beyond 32 bits differ from x86-64's. */
INLINE I i_rounded(V a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }

/* Write the lowest byte of each lane. */
INLINE void i_store_bytes(void *p, I a) {
  uint16x4_t narrow = vmovn_u32(a);
  uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(narrow, narrow))), 0);
  memcpy(p, &four, 4);
}

/* Write floats of 16 bits, rounded to the nearest, ties to even. There is no NaN among them. */
INLINE void v_store_half(void *p, V a) { vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(a))); }
INLINE void v_store_bf16(void *p, V a) {
  I bits = v_as_int(a), odd = i_and(i_right(bits, 16), i_set(1));
  bits = i_add(bits, i_add(odd, i_set(0x7fff)));
  vst1_u8(p, vreinterpret_u8_u16(vshrn_n_u32(bits, 16)));
}

/* Make rows columns. */
INLINE void v_transpose(V *a) {
  float32x4x2_t low = vtrnq_f32(a[0], a[1]), high = vtrnq_f32(a[2], a[3]);
  for (int i = 0; i < 2; i++) {
    a[i] = vcombine_f32(vget_low_f32(low.val[i]), vget_low_f32(high.val[i]));
    a[i + 2] = vcombine_f32(vget_high_f32(low.val[i]), vget_high_f32(high.val[i]));
  }
}

/* Take `yes` where a < b, and `no` elsewhere. */
INLINE V v_where_less(V a, V b, V yes, V no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }

/* Return a * 2^q for whole numbers q from -150 to 129, rounded once. The first product is exact: two steps, because 2^q
   may be no float32 where the result is one. */
INLINE V v_scale(V a, V q) {
  I all = i_rounded(q), half = vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(all), 1));
  V first = v_bits(i_left(i_add(half, i_set(127)), 23)), second = v_bits(i_left(i_add(i_sub(all, half), i_set(127)), 23));
  return v_mul(v_mul(a, first), second);
}

/* Eight lanes, for sums whose order is that of eight lanes. */
typedef struct {
  V low, high;
} Eight;
INLINE Eight e_load(const float *p) { return (Eight){v_load(p), v_load(p + 4)}; }
INLINE void e_store(float *p, Eight a) { v_store(p, a.low), v_store(p + 4, a.high); }
INLINE Eight e_zero(void) { return (Eight){v_set(0), v_set(0)}; }
INLINE Eight e_add(Eight a, Eight b) { return (Eight){v_add(a.low, b.low), v_add(a.high, b.high)}; }
INLINE Eight e_mul(Eight a, Eight b) { return (Eight){v_mul(a.low, b.low), v_mul(a.high, b.high)}; }

/* ---- products of whole numbers, for `int8.c` ---- */

#define DOT_ROWS 2   /* rows of which sums of products and floats have registers, for DOT_VECTORS vectors of outputs */
#define DOT_VECTORS 4
#ifdef __ARM_FEATURE_MATMUL_INT8
#define ROWS_OF_DOT 2 /* rows of one product */
#else
#define ROWS_OF_DOT 1
#endif
#define FUSED_DOTS 1 /* rows for which codes are unpacked in registers; for more, a tile at a time */
#define BYTES_FROM 0 /* added to signed bytes of weights before `i_dots_bytes` */

INLINE I i_xor(I a, I b) { return veorq_u32(a, b); }
INLINE I i_mul(I a, I b) { return vmulq_u32(a, b); }

/* Take 16 bytes as a table, and look up each byte from 0 to 15. */
INLINE I i_table(const uint8_t *values) { return vreinterpretq_u32_u8(vld1q_u8(values)); }
INLINE I i_look(I table, I bytes) {
  return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(bytes)));
}

/* Products of four bytes of each lane: codes from 0 to 127, or any signed bytes of weights, and signed bytes of `x` from
   -127 to 127. They are added to `sum` at once. */
INLINE int dots_at_once(const int top) { return (void)top, 8; }
INLINE I i_begin_dots(I sum) { return sum; }
INLINE I i_dots_bytes(I sum, I bytes, I x) {
  int8x16_t a = vreinterpretq_s8_u32(bytes), b = vreinterpretq_s8_u32(x);
#ifdef __ARM_FEATURE_DOTPROD
  return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sum), a, b));
#else
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  int32x4_t high = vpaddlq_s16(vmull_high_s8(a, b));
  return i_add(sum, vreinterpretq_u32_s32(vpaddq_s32(low, high)));
#endif
}

INLINE I i_dots(I sum, I codes, I x) { return i_dots_bytes(sum, codes, x); }
INLINE I i_end_dots(I part, I sum) { return (void)sum, part; }

#ifdef __ARM_FEATURE_MATMUL_INT8
/* Add the sums of eight products of a first row with each of two outputs, and then of a second row. */
INLINE I i_dots_two(I sum, I rows, I outputs) {
  int8x16_t a = vreinterpretq_s8_u32(rows), b = vreinterpretq_s8_u32(outputs);
  return vreinterpretq_u32_s32(vmmlaq_s32(vreinterpretq_s32_u32(sum), a, b));
}

/* Load eight bytes of each of two rows. */
INLINE I i_eights(const int8_t *one, const int8_t *two) {
  return vreinterpretq_u32_s8(vcombine_s8(vld1_s8(one), vld1_s8(two)));
}

/* Take the lanes of two vectors by turns. */
INLINE void i_by_turns(I *a, I *b) {
  I low = vzip1q_u32(*a, *b);
  *b = vzip2q_u32(*a, *b), *a = low;
}

/* Exchange the second half of one vector and the first half of another. */
INLINE void i_exchange(I *a, I *b) {
  uint64x2_t one = vreinterpretq_u64_u32(*a), two = vreinterpretq_u64_u32(*b);
  *a = vreinterpretq_u32_u64(vzip1q_u64(one, two)), *b = vreinterpretq_u32_u64(vzip2q_u64(one, two));
}
#endif

/* Put the four even bytes of each eight in front of the odd ones, of 32 bytes, and add the bytes of each half. */
INLINE void i_pair_bytes(const int8_t *from, int8_t *to, int32_t *sums) {
  const uint8_t places[] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  UNROLL for (int half = 0; half < 2; half++) {
    int8x16_t a = vld1q_s8(from + 16 * half);
    vst1q_s8(to + 16 * half, vqtbl1q_s8(a, vld1q_u8(places)));
    sums[half] = vaddlvq_s8(a);
  }
}

/* Make four vectors with four bytes of each output, from bytes of 4 * LANES outputs in four rows PANEL bytes apart.
   `i_in_order` puts the outputs in order: they are here. */
INLINE void i_quads(const uint8_t *p, I *out) {
  uint8x16_t a = vld1q_u8(p), b = vld1q_u8(p + PANEL), c = vld1q_u8(p + 2 * PANEL), d = vld1q_u8(p + 3 * PANEL);
  uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(a, b)), high = vreinterpretq_u16_u8(vzip2q_u8(a, b));
  uint16x8_t second_low = vreinterpretq_u16_u8(vzip1q_u8(c, d)), second_high = vreinterpretq_u16_u8(vzip2q_u8(c, d));
  out[0] = vreinterpretq_u32_u16(vzip1q_u16(low, second_low));
  out[1] = vreinterpretq_u32_u16(vzip2q_u16(low, second_low));
  out[2] = vreinterpretq_u32_u16(vzip1q_u16(high, second_high));
  out[3] = vreinterpretq_u32_u16(vzip2q_u16(high, second_high));
}
INLINE void i_in_order(I *quads) { (void)quads; }
