/* A stretch of a model's forward over few tokens, run by one team of threads that meets after every
 * step: waking a team for each product costs more than the small operations between products. */
#include "operations.h"

enum kind { PRODUCT, NORM, ROTATE, ATTEND, ADD, TIMES, SCALE, SILU, GELU, RELU, COPY };

struct place { /* the numbers of token t begin at t * apart */
  int64_t buffer, offset, apart;
};

struct step {
  int64_t kind, width; /* `width`: numbers of a token that are read from a */
  struct place a, b, c, y;
  const void *what; /* linear layers, or the weight of a norm */
  int64_t count;    /* layers; width of a norm or of a head; layer of the cache */
  double real;      /* added to mean squares; scale */
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

/* map: y = f(a, b) for every number, each thread its own; LANES at a time.
 * norms, rotations: one head of one token after another, each by one thread. */
#define MAP(T, EXPRESSION)                                                                        \
  _Pragma("omp for schedule(static) nowait")                                                      \
  for (int64_t i = 0; i < tokens * (s->width / LANES); i++) {                                     \
    const int64_t t = i / (s->width / LANES), k = i % (s->width / LANES) * LANES;                 \
    const floats x = widened_##T(a + t * s->a.apart + k);                                         \
    const floats z = widened_##T(b + t * s->b.apart + k);                                         \
    (void)z;                                                                                      \
    keep_##T(y + t * s->y.apart + k, EXPRESSION);                                                 \
  }

#define DEFINE(T)                                                                                 \
  INLINE void each_##T(const struct step *s, const T *a, const T *b, T *y, int64_t tokens) {      \
    switch (s->kind) {                                                                            \
      case ADD: MAP(T, x + z) break;                                                              \
      case TIMES: MAP(T, x * z) break;                                                            \
      case SCALE: MAP(T, x * (float)s->real) break;                                               \
      case SILU: MAP(T, gated(x, x)) break;                                                       \
      case GELU: MAP(T, gated(x, 1.5957691216f * (x + 0.044715f * x * x * x))) break;             \
      case RELU: MAP(T, larger(x, (floats){0})) break;                                            \
      default: MAP(T, x)                                                                          \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  INLINE void heads_##T(const struct step *s, const T *a, const T *b, const T *c, T *y,           \
                        int64_t tokens) {                                                         \
    const int64_t width = s->count, heads = s->width / width;                                     \
    _Pragma("omp for schedule(static) nowait")                                                    \
    for (int64_t i = 0; i < tokens * heads; i++) {                                                \
      const int64_t t = i / heads, h = i % heads * width;                                         \
      const T *from = a + t * s->a.apart + h;                                                     \
      T *to = y + t * s->y.apart + h;                                                             \
      if (s->kind == NORM) norm_##T(from, s->what, to, 1, width, width, s->real);                 \
      else                                                                                        \
        rotate_##T(from, b + t * s->b.apart, c + t * s->c.apart, to, 1, 1, width, 0, 0, 0);       \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  void segment_##T(const struct step *steps, int64_t count, void *const *buffers, int64_t tokens, \
                   const struct cached *layers, const struct row *rows, int64_t row_count,        \
                   int threads) {                                                                 \
    _Pragma("omp parallel num_threads(threads)")                                                  \
    for (const struct step *s = steps; s < steps + count; s++) {                                  \
      const T *a = (const T *)buffers[s->a.buffer] + s->a.offset;                                 \
      const T *b = (const T *)buffers[s->b.buffer] + s->b.offset;                                 \
      const T *c = (const T *)buffers[s->c.buffer] + s->c.offset;                                 \
      T *y = (T *)buffers[s->y.buffer] + s->y.offset;                                             \
      switch (s->kind) {                                                                          \
        case PRODUCT:                                                                             \
          product_share_##T(a, y, tokens, s->width, s->a.apart, s->what, s->count);               \
          break;                                                                                  \
        case ATTEND:                                                                              \
          attend_share_##T(a, b, c, y, layers[s->count].keys, layers[s->count].values,            \
                           layers[s->count].of, rows, row_count, s->real);                        \
          break;                                                                                  \
        case NORM:                                                                                \
        case ROTATE: heads_##T(s, a, b, c, y, tokens); break;                                     \
        default: each_##T(s, a, b, y, tokens);                                                    \
      }                                                                                           \
      _Pragma("omp barrier")                                                                      \
    }                                                                                             \
  }

DEFINE(f32)
DEFINE(bf16)
