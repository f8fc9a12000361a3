"""Logits to laws: every sampling option, applied along each tree path, to p and to q alike.

Order: repetition penalty, presence and frequency penalties, minimum length, logit bias and banned
tokens, the user's own `LogitsProcessorList`, the grammar; when sampling, temperature, top-k, top-p,
min-p. Which tokens survive equals transformers' warpers bit for bit, ties included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.coins import Coins, no_law
from foretoken.errors import ConfigError
from foretoken.native.laws import softmax
from foretoken.types import Ragged, SamplingParams, TokenTree
from foretoken.warp.best import FIT, best_tokens
from foretoken.warp.cuts import keep_min_p, keep_top_k, keep_top_p
from foretoken.warp.history import History
from foretoken.warp.penalties import penalise_counts, penalise_repetition, place

ALL_AT_ONCE = 1 << 18  # laws of a whole tree are computed together up to this many numbers


class Warp:
    """The sampling options of one row, ready to use."""

    __slots__ = (
        "_bias",
        "_eos",
        "_forbids",
        "_known",
        "_source",
        "bare",
        "cuts",
        "device",
        "failure",
        "greedy",
        "params",
        "path_dependent",
        "prompt_len",
        "uncut",
        "vocab_size",
    )

    def __init__(self, params: SamplingParams, prompt_len: int, vocab_size: int) -> None:
        self.params, self.prompt_len, self.vocab_size = params, prompt_len, vocab_size
        self.greedy = params.temperature == 0.0
        self._eos = sorted(token for token in params.eos if token < vocab_size)
        self._bias = self._constant_bias()
        # Options that, with others, may leave no token at all somewhere in the text.
        self._forbids = bool(
            params.processors or params.grammar or (params.min_new_tokens and self._eos)
        )
        self.path_dependent = bool(
            self._forbids
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )
        self.bare = self._bias is None and not self.path_dependent  # the best logit is the choice
        self.cuts = bool(params.top_k or params.top_p < 1.0 or params.min_p)
        # the law is the softmax of logits over the temperature
        self.uncut = self.bare and not self.cuts
        self.device: Any = None  # that the processors' own tensors are on; None: where scores are
        self._source: Sequence[int] | None = None  # the row's own growing list
        self._known = History(params, prompt_len)  # of that list
        self.failure: BaseException | None = None  # what a processor or grammar of the row raised

    def law(
        self, tokens: Sequence[int], logits: Float[Tensor, "V"], path: Sequence[int] = ()
    ) -> Float[Tensor, "V"]:
        """Probabilities of the next token after `tokens + path`; at temperature 0 a point mass."""
        if self.greedy:
            return point_mass(self.choose(tokens, logits, path), logits)
        scores = self._processed(tokens, (path,), logits[None])
        if self._forbids and impossible(scores):
            raise nothing_left(len(tokens) + len(path))
        return self.probabilities(scores)[0]

    def choose(
        self, tokens: Sequence[int], logits: Float[Tensor, "V"], path: Sequence[int] = ()
    ) -> int:
        """The most likely token after every option: what temperature 0 emits."""
        if self.bare:
            return int(best_tokens(logits))
        scores = self._processed(tokens, (path,), logits[None])
        if self._forbids and impossible(scores):
            raise nothing_left(len(tokens) + len(path))
        return int(best_tokens(scores[0]))

    def laws(
        self, tokens: Sequence[int], tree: TokenTree, logits: Float[Tensor, "N V"]
    ) -> WarpedLaws:
        """The laws of all nodes of `tree`, whose root repeats the last of `tokens`."""
        return WarpedLaws(self, tokens, tree, logits)

    def probabilities(self, scores: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Temperature, top-k, top-p, min-p, softmax, in transformers' order."""
        params = self.params
        if not self.cuts:
            return softmax(scores, params.temperature)
        scores = fit(scores)
        if params.temperature != 1.0:
            scores = scores / params.temperature
        if params.top_k:
            scores = keep_top_k(scores, params.top_k)
        if params.top_p < 1.0:
            scores = keep_top_p(scores, params.top_p)
        if params.min_p:
            scores = keep_min_p(scores, params.min_p)
        return softmax(scores)

    def biased(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Logits with the options that no token changes; as they are where there are none."""
        if self._bias is None:
            return logits
        logits = fit(logits)
        if self._bias.device != logits.device or self._bias.dtype != logits.dtype:
            self._bias = self._bias.to(logits)
        return logits + self._bias

    def _processed(
        self, tokens: Sequence[int], paths: Ragged, logits: Float[Tensor, "n V"]
    ) -> Float[Tensor, "n V"]:
        """Scores after all options that come before the temperature, one row per path.

        What was written before counts for every row alike, so it is applied to all at once.
        """
        if not self.path_dependent:
            return self.biased(logits)
        params = self.params
        scores = logits.clone() if logits.dtype == torch.float64 else logits.float().clone()
        known = self._history(tokens)
        if known.seen is not None:
            penalise_repetition(scores, known.seen, paths, params.repetition_penalty)
        if known.said is not None:
            amounts = params.presence_penalty, params.frequency_penalty
            penalise_counts(scores, known.said, paths, *amounts)
        missing = params.min_new_tokens - (len(tokens) - self.prompt_len)
        if self._eos and missing > 0:
            short = [row for row, path in enumerate(paths) if len(path) < missing]
            cells = [(row, token, 0.0) for row in short for token in self._eos]
            place(scores, cells, lambda old, _: torch.full_like(old, -math.inf))
        scores = self.biased(scores)
        if params.processors:
            ends = self.params.eos  # nothing is told behind one: a constraint may have no answer
            scores = torch.cat(
                [
                    self._user_processed(known.ids(path), scores[row : row + 1])
                    if ends.isdisjoint(path)
                    else scores[row : row + 1]
                    for row, path in enumerate(paths)
                ]
            )
        return scores if params.grammar is None else self._matching(tokens, paths, scores)

    def _matching(self, tokens: Sequence[int], paths: Ragged, scores: Tensor) -> Tensor:
        """Scores less the tokens that the grammar does not allow behind each path, in place."""
        try:
            self.params.grammar.restrict(tokens, paths, scores)
        except BaseException as error:
            self.failure = error
            raise
        return scores

    def _user_processed(self, ids: Tensor, scores: Tensor) -> Tensor:
        where = self.device or scores.device  # a draft's scores may lie elsewhere
        ids = ids.to(where)
        try:
            processed: Any = self.params.processors(ids, scores.to(where, copy=True))
            if not isinstance(processed, Tensor) or processed.shape != scores.shape:
                wrong = isinstance(processed, Tensor)
                given = tuple(processed.shape) if wrong else type(processed).__name__
                raise ConfigError(
                    f"processors gave {given} for scores of shape {tuple(scores.shape)}.",
                    "a logits processor returns the scores it was given, changed or not.",
                    "return a tensor of that shape from each.",
                )
        except BaseException as error:  # SystemExit as well: it is this row's, and nobody else's
            self.failure = error
            raise
        return processed.to(scores.device)

    def _history(self, tokens: Sequence[int]) -> History:
        """What the options read of `tokens`: kept of the list that is followed, else made anew."""
        if tokens is not self._source:
            return History(self.params, self.prompt_len).read(tokens)
        if len(tokens) < self._known.length:  # the text went back
            self._known = History(self.params, self.prompt_len)
        return self._known.read(tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        """Read only what is new in `tokens` from now on: it is the row's own, append-only list."""
        if tokens is not self._source:
            self._source, self._known = tokens, History(self.params, self.prompt_len)

    def _constant_bias(self) -> Tensor | None:
        """Logit bias and bans as one row to add, or None."""
        params = self.params
        if not params.logit_bias and not params.banned_tokens:
            return None
        bias = torch.zeros(self.vocab_size, dtype=torch.float64)
        for token, value in params.logit_bias.items():
            self._check_token(token, "logit_bias")
            if not value < math.inf:  # +inf and NaN make no law
                raise ConfigError(
                    f"logit_bias gives token {token} the value {value}.",
                    "a bias is a finite number, or -inf to ban the token.",
                    "pass a large finite bias, such as 100, to force a token.",
                )
        biased = torch.tensor(list(params.logit_bias), dtype=torch.long)
        bias[biased] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        for token in params.banned_tokens:
            self._check_token(token, "banned_tokens")
        bias[torch.tensor(list(params.banned_tokens), dtype=torch.long)] = -math.inf
        if bool((bias == -math.inf).all()):
            raise ConfigError(
                "every token of the vocabulary is banned.",
                "at least one token must stay possible.",
                "ban fewer tokens.",
            )
        return bias

    def _check_token(self, token: int, option: str) -> None:
        if not 0 <= token < self.vocab_size:
            raise ConfigError(
                f"{option} names token {token}.",
                f"this vocabulary has tokens 0 to {self.vocab_size - 1}.",
                f"take token {token} out of {option}.",
            )


class WarpedLaws:
    """Laws of a tree's nodes under one warp, computed when first asked for."""

    __slots__ = (
        "_all",
        "_choices",
        "_dead",
        "_logits",
        "_rows",
        "_tokens",
        "_tree",
        "_warp",
        "greedy",
    )

    def __init__(
        self, warp: Warp, tokens: Sequence[int], tree: TokenTree, logits: Float[Tensor, "N V"]
    ) -> None:
        self._warp, self._tokens, self._tree, self._logits = warp, tokens, tree, logits
        self.greedy = warp.greedy
        self._all: Tensor | None = None
        self._rows: dict[int, Tensor] = {}
        self._choices: dict[int, int] = {}
        self._dead: set[int] = set()  # nodes after which every token is forbidden
        if warp.path_dependent:
            warp.follow(tokens)

    def __getitem__(self, node: int) -> Float[Tensor, "V"]:
        if self._all is None and node not in self._rows:
            self._rows[node] = self._law(node)
        if node in self._dead:
            raise nothing_left(len(self._tokens) + len(self._tree.path(node)))
        return self._rows[node] if self._all is None else self._all[node]

    def draw(self, node: int, coins: Coins) -> int:
        return self.choice(node) if self.greedy else coins.draw(self[node])

    def choice(self, node: int) -> int:
        """The most likely token at `node`; ConfigError where its scores are NaN.

        Those of other nodes may be: half precision overflows at guesses that no text reaches.
        """
        if node not in self._choices:
            if self._warp.bare:
                nodes: Sequence[int] = range(len(self._logits))
                scores = self._logits
            else:
                nodes = self._together(node)
                scores = self._scores(nodes)
            self._choices.update(zip(nodes, best_tokens(scores, strict=False), strict=True))
        if node in self._dead:
            raise nothing_left(len(self._tokens) + len(self._tree.path(node)))
        if self._choices[node] < 0:
            raise no_law()
        return self._choices[node]

    def _law(self, node: int) -> Tensor:
        if self.greedy:
            return point_mass(self.choice(node), self._logits[node])
        nodes = self._together(node)
        laws = self._warp.probabilities(self._scores(nodes))
        if len(nodes) == 1:
            return laws[0]
        self._all = laws
        return laws[node]

    def _together(self, node: int) -> Sequence[int]:
        """Nodes to compute along with `node`: all of them, unless that is too much at once.

        Processors and grammars are asked about the nodes that are asked for, and no others.
        """
        params = self._warp.params
        few = self._logits.numel() <= ALL_AT_ONCE or (self.greedy and not self._warp.path_dependent)
        each = params.processors or params.grammar
        return range(len(self._tree)) if few and not each else (node,)

    def _scores(self, nodes: Sequence[int]) -> Float[Tensor, "n V"]:
        whole = len(nodes) == len(self._tree)
        logits = self._logits if whole else self._logits[nodes[0] : nodes[0] + 1]
        scores = self._warp._processed(self._tokens, self._paths(nodes), logits)
        if self._warp._forbids:
            self._dead.update(nodes[row] for row in impossible(scores))
        return scores

    def _paths(self, nodes: Sequence[int]) -> Ragged:
        """Drafted tokens that lead to each node; not looked up where no option reads them."""
        if not self._warp.path_dependent:
            return ()
        return [[self._tree.tokens[i] for i in self._tree.path(node)] for node in nodes]


def fit(logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
    """Logits in a type that laws may have."""
    return logits if logits.dtype in FIT else logits.float()


def impossible(scores: Float[Tensor, "n V"]) -> list[int]:
    """Rows that leave no token possible."""
    return [row for row, best in enumerate(scores.amax(-1).tolist()) if best == -math.inf]


def nothing_left(length: int) -> ConfigError:
    return ConfigError(
        f"the options forbid every token after {length} tokens.",
        "at least one token must stay possible at every place of the text.",
        "ban fewer tokens, or lower min_new_tokens.",
    )


def point_mass(token: int, like: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
    """The law that always gives `token`."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    law = torch.zeros(like.shape, dtype=dtype, device=like.device)
    law[token] = 1.0
    return law
