/* Attention of new tokens over a slot cache: writes their keys and values where the cache keeps the
 * row, then mixes, for every head and token, the values of the columns it sees:
 *     y = sum over the columns j that it sees of softmax_j(scale q k_j) v_j
 * Rows of a batch lie end to end, and each reads its own columns and no more. COLUMNS are read at a
 * time, from the first on, and what was made of them is scaled down when a larger score comes, so
 * that a sum is made in the same order whatever else is asked. */
#include <float.h>

#include "operations.h"

enum { PARTS = 4, COLUMNS = PARTS * LANES, QUERIES = 48, TURNING = 2, TRIED = 16 };
enum { LARGE = 512 }; /* columns of a tree that few queries at a time keep room for */
enum { BESIDES = LANES < 16 ? 4 : 2 }; /* registers of a value that are mixed at once */

struct asked { /* one query, and what was made of the columns so far */
  const void *query;
  void *to;
  const int32_t *path; /* of a tree's columns, those that it sees; from the edge on (see `edge`) */
  int64_t seen;        /* columns, as if no others of a tree were there */
  floats top, whole; /* the largest score; sums of weights relative to it */
};

#include "attention_amx.h"

/* Queries of each task of a row alone, so that the thread with most to do has least of it: turning
 * keys takes as long as TURNING queries. Several rows are tasks enough. */
INLINE int64_t evenly(int64_t queries, int64_t groups, int64_t rows, int at_once) {
  const int64_t least = (queries + QUERIES - 1) / QUERIES, team = omp_get_num_threads();
  int64_t best = INT64_MAX, found = QUERIES;
  for (int64_t blocks = least; blocks < least + (rows > 1 ? 1 : TRIED); blocks++) {
    const int64_t each = ((queries + blocks - 1) / blocks + at_once - 1) / at_once * at_once;
    const int64_t tasks = groups * ((queries + each - 1) / each);
    const int64_t most = (tasks + team - 1) / team * (each + TURNING);
    if (most < best) best = most, found = each;
  }
  return found;
}

#define TILE(T, N)                                                                                \
  tile_##T(some, to, across, from, pairs, first, count, depth, wide, scale, next, N)
#define MET(T, N)                                                                                 \
  do {                                                                                            \
    floats sums[ROWS][PARTS];                                                                     \
    met_##T(sums, some, across, depth, N);                                                        \
    for (int i = 0; i < (N); i++) memcpy(told + i * whole, sums[i], sizeof sums[i]);              \
  } while (0)
#define EDGE(T, N) edge_##T(some, to, told, whole, from, pairs, edge, shared, wide, scale, N)
#define BY_TILES(WHAT, T, rows)                                                                   \
  switch (rows) {                                                                                 \
    case 1: WHAT(T, 1); break;                                                                    \
    case 2: WHAT(T, 2); break;                                                                    \
    case 3: WHAT(T, ROWS < 3 ? ROWS : 3); break;                                                  \
    default: WHAT(T, ROWS);                                                                       \
  }

/* turned: keys of COLUMNS columns; across[k * PARTS + p] holds load k of each of LANES columns.
 * met: products of `rows` queries with them.
 * scored: weights of the columns from `first` on, of their products with a query, and how far what
 *         was made so far is scaled down.
 * paired: values of columns as products of several tiles take them.
 * mix: adds the values of `count` columns, weighed, to what was made of `rows` queries, then of each
 *      those that it sees alone: `own` of them in all, those from `count` on named by `which`.
 *      The same number of columns at `next` is fetched meanwhile.
 * tile: all of it, for `count` columns from `first` on.
 * edge: the same of the columns from `first` on of which some are a tree's: each query goes over
 *       those that it sees as if no others were there, so that its sums are made as they are of a
 *       text without branches. `told`: products with them, `whole` for each query. */
