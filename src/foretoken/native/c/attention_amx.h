/* A block of attention in bfloat16 by the matrix units of a processor that has them (AMX): for a
 * lone query as fast as vectors, for many four times.
 *
 * SIDE queries are taken at once. Keys are the left factor, read where the cache keeps them, and
 * queries the right one, so that the scores of a column lie beside each other, one for each query,
 * and what a softmax needs is made of whole registers. The weights are turned, and are then the
 * left factor of values whose columns lie in pairs. What is made of a query depends on no other. */
#ifndef ATTENTION_AMX_H
#define ATTENTION_AMX_H

#if defined(AMX)
struct sixteen { /* SIDE queries, one in each place of a register; past the last, that one again */
  const bf16 *mask[SIDE];
  bf16 *to[SIDE];
  int64_t least; /* columns that all of them see */
  words seen; /* columns, of each */
  floats top, whole; /* the largest score; sum of weights relative to it */
};

/* A compiler does not know what a tile reads, and might write that later. */
#define WRITTEN __asm__ volatile("" ::: "memory")

/* `count` queries of a group from its `one` on, and those queries as tiles. */
INLINE void gather(struct sixteen *at, bf16 *laid, const struct layout *of, const struct row *row,
                   const bf16 *q, bf16 *y, int64_t group, int64_t one, int64_t count) {
  const int64_t fold = of->heads / of->groups;
  const bf16 *query[SIDE];
  int64_t token = 0, head = 0;
  for (int r = 0; r < SIDE; r++) {
    if (r < count) token = (one + r) / fold, head = group * fold + (one + r) % fold;
    const int64_t t = row->first + token;
    query[r] = q + head * of->q_head + t * of->q_token;
    at->mask[r] = row->mask ? (const bf16 *)row->mask + token * row->mask_token : 0;
    at->to[r] = y + (t * of->heads + head) * of->value_width;
    at->seen[r] = (uint32_t)(row->mask ? row->stop : row->start + token + 1);
  }
  at->least = at->seen[0];
  at->top = same(-FLT_MAX);
  at->whole = (floats){0};
  lay_out(laid, query, of->width);
}

/* Scores of COLUMNS columns; keys[p] are SIDE of them. */
INLINE void score(floats *scores, const bf16 *const keys[PARTS], const bf16 *laid, int64_t width) {
#define SCORE(p, tile)                                                                            \
  _tile_loadd(tile, keys[p] + k, width * sizeof(bf16));                                           \
  _tile_dpbf16ps(p, tile, 6)
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < width; k += DEEP, laid += TILE_SIZE) {
    _tile_loadd(6, laid, LINE);
    SCORE(0, 4);
    SCORE(1, 5);
    SCORE(2, 4);
    SCORE(3, 5);
  }
  _tile_stored(0, scores, LINE);
  _tile_stored(1, scores + SIDE, LINE);
  _tile_stored(2, scores + 2 * SIDE, LINE);
  _tile_stored(3, scores + 3 * SIDE, LINE);
}

/* The mask of COLUMNS columns from `first` on, two in each word of a query. */
INLINE void masks(words *more, const bf16 *const mask[SIDE], const struct row *row, int64_t first) {
  for (int64_t h = 0; h < COLUMNS; h += DEEP, more += SIDE) {
    const int64_t from = first + h - row->behind, end = row->stop - row->behind - from;
    __mmask32 there = end <= 0 ? 0 : end < DEEP ? (1u << end) - 1 : ~0u;
    if (from < 0) there = from <= -DEEP ? 0 : there >> -from << -from;
    for (int r = 0; r < SIDE; r++)
      more[r] = (words)_mm512_maskz_loadu_epi16(there, mask[r] + from);
    transpose(more);
  }
}

/* What becomes of scores before the softmax; the largest of them and of `top`. */
INLINE floats settled(floats *scores, const words *more, words seen, int64_t first, float scale,
                      floats top, const int masked, const int limited) {
  floats tops[PARTS] = {top, top, top, top};
  for (int c = 0; c < COLUMNS; c += PARTS)
    UNROLLED for (int p = 0; p < PARTS; p++) {
      floats some = scores[c + p] * scale;
      if (masked) {
        const words two = more[(c + p) / 2];
        some += (floats)(p % 2 ? two & 0xffff0000 : two << 16);
      }
      if (limited) {
        const __m512i column = _mm512_set1_epi32((int)(first + c + p));
        const __mmask16 hidden = _mm512_cmple_epi32_mask((__m512i)seen, column);
        some = (floats)_mm512_mask_mov_ps((__m512)some, hidden, (__m512)same(-INFINITY));
      }
      scores[c + p] = some;
      tops[p] = larger(some, tops[p]);
    }
  return larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
}

