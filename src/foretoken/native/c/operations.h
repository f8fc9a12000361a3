/* What the operations share: where their numbers lie, and the forms that several threads call. */
#ifndef OPERATIONS_H
#define OPERATIONS_H
#include <math.h>
#include <sched.h>

#include "vectors.h"

struct part { /* one linear layer; its bias may be null */
  const void *weight, *bias;
  int64_t outs;
};

INLINE int64_t all_outputs(const struct part *parts, int64_t count) {
  int64_t outs = 0;
  for (int64_t p = 0; p < count; p++) outs += parts[p].outs;
  return outs;
}

struct layout { /* sizes, then elements between neighbours; of the cache: one layer */
  int64_t heads, groups, width, value_width;
  int64_t q_head, q_token, k_head, k_token, v_head, v_token;
  int64_t key_slot, key_head, value_slot, value_head;
};

/* Tokens `first` to `last` of the batch; their columns, counted from behind those to `skip`, which
 * none of them sees. All see what the mask lies `behind`; it is zero where a column of a tree is
 * seen, else the least number there is, and each sees itself. Mask null: each sees up to itself. */
struct row {
  int64_t slot, first, last, start, stop, behind;
  const void *mask;
  int64_t mask_token, skip;
};

/* Where the threads of a team wait for each other. OpenMP's own barrier puts them to sleep as soon
 * as a process has teams for more threads than processors, as when a second thread calls: then each
 * of the hundreds of meetings of a forward is a call to the system. Here they stay awake for as long
 * as a step takes, and then let others have the processor. */
struct meeting {
  int64_t here;
  char apart[LINE];
  int64_t turn;
};
enum { AWAKE = 2000 };
int omp_get_num_threads(void);
int omp_get_thread_num(void);

INLINE void meet(struct meeting *at) {
  const int64_t turn = __atomic_load_n(&at->turn, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&at->here, 1, __ATOMIC_ACQ_REL) == omp_get_num_threads()) {
    __atomic_store_n(&at->here, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&at->turn, turn + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int64_t i = 0; __atomic_load_n(&at->turn, __ATOMIC_ACQUIRE) == turn; i++) {
    if (i < AWAKE) REST;
    else sched_yield();
  }
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define AMX
enum { SIDE = 16, DEEP = 32, TILE_SIZE = SIDE * DEEP }; /* rows, and numbers of one, of a tile */
extern int amx; /* whether the system lets this process use them */

/* Tiles of the calling thread: two of left factors, 4 and 5, and others of so many rows of inputs or
 * sums. Libraries shape theirs anew, too. */
INLINE void shape_tiles_for(int rows) {
  struct {
    uint8_t palette, row, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    shape.bytes[i] = i == 4 || i == 5 ? LINE : rows * sizeof(float);
    shape.rows[i] = SIDE;
  }
  __asm__ volatile("" : : "r"(&shape) : "memory"); /* all of it is read */
  _tile_loadconfig(&shape);
}

/* SIDE rows as tiles that follow each other, pairs of numbers of all of them side by side. */
INLINE void lay_out(bf16 *to, const bf16 *const row[SIDE], int64_t width) {
  for (int64_t k = 0; k < width; k += DEEP, to += TILE_SIZE) {
    words square[SIDE];
    for (int r = 0; r < SIDE; r++) memcpy(square + r, row[r] + k, LINE);
    transpose(square);
    memcpy(to, square, sizeof square);
  }
}
#endif

struct step;   /* of a stretch of a forward (segment.c) */
struct cached; /* one layer of the cache */

/* Each thread of a team calls the shares and does its own; no meeting at the end. */
#define DECLARE(T)                                                                                \
  void product_share_##T(const T *x, T *y, int64_t rows, int64_t width, int64_t apart,            \
                         const struct part *parts, int64_t count);                                \
  void attend_share_##T(const T *q, const T *k, const T *v, T *y, T *keys, T *values,             \
                        const struct layout *of, const struct row *rows, int64_t count,           \
                        float scale, struct meeting *at);                                         \
  void norm_##T(const T *restrict x, const T *restrict w, T *restrict y, int64_t rows,            \
                int64_t width, int64_t apart, float eps);                                         \
  void rotate_##T(const T *restrict x, const T *restrict cos, const T *restrict sin,              \
                  T *restrict y, int64_t heads, int64_t tokens, int64_t width, int64_t head,      \
                  int64_t apart, int64_t angle_apart);                                            \
  void best_##T(const T *z, int64_t rows, int64_t width, int64_t apart, float scale,              \
                const int64_t *names, int64_t most, float *best, int64_t *at);                    \
  void law_##T(const T *z, int64_t rows, int64_t width, int64_t apart, float scale,               \
               const int64_t *names, int64_t whole, float *y, int threads);                       \
  void drawn_##T(const T *law, int64_t width, double coin, int64_t *at);                          \
  int64_t segment_##T(const struct step *steps, int64_t count, void *const *buffers, int64_t all, \
                      int64_t wanted, const int64_t *ids, const int64_t *positions,               \
                      const int64_t *places, const struct cached *layers, const struct row *rows, \
                      int64_t row_count, int threads);

DECLARE(f32)
DECLARE(bf16)
#endif
