/* Laws of rows of logits, and tokens drawn from them. */
#include <float.h>
#include <math.h>

#include "operations.h"

enum { APIECE = 32 * LANES }; /* numbers that are summed before the place of a draw is looked for */

typedef double doubles __attribute__((vector_size(LANES * 8)));

INLINE double summed_doubles(doubles x) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
}

/* ends: the last numbers of a row, and behind them what changes nothing.
 * weights: of one row exp(scale (z - top)), and their sum; each where its name says, if there are some.
 * law: of each row the weights over their sum, in `whole` columns; without a name: zero. `apart`:
 *      logits between rows.
 * drawn: the first column up to which more than the share `coin` of a law lies; none of chance zero.
 *        Minus one where there is no law. */
#define DEFINE(T)                                                                                 \
  INLINE floats ends_##T(const T *from, int64_t count) {                                          \
    floats x;                                                                                     \
    for (int i = 0; i < LANES; i++) x[i] = i < count ? wide_##T(from[i]) : -INFINITY;             \
    return x;                                                                                     \
  }                                                                                               \
                                                                                                  \
  INLINE double weights_##T(const T *z, int64_t width, float scale, const int64_t *names,         \
                            float *y) {                                                           \
    floats top = (floats){0} - INFINITY;                                                          \
    int64_t k = 0;                                                                                \
    for (; k + LANES <= width; k += LANES) top = larger(widened_##T(z + k), top);                 \
    if (k < width) top = larger(ends_##T(z + k, width - k), top);                                 \
    const float most = largest(top);                                                              \
    doubles sums = {0};                                                                           \
    for (k = 0; k < width; k += LANES) {                                                          \
      const int64_t left = width - k < LANES ? width - k : LANES;                                 \
      const floats x = left == LANES ? widened_##T(z + k) : ends_##T(z + k, left);                \
      const floats weight = exponential((x - most) * scale);                                      \
      sums += __builtin_convertvector(weight, doubles);                                           \
      if (names)                                                                                  \
        for (int64_t i = 0; i < left; i++) y[names[k + i]] = weight[i];                           \
      else if (left == LANES) keep_f32(y + k, weight);                                            \
      else                                                                                        \
        for (int64_t i = 0; i < left; i++) y[k + i] = weight[i];                                  \
    }                                                                                             \
    return summed_doubles(sums);                                                                  \
  }                                                                                               \
                                                                                                  \
  void law_##T(const T *z, int64_t rows, int64_t width, int64_t apart, float scale,               \
               const int64_t *names, int64_t whole, float *y) {                                   \
    for (int64_t r = 0; r < rows; r++, z += apart, y += whole) {                                  \
      if (names) memset(y, 0, whole * sizeof(float));                                             \
      const float share = (float)(1.0 / weights_##T(z, width, scale, names, y));                  \
      for (int64_t i = 0; i < whole; i++) y[i] *= share;                                          \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  void drawn_##T(const T *law, int64_t width, double coin, int64_t *at) {                         \
    const int64_t pieces = (width + APIECE - 1) / APIECE;                                         \
    double shares[pieces], total = 0, below = 0;                                                  \
    for (int64_t p = 0; p < pieces; p++) {                                                        \
      doubles sums = {0};                                                                         \
      int64_t k = p * APIECE;                                                                     \
      const int64_t stop = k + APIECE < width ? k + APIECE : width;                               \
      for (; k + LANES <= stop; k += LANES)                                                       \
        sums += __builtin_convertvector(widened_##T(law + k), doubles);                           \
      shares[p] = summed_doubles(sums);                                                           \
      for (; k < stop; k++) shares[p] += wide_##T(law[k]);                                        \
      total += shares[p];                                                                         \
    }                                                                                             \
    *at = -1;                                                                                     \
    if (!(total > 0) || total > DBL_MAX) return;                                                  \
    const double point = coin * total;                                                            \
    int64_t p = 0;                                                                                \
    for (; p + 1 < pieces && below + shares[p] <= point; p++) below += shares[p];                 \
    for (int64_t i = p * APIECE; i < width; i++) {                                                \
      const double chance = wide_##T(law[i]);                                                     \
      below += chance;                                                                            \
      if (chance > 0) *at = i; /* rounding may push the point to the very end */                  \
      if (chance > 0 && below > point) return;                                                    \
    }                                                                                             \
    for (int64_t i = p * APIECE - 1; *at < 0 && i >= 0; i--)                                      \
      if (wide_##T(law[i]) > 0) *at = i;                                                          \
  }

DEFINE(f32)
DEFINE(bf16)