/* Asks for two columns of what comes next: a few at a time, beside what needs no memory. */
INLINE const bf16 *fetch(const bf16 *next, int64_t width) {
  for (int64_t d = 0; d < 2 * width; d += DEEP) FETCH(next + d);
  return next + 2 * width;
}

/* Weights of the columns as tiles of queries; returns how far what was made so far is scaled down.
 * The next keys and values are fetched meanwhile, if there is a place where they are. */
INLINE floats weigh(bf16 *weights, struct sixteen *at, floats *scores, const struct layout *of,
                    const struct row *row, int64_t first, float scale, const bf16 *next_keys,
                    const bf16 *next_values) {
  const int64_t end = first + COLUMNS;
  const floats before = at->top;
  floats top, sums[2] = {{0}, {0}};
  if (row->mask && end > row->behind) {
    words more[COLUMNS / 2];
    masks(more, at->mask, row, first);
    top = settled(scores, more, at->seen, first, scale, before, 1, 1);
  } else if (end > at->least) top = settled(scores, 0, at->seen, first, scale, before, 0, 1);
  else top = settled(scores, 0, at->seen, first, scale, before, 0, 0);
  const words order = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005,
                       0x160006, 0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b,
                       0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f}; /* halves zipped */
  for (int h = 0; h < COLUMNS; h += DEEP, weights += TILE_SIZE) {
    words square[SIDE];
    for (int i = 0; i < SIDE; i++) {
      if (next_keys) {
        next_keys = fetch(next_keys, of->width);
        next_values = fetch(next_values, of->value_width);
      }
      const floats one = exponential(scores[h + 2 * i] - top);
      const floats two = exponential(scores[h + 2 * i + 1] - top);
      sums[0] += one;
      sums[1] += two;
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)two, (__m512)one);
      square[i] = (words)_mm512_permutexvar_epi16((__m512i)order, (__m512i)both);
    }
    transpose(square);
    memcpy(weights, square, sizeof square);
  }
  const floats fade = exponential(before - top);
  at->top = top;
  at->whole = at->whole * fade + (sums[0] + sums[1]);
  return fade;
}

/* Values of `count` columns as tiles, two columns in each word; of every DEEP numbers of a value
 * the first tile has every second four, the next one the others. */
INLINE void pair(bf16 *to, const bf16 *values, int64_t count, int64_t wide) {
  for (int64_t j = 0; j < COLUMNS && (j < count || j % DEEP); j += 2) {
    bf16 *at = to + j / DEEP * DEEP * wide + j % DEEP / 2 * DEEP;
    for (int64_t d = 0; d < wide; d += DEEP, at += 2 * TILE_SIZE) {
      const bf16 *from = values + j * wide + d;
      const __m512i one = _mm512_maskz_loadu_epi16(j < count ? ~0u : 0, from);
      const __m512i two = _mm512_maskz_loadu_epi16(j + 1 < count ? ~0u : 0, from + wide);
      _mm512_storeu_si512(at, _mm512_unpacklo_epi16(one, two));
      _mm512_storeu_si512(at + TILE_SIZE, _mm512_unpackhi_epi16(one, two));
    }
  }
}

/* What is made of `count` columns, added to `tiles` tiles of numbers of all queries. */
INLINE void mix(float *made, const bf16 *weights, const bf16 *pairs, int64_t count, int64_t wide,
                const int tiles) {
  _tile_loadd(0, made, LINE);
  _tile_loadd(1, made + SIDE * SIDE, LINE);
  if (tiles > 2) _tile_loadd(2, made + 2 * SIDE * SIDE, LINE);
  if (tiles > 2) _tile_loadd(3, made + 3 * SIDE * SIDE, LINE);
  for (int64_t j = 0; j < count; j += DEEP, weights += TILE_SIZE, pairs += DEEP * wide) {
    _tile_loadd(4, weights, LINE);
    _tile_loadd(6, pairs, LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, pairs + TILE_SIZE, LINE);
    _tile_dpbf16ps(1, 4, 7);
    if (tiles <= 2) continue;
    _tile_loadd(6, pairs + 2 * TILE_SIZE, LINE);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, pairs + 3 * TILE_SIZE, LINE);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, made, LINE);
  _tile_stored(1, made + SIDE * SIDE, LINE);
  if (tiles > 2) _tile_stored(2, made + 2 * SIDE * SIDE, LINE);
  if (tiles > 2) _tile_stored(3, made + 3 * SIDE * SIDE, LINE);
}

