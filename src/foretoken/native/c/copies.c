/* Copies of what followed before in a text, as trees, in one call. Decides as `drafters/prompt_lookup.py`
 * and `drafters/suffix.py` do, number by number. */
#include "look_ups.h"

struct place {
  int64_t at, matched;
};

/* Tokens before `start` that are those at the end of the text, as far as is told apart. */
static int64_t common(struct list text, int64_t start, int64_t longest) {
  const int64_t furthest = longest < start ? longest : start;
  int64_t length = 1;
  while (length < furthest && text.at[start - 1 - length] == text.at[text.count - 1 - length]) length++;
  return length;
}

/* Copies from `starts` on, which themselves are part of what is copied, each as far as it is likely. */
void copied(struct tree *t, const int64_t *tokens, int64_t token_count, const int64_t *from, int64_t from_count,
            int64_t depth, int64_t nodes, double least, const struct odds *odds, int64_t greedy,
            const int64_t *end, int64_t end_count) {
  const struct list text = {tokens, token_count}, starts = {from, from_count}, ends = {end, end_count};
  plant(t, text.at[text.count - 1]);
  for (int64_t s = 0; s < starts.count; s++) {
    const int64_t start = starts.at[s], period = text.count - start;
    const int64_t matched = common(text, start, odds->longest - 1);
    double reached = 1;
    int64_t node = 0;
    for (int64_t i = 0; i < depth; i++) {
      const int64_t token = text.at[start + i % period];
      const double chance = odds_chance(odds, matched + i, 1, greedy);
      reached *= chance;
      int64_t below = child(t, node, token);
      if (below < 0) {
        if (t->count > nodes || reached < least) break;
        below = sprout(t, node, token);
        t->marks[below] = matched + i, t->shares[below] = 1, t->given[below] = chance;
      }
      node = below;
      if (among(token, ends)) break;
    }
  }
  spread_over_paths(t, t->given);
}

struct index { /* `SuffixIndex`: places chained by the last one, and the last two, tokens before them */
  struct list text;
  const int64_t *by_one, *by_two; /* the place before, counted from the first token ever */
  int64_t base;                   /* tokens forgotten */
  int64_t after_one, after_two;   /* the newest places, from there on */
};

struct following { /* what a speculation is to be like */
  int64_t longest, most;             /* match told apart; occurrences */
  int64_t max_spec, branching, lengths; /* the last: of matches looked at, where nodes have prices */
  double factor, offset, min_prob;
};

struct trie { /* of what followed */
  int64_t *tokens, *parents, *counts, *first, *next; /* the last two: children */
  int64_t count;
};

enum { LOOKED = 4 }; /* places behind one token that are visited for each that is wanted */

/* The newest occurrences behind the last two tokens, then as many behind the last alone: of few visited, as
 * in a text that goes round in circles nearly all lie behind both. */
static int64_t occurrences(const struct index *in, struct list context, const struct following *how,
                           int64_t most, struct place *found) {
  const int64_t *text = in->text.at, *last = context.at + context.count - 1;
  const int64_t pairs = context.count > 1 && how->longest > 1;
  const int64_t told_apart = how->longest < context.count ? how->longest : context.count;
  struct place *both = malloc((2 * most + 1) * sizeof *both), *one = both + most;
  int64_t twos = 0, ones = 0, looked = 0;
  for (int64_t at = in->after_two - in->base; pairs && at >= 0 && twos < most;
       at = in->by_two[at] - in->base) {
    const int64_t furthest = told_apart < at ? told_apart : at;
    int64_t length = 2;
    while (length < furthest && text[at - 1 - length] == last[-length]) length++;
    both[twos++] = (struct place){at, length};
  }
  for (int64_t at = in->after_one - in->base; at >= 0 && ones < most && looked < LOOKED * most;
       at = in->by_one[at] - in->base, looked++)
    if (!pairs || at < 2 || text[at - 2] != last[-1]) one[ones++] = (struct place){at, 1};
  int64_t count = 0;
  for (int64_t i = 0, j = 0; i < twos || j < ones;) /* newest first */
    found[count++] = j == ones || (i < twos && both[i].at > one[j].at) ? both[i++] : one[j++];
  free(both);
  return count;
}

/* The trie of what followed places with a match so long. Returns how many there are. */
static int64_t follow(struct trie *t, const struct index *in, const struct place *places, int64_t count,
                      int64_t matched, int64_t depth, struct list ends) {
  int64_t total = 0;
  t->count = 1, t->first[0] = t->next[0] = -1;
  for (int64_t p = 0; p < count; p++) {
    if (places[p].matched < matched) continue;
    total++;
    for (int64_t at = places[p].at, node = 0, d = 0; d < depth && at < in->text.count; at++, d++) {
      const int64_t token = in->text.at[at];
      if (token < 0) break; /* the end of a text */
      int64_t below = t->first[node], before = -1;
      while (below >= 0 && t->tokens[below] != token) before = below, below = t->next[below];
      if (below < 0) {
        below = t->count++;
        t->tokens[below] = token, t->parents[below] = node, t->counts[below] = 0;
        t->first[below] = t->next[below] = -1;
        if (before < 0) t->first[node] = below;
        else t->next[before] = below;
      }
      t->counts[below]++;
      node = below;
      if (among(token, ends)) break;
    }
  }
  t->counts[0] = total;
  return total;
}

/* The most frequent nodes, of equals the older ones, so parents first; in order. `often` has a place for
 * every count. */
