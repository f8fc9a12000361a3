/* Small operations between products, each token by itself: norms and rotations. */
#include <math.h>

#include "operations.h"

/* norm: y = x w / sqrt(mean(x x) + eps).
 * rotate: y = x cos + (x with its halves swapped) sin, for every head of a token; the first half
 *         of `sin` carries the sign. `apart`: elements between tokens. */
#define DEFINE(T)                                                                                 \
  void norm_##T(const T *restrict x, const T *restrict w, T *restrict y, int64_t rows,            \
                int64_t width, int64_t apart, float eps) {                                        \
    for (int64_t r = 0; r < rows; r++, x += apart, y += width) {                                  \
      float squares[LANES] = {0}, sum = 0;                                                        \
      for (int64_t k = 0; k < width; k += LANES)                                                  \
        for (int i = 0; i < LANES; i++) squares[i] += wide_##T(x[k + i]) * wide_##T(x[k + i]);    \
      for (int i = 0; i < LANES; i++) sum += squares[i];                                          \
      const float scale = 1 / sqrtf(sum / width + eps);                                           \
      for (int64_t k = 0; k < width; k++)                                                         \
        y[k] = narrow_##T(wide_##T(x[k]) * scale * wide_##T(w[k]));                               \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  void rotate_##T(const T *restrict x, const T *restrict cos, const T *restrict sin,              \
                  T *restrict y, int64_t heads, int64_t tokens, int64_t width, int64_t head,      \
                  int64_t apart, int64_t angle_apart) {                                           \
    const int64_t half = width / 2;                                                               \
    for (int64_t h = 0; h < heads; h++)                                                           \
      for (int64_t t = 0; t < tokens; t++, y += width) {                                          \
        const T *from = x + h * head + t * apart, *c = cos + t * angle_apart;                     \
        const T *s = sin + t * angle_apart;                                                       \
        for (int64_t i = 0; i < half; i++) {                                                      \
          const float low = wide_##T(from[i]), high = wide_##T(from[i + half]);                   \
          y[i] = narrow_##T(low * wide_##T(c[i]) + high * wide_##T(s[i]));                        \
          y[i + half] = narrow_##T(high * wide_##T(c[i + half]) + low * wide_##T(s[i + half]));   \
        }                                                                                         \
      }                                                                                           \
  }

DEFINE(f32)
DEFINE(bf16)
