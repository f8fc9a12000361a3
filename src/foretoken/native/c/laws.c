/* Laws of rows of logits, and tokens drawn from them. */
#include <float.h>
#include <math.h>

#include "operations.h"

enum { APIECE = 32 * LANES }; /* numbers that are summed before the place of a draw is looked for */

/* ends: the last numbers of a row, and behind them what changes nothing.
 * weights: of one row exp(scale (z - top)), and their sum; each where its name says, if there are some.
 * law: of each row the weights over their sum, in `whole` columns; without a name: zero. `apart`:
 *      logits between rows.
 * drawn: the first column up to which more than the share `coin` of a law lies; none of chance zero.
 *        Minus one where there is no law.
 * owed: how much of `weight` p lies above q; with y, that over `mass`, which was asked for before.
 * without: a law given that it is none of some tokens, and what is left of it before. */
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
    struct sums sums = {0};                                                                       \
    for (k = 0; k < width; k += LANES) {                                                          \
      const int64_t left = width - k < LANES ? width - k : LANES;                                 \
      const floats x = left == LANES ? widened_##T(z + k) : ends_##T(z + k, left);                \
      const floats weight = exponential((x - most) * scale);                                      \
      sum_up(&sums, weight);                                                                      \
      if (names)                                                                                  \
        for (int64_t i = 0; i < left; i++) y[names[k + i]] = weight[i];                           \
      else if (left == LANES) keep_f32(y + k, weight);                                            \
      else                                                                                        \
        for (int64_t i = 0; i < left; i++) y[k + i] = weight[i];                                  \
    }                                                                                             \
    return summed_up(&sums);                                                                      \
  }                                                                                               \
                                                                                                  \
  INLINE void law_of_##T(const T *z, int64_t width, float scale, const int64_t *names,            \
                         int64_t whole, float *y) {                                               \
    if (names) memset(y, 0, whole * sizeof(float));                                               \
    const float share = (float)(1.0 / weights_##T(z, width, scale, names, y));                    \
    for (int64_t i = 0; i < whole; i++) y[i] *= share;                                            \
  }                                                                                               \
                                                                                                  \
  void law_##T(const T *z, int64_t rows, int64_t width, int64_t apart, float scale,               \
               const int64_t *names, int64_t whole, float *y, int threads) {                      \
    if (rows == 1) { /* a team of one would take the place of the one that waits */               \
      law_of_##T(z, width, scale, names, whole, y);                                               \
      return;                                                                                     \
    }                                                                                             \
    _Pragma("omp parallel for num_threads(threads)")                                              \
    for (int64_t r = 0; r < rows; r++)                                                            \
      law_of_##T(z + r * apart, width, scale, names, whole, y + r * whole);                       \
  }                                                                                               \
                                                                                                  \
  INLINE double sum_##T(const T *from, int64_t count) {                                           \
    struct sums sums = {0};                                                                       \
    int64_t k = 0;                                                                                \
    for (; k + LANES <= count; k += LANES) sum_up(&sums, widened_##T(from + k));                  \
    double sum = summed_up(&sums);                                                                \
    for (; k < count; k++) sum += wide_##T(from[k]);                                              \
    return sum;                                                                                   \
  }                                                                                               \
                                                                                                  \
  void drawn_##T(const T *law, int64_t width, double coin, int64_t *at) {                         \
    const int64_t pieces = (width + APIECE - 1) / APIECE;                                         \
    double shares[pieces], total = 0, below = 0;                                                  \
    for (int64_t p = 0; p < pieces; p++) {                                                        \
      const int64_t from = p * APIECE, left = width - from;                                       \
      shares[p] = sum_##T(law + from, left < APIECE ? left : APIECE);                             \
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
  }                                                                                               \
                                                                                                  \
  void owed_##T(const T *p, const T *q, int64_t width, float weight, T *y, double *mass) {        \
    const floats none = {0}, whole = same((float)*mass);                                          \
    struct sums sums = {0};                                                                       \
    int64_t k = 0;                                                                                \
    for (; k + LANES <= width; k += LANES) { /* what is no number stays so */                     \
      const floats x = larger(none, widened_##T(p + k) * weight - widened_##T(q + k));            \
      sum_up(&sums, x);                                                                           \
      if (y) keep_##T(y + k, x / whole);                                                          \
    }                                                                                             \
    double sum = summed_up(&sums);                                                                \
    for (; k < width; k++) {                                                                      \
      float x = wide_##T(p[k]) * weight - wide_##T(q[k]);                                         \
      x = x < 0 ? 0 : x;                                                                          \
      sum += x;                                                                                   \
      if (y) y[k] = narrow_##T(x / whole[0]);                                                     \
    }                                                                                             \
    *mass = sum;                                                                                  \
  }                                                                                               \
                                                                                                  \
  void without_##T(const T *law, int64_t width, const int64_t *tokens, int64_t count, T *y,       \
                   double *mass) {                                                                \
    memcpy(y, law, width * sizeof(T));                                                            \
    for (int64_t i = 0; i < count; i++) y[tokens[i]] = 0;                                         \
    *mass = sum_##T(y, width);                                                                    \
    const float whole = (float)*mass;                                                             \
    if (whole > 0)                                                                                \
      for (int64_t i = 0; i < width; i++) y[i] = narrow_##T(wide_##T(y[i]) / whole);              \
  }

DEFINE(f32)
DEFINE(bf16)
