/* Products of bfloat16 by the matrix units of a processor that has them (AMX): sixteen outputs of
 * sixteen rows at a time, ten times as many sums as its vector units make. A tree is then as good as
 * free behind the memory, and a prompt takes a third of the time.
 *
 * The weights are the left factor, read where the model keeps them; the inputs are the right one, with
 * pairs of numbers of all rows side by side, so they are laid out anew (`lay_out`) for each product.
 * Every output is summed in the same order however many rows there are. */
#ifndef TILES_AMX_H
#define TILES_AMX_H
#include "operations.h"

#if defined(AMX)
#include <sys/syscall.h>
#include <unistd.h>

enum { LAID_OUT = 1 << 19 }; /* numbers of inputs that stay in the second cache */

int amx;

/* Asked once per process, before any product: one that never asks is killed by its first tile. */
static void ask_for_amx(void) {
  enum { REQUEST = 0x1023, TILE_DATA = 18 };
  amx = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

INLINE int64_t tiles_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

/* Rows that are laid out at once: none of one alone, of a few a tile, of more an even number. */
INLINE int64_t rows_laid_out(int64_t rows, int64_t width) {
  const int64_t most = LAID_OUT / width / (2 * SIDE) * (2 * SIDE);
  const int64_t all = tiles_of(rows, 2 * SIDE) * 2 * SIDE;
  return rows == 1 ? 1 : rows <= SIDE || !most ? SIDE : all <= most ? all : most;
}

/* SIDE rows from the `first` on; past the last, that one again. */
INLINE void lay_out_rows(bf16 *laid, const bf16 *x, int64_t first, int64_t rows, int64_t width,
                         int64_t apart) {
  const bf16 *row[SIDE];
  for (int64_t r = first; r < first + SIDE; r++) row[r - first] = x + (r < rows ? r : rows - 1) * apart;
  lay_out(laid + first * width, row, width);
}

/* The next weights are asked for some lines at a time: more at once would keep what is here waiting. */
INLINE const char *fetched(const char *next, const int lines) {
  for (int i = 0; i < lines; i++) FETCH(next + i * LINE);
  return next + lines * LINE;
}

/* `tall` times SIDE outputs of `broad` times `side` rows, four tiles of sums at most; for each tile of
 * weights `lines` lines are asked for from `next` on, and where that ends is told. */
INLINE const char *multiply(float made[][SIDE * SIDE], const bf16 *w, const bf16 *x, int64_t width,
                            const int tall, const int broad, const int side, const char *next,
                            const int lines) {
  const bf16 *second = x + width * side;
  const int64_t apart = width * sizeof(bf16), below = width * SIDE, between = side * sizeof(float);
  _tile_zero(0);
  if (tall * broad > 1) _tile_zero(1);
  if (tall * broad > 2) _tile_zero(2);
  if (tall * broad > 3) _tile_zero(3);
  for (int64_t k = 0; k < width; k += DEEP, w += DEEP) {
    _tile_loadd(6, x + k * side, between);
    if (broad > 1) _tile_loadd(7, second + k * side, between);
    next = fetched(next, lines);
    _tile_loadd(4, w, apart);
    _tile_dpbf16ps(0, 4, 6);
    if (broad > 1) _tile_dpbf16ps(1, 4, 7);
    if (tall > 1) {
      next = fetched(next, lines);
      _tile_loadd(5, w + below, apart);
      if (broad > 1) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else _tile_dpbf16ps(1, 5, 6);
    }
    if (tall > 2) {
      next = fetched(next, lines);
      _tile_loadd(4, w + 2 * below, apart);
      _tile_dpbf16ps(2, 4, 6);
      next = fetched(next, lines);
      _tile_loadd(5, w + 3 * below, apart);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, made[0], between);
  if (tall * broad > 1) _tile_stored(1, made[1], between);
  if (tall * broad > 2) _tile_stored(2, made[2], between);
  if (tall * broad > 3) _tile_stored(3, made[3], between);
  return next;
}

/* SIDE outputs of `rows` rows, from sums that lie output by output. */
INLINE void hand_over(bf16 *y, const float *made, const bf16 *bias, int64_t rows, int64_t stride) {
  const floats more = bias ? widened_bf16(bias) : (floats){0};
  words square[SIDE];
  memcpy(square, made, sizeof square);
  transpose(square);
  for (int64_t r = 0; r < rows && r < SIDE; r++)
    keep_bf16(y + r * stride, (floats)square[r] + more);
}

/* `tall` times SIDE outputs of all rows. Their weights come from memory for the first of these, and
 * the next ones during all of them. */
INLINE void outputs(bf16 *y, const bf16 *w, const bf16 *bias, const bf16 *laid, int64_t rows,
                    int64_t width, int64_t stride, const int tall, const int broad) {
  float made[4][SIDE * SIDE] __attribute__((aligned(LINE)));
  const int64_t turns = tiles_of(rows, broad * SIDE);
  /* of a lone turn half of what is multiplied is still to come: farther is too far */
  const char *next = (const char *)(w + (turns > 1 ? tall : 1) * SIDE * width);
  for (int64_t r = 0; r < rows; r += broad * SIDE) {
    const bf16 *from = laid + r * width;
    if (turns == 1) next = multiply(made, w, from, width, tall, broad, SIDE, next, SIDE);
    else if (turns <= 4) next = multiply(made, w, from, width, tall, broad, SIDE, next, SIDE / 2);
    else next = multiply(made, w, from, width, tall, broad, SIDE, next, 1);
    for (int i = 0; i < tall; i++)
      for (int k = 0; k < broad; k++)
        hand_over(y + (r + k * SIDE) * stride + i * SIDE, made[i * broad + k],
                  bias ? bias + i * SIDE : 0, rows - r - k * SIDE, stride);
  }
}

/* The same of a lone row, which is a tile of inputs as it is. */
INLINE void outputs_of_one(bf16 *y, const bf16 *w, const bf16 *bias, const bf16 *x, int64_t width,
                           const int tall) {
  float made[4][SIDE * SIDE];
  multiply(made, w, x, width, tall, 1, 1, (const char *)(w + SIDE * width), SIDE);
  for (int i = 0; i < tall; i++)
    keep_bf16(y + i * SIDE,
              load_f32(made[i]) + (bias ? widened_bf16(bias + i * SIDE) : (floats){0}));
}

/* The calling thread's share of all outputs of `rows` rows that are laid out. What is left of a layer
 * beside whole tiles is made by vectors, of the rows as they are. */
INLINE void share(const bf16 *laid, const bf16 *x, bf16 *y, int64_t rows, int64_t width,
                  int64_t apart, int64_t stride, const struct part *parts, int64_t count) {
  const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
  shape_tiles_for(rows > 1 ? SIDE : 1);
  for (int64_t p = 0; p < count; y += parts[p++].outs) {
    const int64_t tiles = tiles_of(parts[p].outs, SIDE), last = tiles * (me + 1) / team * SIDE;
    const int64_t stop = last < parts[p].outs ? last : parts[p].outs;
    for (int64_t o = tiles * me / team * SIDE, left; (left = stop - o) > 0;) {
      const bf16 *w = (const bf16 *)parts[p].weight + o * width;
      const bf16 *bias = parts[p].bias ? (const bf16 *)parts[p].bias + o : 0;
      const int tall = left >= 4 * SIDE && rows <= SIDE ? 4 : left >= 2 * SIDE ? 2 : left >= SIDE;
#define OF_ONE(tall) outputs_of_one(y + o, w, bias, x, width, tall)
#define OF_ALL(tall, broad) outputs(y + o, w, bias, laid, rows, width, stride, tall, broad)
      if (!tall) tiles_bf16(x, w, bias, y + o, OUTS, rows, width, apart, stride, 0);
      else if (tall == 4 && rows == 1) OF_ONE(4);
      else if (tall == 2 && rows == 1) OF_ONE(2);
      else if (rows == 1) OF_ONE(1);
      else if (tall == 4) OF_ALL(4, 1);
      else if (tall == 2 && rows <= SIDE) OF_ALL(2, 1);
      else if (tall == 2) OF_ALL(2, 2);
      else OF_ALL(1, 1);
      o += tall ? tall * SIDE : OUTS;
    }
  }
  _tile_release();
}

/* As product_share and product; zero where vectors have to do it. Threads of a team of many rows lay
 * them out together. */
INLINE int amx_share_bf16(const bf16 *x, bf16 *y, int64_t rows, int64_t width, int64_t apart,
                          const struct part *parts, int64_t count) {
  if (!amx) return 0;
  const int64_t stride = all_outputs(parts, count), most = rows_laid_out(rows, width);
  bf16 laid[most * width] __attribute__((aligned(LINE)));
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t some = rows - first < most ? rows - first : most;
    const bf16 *from = x + first * apart;
    for (int64_t r = 0; rows > 1 && r < some; r += SIDE)
      lay_out_rows(laid, from, r, some, width, apart);
    share(laid, from, y + first * stride, some, width, apart, stride, parts, count);
  }
  return 1;
}

INLINE int amx_product_bf16(const bf16 *x, bf16 *y, int64_t rows, int64_t width, int64_t apart,
                            const struct part *parts, int64_t count, int threads) {
  if (!amx) return 0;
  const int64_t stride = all_outputs(parts, count), most = rows_laid_out(rows, width);
  bf16 laid[most * width] __attribute__((aligned(LINE)));
  _Pragma("omp parallel num_threads(threads)")
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t some = rows - first < most ? rows - first : most;
    const bf16 *from = x + first * apart;
    if (rows > 1) {
      _Pragma("omp for schedule(static)")
      for (int64_t r = 0; r < some; r += SIDE) lay_out_rows(laid, from, r, some, width, apart);
    }
    share(laid, from, y + first * stride, some, width, apart, stride, parts, count);
    if (first + most < rows) {
      _Pragma("omp barrier")
    }
  }
  return 1;
}
#else
static void ask_for_amx(void) {}
#define amx_share_bf16(...) 0
#define amx_product_bf16(...) 0
#endif
#define amx_share_f32(...) 0
#define amx_product_f32(...) 0
#endif
