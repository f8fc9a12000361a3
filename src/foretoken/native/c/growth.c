/* Trees of a draft model in one call, one for each row: forwards over all of them, level by level, and
 * between them which of the candidates the next level has. Decides as the growers in Python do, number by
 * number (`drafters/growers`); what these cost between two forwards of a small model is spared. */
#include <float.h>
#include <time.h>

#include "operations.h"
#include "look_ups.h" /* behind it sums are made as Python makes them */

enum { NODES = 2048, FED = 256, AT_ONCE = 64, WIDEST = 64 };
static const f32 LOWEST_f32 = -FLT_MAX; /* a softmax makes zero of it */
static const bf16 LOWEST_bf16 = 0xff7f;

enum { GROWING, WHOLE, LEFT }; /* the last: somebody else has to go on from there */

struct forward { /* of the next nodes of all trees, whose logits its last step writes */
  const struct step *steps;
  int64_t step_count;
  void *const *buffers;
  const struct cached *layers;
  int64_t threads, most, widest; /* tokens fed at once, and of one row */
  const void *logits;
  int64_t columns, apart; /* those that are tokens; from row to row */
  const int64_t *names;   /* of the columns; null: their numbers */
  /* of a model that is fed with more than tokens: a row of the table for each, and what was said at
   * its parent, so many numbers behind the columns */
  const void *table;
  void *entry; /* what the steps read; null: they read tokens alone */
  int64_t width;
  double seconds;         /* that forwards took */
  struct row rows[AT_ONCE];
  int64_t ids[AT_ONCE], positions[AT_ONCE], wanted[AT_ONCE];
  float chances[AT_ONCE * WIDEST];
  int64_t followers[AT_ONCE * WIDEST];
};

struct growth { /* one row's tree */
  int64_t slot, late, root, room; /* of the cache; tokens before the root; its column; columns from it on */
  void *mask;
  const void *given; /* what enters at the tokens before the root and at the root */
  void *said;        /* at nodes, by place */
  /* what decides */
  double scale; /* of logits: over the temperature */
  int64_t depth, nodes, branch;
  const int64_t *ends; /* no token follows these */
  int64_t end_count;
  const double *prices, *bars; /* of so many nodes; what a node at each level must be worth to be fed */
  int64_t price_count;
  double share, least, level_price, floor, min_gain;
  const double *hits, *promised, *edges; /* of confidence, corrected by experience; null: as it is */
  int64_t edge_count, greedy, rehearsed;
  double weight, fade, *decline; /* what levels gained, and those after them; null: as much */
  /* of a chain whose tokens are drawn: a coin for each, what logits are over in its laws, and room for
   * these, one more than there are levels, so many numbers each; null: the likeliest */
  const double *coins;
  double law_scale;
  float *drawn;
  int64_t law_width;
  /* the tree */
  int64_t state, count, level, fed, paid, held, waiting;
  double worth, gain;
  int64_t before[AT_ONCE]; /* the tokens before the root */
  int64_t tokens[NODES], parents[NODES], ranks[NODES], places[NODES]; /* of those that were fed */
  double laws[NODES], values[NODES];
  int64_t best[AT_ONCE], frontier[AT_ONCE], above[FED], depths[FED]; /* the last two by place */
};

int64_t growth_bytes(void) { return sizeof(struct growth); }
int64_t forward_bytes(void) { return sizeof(struct forward); }

