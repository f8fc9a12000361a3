/* Products of few rows with the weights of linear layers, one below another:
 *     y[r, o] = sum over k of x[r, k] w[o, k] + b[o]
 * Reading the weights is what such a product costs, so each is read once, where the model keeps it,
 * and asked for ahead of time. A sum is made in the same order however many rows there are.
 * Accumulated in float32. Compiled for the machine it runs on by `native.py`. */
#include "operations.h"

/* tile: OUTS outputs of up to ROWS rows, while `lines` lines per step are fetched from `next`.
 * tiles: OUTS outputs of all rows; their weights come from memory for the first tile only, so
 *        those of a later one are fetched during all of them, a share in each. The last tile
 *        begins early enough to be whole: one of fewer rows is over before its share is here.
 * product_share: all outputs, each by one of the threads that call. `apart`: elements between two
 *        rows of x. product: with threads of its own. */
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
      for (int i = 0; i < lines; i++) FETCH(next + i * LINE);                                   \
      next += lines * LINE;                                                                     \
      for (int r = 0; r < rows; r++) {                                                          \
        held_##T row = load_##T(x + r * apart + k);                                             \
        HELD(row);                                                                              \
        for (int o = 0; o < OUTS; o++) sums[r][o] = add_##T(sums[r][o], held[o], row);          \
      }                                                                                         \
    }                                                                                           \
    total(made, sums, rows);                                                                    \
    for (int r = 0; r < rows; r++) {                                                            \
      if (bias)                                                                                 \
        for (int o = 0; o < OUTS; o++) made[r * OUTS + o] += wide_##T(bias[o]);                 \
      store_##T(y + r * stride, made + r * OUTS);                                               \
    }                                                                                           \
  }                                                                                             \
                                                                                                \
  INLINE void tiles_##T(const T *x, const T *w, const T *bias, T *y, int64_t rows,              \
                        int64_t width, int64_t apart, int64_t stride) {                         \
    const int64_t count = (rows + ROWS - 1) / ROWS, steps = width / STEP_##T;                   \
    const int ahead = sizeof(float) / sizeof(T); /* tiles: as many bytes of either type */      \
    const char *next = (const char *)(w + ahead * OUTS * width);                                \
    for (int64_t i = 0; i < count; i++) {                                                       \
      const int64_t r = i + 1 < count ? i * ROWS : rows > ROWS ? rows - ROWS : 0;               \
      const int lines = OUTS * (i + 1) / count - OUTS * i / count;                              \
      const T *from = x + r * apart;                                                            \
      T *to = y + r * stride;                                                                   \
      switch (rows) {                                                                           \
        case 1: tile_##T(from, w, bias, to, width, apart, stride, 1, lines, next); break;       \
        case 2: tile_##T(from, w, bias, to, width, apart, stride, 2, lines, next); break;       \
        case 3:                                                                                 \
          tile_##T(from, w, bias, to, width, apart, stride, ROWS < 3 ? ROWS : 3, lines, next);  \
          break;                                                                                \
        default: tile_##T(from, w, bias, to, width, apart, stride, ROWS, lines, next);          \
      }                                                                                         \
      next += lines * steps * LINE;                                                             \
    }                                                                                           \
  }                                                                                             \
                                                                                                \
  void product_share_##T(const T *x, T *y, int64_t rows, int64_t width, int64_t apart,          \
                         const struct part *parts, int64_t count) {                             \
    int64_t stride = 0;                                                                         \
    for (int64_t p = 0; p < count; p++) stride += parts[p].outs;                                \
    for (int64_t p = 0; p < count; y += parts[p++].outs) {                                      \
      const T *w = parts[p].weight, *bias = parts[p].bias;                                      \
      _Pragma("omp for schedule(static) nowait")                                                \
      for (int64_t o = 0; o < parts[p].outs; o += OUTS)                                         \
        tiles_##T(x, w + o * width, bias ? bias + o : 0, y + o, rows, width, apart, stride);    \
    }                                                                                           \
  }                                                                                             \
                                                                                                \
  void product_##T(const T *x, T *y, int64_t rows, int64_t width, int64_t apart,                \
                   const struct part *parts, int64_t count, int threads) {                      \
    _Pragma("omp parallel num_threads(threads)")                                                \
    product_share_##T(x, y, rows, width, apart, parts, count);                                  \
  }

DEFINE(f32)
DEFINE(bf16)

int64_t whole_outputs(void) { return OUTS; } /* outputs and inputs of a layer are multiples of */
int64_t whole_inputs(void) { return 2 * LANES; }
