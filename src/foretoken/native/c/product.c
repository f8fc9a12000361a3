/* Products with the weights of linear layers, one below another:
 *     y[r, o] = sum over k of x[r, k] w[o, k] + b[o]
 * For few rows, reading the weights is what such a product costs, so each is read once, where the
 * model keeps it, and asked for ahead of time. Many rows are taken in blocks whose inputs stay in the
 * second cache. A sum is made in the same order however many rows there are. Accumulated in float32.
 * Compiled for the machine it runs on by `native.py`. */
#if defined(__AVX512F__)
#include "tiles_wide.h"
#else
#include "tiles_narrow.h"
#endif
#include "tiles_amx.h"

/* product_share: all outputs, each by one of the threads that call. `apart`: elements between two
 *        rows of x. product: with threads of its own. */
#define DEFINE(T)                                                                                 \
  void product_share_##T(const T *x, T *y, int64_t rows, int64_t width, int64_t apart,            \
                         const struct part *parts, int64_t count) {                               \
    if (amx_share_##T(x, y, rows, width, apart, parts, count)) return;                            \
    const int64_t stride = all_outputs(parts, count), most = block_of(rows, width);               \
    factor_##T room[ROOM(T, most * width)];                                                       \
    float kept[ROOM(T, OUTS * width)];                                                            \
    for (int64_t first = 0; first < rows; first += most) {                                        \
      const int64_t some = rows - first < most ? rows - first : most;                             \
      int64_t between = apart;                                                                    \
      const factor_##T *from = factors_##T(room, x + first * apart, some, width, &between);       \
      const int64_t at_once = outputs_of(some, width, sizeof(T));                                 \
      T *to = y + first * stride;                                                                 \
      for (int64_t p = 0; p < count; to += parts[p++].outs) {                                     \
        const T *w = parts[p].weight, *bias = parts[p].bias;                                      \
        _Pragma("omp for schedule(static) nowait")                                                \
        for (int64_t o = 0; o < parts[p].outs; o += at_once) {                                    \
          const int64_t left = parts[p].outs - o, outs = left < at_once ? left : at_once;         \
          tiles_##T(from, w + o * width, bias ? bias + o : 0, to + o, outs, some, width, between, \
                    stride, kept);                                                                \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  void product_##T(const T *x, T *y, int64_t rows, int64_t width, int64_t apart,                  \
                   const struct part *parts, int64_t count, int threads) {                        \
    if (amx_product_##T(x, y, rows, width, apart, parts, count, threads)) return;                 \
    _Pragma("omp parallel num_threads(threads)")                                                  \
    product_share_##T(x, y, rows, width, apart, parts, count);                                    \
  }

DEFINE(f32)
DEFINE(bf16)

void prepare(void) { ask_for_amx(); }
int64_t whole_outputs(void) { return OUTS; } /* outputs and inputs of a layer are multiples of */
int64_t whole_inputs(void) { return LINE / sizeof(bf16); }
