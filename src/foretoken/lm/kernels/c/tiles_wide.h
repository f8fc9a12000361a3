/* Tiles of products where a register holds sixteen numbers: both factors as they lie in memory. */
#ifndef TILES_H
#define TILES_H
#include "operations.h"

enum { FEW = 64 }; /* rows that are multiplied at once: their inputs are as good as in the cache */
typedef f32 factor_f32; /* what inputs are multiplied as */
typedef bf16 factor_bf16;
#define ROOM(T, numbers) 1

INLINE int64_t block_of(int64_t rows, int64_t width) {
  const int64_t most = BLOCK / width;
  return rows <= FEW || rows <= most ? rows : most < FEW ? FEW : most;
}

/* factors: inputs as tiles take them, where they lie or in `room`; `apart` then becomes that of both.
 * tile: OUTS outputs of up to ROWS rows, while `lines` lines per step are fetched from `next`.
 * tiles: OUTS outputs of all rows; their weights come from memory for the first tile only, so
 *        those of a later one are fetched during all of them, a share in each; of three and more
 *        the first is spared: it waits for its own weights, behind whatever else is under way. The
 *        last begins early enough to be whole: one of fewer rows is over before its share is here. */
#define DEFINE(T)                                                                               \
  INLINE const T *factors_##T(T *room, const T *x, int64_t rows, int64_t width,                 \
                              int64_t *apart) {                                                 \
    (void)room, (void)rows, (void)width, (void)apart;                                           \
    return x;                                                                                   \
  }                                                                                             \
                                                                                                \
  INLINE void tile_##T(const T *x, const T *w, const T *bias, T *y, int64_t width,              \
                       int64_t apart, int64_t stride, const int rows, int lines,                \
                       const char *next) {                                                      \
    floats sums[ROWS][OUTS];                                                                    \
    float made[ROWS * OUTS];                                                                    \
    memset(sums, 0, sizeof sums);                                                               \
    for (const T *end = w + width; w < end; w += STEP_##T, x += STEP_##T) {                     \
      held_##T held[OUTS];                                                                      \
      for (int o = 0; o < OUTS; o++) held[o] = load_##T(w + o * width);                         \
      for (int i = 0; i < lines; i++) FETCH(next + i * LINE);                                   \
      next += lines * LINE;                                                                     \
      for (int r = 0; r < rows; r++) {                                                          \
        held_##T row = load_##T(x + r * apart);                                                 \
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
                        int64_t width, int64_t apart, int64_t stride, float *kept) {            \
    const int count = (rows + ROWS - 1) / ROWS, spared = count > 2, turns = count - spared;     \
    const int64_t steps = width / STEP_##T;                                                     \
    const int ahead = sizeof(float) / sizeof(T); /* tiles: as many bytes of either type */      \
    const char *next = (const char *)(w + ahead * OUTS * width);                                \
    (void)kept;                                                                                 \
    for (int i = 0, turn = -spared; i < count; i++, turn++) {                                   \
      const int64_t r = i + 1 < count ? i * ROWS : rows > ROWS ? rows - ROWS : 0;               \
      const T *from = x + r * apart;                                                            \
      T *to = y + r * stride;                                                                   \
      const int lines = turn < 0 ? 0 : OUTS * (turn + 1) / turns - OUTS * turn / turns;         \
      switch (rows) {                                                                           \
        case 1: tile_##T(from, w, bias, to, width, apart, stride, 1, lines, next); break;       \
        case 2: tile_##T(from, w, bias, to, width, apart, stride, 2, lines, next); break;       \
        case 3: tile_##T(from, w, bias, to, width, apart, stride, 3, lines, next); break;       \
        default: tile_##T(from, w, bias, to, width, apart, stride, ROWS, lines, next);          \
      }                                                                                         \
      next += lines * steps * LINE;                                                             \
    }                                                                                           \
  }

DEFINE(f32)
DEFINE(bf16)
#undef DEFINE
#endif
