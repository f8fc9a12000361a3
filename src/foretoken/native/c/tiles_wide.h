/* Tiles of products where a register holds sixteen numbers: both factors as they lie in memory. */
#ifndef TILES_H
#define TILES_H
#include "operations.h"

enum { FEW = 64 }; /* rows that are multiplied at once: their inputs are as good as in the cache */
enum { SHORT = 3, TALL = 6 }; /* rows of a lone tile, either of them; of one of several, ROWS to TALL */
typedef f32 factor_f32; /* what inputs are multiplied as */
typedef bf16 factor_bf16;
#define ROOM(T, numbers) 1

INLINE int64_t block_of(int64_t rows, int64_t width) {
  const int64_t most = BLOCK / width;
  return rows <= FEW || rows <= most ? rows : most < FEW ? FEW : most;
}

/* Inputs so wide that the weights of a tile fill the first cache would bring weights and rows from the
 * second one for every tile. Then more outputs at once take such rows in parts that stay in it. */
enum { FIRST = 1 << 15, PART = 28 << 10, GROUP = 4 * OUTS, MOST = 32 };

INLINE int64_t outputs_of(int64_t rows, int64_t width, int64_t size) {
  return OUTS * width * size >= FIRST && rows > ROWS && rows <= MOST ? GROUP : OUTS;
}

/* factors: inputs as tiles take them, where they lie or in `room`; `apart` then becomes that of both.
 * tile: OUTS outputs of some rows, while `lines` lines per step are fetched from `next`; of
 *       `some` of the inputs, with sums that are `kept` between those that begin and those that end.
 *       Rows behind the `last` one are that one again: one row and two are multiplied as three,
 *       four and five as six, which costs nothing behind the memory.
 *       Sums are set one by one: whatever takes their address keeps them in memory.
 * each: OUTS outputs of all rows, in as few tiles as do, all but equally tall: one of few rows is
 *       over before its share of the next weights is here. Weights come from memory for the first
 *       tile only, so those of a later one are fetched during all of them, a share in each; of three
 *       and more the first is spared: it waits for its own weights, behind whatever else is under
 *       way. Compilers make faster code where they know how many lines a tile fetches (SHARED).
 * parts: `outs` outputs of all rows, a part of the inputs after the other. A function of its own, or
 *        the compiler makes worse code of the rest.
 * tiles: as many outputs as `outputs_of` says, or the last ones. */
