"""Logits to laws: every sampling option, applied along each tree path, to p and to q alike.

Order: repetition penalty, presence and frequency penalties, minimum length, logit bias and banned
tokens, then the user's own `LogitsProcessorList`; when sampling, temperature, top-k, top-p, min-p.
Which tokens survive equals transformers' warpers bit for bit, ties included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.coins import Coins
from foretoken.errors import ConfigError
from foretoken.types import SamplingParams, TokenTree

TOP_P_CANDIDATES = 512  # sorted instead of the whole vocabulary while they settle the nucleus
TOP_P_DOUBT = 1e-5  # a boundary this close to top_p is left to the full sort
ALL_AT_ONCE = 1 << 18  # laws of a whole tree are computed together up to this many numbers


class Warp:
    """The sampling options of one row, ready to use."""

    __slots__ = (
        "_bias",
        "_counted",
        "_counts",
        "_eos",
        "_seen",
        "_source",
        "greedy",
        "params",
        "path_dependent",
        "prompt_len",
        "vocab_size",
    )

    def __init__(self, params: SamplingParams, prompt_len: int, vocab_size: int) -> None:
        self.params, self.prompt_len, self.vocab_size = params, prompt_len, vocab_size
        self.greedy = params.temperature == 0.0
        self._eos = sorted(token for token in params.eos if token < vocab_size)
        self._bias = self._constant_bias()
        self.path_dependent = bool(
            params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or (params.min_new_tokens and self._eos)
            or params.processors
        )
        self._source: Sequence[int] | None = None  # the row's growing list, counted up to _counted
        self._counted = 0
        self._seen: set[int] = set()
        self._counts: Counter[int] = Counter()

    def law(self, tokens: Sequence[int], logits: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        """Probabilities of the next token after `tokens`; at temperature 0 a point mass."""
        if self.greedy:
            return point_mass(self.choose(tokens, logits), logits)
        return self.probabilities(self._processed(tokens, (), logits))

    def choose(self, tokens: Sequence[int], logits: Float[Tensor, "V"]) -> int:
        """The most likely token after every option: what temperature 0 emits."""
        return int(self._processed(tokens, (), logits).argmax())

    def laws(
        self, tokens: Sequence[int], tree: TokenTree, logits: Float[Tensor, "N V"]
    ) -> WarpedLaws:
        """The laws of all nodes of `tree`, whose root repeats the last of `tokens`."""
        return WarpedLaws(self, tokens, tree, logits)

    def probabilities(self, scores: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Temperature, top-k, top-p, min-p, softmax, in transformers' order."""
        params = self.params
        if params.temperature != 1.0:
            scores = scores / params.temperature
        if params.top_k:
            scores = keep_top_k(scores, params.top_k)
        if params.top_p < 1.0:
            scores = keep_top_p(scores, params.top_p)
        if params.min_p:
            scores = keep_min_p(scores, params.min_p)
        return scores.softmax(-1)

    def biased(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Logits in a dtype fit for laws, with the options that no token changes."""
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        if self._bias is None:
            return logits
        if self._bias.device != logits.device or self._bias.dtype != logits.dtype:
            self._bias = self._bias.to(logits)
        return logits + self._bias

    def _processed(
        self, tokens: Sequence[int], path: Sequence[int], logits: Float[Tensor, "V"]
    ) -> Float[Tensor, "V"]:
        """Scores after all options that come before the temperature, following `tokens + path`."""
        if not self.path_dependent:
            return self.biased(logits)
        params = self.params
        scores = logits if logits.dtype == torch.float64 else logits.float()
        seen, counts = self._history(tokens, path)
        if params.repetition_penalty != 1.0:
            scores = penalise_repetition(scores, seen, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            scores = penalise_counts(
                scores, counts, params.presence_penalty, params.frequency_penalty
            )
        if len(tokens) + len(path) - self.prompt_len < params.min_new_tokens and self._eos:
            scores = scores.index_fill(0, indices(self._eos, scores), -math.inf)
        scores = self.biased(scores)
        if params.processors:
            ids = torch.tensor([[*tokens, *path]], dtype=torch.long, device=scores.device)
            scores = params.processors(ids, scores[None].clone())[0]
        if float(scores.max()) == -math.inf:
            raise ConfigError(
                f"the options forbid every token after {len(tokens) + len(path)} tokens.",
                "at least one token must stay possible at every place of the text.",
                "ban fewer tokens, or lower min_new_tokens.",
            )
        return scores

    def _history(self, tokens: Sequence[int], path: Sequence[int]) -> tuple[set[int], Counter[int]]:
        """Tokens seen (prompt and text) and counts of generated ones, along a path.

        The list handed to `laws` is the row's own and only grows, so it is counted once.
        """
        if tokens is self._source and len(tokens) >= self._counted:
            self._seen.update(tokens[self._counted :])
            self._counts.update(tokens[max(self._counted, self.prompt_len) :])
            self._counted = len(tokens)
            seen, counts = self._seen, self._counts
        else:
            seen, counts = set(tokens), Counter(tokens[self.prompt_len :])
        if path:
            seen = seen | set(path)
            counts = counts + Counter(path)
        return seen, counts

    def follow(self, tokens: Sequence[int]) -> None:
        """Count `tokens` incrementally from now on: it is the row's own, append-only list."""
        if tokens is not self._source:
            self._source, self._counted = tokens, 0
            self._seen, self._counts = set(), Counter()

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
            bias[token] += value
        for token in params.banned_tokens:
            self._check_token(token, "banned_tokens")
            bias[token] = -math.inf
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

    __slots__ = ("_all", "_choices", "_logits", "_rows", "_tokens", "_tree", "_warp", "greedy")

    def __init__(
        self, warp: Warp, tokens: Sequence[int], tree: TokenTree, logits: Float[Tensor, "N V"]
    ) -> None:
        self._warp, self._tokens, self._tree, self._logits = warp, tokens, tree, logits
        self.greedy = warp.greedy
        self._all: Tensor | None = None
        self._rows: dict[int, Tensor] = {}
        self._choices: list[int] | dict[int, int] | None = None
        if warp.path_dependent:
            warp.follow(tokens)

    def __getitem__(self, node: int) -> Float[Tensor, "V"]:
        if self._all is not None:
            return self._all[node]
        if node not in self._rows:
            self._rows[node] = self._law(node)
        return self._rows[node]

    def draw(self, node: int, coins: Coins) -> int:
        return self.choice(node) if self.greedy else coins.draw(self[node])

    def choice(self, node: int) -> int:
        """The most likely token at `node`."""
        warp = self._warp
        if self._choices is None:
            # One argmax and one copy to the host for the whole tree, where no path matters.
            self._choices = {}
            if not warp.path_dependent:
                scores = self._logits if warp._bias is None else warp.biased(self._logits)
                self._choices = scores.argmax(-1).tolist()
        if isinstance(self._choices, dict) and node not in self._choices:
            self._choices[node] = int(self._processed(node).argmax())
        return self._choices[node]

    def _law(self, node: int) -> Tensor:
        warp = self._warp
        if self.greedy:
            return point_mass(self.choice(node), self._logits[node])
        if not warp.path_dependent and self._logits.numel() <= ALL_AT_ONCE:
            self._all = warp.probabilities(warp.biased(self._logits))
            return self._all[node]
        return warp.probabilities(self._processed(node))

    def _processed(self, node: int) -> Tensor:
        path = [self._tree.tokens[i] for i in self._tree.path(node)]
        return self._warp._processed(self._tokens, path, self._logits[node])


def point_mass(token: int, like: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
    """The law that always gives `token`."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    law = torch.zeros(like.shape, dtype=dtype, device=like.device)
    law[token] = 1.0
    return law


def indices(tokens: Iterable[int], like: Tensor) -> Tensor:
    """Those of `tokens` that exist in the vocabulary of `like`, as an index."""
    size = like.shape[-1]
    return torch.tensor([t for t in tokens if t < size], dtype=torch.long, device=like.device)


def penalise_repetition(scores: Tensor, seen: Iterable[int], penalty: float) -> Tensor:
    """CTRL's repetition penalty: scores of seen tokens move away from likely by a factor."""
    index = indices(seen, scores)
    old = scores[index]
    return scores.scatter(0, index, torch.where(old < 0, old * penalty, old / penalty))


def penalise_counts(
    scores: Tensor, counts: Mapping[int, int], presence: float, frequency: float
) -> Tensor:
    """The OpenAI interface's penalties: `presence` once, `frequency` per earlier use."""
    size = scores.shape[-1]
    used = [(token, count) for token, count in counts.items() if token < size]
    if not used:
        return scores
    index = torch.tensor([token for token, _ in used], device=scores.device)
    amount = torch.tensor(
        [presence + frequency * count for _, count in used],
        dtype=scores.dtype,
        device=scores.device,
    )
    return scores.scatter(0, index, scores[index] - amount)


def keep_top_k(scores: Float[Tensor, "*n V"], k: int) -> Float[Tensor, "*n V"]:
    """The k best tokens, and every token that ties with the last of them."""
    least = scores.topk(min(k, scores.shape[-1]))[0][..., -1:]
    return scores.masked_fill(scores < least, -math.inf)


def keep_min_p(scores: Float[Tensor, "*n V"], min_p: float) -> Float[Tensor, "*n V"]:
    """Tokens at least `min_p` times as likely as the best one; the best one always."""
    probs = scores.softmax(-1)
    best, index = probs.topk(1, -1)
    remove = probs < min_p * best
    return scores.masked_fill(remove.scatter(-1, index, False), -math.inf)


def keep_top_p(scores: Float[Tensor, "*n V"], top_p: float) -> Float[Tensor, "*n V"]:
    """The nucleus: the fewest likely tokens whose mass reaches `top_p`."""
    if scores.dim() == 1:
        return keep_top_p(scores[None], top_p)[0]
    if scores.shape[-1] > 2 * TOP_P_CANDIDATES:
        fast = nucleus_from_candidates(scores, top_p)
        if fast is not None:
            return fast
    return nucleus_from_full_sort(scores, top_p)


def nucleus_from_full_sort(scores: Float[Tensor, "n V"], top_p: float) -> Float[Tensor, "n V"]:
    """The rule of transformers, operation for operation: it decides ties by its sort."""
    ordered, order = scores.sort(descending=False)
    remove = ordered.softmax(-1).cumsum(-1) <= (1 - top_p)
    remove[..., -1:] = False
    return scores.masked_fill(remove.scatter(1, order, remove), -math.inf)


def nucleus_from_candidates(
    scores: Float[Tensor, "n V"], top_p: float
) -> Float[Tensor, "n V"] | None:
    """The same nucleus without the full sort; None where rounding or a tie could decide.

    A token stays while the mass above it is less than `top_p`. The likeliest tokens settle that
    when the boundary lies among them and clear of `top_p`.
    """
    best, _ = scores.topk(TOP_P_CANDIDATES)  # [n, C]
    weight = (best - scores.logsumexp(-1, keepdim=True)).exp().double()
    above = weight.cumsum(-1) - weight  # mass above each candidate
    kept = (above < top_p).sum(-1)  # [n], at least 1
    if int(kept.max()) >= TOP_P_CANDIDATES:
        return None
    last = best.gather(-1, (kept - 1)[:, None])
    next_ = best.gather(-1, kept[:, None])
    doubt = (above - top_p).abs().amin(-1) < TOP_P_DOUBT
    if bool((doubt | (last == next_)[:, 0]).any()):
        return None
    return scores.masked_fill(scores < last, -math.inf)
