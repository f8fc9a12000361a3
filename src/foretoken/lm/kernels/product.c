/* Products of few rows with the weights of linear layers, one below another:
 *     y[r, o] = sum over k of x[r, k] w[o, k] + b[o]
 * Reading the weights is what such a product costs, so each is read once, where the model keeps it,
 * and asked for ahead of time. A sum is made in the same order however many rows there are.
 * Accumulated in float32. Compiled for the machine it runs on by `native.py`. */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) /* floats of a register, rows of x in a tile: as many as registers hold */
enum { LANES = 16, ROWS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 2 };
#else
enum { LANES = 4, ROWS = 4 };
#endif
enum { OUTS = 4, LINE = 64 }; /* rows of weights in a tile; bytes fetched at once */
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef float f32;
typedef uint16_t bf16;

struct part { /* one linear layer; its bias may be null */
  const void *weight, *bias;
  int64_t outs;
};

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
INLINE held_bf16 load_bf16(const bf16 *from) {
  halves value;
  memcpy(&value, from, sizeof value);
  words bits = __builtin_convertvector(value, words) << 16;
  floats wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}
INLINE floats add_bf16(floats sums, held_bf16 a, held_bf16 b) { return sums + a * b; }
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

/* tile: OUTS outputs of up to ROWS rows, while `lines` lines per step are fetched from `next`.
 * tiles: OUTS outputs of all rows; their weights come from memory for the first tile only, so the
 *        next ones are fetched during all of them.
 * product: all outputs, shared out among threads. `apart`: elements between two rows of x. */
#define DEFINE(T)                                                                               \
  INLINE void tile_##T(const T *x, const T *w, const T *bias, T *y, int64_t width,              \
                       int64_t apart, int64_t stride, const int rows, int lines,                \
                       const char *next) {                                                      \
    floats sums[ROWS][OUTS];                                                                    \
    float made[ROWS * OUTS];                                                                    \
    memset(sums, 0, sizeof sums);                                                               \
    for (int64_t k = 0; k < width; k += STEP_##T) {                                             \
      held_##T held[OUTS];                                                                      \
      for (int o = 0; o < OUTS; o++) held[o] = load_##T(w + o * width + k);                     \
      for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * LINE);                      \
      next += lines * LINE;                                                                     \
      for (int r = 0; r < rows; r++) {                                                          \
        held_##T row = load_##T(x + r * apart + k);                                             \
        for (int o = 0; o < OUTS; o++) sums[r][o] = add_##T(sums[r][o], held[o], row);          \
      }                                                                                         \
    }                                                                                           \
    total(made, sums, rows);                                                                    \
    for (int r = 0; r < rows; r++)                                                              \
      for (int o = 0; o < OUTS; o++)                                                            \
        y[r * stride + o] = narrow_##T(made[r * OUTS + o] + (bias ? wide_##T(bias[o]) : 0));    \
  }                                                                                             \
                                                                                                \
  INLINE void tiles_##T(const T *x, const T *w, const T *bias, T *y, int64_t rows,              \
                        int64_t width, int64_t apart, int64_t stride) {                         \
    const int64_t count = (rows + ROWS - 1) / ROWS, steps = width / STEP_##T;                   \
    const int lines = count == 1 ? OUTS : count == 2 ? OUTS / 2 : 1;                            \
    const char *next = (const char *)(w + OUTS * width);                                        \
    for (int64_t r = 0; r < rows; r += ROWS, next += lines * steps * LINE) {                    \
      const T *from = x + r * apart;                                                            \
      T *to = y + r * stride;                                                                   \
      switch (rows - r) {                                                                       \
        case 1: tile_##T(from, w, bias, to, width, apart, stride, 1, lines, next); break;       \
        case 2: tile_##T(from, w, bias, to, width, apart, stride, 2, lines, next); break;       \
        case 3:                                                                                 \
          tile_##T(from, w, bias, to, width, apart, stride, ROWS < 3 ? ROWS : 3, lines, next);  \
          break;                                                                                \
        default: tile_##T(from, w, bias, to, width, apart, stride, ROWS, lines, next);          \
      }                                                                                         \
    }                                                                                           \
  }                                                                                             \
                                                                                                \
  void product_##T(const T *x, T *y, int64_t rows, int64_t width, int64_t apart,                \
                   const struct part *parts, int64_t count, int threads) {                      \
    int64_t stride = 0;                                                                         \
    for (int64_t p = 0; p < count; p++) stride += parts[p].outs;                                \
    _Pragma("omp parallel num_threads(threads)") {                                              \
      T *to = y;                                                                                \
      for (int64_t p = 0; p < count; to += parts[p++].outs) {                                   \
        const T *w = parts[p].weight, *bias = parts[p].bias;                                    \
        _Pragma("omp for schedule(static) nowait")                                              \
        for (int64_t o = 0; o < parts[p].outs; o += OUTS)                                       \
          tiles_##T(x, w + o * width, bias ? bias + o : 0, to + o, rows, width, apart, stride); \
      }                                                                                         \
    }                                                                                           \
  }

DEFINE(f32)
DEFINE(bf16)

int64_t whole_outputs(void) { return OUTS; } /* outputs and inputs of a layer are multiples of */
int64_t whole_inputs(void) { return 2 * LANES; }
