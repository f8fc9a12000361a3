/* The likeliest columns of rows of logits: the best one, which greedy text takes, or several with
 * their probabilities, which trees of guesses grow by. */
#include <math.h>

#include "operations.h"

enum { TRIED = 8 * LANES }; /* columns that are looked at one by one, where any of them is good enough */

/* Put a column among the `held` best ones, the first of equals first; whoever was least leaves. */
INLINE int64_t put(float value, int64_t column, float *best, int64_t *at, int64_t held, int64_t most) {
  int64_t i = held < most ? held : most - 1;
  for (; i > 0 && best[i - 1] < value; i--) best[i] = best[i - 1], at[i] = at[i - 1];
  best[i] = value, at[i] = column;
  return held < most ? held + 1 : most;
}

/* first: of each row the first of its largest numbers; minus one where one of them is no number.
 * largest: of each row the `most` largest numbers and their columns; column minus one where there are
 *          fewer that are numbers.
 * best: of each row the `most` largest logits' columns, and exp(scale z) over the sum of all. Columns
 * are told by their names, if they have some. `apart`: logits between rows. */
#define DEFINE(T)                                                                                 \
  INLINE int64_t first_of_##T(const T *z, int64_t width) {                                        \
    float most = -INFINITY;                                                                       \
    int none = 0;                                                                                 \
    int64_t k = 0, from = 0; /* where the first of the largest is, or close behind */             \
    for (; k + TRIED <= width; k += TRIED) {                                                      \
      floats top = (floats){0} - INFINITY, all = {0};                                             \
      for (int64_t i = k; i < k + TRIED; i += LANES) {                                            \
        const floats x = widened_##T(z + i);                                                      \
        top = larger(x, top);                                                                     \
        all += x;                                                                                 \
      }                                                                                           \
      const float x = largest(top), sum = summed(all);                                            \
      if (x > most) most = x, from = k;                                                           \
      if (sum != sum) /* or infinities of both signs */                                           \
        for (int64_t i = k; i < k + TRIED; i++) none |= wide_##T(z[i]) != wide_##T(z[i]);         \
    }                                                                                             \
    for (; k < width; k++) {                                                                      \
      const float x = wide_##T(z[k]);                                                             \
      none |= x != x;                                                                             \
      if (x > most) most = x, from = k;                                                           \
    }                                                                                             \
    while (!none && wide_##T(z[from]) != most) from++;                                            \
    return none ? -1 : from;                                                                      \
  }                                                                                               \
                                                                                                  \
  void first_##T(const T *z, int64_t rows, int64_t width, int64_t apart, int64_t *at,             \
                 int threads) {                                                                   \
    if (rows == 1) { /* a team of one would take the place of the one that waits */               \
      *at = first_of_##T(z, width);                                                               \
      return;                                                                                     \
    }                                                                                             \
    _Pragma("omp parallel for num_threads(threads)")                                              \
    for (int64_t r = 0; r < rows; r++) at[r] = first_of_##T(z + r * apart, width);                \
  }                                                                                               \
                                                                                                  \
  INLINE int64_t found_##T(const T *z, int64_t width, float *best, int64_t *at, int64_t most) {   \
    int64_t held = 0, k = 0;                                                                      \
    for (; k < width; k += TRIED) {                                                               \
      const int64_t stop = k + TRIED < width ? k + TRIED : width;                                 \
      if (held == most && stop == k + TRIED) {                                                    \
        floats top = same(best[most - 1]); /* a number: what is none would hide others of its lane */ \
        for (int64_t i = k; i < stop; i += LANES) top = larger(widened_##T(z + i), top);          \
        if (largest(top) <= best[most - 1]) continue;                                             \
      }                                                                                           \
      for (int64_t i = k; i < stop; i++) {                                                        \
        const float value = wide_##T(z[i]);                                                       \
        if (held < most ? value == value : value > best[most - 1])                                \
          held = put(value, i, best, at, held, most);                                             \
      }                                                                                           \
    }                                                                                             \
    return held;                                                                                  \
  }                                                                                               \
                                                                                                  \
  INLINE void largest_of_##T(const T *z, int64_t width, int64_t most, float *best, int64_t *at) {  \
    for (int64_t i = found_##T(z, width, best, at, most); i < most; i++)                          \
      best[i] = -INFINITY, at[i] = -1;                                                            \
  }                                                                                               \
                                                                                                  \
  void largest_##T(const T *z, int64_t rows, int64_t width, int64_t apart, int64_t most,          \
                   float *best, int64_t *at, int threads) {                                       \
    if (rows == 1) {                                                                              \
      largest_of_##T(z, width, most, best, at);                                                   \
      return;                                                                                     \
    }                                                                                             \
    _Pragma("omp parallel for num_threads(threads)")                                              \
    for (int64_t r = 0; r < rows; r++)                                                            \
      largest_of_##T(z + r * apart, width, most, best + r * most, at + r * most);                 \
  }                                                                                               \
                                                                                                  \
  void best_##T(const T *z, int64_t rows, int64_t width, int64_t apart, float scale,              \
                const int64_t *names, int64_t most, float *best, int64_t *at) {                   \
    for (int64_t r = 0; r < rows; r++, z += apart, best += most, at += most) {                    \
      const int64_t held = found_##T(z, width, best, at, most);                                   \
      const float top = held ? best[0] : 0;                                                       \
      floats sums = {0};                                                                          \
      int64_t k = 0;                                                                              \
      for (; k + LANES <= width; k += LANES)                                                      \
        sums += exponential((widened_##T(z + k) - top) * scale);                                  \
      float sum = summed(sums); /* no number where a logit is none: nothing is likely then */     \
      for (; k < width; k++) sum += expf((wide_##T(z[k]) - top) * scale);                         \
      for (int64_t i = 0; i < most; i++) {                                                        \
        best[i] = i < held && sum > 0 ? expf((best[i] - top) * scale) / sum : 0;                  \
        at[i] = i >= held ? 0 : names ? names[at[i]] : at[i];                                     \
      }                                                                                           \
    }                                                                                             \
  }

DEFINE(f32)
DEFINE(bf16)
