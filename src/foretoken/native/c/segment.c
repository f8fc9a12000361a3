/* Stretches of a model's forward. Over few tokens all of it is one call, run by one team of threads
 * that meets after every step: waking a team for each product costs more than the small operations
 * between products. Over many tokens only what lies between products and attention is, where each
 * token is by itself: a thread takes some tokens through all steps while they are in its cache. */
#include <string.h>

#include "operations.h"

enum { TOGETHER = 16, PLACES = 2 };
enum kind { PRODUCT, NORM, ROTATE, ATTEND, ADD, TIMES, SCALE, SILU, GELU, RELU, COPY, PICK, LOOK_UP };

struct place { /* the numbers of token t begin at t * apart */
  int64_t buffer, offset, apart;
};

struct step {
  int64_t kind, width; /* `width`: numbers of a token that are read from a */
  struct place a, b, c, y;
  const void *what; /* linear layers, the weight of a norm, or a table */
  int64_t count;    /* layers; width of a norm or of a head; layer of the cache; rows of a table */
  double real;      /* added to mean squares; scale */
  int64_t counted;  /* which tokens it is done for: all, or those that logits are wanted of */
  int64_t input;    /* of the forward, that has the rows to look up */
};

struct buffer { /* its numbers; elements between tokens of one from outside, else zero */
  void *at;
  int64_t apart;
};

struct cached { /* one layer of the cache, and how its queries, keys and values lie */
  void *keys, *values;
  const struct layout *of;
};

INLINE floats gated(floats x, floats by) { /* x / (1 + exp(-by)) */
  const words down = (words)(by > 0); /* the sign is taken off: exponential wants no more than zero */
  const floats small = exponential((floats)(((words)-by & down) | ((words)by & ~down)));
  const floats one = (floats){0} + 1.0f;
  const floats above = (floats)(((words)one & down) | ((words)small & ~down));
  return x * (above / (one + small));
}

/* The part of `count` things that the calling thread does. */
INLINE struct part_of { int64_t first, last; } my_part(int64_t count) {
  const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
  return (struct part_of){count * me / team, count * (me + 1) / team};
}

/* map: y = f(a, b) for numbers from the `first` to the `last`, LANES at a time.
 * heads: norms and rotations of single heads of single tokens.
 * items: how many of either a step has. */
#define MAP(T, EXPRESSION)                                                                        \
  for (int64_t t = first / each, k = first % each * LANES, i = first; i < last; i++) {            \
    const floats x = widened_##T(a + t * s->a.apart + k);                                         \
    const floats z = widened_##T(b + t * s->b.apart + k);                                         \
    (void)z;                                                                                      \
    keep_##T(y + t * s->y.apart + k, EXPRESSION);                                                 \
    if ((k += LANES) == s->width) k = 0, t++;                                                     \
  }

/* The first look-up of a row that its table lacks, or minus one. They come before all other steps. */
INLINE int64_t beyond_a_table(const struct step *steps, int64_t count, int64_t tokens,
                              const int64_t *const *inputs) {
  for (int64_t i = 0; i < count && steps[i].kind == LOOK_UP; i++)
    for (int64_t t = 0; t < tokens; t++)
      if ((uint64_t)inputs[steps[i].input][t] >= (uint64_t)steps[i].count) return i;
  return -1;
}

INLINE int64_t items(const struct step *s, int64_t tokens) {
  return tokens * (s->width / (s->kind == NORM || s->kind == ROTATE ? s->count : LANES));
}

