/* Tiles of products where a register holds eight numbers or four, and none of bfloat16. Both factors
 * are float32: what is not is widened once, inputs for all outputs and weights for all rows. */
#ifndef TILES_H
#define TILES_H
#include "operations.h"

enum { TALL = 3, STEP = 32 }; /* rows of a tile; inputs between two requests for weights */
typedef float factor_f32;     /* what inputs are multiplied as */
typedef float factor_bf16;
#define ROOM(T, numbers) (sizeof(T) == sizeof(float) ? 1 : (numbers))

INLINE int64_t block_of(int64_t rows, int64_t width) {
  const int64_t most = BLOCK / width / TALL * TALL;
  return rows <= most ? rows : most ? most : TALL;
}

INLINE int64_t outputs_of(int64_t rows, int64_t width, int64_t size) { /* at once */
  (void)rows, (void)width, (void)size;
  return OUTS;
}

/* Sums stay in registers only where each has a name and the order of its operands is ours. */
#if defined(__FMA__)
#define ADD(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
#else
#define ADD(sum, a, b) sum = fused(a, b, sum)
#endif
#define SUMS(r) sum##r##0 = {0}, sum##r##1 = {0}, sum##r##2 = {0}, sum##r##3 = {0}
#define ALL(r) {sum##r##0, sum##r##1, sum##r##2, sum##r##3}
#define OUTPUT(T, o)                                                                              \
  {                                                                                               \
    const floats weight = widened_##T(w + o * width + i);                                         \
    if (kept) keep_f32(kept + o * width + i, weight);                                             \
    ADD(sum0##o, weight, x0);                                                                     \
    if (rows > 1) ADD(sum1##o, weight, x1);                                                       \
    if (rows > 2) ADD(sum2##o, weight, x2);                                                       \
  }

/* factors: inputs as tiles take them, where they lie or in `room`; `apart` then becomes that of both.
 * tile: OUTS outputs of up to TALL rows, while `lines` lines per step are fetched from `next`; the
 *       weights are `kept` as they are multiplied. */
#define DEFINE(T)                                                                                 \
  INLINE const float *factors_##T(float *room, const T *x, int64_t rows, int64_t width,           \
                                  int64_t *apart) {                                               \
    if (sizeof(T) == sizeof(float)) return (const float *)x;                                      \
    for (int64_t r = 0; r < rows; r++)                                                            \
      for (int64_t k = 0; k < width; k += LANES)                                                  \
        keep_f32(room + r * width + k, widened_##T(x + r * *apart + k));                          \
    *apart = width;                                                                               \
    return room;                                                                                  \
  }                                                                                               \
                                                                                                  \
  INLINE void tile_##T(float *made, const float *x, const T *w, int64_t width, int64_t apart,     \
                       const int rows, int lines, const char *next, float *kept) {                \
    floats SUMS(0), SUMS(1), SUMS(2);                                                             \
    for (int64_t k = 0; k < width; k += STEP) {                                                   \
      for (int i = 0; i < lines; i++, next += LINE) FETCH(next);                                  \
      UNROLLED for (int64_t i = k; i < k + STEP; i += LANES) {                                    \
        const floats x0 = load_f32(x + i);                                                        \
        const floats x1 = rows > 1 ? load_f32(x + apart + i) : x0;                                \
        const floats x2 = rows > 2 ? load_f32(x + 2 * apart + i) : x0;                            \
        OUTPUT(T, 0) OUTPUT(T, 1) OUTPUT(T, 2) OUTPUT(T, 3)                                       \
      }                                                                                           \
    }                                                                                             \
    floats sums[TALL][OUTS] = {ALL(0), ALL(1), ALL(2)};                                           \
    total(made, sums, rows);                                                                      \
  }

DEFINE(f32)
DEFINE(bf16)
#undef DEFINE

#define TILE(T, FROM, KEPT)                                                                       \
  switch (some) {                                                                                 \
    case 1: tile_##T(made, at, FROM, width, apart, 1, lines, next, KEPT); break;                  \
    case 2: tile_##T(made, at, FROM, width, apart, 2, lines, next, KEPT); break;                  \
    default: tile_##T(made, at, FROM, width, apart, TALL, lines, next, KEPT);                     \
  }

/* tiles: OUTS outputs of all rows, dealt evenly. Weights come from memory for the first tile only,
 *        which keeps them for the others; those of later outputs are fetched during all tiles, a
 *        share in each. */
#define DEFINE(T)                                                                                 \
  INLINE void tiles_##T(const float *x, const T *w, const T *bias, T *y, int64_t outs,            \
                        int64_t rows, int64_t width, int64_t apart, int64_t stride,               \
                        float *kept) {                                                            \
    const int64_t count = (rows + TALL - 1) / TALL;                                               \
    const int all = OUTS * STEP * sizeof(T) / LINE, ahead = sizeof(float) / sizeof(T);            \
    const char *next = (const char *)(w + ahead * OUTS * width);                                  \
    (void)outs;                                                                                   \
    for (int64_t i = 0; i < count; i++) {                                                         \
      const int64_t first = rows * i / count, some = rows * (i + 1) / count - first;              \
      const int lines = all * (i + 1) / count - all * i / count;                                  \
      const float *at = x + first * apart;                                                        \
      float made[TALL * OUTS];                                                                    \
      if (sizeof(T) == sizeof(float)) TILE(f32, (const f32 *)w, 0)                                \
      else if (i) TILE(f32, kept, 0)                                                              \
      else if (count > 1) TILE(T, w, kept)                                                        \
      else TILE(T, w, 0)                                                                          \
      for (int r = 0; r < some; r++) {                                                            \
        if (bias)                                                                                 \
          for (int o = 0; o < OUTS; o++) made[r * OUTS + o] += wide_##T(bias[o]);                 \
        store_##T(y + (first + r) * stride, made + r * OUTS);                                     \
      }                                                                                           \
      next += lines * (width / STEP) * LINE;                                                      \
    }                                                                                             \
  }

DEFINE(f32)
DEFINE(bf16)
#undef DEFINE
#endif