static double seconds(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* That a child of this probability and rank is the one, given that its parent is. */
static double chance_of(const struct growth *g, double law, int64_t rank) {
  if (g->rehearsed) return rank ? law : 1;
  if (!g->hits) return law;
  const struct calibration known = {(double *)g->hits, (double *)g->promised, g->edges, g->edge_count,
                                    g->weight, 0};
  return calibrated(&known, law, rank, g->greedy);
}

/* What a further candidate must exceed. */
static double least_of(const struct growth *g) {
  return g->held == g->nodes ? g->values[g->best[g->held - 1]] : g->floor;
}

/* A candidate, among the best ones: behind those worth as much. */
static void enter(struct growth *g, int64_t parent, int64_t token, int64_t rank, double law,
                  double value) {
  const int64_t node = g->count++;
  g->tokens[node] = token, g->parents[node] = parent, g->ranks[node] = rank, g->places[node] = -1;
  g->laws[node] = law, g->values[node] = value;
  int64_t i = g->held < g->nodes ? g->held++ : g->held - 1;
  for (; i > 0 && g->values[g->best[i - 1]] < value; i--) g->best[i] = g->best[i - 1];
  g->best[i] = node;
}

/* Children of the nodes just fed that can still be among the best, of `width` likeliest tokens of each. */
static void spawn(struct growth *g, int64_t width, const float *chances, const int64_t *followers) {
  for (int64_t f = 0; f < g->waiting; f++) {
    const int64_t node = g->frontier[f];
    const double above = g->values[node];
    for (int64_t rank = 0; rank < width; rank++) {
      const double law = chances[f * width + rank], least = least_of(g);
      if ((law <= 0 && !g->coins) || above <= least) break; /* no child is worth more than its parent */
      const double value = above * chance_of(g, law, rank);
      if (value > least) enter(g, node, followers[f * width + rank], rank, law, value);
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
  return among(token, (struct list){g->ends, g->end_count});
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
  double *decline = g->decline;
  if (decline && g->level > 1 && !g->rehearsed) {
    decline[0] = decline[0] * g->fade + before, decline[1] = decline[1] * g->fade + g->gain;
  }
  const double share = decline ? decline[1] / decline[0] : 1;
  return g->gain * (share < 1 ? share : 1) >= g->level_price;
}

static int64_t tokens_of(const struct growth *g) { /* that its next level feeds */
  return g->waiting + (g->fed ? 0 : g->late);
}

/* Whether there is room for a tree's next level. */
static int fits(const struct growth *g, const struct forward *all, int64_t width) {
  const int64_t new = g->waiting;
  return tokens_of(g) <= all->widest && g->fed + new <= g->room && g->fed + new <= FED &&
         g->count + new * width <= NODES;
}

/* What of the frontier is known before its forward, behind so many tokens of other rows, of which so
 * many are wanted: ids, positions, columns. Whether it is a chain. */
static int place(struct growth *g, struct forward *all, struct row *row, int64_t first,
                 int64_t wanted) {
  const int64_t before = g->fed ? 0 : g->late, last = first + before + g->waiting;
  for (int64_t i = 0; i < before; i++)
    all->ids[first + i] = g->before[i], all->positions[first + i] = g->root - g->late + i;
  int chain = 1;
  for (int64_t f = 0, t = first + before; f < g->waiting; f++, t++) {
    const int64_t node = g->frontier[f], at = g->fed + f;
    const int64_t above = g->parents[node] < 0 ? -1 : g->places[g->parents[node]];
    g->above[at] = above, g->depths[at] = above < 0 ? 0 : g->depths[above] + 1;
    all->ids[t] = g->tokens[node], all->positions[t] = g->root + g->depths[at];
    all->wanted[wanted + f] = t;
    chain &= g->depths[at] == at;
  }
  const int64_t start = g->root + g->fed - before, stop = start + last - first;
  *row = (struct row){g->slot, first, last, start, stop, stop, 0, 0, 0};
  return chain;
}

static int64_t width_of(const struct growth *g, const struct forward *all) {
  const int64_t width = g->branch < all->columns ? g->branch : all->columns;
  return width < g->nodes ? width : g->nodes;
}

/* One level more, of the nodes just fed. */
static void rise(struct growth *g, int64_t width, const float *chances, const int64_t *followers) {
  const int64_t born = g->count;
  const double before = g->gain, worth = g->worth;
  for (int64_t f = 0; f < g->waiting; f++) g->places[g->frontier[f]] = g->fed++;
  spawn(g, width, chances, followers);
  pay(g);
  g->gain = g->worth - worth, g->level++;
  choose(g, born);
  if (g->level >= g->depth || !g->waiting || !promising(g, before)) g->state = WHOLE;
}

#define DEFINE(T)                                                                                 \
  /* what enters at the tokens of a tree's next level, in place of their embeddings */            \
  static void bring_##T(const struct growth *g, const struct forward *all, int64_t first) {       \
    const int64_t width = all->width;                                                             \
    T *to = (T *)all->entry + first * width;                                                      \
    if (!g->fed) {                                                                                \
      memcpy(to, g->given, (size_t)((g->late + 1) * width) * sizeof(T));                          \
      return;                                                                                     \
    }                                                                                             \
    for (int64_t f = 0; f < g->waiting; f++, to += width) {                                       \
      const int64_t node = g->frontier[f];                                                        \
      const T *own = (const T *)all->table + g->tokens[node] * width;                             \
      const T *said = (const T *)g->said + g->places[g->parents[node]] * width;                   \
      for (int64_t k = 0; k < width; k += LANES)                                                  \
        keep_##T(to + k, widened_##T(own + k) + widened_##T(said + k));                           \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  /* what is said at the nodes just fed, of logits from `z` on */                                 \
  static void hear_##T(const struct growth *g, const struct forward *all, const T *z) {           \
    for (int64_t f = 0; f < g->waiting; f++)                                                      \
      memcpy((T *)g->said + (g->fed + f) * all->width, z + f * all->apart + all->columns,         \
             (size_t)all->width * sizeof(T));                                                     \
  }                                                                                               \
                                                                                                  \
  /* A token drawn at the node just fed, and the chance that it has by the logits alone. How many   \
   * that are: none of what is no law. */                                                         \
  static int64_t draw_##T(const struct growth *g, const struct forward *all, const T *z,          \
                          float *chance, int64_t *token) {                                        \
    float *law = g->drawn + g->level * g->law_width;                                              \
    law_##T(z, 1, all->columns, 0, (float)g->law_scale, all->names, g->law_width, law, 1);        \
    drawn_f32(law, g->law_width, g->coins[g->level], token);                                      \
    if (*token < 0) return 0;                                                                     \
    if (g->law_scale != g->scale && g->bars) { /* in the place of the next law */                 \
      law += g->law_width;                                                                        \
      law_##T(z, 1, all->columns, 0, (float)g->scale, all->names, g->law_width, law, 1);          \
    }                                                                                             \
    *chance = law[*token];                                                                        \
    return 1;                                                                                     \
  }                                                                                               \
                                                                                                  \
  /* who sees whom of the columns from the root on: each node its ancestors and itself */         \
  static void hide_##T(const struct growth *g, struct row *row) {                                 \
    const int64_t wide = g->fed + g->waiting;                                                     \
    T *mask = g->mask;                                                                            \
    for (int64_t f = 0; f < g->waiting; f++, mask += wide) {                                      \
      for (int64_t j = 0; j < wide; j++) mask[j] = LOWEST_##T;                                    \
      for (int64_t at = g->fed + f; at >= 0; at = g->above[at]) mask[at] = 0;                     \
    }                                                                                             \
    row->mask = g->mask, row->mask_token = wide, row->behind = g->root;                           \
  }                                                                                               \
                                                                                                  \
  void grow_##T(struct forward *all, struct growth *const *trees, int64_t count) {                \
    for (;;) {                                                                                    \
      struct growth *now[AT_ONCE];                                                                \
      int64_t tokens = 0, wanted = 0, rows = 0, all_of_them = 0;                                  \
      for (int64_t i = 0; i < count; i++) {                                                       \
        struct growth *g = trees[i];                                                              \
        if (g->state == GROWING && !fits(g, all, width_of(g, all))) g->state = LEFT;              \
        if (g->state == GROWING) all_of_them += tokens_of(g);                                     \
      }                                                                                           \
      for (int64_t i = 0; i < count; i++) {                                                       \
        struct growth *g = trees[i];                                                              \
        if (g->state != GROWING) continue;                                                        \
        if (all_of_them > all->most) { /* somebody else has one forward for all of them */\
          g->state = LEFT;                                                                        \
          continue;                                                                               \
        }                                                                                         \
        struct row *row = all->rows + rows;                                                       \
        if (!place(g, all, row, tokens, wanted)) hide_##T(g, row);                                \
        if (all->entry) bring_##T(g, all, tokens);                                                \
        tokens = row->last, wanted += g->waiting;                                                 \
        now[rows++] = g;                                                                          \
      }                                                                                           \
      if (!rows) return;                                                                          \
      const double began = seconds();                                                             \
      const int64_t beyond = segment_##T(all->steps, all->step_count, all->buffers, tokens,       \
                                         wanted, all->ids, all->positions, all->wanted,           \
                                         all->layers, all->rows, rows, (int)all->threads);        \
      all->seconds += seconds() - began;                                                          \
      const T *z = all->logits;                                                                   \
      for (int64_t r = 0; r < rows; r++) {                                                        \
        struct growth *g = now[r];                                                                \
        if (beyond >= 0) { /* a table that has to be longer: nothing was done */                  \
          g->state = LEFT;                                                                        \
          continue;                                                                               \
        }                                                                                         \
        const int64_t new = g->waiting;                                                           \
        int64_t width = width_of(g, all);                                                         \
        if (g->coins) width = draw_##T(g, all, z, all->chances, all->followers);                  \
        else                                                                                      \
          best_##T(z, new, all->columns, all->apart, (float)g->scale, all->names, width,          \
                   all->chances, all->followers);                                                 \
        if (all->entry) hear_##T(g, all, z);                                                      \
        rise(g, width, all->chances, all->followers);                                             \
        z += new * all->apart;                                                                    \
      }                                                                                           \
    }                                                                                             \
  }

DEFINE(f32)
DEFINE(bf16)
