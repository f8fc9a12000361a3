/* Columns of the slot cache that stand move to where they belong. */
#include <string.h>

#include "operations.h"

/* columns: of every head of every layer the columns `from` follow each other from column `to` on.
 * They ascend, and none lies before its place: each is moved before another takes its own.
 * `layer`, `head`: elements from one to the next; `width`: of a column. */
#define DEFINE(T)                                                                                 \
  void columns_##T(T *at, int64_t layers, int64_t layer, int64_t heads, int64_t head,             \
                   int64_t width, const int64_t *from, int64_t count, int64_t to) {               \
    for (int64_t l = 0; l < layers; l++)                                                          \
      for (int64_t h = 0; h < heads; h++) {                                                       \
        T *of = at + l * layer + h * head;                                                        \
        for (int64_t i = 0; i < count; i++)                                                       \
          memcpy(of + (to + i) * width, of + from[i] * width, width * sizeof(T));                 \
      }                                                                                           \
  }

DEFINE(f32)
DEFINE(bf16)