#define DEFINE(T)                                                                                 \
  INLINE void turned_##T(words *across, const T *keys, int64_t count, int64_t width,              \
                         const T *next) {                                                         \
    for (int64_t k = 0; k < width; k += STEP_##T)                                                 \
      for (int p = 0; p < PARTS; p++) {                                                           \
        words square[LANES];                                                                      \
        for (int i = 0; i < LANES; i++) { /* past the last column, that one again */              \
          const int64_t j = p * LANES + i < count ? p * LANES + i : count - 1;                    \
          const held_##T some = load_##T(keys + j * width + k);                                   \
          FETCH(next + j * width + k);                                                            \
          memcpy(square + i, &some, sizeof some);                                                 \
        }                                                                                         \
        transpose(square);                                                                        \
        words *to = across + k / STEP_##T * COLUMNS + p;                                          \
        for (int i = 0; i < LANES; i++) to[i * PARTS] = square[i];                                \
      }                                                                                           \
  }                                                                                               \
                                                                                                  \
  INLINE void met_##T(floats sums[ROWS][PARTS], const struct asked *at, const words *across,      \
                      int64_t depth, const int rows) {                                            \
    memset(sums, 0, sizeof(floats) * rows * PARTS);                                               \
    for (int64_t k = 0; k < depth; k++, across += PARTS) {                                        \
      held_##T keys[PARTS];                                                                       \
      memcpy(keys, across, sizeof keys);                                                          \
      for (int p = 0; LANES < 16 && p < PARTS; p++) HELD(keys[p]);                                \
      for (int r = 0; r < rows; r++) {                                                            \
        held_##T query = spread_##T((const T *)at[r].query + k * (STEP_##T / LANES));             \
        HELD(query);                                                                              \
        for (int p = 0; p < PARTS; p++) sums[r][p] = add_##T(sums[r][p], keys[p], query);         \
      }                                                                                           \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  INLINE floats scored_##T(struct asked *at, floats scores[PARTS], weight_##T *weights,           \
                           int64_t first, float scale) {                                          \
    floats top = at->top;                                                                         \
    for (int p = 0; p < PARTS; p++) {                                                             \
      const int64_t left = at->seen - first - p * LANES;                                          \
      scores[p] *= scale;                                                                         \
      for (int i = left < 0 ? 0 : left; i < LANES; i++) scores[p][i] = -INFINITY;                 \
      top = larger(scores[p], top);                                                               \
    }                                                                                             \
    top = same(largest(top));                                                                     \
    const floats fade =                                                                           \
      at->top[0] == top[0] ? (floats){0} + 1 : exponential(at->top - top);                        \
    at->top = top;                                                                                \
    at->whole *= fade;                                                                            \
    for (int p = 0; p < PARTS; p++) {                                                             \
      const floats some = exponential(scores[p] - top);                                           \
      at->whole += some;                                                                          \
      weigh_##T(weights + p * LANES, some);                                                       \
    }                                                                                             \
    return fade;                                                                                  \
  }                                                                                               \
                                                                                                  \
  INLINE void paired_##T(beside_##T *to, const T *values, int64_t count, int64_t width) {         \
    for (int64_t j = 0; j < count; j += BESIDE_##T) {                                             \
      const T *one = values + j * width, *two = j + 1 < count ? one + width : one;                \
      for (int64_t d = 0; d < width; d += LANES) *to++ = both_##T(one + d, two + d);              \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  INLINE void mix_##T(float *mixed, weight_##T weights[ROWS][COLUMNS], const floats *fade,        \
                      const T *values, const beside_##T *pairs, int64_t count, int64_t width,     \
                      const T *next, const int64_t *own, const int32_t *const *which,             \
                      const int rows) {                                                           \
    for (int64_t d = 0; d < width; d += BESIDES * LANES) {                                        \
      floats made[ROWS][BESIDES];                                                                 \
      for (int r = 0; r < rows; r++)                                                              \
        for (int i = 0; i < BESIDES; i++)                                                         \
          made[r][i] = load_f32(mixed + r * width + d + i * LANES) * fade[r];                     \
      for (int64_t j = 0; j < count; j += BESIDE_##T) {                                           \
        const T *one = values + j * width + d, *two = j + 1 < count ? one + width : one;          \
        const beside_##T *known = pairs ? pairs + (j / BESIDE_##T * width + d) / LANES : 0;       \
        beside_##T value[BESIDES];                                                                \
        for (int i = 0; i < BESIDES; i++)                                                         \
          value[i] = known ? known[i] : both_##T(one + i * LANES, two + i * LANES);               \
        if (next)                                                                                 \
          for (int k = 0; k < BESIDE_##T; k++)                                                    \
            for (int i = 0; i < BESIDES * LANES; i += LINE / (int)sizeof(T))                      \
              FETCH(next + (j + k) * width + d + i);                                              \
        for (int r = 0; r < rows; r++) {                                                          \
          beside_##T weight = spread_weight_##T(weights[r] + j);                                  \
          HELD(weight);                                                                           \
          for (int i = 0; i < BESIDES; i++)                                                       \
            made[r][i] = weighed_##T(made[r][i], value[i], weight);                               \
        }                                                                                         \
      }                                                                                           \
      for (int r = 0; own && r < rows; r++)                                                       \
        for (int64_t j = count; j < own[r]; j += BESIDE_##T) {                                    \
          const int32_t *at = which[r] + j - count;                                               \
          const T *one = values + at[0] * width + d;                                              \
          const T *two = j + 1 < own[r] ? values + at[1] * width + d : one;                       \
          const beside_##T weight = spread_weight_##T(weights[r] + j);                            \
          for (int i = 0; i < BESIDES; i++)                                                       \
            made[r][i] =                                                                          \
              weighed_##T(made[r][i], both_##T(one + i * LANES, two + i * LANES), weight);        \
        }                                                                                         \
      for (int r = 0; r < rows; r++)                                                              \
        for (int i = 0; i < BESIDES; i++)                                                         \
          keep_f32(mixed + r * width + d + i * LANES, made[r][i]);                                \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  INLINE void tile_##T(struct asked *at, float *mixed, const words *across, const T *values,      \
                       const beside_##T *pairs, int64_t first, int64_t count, int64_t depth,      \
                       int64_t width, float scale, const T *next, const int rows) {               \
    floats sums[ROWS][PARTS], fade[ROWS];                                                         \
    weight_##T weights[ROWS][COLUMNS];                                                            \
    met_##T(sums, at, across, depth, rows);                                                       \
    for (int r = 0; r < rows; r++)                                                                \
      fade[r] = scored_##T(at + r, sums[r], weights[r], first, scale);                            \
    mix_##T(mixed, weights, fade, values, pairs, count, width, next, 0, 0, rows);                 \
  }                                                                                               \
                                                                                                  \
  INLINE void edge_##T(struct asked *at, float *mixed, const float *told, int64_t whole,          \
                       const T *values, const beside_##T *pairs, int64_t first, int64_t shared,   \
                       int64_t width, float scale, const int rows) {                              \
    const int64_t even = shared / BESIDE_##T * BESIDE_##T;                                        \
    int64_t most = 0, own[ROWS];                                                                  \
    const int32_t *which[ROWS];                                                                   \
    for (int r = 0; r < rows; r++) most = at[r].seen - first > most ? at[r].seen - first : most;  \
    for (int64_t done = 0; done < most; done += COLUMNS) {                                        \
      const int64_t count = done ? 0 : even;                                                      \
      floats sums[ROWS][PARTS], fade[ROWS];                                                       \
      weight_##T weights[ROWS][COLUMNS];                                                          \
      for (int r = 0; r < rows; r++) {                                                            \
        const float *from = told + r * whole;                                                     \
        const int64_t left = at[r].seen - first - done;                                           \
        float some[COLUMNS];                                                                      \
        own[r] = left < 0 ? 0 : left < COLUMNS ? left : COLUMNS;                                  \
        which[r] = at[r].path + (own[r] && done ? done - even : 0);                               \
        memcpy(some, from, sizeof some);                                                          \
        for (int64_t j = count; j < own[r]; j++) some[j] = from[which[r][j - count]];             \
        memcpy(sums[r], some, sizeof some);                                                       \
        fade[r] = scored_##T(at + r, sums[r], weights[r], first + done, scale);                   \
      }                                                                                           \
      mix_##T(mixed, weights, fade, values, pairs, count, width, 0, own, which, rows);            \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  /* the path of a token by its row of the mask; how long it is */                                \
  INLINE int64_t path_##T(int32_t *to, const T *mask, int64_t shared, int64_t tree) {             \
    int64_t n = 0;                                                                                \
    if (shared % BESIDE_##T) to[n++] = shared - 1; /* in a pair with the first of the tree */     \
    const int64_t before = n;                                                                     \
    for (int64_t j = 0; j < tree; j++) {                                                          \
      to[n] = shared + j;                                                                         \
      n += wide_##T(mask[j]) == 0;                                                                \
    }                                                                                             \
    return n - before;                                                                            \
  }                                                                                               \
                                                                                                  \
  /* where the cache keeps those of a row that one group reads */                                 \
  INLINE const T *keys_##T(const struct layout *of, const struct row *row, const T *keys,         \
                           int64_t group) {                                                       \
    return keys + row->slot * of->key_slot + group * of->key_head + row->skip * of->width;        \
  }                                                                                               \
  INLINE const T *values_##T(const struct layout *of, const struct row *row, const T *values,     \
                             int64_t group) {                                                     \
    return values + row->slot * of->value_slot + group * of->value_head +                         \
           row->skip * of->value_width;                                                           \
  }                                                                                               \
                                                                                                  \
  /* queries of one group: tokens of a row from its `one / fold` on, each with the group's heads; \
   * `later`: where the keys and values of whoever comes next begin */                            \
  INLINE void block_##T(const struct layout *of, const struct row *row, const T *q, T *y,         \
                        const T *keys, const T *values, const T *const later[2], int64_t group,   \
                        int64_t one, int64_t most, float scale) {                                 \
    const int64_t fold = of->heads / of->groups, left = (row->last - row->first) * fold - one;    \
    const int64_t width = of->width, wide = of->value_width, depth = width / (STEP_##T / LANES);  \
    const int64_t rows = left < most ? left : most;                                               \
    if (amx_block_##T(of, row, q, y, keys, values, later, group, one, rows, scale)) return;       \
    struct asked at[QUERIES];                                                                     \
    words across[depth * PARTS];                                                                  \
    float mixed[QUERIES * wide];                                                                  \
    const int turns = sizeof(beside_##T) != LANES * sizeof(T) || BESIDE_##T > 1;                  \
    beside_##T room[turns ? COLUMNS / BESIDE_##T * wide / LANES : 1];                             \
    beside_##T *pairs = turns && rows > ROWS ? room : 0;                                          \
    memset(mixed, 0, sizeof(float) * rows * wide);                                                \
    const int64_t last = row->start + (one + rows - 1) / fold + 1;                                \
    const int64_t seen = row->mask ? row->stop : last;                                            \
    const int64_t edge = row->mask ? row->behind / COLUMNS * COLUMNS : seen;                      \
    const int64_t shared = row->behind - edge, tree = seen - row->behind, around = seen - edge;   \
    const int64_t whole = (around + COLUMNS - 1) / COLUMNS * COLUMNS;                             \
    float products[rows * whole + 1];                                                             \
    int32_t paths[row->mask ? rows * (around + 1) : 1], *path = paths;                            \
    for (int r = 0; r < rows; r++) {                                                              \
      const int64_t token = (one + r) / fold, t = row->first + token;                             \
      const int64_t head = group * fold + (one + r) % fold;                                       \
      at[r].query = q + head * of->q_head + t * of->q_token;                                      \
      at[r].to = y + (t * of->heads + head) * wide;                                               \
      at[r].path = path, at[r].seen = row->start + token + 1;                                     \
      if (row->mask && r && token == (one + r - 1) / fold) at[r].seen = at[r - 1].seen;           \
      else if (row->mask) {                                                                       \
        const T *mask = (const T *)row->mask + token * row->mask_token;                           \
        path = paths + r * (around + 1), at[r].path = path;                                       \
        at[r].seen = row->behind + path_##T(path, mask, shared, tree);                            \
      }                                                                                           \
      at[r].top = (floats){0} - FLT_MAX;                                                          \
      at[r].whole = (floats){0};                                                                  \
    }                                                                                             \
    for (int64_t first = 0; first < seen; first += COLUMNS) {                                     \
      const int64_t end = first + COLUMNS, count = (seen < end ? seen : end) - first;             \
      const T *from = values + first * wide;                                                      \
      const T *next_keys = end < seen ? keys + end * width : later[0];                            \
      const T *next = end < seen ? values + end * wide : later[1];                                \
      turned_##T(across, keys + first * width, count, width, next_keys);                          \
      if (pairs && first <= edge) paired_##T(pairs, from, count, wide);                           \
      for (int r = 0; r < rows; r += ROWS) {                                                      \
        struct asked *some = at + r;                                                              \
        float *to = mixed + r * wide;                                                             \
        if (r) next = 0; /* fetched with the first tile */                                        \
        if (first < edge) BY_TILES(TILE, T, rows - r)                                             \
        else {                                                                                    \
          float *told = products + r * whole + (first - edge);                                    \
          const int64_t asked = next ? count * wide : 0;                                          \
          for (int64_t d = 0; d < asked; d += LINE / (int)sizeof(T)) FETCH(next + d);             \
          BY_TILES(MET, T, rows - r)                                                              \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
    for (int r = 0; edge < seen && r < rows; r += ROWS) {                                         \
      struct asked *some = at + r;                                                                \
      const T *from = values + edge * wide;                                                       \
      float *to = mixed + r * wide, *told = products + r * whole;                                 \
      BY_TILES(EDGE, T, rows - r)                                                                 \
    }                                                                                             \
    for (int r = 0; r < rows; r++) {                                                              \
      const float share = 1 / summed(at[r].whole);                                                \
      for (int64_t d = 0; d < wide; d += LANES)                                                   \
        keep_##T((T *)at[r].to + d, load_f32(mixed + r * wide + d) * share);                      \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  void attend_share_##T(const T *q, const T *k, const T *v, T *y, T *keys, T *values,             \
                        const struct layout *of, const struct row *rows, int64_t count,           \
                        float scale, struct meeting *at) {                                        \
    const int64_t fold = of->heads / of->groups;                                                  \
    for (int64_t r = 0; r < count; r++) {                                                         \
      T *to_k = keys + rows[r].slot * of->key_slot + rows[r].skip * of->width;                    \
      T *to_v = values + rows[r].slot * of->value_slot + rows[r].skip * of->value_width;          \
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
    meet(at);                                                                                     \
    for (int64_t r = 0; r < count; r++) {                                                         \
      const struct row *row = rows + r, *after = r + 1 < count ? row + 1 : row;                   \
      const int64_t all = (row->last - row->first) * fold;                                        \
      const int64_t tree = row->mask ? row->stop - row->behind : 0;                               \
      const int64_t most =                                                                        \
        tree > LARGE && ROOM_##T ? ROWS : evenly(all, of->groups, count, AT_ONCE_##T);            \
      const int64_t blocks = (all + most - 1) / most;                                             \
      _Pragma("omp for schedule(dynamic) nowait")                                                 \
      for (int64_t task = 0; task < blocks * of->groups; task++) {                                \
        const int64_t group = task / blocks, ahead = (task + 1) / blocks % of->groups;            \
        const T *const later[] = {                                                                \
          keys_##T(of, task + 1 < blocks * of->groups ? row : after, keys, ahead),                \
          values_##T(of, task + 1 < blocks * of->groups ? row : after, values, ahead)};           \
        const T *own = keys_##T(of, row, keys, group);                                            \
        block_##T(of, row, q, y, own, values_##T(of, row, values, group), later, group,           \
                  task % blocks * most, most, scale);                                             \
      }                                                                                           \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  void attend_##T(const T *q, const T *k, const T *v, T *y, T *keys, T *values,                   \
                  const struct layout *of, const struct row *rows, int64_t count, float scale,    \
                  int threads) {                                                                  \
    struct meeting at = {0};                                                                      \
    _Pragma("omp parallel num_threads(threads)")                                                  \
    attend_share_##T(q, k, v, y, keys, values, of, rows, count, scale, &at);                      \
  }

DEFINE(f32)
DEFINE(bf16)