static int64_t most_frequent(const struct trie *t, int64_t nodes, double least, int64_t *often,
                             int64_t *kept) {
  memset(often, 0, (t->counts[0] + 1) * sizeof *often);
  for (int64_t node = 1; node < t->count; node++)
    if (t->counts[node] >= least) often[t->counts[node]]++;
  int64_t bar = t->counts[0], above = 0;
  while (bar > 0 && above + often[bar] < nodes) above += often[bar--];
  int64_t count = 0, equal = nodes - above;
  for (int64_t node = 1; node < t->count; node++) {
    const int64_t times = t->counts[node];
    if (times >= least && (times > bar || (times == bar && equal-- > 0))) kept[count++] = node;
  }
  return count;
}

/* The most frequent child of the most frequent child, and so on; ties to the older node, the newest place. */
static int64_t most_frequent_chain(const struct trie *t, int64_t nodes, double least, int64_t *kept) {
  int64_t count = 0;
  for (int64_t node = 0; count < nodes;) {
    int64_t heir = -1;
    for (int64_t below = t->first[node]; below >= 0; below = t->next[below])
      if (heir < 0 || t->counts[below] > t->counts[heir]) heir = below;
    if (heir < 0 || t->counts[heir] < least) break;
    kept[count++] = node = heir;
  }
  return count;
}

/* Nodes that are likely enough behind a match so long, with their chances; without a `least` all of them,
 * by their frequency. */
static void judge(struct tree *t, const struct trie *of, const int64_t *kept, int64_t count,
                  int64_t matched, int64_t total, const struct odds *odds, int64_t greedy, double least,
                  int64_t *grown) {
  memset(grown, -1, of->count * sizeof *grown); /* where nodes of the trie are in the tree */
  grown[0] = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t node = kept[i], parent = grown[of->parents[node]];
    if (parent < 0) continue;
    const double share = (double)of->counts[node] / (double)of->counts[of->parents[node]];
    const int64_t length = matched + t->depths[parent];
    const double chance = least < 0 ? (double)of->counts[node] / (double)total
                                    : t->paths[parent] * odds_chance(odds, length, share, greedy);
    if (least >= 0 && chance < least) continue;
    const int64_t at = grown[node] = sprout(t, parent, of->tokens[node]);
    t->marks[at] = length, t->shares[at] = share, t->paths[at] = chance;
  }
}

/* Tokens that a copy has, at best, before its chance falls below `least`. */
static int64_t reach(const struct odds *odds, int64_t matched, int64_t greedy, double least,
                     int64_t most) {
  double chance = 1;
  for (int64_t ahead = 0; ahead < most; ahead++) {
    chance *= odds_chance(odds, matched + ahead, 1, greedy);
    if (chance < least) return ahead;
  }
  return most;
}

/* The tree that promises most accepted tokens over all lengths of a match, of equals the longest; `other`
 * is room for one. `unfinished`: occurrences that nothing has followed yet. `least` below zero: nothing
 * is priced. */
void followed(struct tree *best, struct tree *other, const struct index *in, const int64_t *last,
              int64_t last_count, const struct following *how, int64_t unfinished, int64_t depth,
              int64_t nodes, double least, const struct odds *odds, int64_t greedy, const int64_t *end,
              int64_t end_count) {
  const struct list context = {last, last_count}, ends = {end, end_count};
  const int64_t root = context.at[context.count - 1];
  plant(best, root);
  const int64_t occur = how->most < in->text.count ? how->most : in->text.count;
  struct place *places = malloc((2 * occur + 1) * sizeof *places);
  const int64_t count = occurrences(in, context, how, occur, places);
  const int64_t deepest = how->max_spec < depth ? how->max_spec : depth, room = count * deepest + 1;
  int64_t *whole = malloc((7 * room + count + 1) * sizeof *whole);
  struct trie trie = {whole, whole + room, whole + 2 * room, whole + 3 * room, whole + 4 * room, 0};
  int64_t *kept = whole + 5 * room, *grown = whole + 6 * room, *often = whole + 7 * room;
  int64_t length = INT64_MAX;
  for (int64_t turn = 0; least < 0 || turn < how->lengths; turn++) {
    int64_t shorter = 0; /* the next length that there is */
    for (int64_t p = 0; p < count; p++)
      if (places[p].matched < length && places[p].matched > shorter) shorter = places[p].matched;
    if (!(length = shorter)) break;
    int64_t most = how->max_spec < nodes ? how->max_spec : nodes;
    if (least < 0) { /* 1e-6: a factor such as 0.1 must not lose a node to rounding */
      const double wanted = how->factor * length + how->offset + 1e-6;
      most = wanted < most ? (int64_t)wanted : most;
    }
    if (most <= best->score) break; /* no node is worth more than one, and shorter matches get fewer */
    int64_t deep = most < depth ? most : depth;
    if (least >= 0 && !(deep = reach(odds, length, greedy, least, deep))) continue;
    const int64_t total = follow(&trie, in, places, count, length, deep, ends) + unfinished;
    const double frequent = how->min_prob * total;
    const int64_t chosen = how->branching ? most_frequent(&trie, most, frequent, often, kept)
                                          : most_frequent_chain(&trie, most, frequent, kept);
    plant(other, root);
    judge(other, &trie, kept, chosen, length, total, odds, greedy, least, grown);
    double sum = 0;
    for (int64_t node = 0; node < other->count; node++) sum += other->paths[node];
    if (sum - 1 > best->score) {
      take_over(best, other);
      best->score = sum - 1;
    }
  }
  free(whole);
  free(places);
}