/* All of what was made of SIDE queries scaled, each by a factor of its own. */
INLINE void fade_out(float *made, floats fade, int64_t wide) {
  if (_mm512_cmpneq_ps_mask((__m512)fade, (__m512)same(1)) == 0) return;
  for (int r = 0; r < SIDE; r++)
    for (int64_t d = 0; d < wide; d += SIDE) {
      float *some = made + d * SIDE + r * SIDE;
      keep_f32(some, load_f32(some) * fade[r]);
    }
}

INLINE void spread_out(const struct sixteen *at, const float *made, int64_t wide, int64_t count) {
  const floats share = 1 / at->whole;
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0); /* fours zipped */
  for (int r = 0; r < count && r < SIDE; r++)
    for (int64_t d = 0; d < wide; d += DEEP) {
      const float *some = made + d * SIDE + r * SIDE;
      const floats one = load_f32(some) * share[r], two = load_f32(some + SIDE * SIDE) * share[r];
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)two, (__m512)one);
      _mm512_storeu_si512(at->to[r] + d, _mm512_permutexvar_epi64(order, (__m512i)both));
    }
}

/* As block: `rows` queries; zero where vectors have to do it. */
INLINE int amx_block_bf16(const struct layout *of, const struct row *row, const bf16 *q, bf16 *y,
                          const bf16 *keys, const bf16 *values, const bf16 *const later[2],
                          int64_t group, int64_t one, int64_t rows, float scale) {
  if (!amx) return 0;
  const int64_t width = of->width, wide = of->value_width;
  const int64_t last = row->start + (one + rows - 1) / (of->heads / of->groups) + 1;
  const int64_t seen = row->mask ? row->stop : last;
  struct sixteen at[QUERIES / SIDE];
  bf16 laid[QUERIES * width] __attribute__((aligned(LINE)));
  bf16 pairs[COLUMNS * wide] __attribute__((aligned(LINE)));
  bf16 weights[COLUMNS * SIDE] __attribute__((aligned(LINE)));
  bf16 rest[SIDE * width];
  float made[QUERIES * wide] __attribute__((aligned(LINE)));
  floats scores[COLUMNS];
  memset(made, 0, sizeof made);
  for (int64_t r = 0; r < rows; r += SIDE)
    gather(at + r / SIDE, laid + r * width, of, row, q, y, group, one + r, rows - r);
  shape_tiles_for(SIDE);
  for (int64_t first = 0; first < seen; first += COLUMNS) {
    const int64_t end = first + COLUMNS, count = (seen < end ? seen : end) - first;
    const bf16 *next_keys = end < seen ? keys + end * width : later[0], *parts[PARTS];
    const bf16 *next_values = end < seen ? values + end * wide : later[1];
    for (int p = 0; p < PARTS; p++)
      parts[p] = (p + 1) * SIDE <= count ? keys + (first + p * SIDE) * width : rest;
    for (int64_t i = 0, j = count / SIDE * SIDE; count % SIDE && i < SIDE; i++)
      memcpy(rest + i * width, keys + (first + (j + i < count ? j + i : count - 1)) * width,
             width * sizeof(bf16)); /* past the last column, that one again */
    pair(pairs, values + first * wide, count, wide);
    WRITTEN;
    for (int64_t r = 0; r < rows; r += SIDE, next_keys = 0) { /* fetched beside the first of them */
      float *to = made + r * wide;
      score(scores, parts, laid + r * width, width);
      const floats fade =
        weigh(weights, at + r / SIDE, scores, of, row, first, scale, next_keys, next_values);
      fade_out(to, fade, wide);
      WRITTEN;
      for (int64_t d = 0; d < wide; d += 4 * SIDE)
        if (wide - d >= 4 * SIDE) mix(to + d * SIDE, weights, pairs + d * DEEP, count, wide, 4);
        else mix(to + d * SIDE, weights, pairs + d * DEEP, count, wide, 2);
    }
  }
  _tile_release();
  for (int64_t r = 0; r < rows; r += SIDE) spread_out(at + r / SIDE, made + r * wide, wide, rows - r);
  return 1;
}
#define AT_ONCE_bf16 (amx ? SIDE : ROWS) /* queries */
#define ROOM_bf16 (!amx)                 /* whether room is kept for all of a tree */
#else
#define amx_block_bf16(...) 0
#define AT_ONCE_bf16 ROWS
#define ROOM_bf16 1
#endif
#define amx_block_f32(...) 0
#define AT_ONCE_f32 ROWS
#define ROOM_f32 1
#endif