#define DEFINE(T)                                                                                 \
  INLINE void map_##T(const struct step *s, const T *a, const T *b, T *y, int64_t first,          \
                      int64_t last) {                                                             \
    const int64_t each = s->width / LANES;                                                        \
    switch (s->kind) {                                                                            \
      case ADD: MAP(T, x + z) break;                                                              \
      case TIMES: MAP(T, x * z) break;                                                            \
      case SCALE: MAP(T, x * (float)s->real) break;                                               \
      case SILU: MAP(T, gated(x, x)) break;                                                       \
      case GELU: MAP(T, gated(x, 1.5957691216f * (x + 0.044715f * x * x * x))) break;             \
      case RELU: MAP(T, larger((floats){0}, x)) break; /* NaN stays */                            \
      default: MAP(T, x)                                                                          \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  INLINE void heads_##T(const struct step *s, const T *a, const T *b, const T *c, T *y,           \
                        int64_t first, int64_t last) {                                            \
    const int64_t width = s->count, heads = s->width / width;                                     \
    for (int64_t i = first; i < last; i++) {                                                      \
      const int64_t t = i / heads, h = i % heads * width;                                         \
      const T *from = a + t * s->a.apart + h;                                                     \
      T *to = y + t * s->y.apart + h;                                                             \
      if (s->kind == NORM) norm_##T(from, s->what, to, 1, width, width, s->real);                 \
      else                                                                                        \
        rotate_##T(from, b + t * s->b.apart, c + t * s->c.apart, to, 1, 1, width, 0, 0, 0);       \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  INLINE void small_##T(const struct step *s, const T *a, const T *b, const T *c, T *y,           \
                        struct part_of of) {                                                      \
    if (s->kind == NORM || s->kind == ROTATE) heads_##T(s, a, b, c, y, of.first, of.last);        \
    else map_##T(s, a, b, y, of.first, of.last);                                                  \
  }                                                                                               \
                                                                                                  \
  INLINE void rows_##T(const T *from, int64_t apart, const int64_t *which, T *y, int64_t width,   \
                       struct part_of of) {                                                       \
    for (int64_t t = of.first; t < of.last; t++)                                                  \
      memcpy(y + t * width, from + which[t] * apart, width * sizeof(T));                          \
  }                                                                                               \
                                                                                                  \
  /* minus one, or the step that was asked for a row beyond its table: nothing is done then */    \
  int64_t segment_##T(const struct step *steps, int64_t count, void *const *buffers, int64_t all, \
                      int64_t wanted, const int64_t *ids, const int64_t *positions,               \
                      const int64_t *places, const struct cached *layers, const struct row *rows, \
                      int64_t row_count, int threads) {                                           \
    const int64_t counts[] = {all, wanted}, *inputs[] = {ids, positions, places};                 \
    const int64_t beyond = beyond_a_table(steps, count, all, inputs);                             \
    if (beyond >= 0) return beyond;                                                               \
    struct meeting at = {0};                                                                      \
    _Pragma("omp parallel num_threads(threads)")                                                  \
    for (const struct step *s = steps; s < steps + count; s++) {                                  \
      const T *a = (const T *)buffers[s->a.buffer] + s->a.offset;                                 \
      const T *b = (const T *)buffers[s->b.buffer] + s->b.offset;                                 \
      const T *c = (const T *)buffers[s->c.buffer] + s->c.offset;                                 \
      T *y = (T *)buffers[s->y.buffer] + s->y.offset;                                             \
      const int64_t tokens = counts[s->counted];                                                  \
      switch (s->kind) {                                                                          \
        case PRODUCT:                                                                             \
          product_share_##T(a, y, tokens, s->width, s->a.apart, s->what, s->count);               \
          break;                                                                                  \
        case ATTEND:                                                                              \
          attend_share_##T(a, b, c, y, layers[s->count].keys, layers[s->count].values,            \
                           layers[s->count].of, rows, row_count, s->real, &at);                   \
          break;                                                                                  \
        case PICK:                                                                                \
          rows_##T(a, s->a.apart, inputs[PLACES], y, s->width, my_part(tokens));                  \
          break;                                                                                  \
        case LOOK_UP:                                                                             \
          rows_##T(s->what, s->width, inputs[s->input], y, s->width, my_part(tokens));            \
          break;                                                                                  \
        default: small_##T(s, a, b, c, y, my_part(items(s, tokens)));                             \
      }                                                                                           \
      meet(&at);                                                                                  \
    }                                                                                             \
    return -1;                                                                                    \
  }                                                                                               \
                                                                                                  \
  /* where the numbers of token `first` are, of a buffer from outside or of this thread's own */  \
  INLINE T *found_##T(struct place *at, const struct buffer *buffers, int64_t first) {            \
    const struct buffer *from = buffers + at->buffer;                                             \
    const int64_t token = from->apart ? first : omp_get_thread_num() * TOGETHER;                  \
    if (from->apart) at->apart = from->apart;                                                     \
    return (T *)from->at + at->offset + token * at->apart;                                        \
  }                                                                                               \
                                                                                                  \
  void between_##T(const struct step *steps, int64_t count, const struct buffer *buffers,         \
                   int64_t tokens, int threads) {                                                 \
    _Pragma("omp parallel for schedule(dynamic) num_threads(threads)")                            \
    for (int64_t first = 0; first < tokens; first += TOGETHER) {                                  \
      const int64_t some = tokens - first < TOGETHER ? tokens - first : TOGETHER;                 \
      for (int64_t i = 0; i < count; i++) {                                                       \
        struct step s = steps[i];                                                                 \
        const T *a = found_##T(&s.a, buffers, first), *b = found_##T(&s.b, buffers, first);       \
        const T *c = found_##T(&s.c, buffers, first);                                             \
        T *y = found_##T(&s.y, buffers, first);                                                   \
        small_##T(&s, a, b, c, y, (struct part_of){0, items(&s, some)});                          \
      }                                                                                           \
    }                                                                                             \
  }

DEFINE(f32)
DEFINE(bf16)

int64_t together(void) { return TOGETHER; } /* tokens that a thread takes through all steps */

/* Whether the threads of a team, so many (below 64), know of each other: each has another number, and
 * all are told how many they are. Where a compiler starts threads by an OpenMP of its own, the one
 * that is asked knows of none of them: each would do all of the work, and wait for nobody. */
int team(int threads) {
  uint64_t numbers = 0;
  int64_t here = 0, told = 0;
#pragma omp parallel num_threads(threads)
  {
    __atomic_fetch_or(&numbers, (uint64_t)1 << omp_get_thread_num(), __ATOMIC_RELAXED);
    __atomic_fetch_add(&told, omp_get_num_threads(), __ATOMIC_RELAXED);
    __atomic_fetch_add(&here, 1, __ATOMIC_RELAXED);
  }
  return numbers == ((uint64_t)1 << here) - 1 && told == here * here;
}
