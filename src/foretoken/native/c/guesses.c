/* What becomes of trees of guesses: what came true of them, trees of remembered followers, those of several
 * drafters as one, and the part that pays. As `drafters/parts/class_odds.py`, `parts/adjacency.py`,
 * `fusion.py`, `trees/token_odds.py` and `parts/chances.py` do. */
#include <math.h>
#include "look_ups.h"

struct token_odds { /* `TokenOdds` */
  double *numbers; /* of a kind of token: a shift and squared errors, as four kinds of guesses have it */
  int64_t kinds;
  double likely, least, most, token_rate, before_rate, text_rate, most_squares;
};

static inline double *odds_of(const struct token_odds *o, double promised, int64_t token, int before) {
  return o->numbers + 8 * (token % o->kinds) + 4 * before + 2 * (promised >= o->likely);
}

static double token_chance(const struct token_odds *o, double promised, int64_t token, int64_t before,
                      const double *text) {
  if (promised <= 0) return 0;
  const double of_token = *odds_of(o, promised, token, 0), of_before = *odds_of(o, promised, before, 1);
  const double least = promised > o->least ? promised : o->least;
  const double within = least < o->most ? least : o->most;
  const double odds = log(within / (1 - within)) + of_token + of_before + *text;
  return 1 / (1 + exp(-odds));
}

static inline void learn_shift(double *numbers, double rate, double error, double most_squares) {
  const double squares = numbers[1] + error * error;
  numbers[1] = squares < most_squares ? squares : most_squares;
  numbers[0] += rate * error / sqrt(1 + numbers[1]);
}

static void token_tried(const struct token_odds *o, double promised, int64_t token, int64_t before, double *text,
                  int64_t hit) {
  if (promised <= 0) return;
  const double error = hit - token_chance(o, promised, token, before, text);
  learn_shift(odds_of(o, promised, token, 0), o->token_rate, error, o->most_squares);
  learn_shift(odds_of(o, promised, before, 1), o->before_rate, error, o->most_squares);
  *text += o->text_rate * error;
}

/* What came is compared with what was looked up, scored or not. */
void guesses_tried(const struct tree *t, const int64_t *tokens, int64_t count, struct odds *o,
                   int64_t greedy) {
  const struct list said = {tokens, count};
  char *reached = malloc(t->count);
  int64_t hit = 0;
  for (int64_t node = 0; (node = next_trial(t, said, reached, node, &hit)) > 0;) {
    const int64_t at = odds_place(o, t->marks[node], greedy);
    o->hits[at] = o->hits[at] * o->fade + hit;
    o->promised[at] = o->promised[at] * o->fade + t->shares[node];
    const double prior = o->prior[at % o->count];
    const double factor = (o->hits[at] + o->weight * prior) / (o->promised[at] + o->weight);
    o->factors[at] = factor > o->floor ? factor : o->floor;
  }
  free(reached);
}

struct memory { /* `Adjacency` */
  const int32_t *ids; /* followers of every token, likeliest first; below zero: unknown */
  const uint8_t *sure;
  int64_t keep;
};

/* The likeliest nodes below the root, best first; of equals the child of the older node, then the better
 * rank. Classes of further followers stand behind those of first ones. */
void recycled(struct tree *t, const struct memory *known, int64_t root, const struct odds *odds,
              double least, int64_t depth, int64_t nodes, int64_t greedy, const int64_t *end,
              int64_t end_count) {
  const struct list ends = {end, end_count};
  const int64_t keep = known->keep, further = odds->count / 2;
  plant(t, root);
  int64_t *next = malloc((nodes + 1) * sizeof *next); /* of every node: rank of its next child */
  next[0] = depth > 0 ? 0 : keep;
  while (t->count <= nodes) {
    double best = -1;
    int64_t parent = -1, mark = 0;
    for (int64_t node = 0; node < t->count; node++) {
      if (next[node] >= keep) continue;
      const int64_t at = t->tokens[node] * keep + next[node];
      const int64_t class = known->sure[at] + (next[node] ? further : 0);
      const double chance =
          known->ids[at] < 0 ? -1 : t->paths[node] * odds_chance(odds, class, 1, greedy);
      if (chance < least) next[node] = keep; /* no worse one is asked for */
      else if (chance > best) best = chance, parent = node, mark = class;
    }
    if (parent < 0) break;
    const int64_t token = known->ids[t->tokens[parent] * keep + next[parent]++];
    const int64_t node = sprout(t, parent, token);
    t->marks[node] = mark, t->shares[node] = 1, t->paths[node] = best;
    next[node] = t->depths[node] < depth && !among(token, ends) ? 0 : keep;
  }
  free(next);
}

/* All trees as one. Of every node `marks` say how many have it, `shares` the best chance that any of them
 * gives it, `given` what that is worth whatever its token, `paths` what it is worth as that token and in
 * this text. The calibrations: of each tree so many, by depth, and of nodes that so many agree on. */
