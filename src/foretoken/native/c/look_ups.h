/* Trees of guesses that were looked up, and what is known of how such guesses came true. */
#ifndef LOOK_UPS_H
#define LOOK_UPS_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__) /* sums as Python makes them: no products within */
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

/* One row's, as one drafter proposes it; arrays of as many numbers as Python made room for
 * (`trees/guesses.py`). */
struct tree {
  int64_t *tokens, *parents, *depths, *ranks; /* ranks: among siblings, in the order of nodes */
  int64_t *marks;  /* by which its drafter tells nodes apart */
  double *shares;  /* that its drafter believes in, before experience */
  double *given;   /* chance given that the parent is right */
  double *paths;   /* chance of the path from the root */
  int64_t count;
  double score;
};

struct list { /* of tokens */
  const int64_t *at;
  int64_t count;
};

struct odds { /* `ClassOdds`: greedy texts behind the others */
  double *hits, *promised, *factors;
  const double *prior;
  const int64_t *places; /* classes of marks below `longest`; of others the last one */
  int64_t count, longest;
  double weight, fade, floor;
};

struct calibration { /* `Calibration` */
  double *hits, *promised;
  const double *edges;
  int64_t edge_count;
  double weight, fade;
};

static inline int among(int64_t token, struct list some) {
  for (int64_t i = 0; i < some.count; i++)
    if (some.at[i] == token) return 1;
  return 0;
}

/* The root alone. */
static inline void plant(struct tree *t, int64_t token) {
  t->tokens[0] = token, t->parents[0] = -1, t->depths[0] = t->ranks[0] = t->marks[0] = 0;
  t->shares[0] = t->given[0] = t->paths[0] = 1;
  t->count = 1, t->score = 0;
}

/* The nodes of another tree, with all that a drafter says of them. */
static inline void take_over(struct tree *t, const struct tree *other) {
  int64_t *const to[] = {t->tokens, t->parents, t->depths, t->ranks, t->marks};
  const int64_t *const from[] = {other->tokens, other->parents, other->depths, other->ranks, other->marks};
  for (int i = 0; i < 5; i++) memcpy(to[i], from[i], other->count * sizeof **to);
  memcpy(t->shares, other->shares, other->count * sizeof *t->shares);
  memcpy(t->paths, other->paths, other->count * sizeof *t->paths);
  t->count = other->count;
}

/* A new child; its rank is found behind the last one of its parent. */
static inline int64_t sprout(struct tree *t, int64_t parent, int64_t token) {
  const int64_t node = t->count++;
  t->tokens[node] = token, t->parents[node] = parent, t->depths[node] = t->depths[parent] + 1;
  t->ranks[node] = 0;
  for (int64_t other = node - 1; other > parent; other--)
    if (t->parents[other] == parent) {
      t->ranks[node] = t->ranks[other] + 1;
      break;
    }
  return node;
}

/* The child of that token; -1: there is none. */
static inline int64_t child(const struct tree *t, int64_t parent, int64_t token) {
  for (int64_t node = parent + 1; node < t->count; node++)
    if (t->parents[node] == parent && t->tokens[node] == token) return node;
  return -1;
}

static inline int64_t odds_place(const struct odds *o, int64_t matched, int64_t greedy) {
  return greedy * o->count + (matched < o->longest ? o->places[matched] : o->count - 1);
}

static inline double odds_chance(const struct odds *o, int64_t matched, double share,
                                 int64_t greedy) {
  const double found = share * o->factors[odds_place(o, matched, greedy)];
  return found < 1 ? found : 1;
}

static inline int64_t calibration_place(const struct calibration *c, double law, int64_t rank,
                                        int64_t greedy) {
  int64_t band = 0;
  while (band < c->edge_count && law >= c->edges[band]) band++;
  return 4 * band + 2 * greedy + (rank > 0);
}

static inline double calibrated(const struct calibration *c, double law, int64_t rank,
                                int64_t greedy) {
  if (law <= 0) return 0;
  const int64_t at = calibration_place(c, law, rank, greedy);
  const double word = c->weight * law;
  const double chance = law * (c->hits[at] + word) / (c->promised[at] + word);
  return chance < 1 ? chance : 1;
}

static inline void calibrate(struct calibration *c, double law, int64_t rank, int64_t greedy,
                             int64_t hit) {
  const int64_t at = calibration_place(c, law, rank, greedy);
  c->hits[at] = c->hits[at] * c->fade + hit;
  c->promised[at] = c->promised[at] * c->fade + law;
}

/* The children of nodes that what was said reaches, in order: goes on from `node` to the next one,
 * and whether it was the one; -1 behind the last. `reached` has a place for every node. */
static inline int64_t next_trial(const struct tree *t, struct list said, char *reached, int64_t node,
                                 int64_t *hit) {
  if (node == 0) memset(reached, 0, t->count), reached[0] = 1;
  for (node++; node < t->count; node++) {
    const int64_t above = t->depths[node] - 1;
    if (!reached[t->parents[node]] || above >= said.count) continue;
    *hit = reached[node] = t->tokens[node] == said.at[above];
    return node;
  }
  return -1;
}

/* Chances of whole paths from those given the parent: siblings share at most one. */
static inline void spread_over_paths(struct tree *t, const double *here) {
  double *total = calloc(t->count, sizeof *total);
  for (int64_t node = 1; node < t->count; node++) total[t->parents[node]] += here[node];
  for (int64_t node = 1; node < t->count; node++) {
    const int64_t parent = t->parents[node];
    t->paths[node] = t->paths[parent] * here[node] / (total[parent] > 1 ? total[parent] : 1);
  }
  free(total);
}
#endif
