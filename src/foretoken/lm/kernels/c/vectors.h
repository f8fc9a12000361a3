/* Registers of floats, and numbers in memory of either type, for the processor this is compiled for. */
#ifndef VECTORS_H
#define VECTORS_H
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
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
#else
#define HELD(value)
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef float f32;
typedef uint16_t bf16;

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

typedef floats held_f32; /* what one load holds */
enum { STEP_f32 = LANES };
INLINE held_f32 load_f32(const f32 *from) {
  floats value;
  memcpy(&value, from, sizeof value);
  return value;
}
INLINE floats add_f32(floats sums, held_f32 a, held_f32 b) { return sums + a * b; }

INLINE floats widened_f32(const f32 *from) { return load_f32(from); }
INLINE floats widened_bf16(const bf16 *from) {
  halves value;
  memcpy(&value, from, sizeof value);
  words bits = __builtin_convertvector(value, words) << 16;
  return (floats)bits;
}

#if defined(__AVX512BF16__)
typedef __m512bh held_bf16;
enum { STEP_bf16 = 2 * LANES };
INLINE held_bf16 load_bf16(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }
INLINE floats add_bf16(floats sums, held_bf16 a, held_bf16 b) {
  return (floats)_mm512_dpbf16_ps((__m512)sums, a, b);
}
#else
typedef floats held_bf16;
enum { STEP_bf16 = LANES };
INLINE held_bf16 load_bf16(const bf16 *from) { return widened_bf16(from); }
INLINE floats add_bf16(floats sums, held_bf16 a, held_bf16 b) { return sums + a * b; }
#endif

INLINE void keep_f32(f32 *to, floats value) { memcpy(to, &value, sizeof value); }
#if defined(__AVX512BF16__)
INLINE void keep_bf16(bf16 *to, floats value) {
  const __m256bh some = _mm512_cvtneps_pbh((__m512)value);
  memcpy(to, &some, sizeof some);
}
#else
INLINE void keep_bf16(bf16 *to, floats value) {
  for (int i = 0; i < LANES; i++) to[i] = narrow_bf16(value[i]);
}
#endif

INLINE floats larger(floats a, floats b) {
  const words first = (words)(a > b);
  return (floats)(((words)a & first) | ((words)b & ~first));
}

INLINE floats exponential(floats x) { /* of numbers up to zero; below -87, zero */
  const floats lowest = (floats){0} - 87.0f, shift = (floats){0} + 12582912.0f; /* 1.5 2^23 */
  words kept = ~(words)(x < lowest);
  floats bounded = (floats)((words)x & kept);
  floats turns = bounded * 1.44269504f + shift; /* whole numbers in the low bits */
  words whole = (words)turns << 23;
  turns -= shift;
  floats r = bounded - turns * 0.693145752f - turns * 1.42860677e-6f;
  floats p = r * 1.3888889e-3f + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (floats)(((words)p + whole) & kept) + (bounded - bounded); /* what is no number stays so */
}

/* A tile: sums of ROWS by OUTS products, as many as registers hold. */
enum { ROWS = LANES == 8 ? 2 : 4, OUTS = 4 };

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
INLINE floats pairs(floats a, floats b) { /* neighbours added: of a in the lower half, b above */
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (floats)_mm512_add_ps(_mm512_permutex2var_ps((__m512)a, even, (__m512)b),
                               _mm512_permutex2var_ps((__m512)a, odd, (__m512)b));
}

INLINE void total(float *to, floats sums[ROWS][OUTS], const int rows) {
  floats four[ROWS];
  for (int r = 0; r < rows; r++)
    four[r] = pairs(pairs(sums[r][0], sums[r][1]), pairs(sums[r][2], sums[r][3]));
  floats low = pairs(four[0], rows > 1 ? four[1] : four[0]);
  floats high = rows > 2 ? pairs(four[2], rows > 3 ? four[3] : four[2]) : low;
  floats all = pairs(low, high);
  memcpy(to, &all, sizeof all);
}
#else
INLINE void total(float *to, floats sums[ROWS][OUTS], const int rows) {
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < OUTS; o++) {
      float sum = 0;
      for (int i = 0; i < LANES; i++) sum += sums[r][o][i];
      to[r * OUTS + o] = sum;
    }
}
#endif
#endif
