/* A draft model's tree in one call: its forwards, level by level, and between them which of the
 * candidates the next level has. Decides as `drafters/growers/best_first.py` does, number by number;
 * what a call of Python costs there is spared once per level. */
#include <float.h>
#include <time.h>

#include "operations.h"

enum { NODES = 512, FED = 128, AT_ONCE = 64, WIDEST = 64 };
static const f32 LOWEST_f32 = -FLT_MAX; /* a softmax makes zero of it */
static const bf16 LOWEST_bf16 = 0xff7f;

struct growth {
  /* the forward, whose logits the last step writes, and the row of the cache that it fills */
  const struct step *steps;
  int64_t step_count;
  void *const *buffers;
  const struct cached *layers;
  int64_t threads;
  const void *logits;
  int64_t columns, apart; /* those that are tokens; from row to row */
  const int64_t *names;   /* of the columns; null: their numbers */
  double scale;           /* of logits: over the temperature */
  void *mask;
  int64_t late, root, room, most; /* tokens before the root; its column; columns from there on; fed at once */
  /* what decides */
  int64_t depth, nodes, branch;
  const int64_t *ends; /* no token follows these */
  int64_t end_count;
  const double *prices, *bars; /* of so many nodes; what a node at each level must be worth to be fed */
  int64_t price_count;
  double share, least, level_price, floor, min_gain;
  const double *hits, *promised, *edges; /* of confidence, corrected by experience; null: as it is */
  int64_t edge_count, greedy, rehearsed;
  double weight, last, following; /* of the decline from level to level */
  /* the tree */
  int64_t count, level, fed, paid, held, waiting;
  double worth, gain, seconds; /* of its forwards */
  struct row row;
  int64_t ids[AT_ONCE], positions[AT_ONCE];
  int64_t tokens[NODES], parents[NODES], ranks[NODES], places[NODES]; /* of those that were fed */
  double laws[NODES], values[NODES];
  int64_t best[AT_ONCE + 1], frontier[AT_ONCE], above[FED], depths[FED]; /* the last two by place */
  float chances[AT_ONCE * WIDEST];
  int64_t followers[AT_ONCE * WIDEST];
};

int64_t growth_bytes(void) { return sizeof(struct growth); }

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* That a child of this probability and rank is the one, given that its parent is. */
static double chance_of(const struct growth *g, double law, int64_t rank) {
  if (g->rehearsed) return rank ? law : 1;
  if (!g->hits) return law;
  int64_t band = 0;
  while (band < g->edge_count && law >= g->edges[band]) band++;
  const int64_t at = 4 * band + 2 * g->greedy + (rank > 0);
  const double word = g->weight * law;
  const double chance = law * (g->hits[at] + word) / (g->promised[at] + word);
  return chance < 1 ? chance : 1;
}

/* What a further candidate must exceed. */
static double least_of(const struct growth *g) {
  return g->held == g->nodes ? g->values[g->best[g->held - 1]] : g->floor;
}

/* A candidate, among the best ones: behind those worth as much. */
static void enter(struct growth *g, int64_t parent, int64_t token, int64_t rank, double law, double value) {
  const int64_t node = g->count++;
  g->tokens[node] = token, g->parents[node] = parent, g->ranks[node] = rank, g->places[node] = -1;
  g->laws[node] = law, g->values[node] = value;
  int64_t i = g->held < g->nodes ? g->held++ : g->held - 1;
  for (; i > 0 && g->values[g->best[i - 1]] < value; i--) g->best[i] = g->best[i - 1];
  g->best[i] = node;
}

/* Children of the nodes just fed that can still be among the best: each has `width` likeliest tokens. */
static void spawn(struct growth *g, int64_t width) {
  for (int64_t f = 0; f < g->waiting; f++) {
    const int64_t node = g->frontier[f];
    const double above = g->values[node];
    for (int64_t rank = 0; rank < width; rank++) {
      const double law = g->chances[f * width + rank], least = least_of(g);
      if (law <= 0 || above <= least) break; /* no child is worth more than its parent */
      const double value = above * chance_of(g, law, rank);
      if (value > least) enter(g, node, g->followers[f * width + rank], rank, law, value);
      else if (rank) break; /* only the favourite is trusted by another measure than the next */
    }
  }
}

/* Of the best nodes, those that are worth most above the price of scoring them. */
static void pay(struct growth *g) {
  double total = 0;
  if (!g->price_count) {
    for (int64_t i = 0; i < g->held; i++) total += g->values[g->best[i]];
    g->paid = g->held, g->worth = total;
    return;
  }
  g->paid = 0, g->worth = 0;
  for (int64_t n = 1; n <= g->held && n < g->price_count; n++) {
    total += g->values[g->best[n - 1]];
    if (total - g->prices[n] > g->worth) g->worth = total - g->prices[n], g->paid = n;
  }
}

