/* What the operations share: where their numbers lie, and the forms that several threads call. */
#ifndef OPERATIONS_H
#define OPERATIONS_H
#include <math.h>

#include "vectors.h"

struct part { /* one linear layer; its bias may be null */
  const void *weight, *bias;
  int64_t outs;
};

struct layout { /* sizes, then elements between neighbours; of the cache: one layer */
  int64_t heads, groups, width, value_width;
  int64_t q_head, q_token, k_head, k_token, v_head, v_token;
  int64_t key_slot, key_head, value_slot, value_head;
};

/* Tokens `first` to `last` of the batch; their columns. All see what the mask lies `behind`; mask
 * null: each sees up to itself. */
struct row {
  int64_t slot, first, last, start, stop, behind;
  const void *mask;
  int64_t mask_token;
};

/* Each thread of a team calls these and does its share; no barrier at the end. */
#define DECLARE(T)                                                                                \
  void product_share_##T(const T *x, T *y, int64_t rows, int64_t width, int64_t apart,            \
                         const struct part *parts, int64_t count);                                \
  void attend_share_##T(const T *q, const T *k, const T *v, T *y, T *keys, T *values,             \
                        const struct layout *of, const struct row *rows, int64_t count,           \
                        float scale);                                                             \
  void norm_##T(const T *restrict x, const T *restrict w, T *restrict y, int64_t rows,            \
                int64_t width, int64_t apart, float eps);                                         \
  void rotate_##T(const T *restrict x, const T *restrict cos, const T *restrict sin,              \
                  T *restrict y, int64_t heads, int64_t tokens, int64_t width, int64_t head,      \
                  int64_t apart, int64_t angle_apart);

DECLARE(f32)
DECLARE(bf16)
#endif
