/* Registers of floats, and numbers in memory of either type, for the processor this is compiled for. */
#ifndef VECTORS_H
#define VECTORS_H
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) /* floats of a register */
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
#if defined(__AVX512F__) /* one load for all uses: else each reads the memory again */
#define HELD(value) __asm__("" : "+v"(value))
#elif defined(__AVX__)
#define HELD(value) __asm__("" : "+x"(value))
#else
#define HELD(value)
#endif
enum { LINE = 64 }; /* bytes that come from memory at once */
/* Ask for a line ahead of time, into the second cache: the first can wait for few lines at once, and
 * while it waits for those, loads of what is already there stand behind them. */
#define FETCH(line) __builtin_prefetch(line, 0, 2)
#if defined(__x86_64__) || defined(__i386__) /* a moment in which nothing is done */
#define REST __builtin_ia32_pause()
#elif defined(__aarch64__)
#define REST __asm__ volatile("yield")
#else
#define REST (void)0
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8") /* so that what each turn makes may stay in registers */

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef float f32;
typedef uint16_t bf16;

INLINE floats same(float value) { /* in every place; a sum with zeros would be another number */
#if defined(__AVX512F__)
  return (floats)_mm512_set1_ps(value);
#elif defined(__AVX__)
  return (floats)_mm256_set1_ps(value);
#else
  return (floats){value, value, value, value};
#endif
}

INLINE float wide_f32(f32 value) { return value; }
INLINE f32 narrow_f32(float value) { return value; }