static int ends(const struct growth *g, int64_t token) {
  for (int64_t i = 0; i < g->end_count; i++)
    if (g->ends[i] == token) return 1;
  return 0;
}

/* The nodes from `born` on that are worth feeding, best first. */
static void choose(struct growth *g, int64_t born) {
  const double bar = g->bars ? g->bars[g->level] : g->least;
  g->waiting = 0;
  for (int64_t i = 0; i < g->paid; i++) {
    const int64_t node = g->best[i];
    if (node >= born && g->values[node] * g->share >= bar && !ends(g, g->tokens[node]))
      g->frontier[g->waiting++] = node;
  }
}

/* Whether one level more is likely to pay, after one before the last that gained `before`. */
static int promising(struct growth *g, double before) {
  double most = 0;
  for (int64_t f = 0; f < g->waiting; f++) most += g->values[g->frontier[f]];
  if (most < g->min_gain) return 0;
  if (g->level > 1 && !g->rehearsed) {
    const double fade = 0x1.fa7c1819e90d8p-1; /* one half to the 64th part */
    g->last = g->last * fade + before, g->following = g->following * fade + g->gain;
  }
  const double share = g->following / g->last;
  return g->gain * (share < 1 ? share : 1) >= g->level_price;
}

/* What of the frontier is known before its forward: ids, positions, columns; whether it is a chain. */
static int place(struct growth *g) {
  const int64_t before = g->fed ? 0 : g->late;
  for (int64_t i = 0; i < before; i++) g->positions[i] = g->root - g->late + i;
  int chain = 1;
  for (int64_t f = 0; f < g->waiting; f++) {
    const int64_t node = g->frontier[f], at = g->fed + f;
    const int64_t above = g->parents[node] < 0 ? -1 : g->places[g->parents[node]];
    g->above[at] = above, g->depths[at] = above < 0 ? 0 : g->depths[above] + 1;
    g->ids[before + f] = g->tokens[node], g->positions[before + f] = g->root + g->depths[at];
    chain &= g->depths[at] == at;
  }
  const int64_t all = before + g->waiting, start = g->root + g->fed - before, stop = start + all;
  g->row = (struct row){g->row.slot, 0, all, start, stop, stop, 0, 0};
  return chain;
}

#define DEFINE(T)                                                                                 \
  /* who sees whom of the columns from the root on: each node its ancestors and itself */         \
  static void hide_##T(struct growth *g) {                                                        \
    const int64_t wide = g->fed + g->waiting;                                                     \
    T *mask = g->mask;                                                                            \
    for (int64_t f = 0; f < g->waiting; f++, mask += wide) {                                      \
      for (int64_t j = 0; j < wide; j++) mask[j] = LOWEST_##T;                                    \
      for (int64_t at = g->fed + f; at >= 0; at = g->above[at]) mask[at] = 0;                     \
    }                                                                                             \
    g->row.mask = g->mask, g->row.mask_token = wide, g->row.behind = g->root;                     \
  }                                                                                               \
                                                                                                  \
  /* one: the tree is whole; zero: somebody else has to go on from here */                        \
  int64_t grow_##T(struct growth *g, const int64_t *places) {                                     \
    int64_t width = g->branch < g->columns ? g->branch : g->columns;                              \
    width = width < g->nodes ? width : g->nodes;                                                  \
    for (;;) {                                                                                    \
      const int64_t before = g->fed ? 0 : g->late, new = g->waiting, born = g->count;             \
      if (before + new > g->most || g->fed + new > g->room || g->fed + new > FED) return 0;       \
      if (born + new * width > NODES) return 0;                                                   \
      if (!place(g)) hide_##T(g);                                                                 \
      const double began = now();                                                                 \
      const int64_t beyond = segment_##T(g->steps, g->step_count, g->buffers, before + new, new,  \
                                         g->ids, g->positions, places + before, g->layers,        \
                                         &g->row, 1, (int)g->threads);                            \
      g->seconds += now() - began;                                                                \
      if (beyond >= 0) return 0;                                                                  \
      for (int64_t f = 0; f < new; f++) g->places[g->frontier[f]] = g->fed++;                     \
      best_##T(g->logits, new, g->columns, g->apart, (float)g->scale, g->names, width, g->chances, \
               g->followers);                                                                     \
      const double earlier = g->gain, worth = g->worth;                                           \
      spawn(g, width);                                                                            \
      pay(g);                                                                                     \
      g->gain = g->worth - worth, g->level++;                                                     \
      choose(g, born);                                                                            \
      if (g->level >= g->depth || !g->waiting || !promising(g, earlier)) return 1;                \
    }                                                                                             \
  }

DEFINE(f32)
DEFINE(bf16)
