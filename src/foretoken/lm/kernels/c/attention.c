/* Attention of a few new tokens over a slot cache: writes their keys and values where the cache
 * keeps the row, then mixes, for every head and token, the values of all columns its row reads:
 *     y = sum over j of softmax_j(scale q k_j + mask_j) v_j
 * Rows of a batch lie end to end, and each reads its own columns and no more. */
#include "operations.h"

enum { MOST = 8192 }; /* columns: their scores lie on the stack */

struct asked { /* up to ROWS queries over one group's columns */
  const void *query[ROWS], *mask[ROWS];
  void *to[ROWS];
};

/* softmax of `count` scores in place, of one query; one over their sum */
#define DEFINE(T)                                                                                 \
  INLINE float softmax_##T(float *scores, const T *mask, int64_t count, float scale) {            \
    floats top = (floats){0} - INFINITY, sums = {0};                                              \
    for (int64_t j = count; j % LANES; j++) scores[j] = -INFINITY;                                \
    for (int64_t j = 0; j < count; j += LANES) {                                                  \
      floats some = load_f32(scores + j) * scale;                                                 \
      if (mask && j + LANES <= count) some += widened_##T(mask + j);                              \
      else if (mask)                                                                              \
        for (int i = 0; j + i < count; i++) some[i] += wide_##T(mask[j + i]);                     \
      top = larger(some, top);                                                                    \
      memcpy(scores + j, &some, sizeof some);                                                     \
    }                                                                                             \
    float most = top[0], whole = 0;                                                               \
    for (int i = 1; i < LANES; i++) most = top[i] > most ? top[i] : most;                         \
    for (int64_t j = 0; j < count; j += LANES) {                                                  \
      floats some = exponential(load_f32(scores + j) - most);                                     \
      sums += some;                                                                               \
      memcpy(scores + j, &some, sizeof some);                                                     \
    }                                                                                             \
    for (int i = 0; i < LANES; i++) whole += sums[i];                                             \
    return 1 / whole;                                                                             \
  }                                                                                               \
                                                                                                  \
  INLINE void mixed_##T(const struct asked *at, const T *keys, const T *values, int64_t count,    \
                        int64_t width, int64_t value_width, float scale, const int rows) {        \
    float weights[ROWS][MOST + LANES], made[ROWS * OUTS], share[ROWS];                            \
    for (int64_t j = 0; j < count; j += OUTS) {                                                   \
      floats sums[ROWS][OUTS];                                                                    \
      const T *from[OUTS]; /* past the last column, that one again */                             \
      memset(sums, 0, sizeof sums);                                                               \
      for (int o = 0; o < OUTS; o++) from[o] = keys + (j + o < count ? j + o : count - 1) * width; \
      for (int64_t k = 0; k < width; k += STEP_##T) {                                             \
        held_##T held[OUTS];                                                                      \
        for (int o = 0; o < OUTS; o++) held[o] = load_##T(from[o] + k);                           \
        for (int r = 0; r < rows; r++) {                                                          \
          held_##T query = load_##T((const T *)at->query[r] + k);                                 \
          for (int o = 0; o < OUTS; o++) sums[r][o] = add_##T(sums[r][o], held[o], query);        \
        }                                                                                         \
      }                                                                                           \
      total(made, sums, rows);                                                                    \
      for (int r = 0; r < rows; r++) memcpy(weights[r] + j, made + r * OUTS, OUTS * sizeof(float)); \
    }                                                                                             \
    for (int r = 0; r < rows; r++)                                                                \
      share[r] = softmax_##T(weights[r], at->mask[r], count, scale);                              \
    for (int64_t d = 0; d < value_width; d += 2 * LANES) {                                        \
      floats sums[ROWS][2];                                                                       \
      memset(sums, 0, sizeof sums);                                                               \
      for (int64_t j = 0; j < count; j++) {                                                       \
        const T *from = values + j * value_width + d;                                             \
        const floats low = widened_##T(from), high = widened_##T(from + LANES);                   \
        for (int r = 0; r < rows; r++) {                                                          \
          sums[r][0] += weights[r][j] * low;                                                      \
          sums[r][1] += weights[r][j] * high;                                                     \
        }                                                                                         \
      }                                                                                           \
      for (int r = 0; r < rows; r++)                                                              \
        for (int i = 0; i < 2 * LANES; i++)                                                       \
          ((T *)at->to[r])[d + i] = narrow_##T(sums[r][i / LANES][i % LANES] * share[r]);         \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  /* block `block` of the queries of one group: tokens of a row, each with the group's heads */   \
  INLINE void block_##T(const struct layout *of, const struct row *row, const T *q, T *y,         \
                        const T *keys, const T *values, int64_t group, int64_t block,             \
                        float scale) {                                                            \
    const int64_t fold = of->heads / of->groups, all = (row->last - row->first) * fold;           \
    const int64_t left = all - block * ROWS;                                                      \
    const int rows = left < ROWS ? left : ROWS;                                                   \
    const T *mask = row->mask;                                                                    \
    struct asked at;                                                                              \
    for (int r = 0; r < rows; r++) {                                                              \
      const int64_t one = block * ROWS + r, token = one / fold, t = row->first + token;           \
      const int64_t head = group * fold + one % fold;                                             \
      at.query[r] = q + head * of->q_head + t * of->q_token;                                      \
      at.mask[r] = mask ? mask + token * row->mask_token : 0;                                     \
      at.to[r] = y + (t * of->heads + head) * of->value_width;                                    \
    }                                                                                             \
    keys += row->slot * of->key_slot + group * of->key_head;                                      \
    values += row->slot * of->value_slot + group * of->value_head;                                \
    const int64_t count = row->stop, width = of->width, value_width = of->value_width;            \
    switch (rows) {                                                                               \
      case 1: mixed_##T(&at, keys, values, count, width, value_width, scale, 1); break;           \
      case 2: mixed_##T(&at, keys, values, count, width, value_width, scale, 2); break;           \
      case 3: mixed_##T(&at, keys, values, count, width, value_width, scale, ROWS < 3 ? 1 : 3);   \
        break;                                                                                    \
      default: mixed_##T(&at, keys, values, count, width, value_width, scale, ROWS);              \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  void attend_share_##T(const T *q, const T *k, const T *v, T *y, T *keys, T *values,             \
                        const struct layout *of, const struct row *rows, int64_t count,           \
                        float scale) {                                                            \
    const int64_t fold = of->heads / of->groups;                                                  \
    for (int64_t r = 0; r < count; r++) {                                                         \
      T *to_k = keys + rows[r].slot * of->key_slot, *to_v = values + rows[r].slot * of->value_slot; \
      _Pragma("omp for schedule(static) nowait")                                                  \
      for (int64_t t = rows[r].first; t < rows[r].last; t++) {                                    \
        const int64_t at = rows[r].start + t - rows[r].first;                                     \
        for (int64_t g = 0; g < of->groups; g++) {                                                \
          memcpy(to_k + g * of->key_head + at * of->width, k + g * of->k_head + t * of->k_token,  \
                 of->width * sizeof(T));                                                          \
          memcpy(to_v + g * of->value_head + at * of->value_width,                                \
                 v + g * of->v_head + t * of->v_token, of->value_width * sizeof(T));              \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
    _Pragma("omp barrier")                                                                        \
    for (int64_t r = 0; r < count; r++) {                                                         \
      const struct row *row = rows + r;                                                           \
      const int64_t blocks = ((row->last - row->first) * fold + ROWS - 1) / ROWS;                 \
      _Pragma("omp for schedule(dynamic) nowait")                                                 \
      for (int64_t task = 0; task < blocks * of->groups; task++)                                  \
        block_##T(of, row, q, y, keys, values, task / blocks, task % blocks, scale);              \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  void attend_##T(const T *q, const T *k, const T *v, T *y, T *keys, T *values,                   \
                  const struct layout *of, const struct row *rows, int64_t count, float scale,    \
                  int threads) {                                                                  \
    _Pragma("omp parallel num_threads(threads)")                                                  \
    attend_share_##T(q, k, v, y, keys, values, of, rows, count, scale);                           \
  }

DEFINE(f32)
DEFINE(bf16)

int64_t most_columns(void) { return MOST; }