INLINE float wide_bf16(bf16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

INLINE bf16 narrow_bf16(float value) { /* to the nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* not a number */
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* a b + c, rounded once where the processor can. Compilers are told to make no such of their own: they
 * do it in one copy of a function and not in another, and the same sum would be two numbers. */
INLINE floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

typedef floats held_f32; /* what one load holds */
enum { STEP_f32 = LANES };
INLINE held_f32 load_f32(const f32 *from) {
  floats value;
  memcpy(&value, from, sizeof value);
  return value;
}
INLINE floats add_f32(floats sums, held_f32 a, held_f32 b) { return fused(a, b, sums); }
INLINE held_f32 spread_f32(const f32 *from) { return same(*from); } /* first of a load, to all */

INLINE floats widened_f32(const f32 *from) { return load_f32(from); }
INLINE floats widened_bf16(const bf16 *from) {
  halves value;
  memcpy(&value, from, sizeof value);
  words bits = __builtin_convertvector(value, words) << 16;
  return (floats)bits;
}

/* Pairs of bfloat16 multiplied at once: where there are matrix units, vectors do it at half the speed
 * of float32. */
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define PAIRS
#endif

#if defined(PAIRS)
typedef __m512bh held_bf16;
enum { STEP_bf16 = 2 * LANES };
INLINE held_bf16 load_bf16(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }
INLINE floats add_bf16(floats sums, held_bf16 a, held_bf16 b) {
  return (floats)_mm512_dpbf16_ps((__m512)sums, a, b);
}
INLINE held_bf16 spread_bf16(const bf16 *from) {
  int32_t two;
  memcpy(&two, from, sizeof two);
  return (__m512bh)_mm512_set1_epi32(two);
}
#else
typedef floats held_bf16;
enum { STEP_bf16 = LANES };
INLINE held_bf16 load_bf16(const bf16 *from) { return widened_bf16(from); }
INLINE floats add_bf16(floats sums, held_bf16 a, held_bf16 b) { return fused(a, b, sums); }
INLINE held_bf16 spread_bf16(const bf16 *from) { return same(wide_bf16(*from)); }
#endif

INLINE void keep_f32(f32 *to, floats value) { memcpy(to, &value, sizeof value); }
#if defined(__AVX512BF16__)
INLINE void keep_bf16(bf16 *to, floats value) {
  const __m256bh some = _mm512_cvtneps_pbh((__m512)value);
  memcpy(to, &some, sizeof some);
}
#else
INLINE void keep_bf16(bf16 *to, floats value) { /* as narrow_bf16 */
  const words bits = (words)value, none = (words)(value != value);
  const words near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const halves some = __builtin_convertvector((near & ~none) | (none & 0x7fc0), halves);
  memcpy(to, &some, sizeof some);
}
#endif

/* Weights of columns, and the same numbers of BESIDE columns as one register takes them. */
typedef f32 weight_f32;
typedef floats beside_f32;
enum { BESIDE_f32 = 1 };
INLINE void weigh_f32(weight_f32 *to, floats value) { keep_f32(to, value); }
INLINE floats spread_weight_f32(const weight_f32 *from) { return same(*from); }
INLINE floats both_f32(const f32 *one, const f32 *two) {
  (void)two;
  return load_f32(one);
}
INLINE floats weighed_f32(floats sums, floats a, floats b) { return fused(a, b, sums); }
#if defined(PAIRS)
typedef bf16 weight_bf16;
typedef held_bf16 beside_bf16;
enum { BESIDE_bf16 = 2 };
INLINE void weigh_bf16(weight_bf16 *to, floats value) { keep_bf16(to, value); }
INLINE held_bf16 spread_weight_bf16(const weight_bf16 *from) { return spread_bf16(from); }
INLINE held_bf16 both_bf16(const bf16 *one, const bf16 *two) {
  return (held_bf16)((words)widened_bf16(one) >> 16 | (words)widened_bf16(two));
}
INLINE floats weighed_bf16(floats sums, held_bf16 a, held_bf16 b) { return add_bf16(sums, a, b); }
#else
typedef f32 weight_bf16;
typedef floats beside_bf16;
enum { BESIDE_bf16 = 1 };
INLINE void weigh_bf16(weight_bf16 *to, floats value) { keep_f32(to, value); }
INLINE floats spread_weight_bf16(const weight_bf16 *from) { return same(*from); }
INLINE floats both_bf16(const bf16 *one, const bf16 *two) {
  (void)two;
  return widened_bf16(one);
}
INLINE floats weighed_bf16(floats sums, floats a, floats b) { return fused(a, b, sums); }
#endif

#if defined(__AVX512F__)
INLINE floats larger(floats a, floats b) { return (floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float largest(floats x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE float summed(floats x) { return _mm512_reduce_add_ps((__m512)x); }
#elif defined(__AVX__)
INLINE floats larger(floats a, floats b) { return (floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE float largest(floats x) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}
INLINE float summed(floats x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
#else
INLINE floats larger(floats a, floats b) {
  const words first = (words)(a > b);
  return (floats)(((words)a & first) | ((words)b & ~first));
}
INLINE float largest(floats x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}
INLINE float summed(floats x) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
}
#endif

/* Sums in double of what registers of floats hold; a conversion of all of one at once is not seen as the
 * two that processors have. */
typedef double doubles __attribute__((vector_size(LANES * 4)));
struct sums {
  doubles low, high;
};
INLINE void sum_up(struct sums *to, floats x) {
#if defined(__AVX512F__)
  const __m256d high = _mm512_extractf64x4_pd((__m512d)x, 1);
  to->low += (doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
  to->high += (doubles)_mm512_cvtps_pd((__m256)high);
#elif defined(__AVX__)
  to->low += (doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
  to->high += (doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#else
  for (int i = 0; i < LANES / 2; i++) to->low[i] += x[i], to->high[i] += x[LANES / 2 + i];
#endif
}
INLINE double summed_up(const struct sums *from) {
  const doubles both = from->low + from->high;
  double sum = 0;
  for (int i = 0; i < LANES / 2; i++) sum += both[i];
  return sum;
}

INLINE floats exponential(floats x) { /* of numbers up to zero; below -88.1, zero */
  const floats lowest = (floats){0} - 88.1f, shift = (floats){0} + 12583039.0f; /* 1.5 2^23 + 127 */
  const floats bounded = larger(lowest, x); /* what is no number stays so */
  floats turns = fused(bounded, same(1.44269504f), shift); /* the exponent in the low bits */
  const floats power = (floats)((words)turns << 23);
  turns -= shift;
  const floats part = fused(turns, same(-0.693145752f), bounded);
  const floats r = fused(turns, same(-1.42860677e-6f), part);
  floats p = fused(r, same(1.3888889e-3f), same(8.3333333e-3f));
  p = fused(p, r, same(4.1666667e-2f));
  p = fused(p, r, same(1.6666667e-1f));
  p = fused(p, r, same(0.5f));
  p = fused(p, r, same(1.0f));
  p = fused(p, r, same(1.0f));
  return p * power;
}

/* A tile: sums of ROWS by OUTS products, as many as registers hold. */
enum { ROWS = LANES == 8 ? 2 : 4, OUTS = 4 };
enum { BLOCK = 1 << 16 }; /* numbers, in float32, that stay in the second cache beside others */

/* OUTS sums beside each other, in the type of the memory */
INLINE void store_f32(f32 *to, const float *from) {
  for (int i = 0; i < OUTS; i++) to[i] = from[i];
}
#if defined(__AVX512BF16__)
INLINE void store_bf16(bf16 *to, const float *from) {
  __m128bh some = _mm_cvtneps_pbh(_mm_loadu_ps(from));
  memcpy(to, &some, OUTS * sizeof(bf16));
}
#else
INLINE void store_bf16(bf16 *to, const float *from) {
  for (int i = 0; i < OUTS; i++) to[i] = narrow_bf16(from[i]);
}
#endif

#if defined(__AVX512F__)
/* Halves of a and b, or every second four of each, added: one register of what two held. */
INLINE __m512 fours(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

INLINE void total(float *to, floats sums[][OUTS], const int rows) {
  __m512 four[ROWS]; /* of one row: within every four numbers, one sum of each output */
  UNROLLED for (int r = 0; r < rows; r++) {
    const __m512 a = (__m512)sums[r][0], b = (__m512)sums[r][1];
    const __m512 c = (__m512)sums[r][2], d = (__m512)sums[r][3];
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    four[r] = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  }
  const __m512 first = fours(four[0], four[rows > 1 ? 1 : 0]);
  const __m512 all = fours(first, rows > 2 ? fours(four[2], four[rows > 3 ? 3 : 2]) : first);
  memcpy(to, &all, sizeof all);
}
#elif defined(__AVX__)
INLINE void total(float *to, floats sums[][OUTS], const int rows) {
  for (int r = 0; r < rows; r++, sums++, to += OUTS) {
    const __m256 low = _mm256_hadd_ps((__m256)(*sums)[0], (__m256)(*sums)[1]);
    const __m256 high = _mm256_hadd_ps((__m256)(*sums)[2], (__m256)(*sums)[3]);
    const __m256 both = _mm256_hadd_ps(low, high); /* half of each output's sum on either side */
    const __m128 all = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    memcpy(to, &all, sizeof all);
  }
}
#else
INLINE void total(float *to, floats sums[][OUTS], const int rows) {
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < OUTS; o++) {
      float sum = 0;
      for (int i = 0; i < LANES; i++) sum += sums[r][o][i];
      to[r * OUTS + o] = sum;
    }
}
#endif

#if defined(__clang__)
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

#if defined(__AVX512F__)
INLINE void transpose(words square[LANES]) { /* in fours of numbers, then in fours of fours */
  __m512i *a = (__m512i *)square, b[LANES];
  for (int i = 0; i < LANES; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int k = 0; k < 2; k++) {
      a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + 2 + k]);
      a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + 2 + k]);
    }
  for (int k = 0; k < 4; k++) {
    const __m512i first = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88);
    const __m512i second = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
    const __m512i third = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
    const __m512i last = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
    b[k] = _mm512_shuffle_i32x4(first, third, 0x88);
    b[4 + k] = _mm512_shuffle_i32x4(second, last, 0x88);
    b[8 + k] = _mm512_shuffle_i32x4(first, third, 0xdd);
    b[12 + k] = _mm512_shuffle_i32x4(second, last, 0xdd);
  }
  memcpy(square, b, sizeof b);
}
#else
#if defined(__AVX__)
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
INLINE void transpose(words square[LANES]) { /* rows of both halves zipped, until each came round */
  words other[LANES];
  for (int n = 1; n < LANES; n *= 2) {
    for (int i = 0; i < LANES / 2; i++) {
      other[2 * i] = MIXED(square[i], square[i + LANES / 2], LOW);
      other[2 * i + 1] = MIXED(square[i], square[i + LANES / 2], HIGH);
    }
    memcpy(square, other, sizeof other);
  }
}
#endif
#endif