#define APART static __attribute__((noinline))
#define DEFINE(T)                                                                               \
  INLINE const T *factors_##T(T *room, const T *x, int64_t rows, int64_t width,                 \
                              int64_t *apart) {                                                 \
    (void)room, (void)rows, (void)width, (void)apart;                                           \
    return x;                                                                                   \
  }                                                                                             \
                                                                                                \
  INLINE void tile_##T(const T *x, const T *w, const T *bias, T *y, int64_t some,               \
                       int64_t width, int64_t apart, int64_t stride, const int rows,           \
                       const int last, const int lines, const char *next, floats *kept,         \
                       const int begins, const int ends) {                                      \
    floats sums[TALL][OUTS];                                                                    \
    float made[2 * ROWS * OUTS];                                                                \
    UNROLLED for (int r = 0; r < rows; r++)                                                     \
      UNROLLED for (int o = 0; o < OUTS; o++)                                                   \
        sums[r][o] = begins ? (floats){0} : kept[r * OUTS + o];                                 \
    for (const T *end = w + some; w < end; w += STEP_##T, x += STEP_##T) {                      \
      held_##T held[OUTS];                                                                      \
      for (int o = 0; o < OUTS; o++) held[o] = load_##T(w + o * width);                         \
      for (int i = 0; i < lines; i++) FETCH(next + i * LINE);                                   \
      next += lines * LINE;                                                                     \
      for (int r = 0; r < rows; r++) {                                                          \
        held_##T row = load_##T(x + (r < last ? r : last) * apart);                             \
        HELD(row);                                                                              \
        for (int o = 0; o < OUTS; o++) sums[r][o] = add_##T(sums[r][o], held[o], row);          \
      }                                                                                         \
    }                                                                                           \
    if (!ends) {                                                                                \
      UNROLLED for (int r = 0; r < rows; r++)                                                   \
        UNROLLED for (int o = 0; o < OUTS; o++) kept[r * OUTS + o] = sums[r][o];                \
      return;                                                                                   \
    }                                                                                           \
    total(made, sums, rows < ROWS ? rows : ROWS);                                               \
    if (rows > ROWS) total(made + ROWS * OUTS, sums + ROWS, rows - ROWS);                       \
    for (int r = 0; r < rows; r++) {                                                            \
      if (bias)                                                                                 \
        for (int o = 0; o < OUTS; o++) made[r * OUTS + o] += wide_##T(bias[o]);                 \
      store_##T(y + (r < last ? r : last) * stride, made + r * OUTS);                           \
    }                                                                                           \
  }                                                                                             \
                                                                                                \
  INLINE const char *each_##T(const T *x, const T *w, const T *bias, T *y, int64_t rows,        \
                              int64_t some, int64_t width, int64_t apart, int64_t stride,       \
                              const char *next, floats (*kept)[TALL * OUTS], const int begins,  \
                              const int ends) {                                                 \
    const int count = (rows + TALL - 1) / TALL, spared = count > 2, turns = count - spared;     \
    for (int i = 0, turn = -spared; i < count; i++, turn++) {                                   \
      const int64_t r = rows * i / count, height = rows * (i + 1) / count - r;                  \
      const int tall = height < ROWS ? ROWS : height;                                           \
      const T *from = x + r * apart;                                                            \
      T *to = y + r * stride;                                                                   \
      floats *own = kept ? kept[i] : 0;                                                         \
      const int lines = turn < 0 ? 0 : OUTS * (turn + 1) / turns - OUTS * turn / turns;         \
      if (rows < ROWS) TILE(T, SHORT, rows - 1, OUTS);                                          \
      else if (count == 1) TILE(T, TALL, rows - 1, OUTS);                                       \
      else if (tall == ROWS) SHARED(T, ROWS);                                                   \
      else if (tall == TALL) SHARED(T, TALL);                                                   \
      else SHARED(T, TALL - 1);                                                                 \
      next += lines * (some / STEP_##T) * LINE;                                                 \
    }                                                                                           \
    return next;                                                                                \
  }                                                                                             \
                                                                                                \
  APART void parts_##T(const T *x, const T *w, const T *bias, T *y, int64_t outs, int64_t rows, \
                       int64_t width, int64_t apart, int64_t stride) {                          \
    floats kept[GROUP / OUTS][(MOST + TALL - 1) / TALL][TALL * OUTS];                           \
    const int64_t parts = ((rows + OUTS) * width * sizeof(T) + PART - 1) / PART;                \
    const int64_t part = (width / parts + STEP_##T - 1) / STEP_##T * STEP_##T;                  \
    const char *next = (const char *)(w + outs * width);                                        \
    for (int64_t k = 0; k < width; k += part) {                                                 \
      const int64_t some = width - k < part ? width - k : part;                                 \
      for (int64_t o = 0; o < outs; o += OUTS) {                                                \
        const T *from = x + k, *at = w + o * width + k, *more = bias ? bias + o : 0;            \
        T *to = y + o;                                                                          \
        if (k == 0) EACH(T, 1, 0);                                                              \
        else if (k + some < width) EACH(T, 0, 0);                                               \
        else EACH(T, 0, 1);                                                                     \
      }                                                                                         \
    }                                                                                           \
  }                                                                                             \
                                                                                                \
  INLINE void tiles_##T(const T *x, const T *w, const T *bias, T *y, int64_t outs,              \
                        int64_t rows, int64_t width, int64_t apart, int64_t stride,             \
                        float *unused) {                                                        \
    const int ahead = sizeof(float) / sizeof(T); /* tiles: as many bytes of either type */      \
    const char *next = (const char *)(w + ahead * OUTS * width);                                \
    (void)unused;                                                                               \
    if (outs > OUTS) parts_##T(x, w, bias, y, outs, rows, width, apart, stride);                \
    else each_##T(x, w, bias, y, rows, width, width, apart, stride, next, 0, 1, 1);             \
  }

#define TILE(T, tall, last, each)                                                               \
  tile_##T(from, w, bias, to, some, width, apart, stride, tall, last, each, next, own, begins,  \
           ends)
#define SHARED(T, tall)                                                                         \
  do {                                                                                          \
    if (lines == 0) TILE(T, tall, tall, 0);                                                     \
    else if (lines == 1) TILE(T, tall, tall, 1);                                                \
    else TILE(T, tall, tall, 2);                                                                \
  } while (0)
#define EACH(T, begins, ends)                                                                   \
  next = each_##T(from, at, more, to, rows, some, width, apart, stride, next, kept[o / OUTS],   \
                  begins, ends)
DEFINE(f32)
DEFINE(bf16)
#undef DEFINE
#endif