void merged(struct tree *t, struct tree *const *offers, int64_t count,
            const struct calibration *levels, int64_t level_count, const struct calibration *agreed,
            const struct token_odds *odds, int64_t greedy, const double *text) {
  plant(t, offers[0]->tokens[0]);
  int64_t longest = 0, all = 1;
  for (int64_t o = 0; o < count; o++) {
    longest = offers[o]->count > longest ? offers[o]->count : longest;
    all += offers[o]->count - 1;
  }
  int64_t *place = malloc((longest + all) * sizeof *place), *voted = place + longest;
  place[0] = 0;
  for (int64_t o = 0; o < count; o++) {
    struct tree *own = offers[o];
    for (int64_t node = 1; node < own->count; node++) {
      const int64_t depth = own->depths[node], parent = own->parents[node];
      const double above = own->paths[parent], share = above > 0 ? own->paths[node] / above : 0;
      own->given[node] = share < 1 ? share : 1;
      const struct calibration *level =
          levels + o * level_count + (depth < level_count ? depth : level_count) - 1;
      const double chance = calibrated(level, own->given[node], own->ranks[node], greedy);
      int64_t at = child(t, place[parent], own->tokens[node]);
      if (at < 0) {
        at = sprout(t, place[parent], own->tokens[node]);
        t->marks[at] = 0, t->shares[at] = chance, voted[at] = -1;
      }
      if (voted[at] != o) t->marks[at]++, voted[at] = o;
      if (chance > t->shares[at]) t->shares[at] = chance;
      place[node] = at;
    }
  }
  double *here = malloc(all * sizeof *here);
  for (int64_t node = 1; node < t->count; node++) {
    t->given[node] = calibrated(agreed + t->marks[node], t->shares[node], 0, greedy);
    here[node] = token_chance(odds, t->given[node], t->tokens[node], t->tokens[t->parents[node]], text);
  }
  spread_over_paths(t, here);
  free(here);
  free(place);
}

/* All trees, and what became of them, are compared with what came. */
void merged_tried(const struct tree *t, struct tree *const *offers, int64_t count,
                  struct calibration *levels, int64_t level_count, struct calibration *agreed,
                  const struct token_odds *odds, int64_t greedy, double *text, const int64_t *tokens,
                  int64_t token_count) {
  const struct list said = {tokens, token_count};
  int64_t most = t->count, hit = 0;
  for (int64_t o = 0; o < count; o++) most = offers[o]->count > most ? offers[o]->count : most;
  char *reached = malloc(most);
  for (int64_t o = 0; o < count; o++) {
    const struct tree *own = offers[o];
    for (int64_t node = 0; (node = next_trial(own, said, reached, node, &hit)) > 0;) {
      const int64_t depth = own->depths[node] < level_count ? own->depths[node] : level_count;
      calibrate(levels + o * level_count + depth - 1, own->given[node], own->ranks[node], greedy, hit);
    }
  }
  for (int64_t node = 0; (node = next_trial(t, said, reached, node, &hit)) > 0;) {
    calibrate(agreed + t->marks[node], t->shares[node], 0, greedy, hit);
    token_tried(odds, t->given[node], t->tokens[node], t->tokens[t->parents[node]], text, hit);
  }
  free(reached);
}

static int falling(const void *a, const void *b) {
  const double one = *(const double *)a, other = *(const double *)b;
  return (one < other) - (one > other);
}

/* The likeliest nodes, as many as are allowed and worth their price, the root first, in `kept` and, unless
 * they are all, as a tree; how many. No prices: as many as are allowed. */
int64_t paid(const struct tree *t, struct tree *cut, int64_t nodes, const double *prices,
             int64_t price_count, int64_t *kept) {
  const int64_t below = t->count - 1;
  double *best = malloc((below + 1) * sizeof *best);
  memcpy(best, t->paths + 1, below * sizeof *best);
  qsort(best, below, sizeof *best, falling);
  int64_t count = below < nodes ? below : nodes;
  if (price_count) {
    double most = 0, total = 0;
    int64_t bought = 0;
    for (int64_t n = 1; n <= count && n < price_count; n++) {
      total += best[n - 1];
      if (total - prices[n] > most) most = total - prices[n], bought = n;
    }
    count = bought;
  }
  const double bar = count ? best[count - 1] : 2;
  int64_t found = 1, equal = count;
  for (int64_t i = 0; i < count; i++) equal -= best[i] > bar;
  kept[0] = 0;
  for (int64_t node = 1; node <= below; node++)
    if (t->paths[node] > bar || (t->paths[node] == bar && equal-- > 0)) kept[found++] = node;
  free(best);
  if (found == t->count) return found;
  plant(cut, t->tokens[0]);
  for (int64_t i = 1, parent = 0; i < found; i++) {
    if (t->parents[kept[i]] < kept[parent]) parent = 0;
    while (kept[parent] < t->parents[kept[i]]) parent++;
    cut->paths[sprout(cut, parent, t->tokens[kept[i]])] = t->paths[kept[i]];
  }
  return found;
}
