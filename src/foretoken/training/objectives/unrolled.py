"""EAGLE-3's training-time test: a head learns laws along its own outputs (arXiv 2503.01840).

Step 0 reads the target's states at every token of a text, as where a draft begins. Step s reads
what the head itself said one token before in step s - 1, as s levels below: there it sees the text
up to where that draft would have begun, and its own tokens since.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.engine.session import Session
from foretoken.errors import ConfigError, check_values
from foretoken.heads import store
from foretoken.heads.decoder_layer import BASE
from foretoken.lm.draft_vocabulary import chosen_rows
from foretoken.lm.views.view import innermost
from foretoken.shipped import resolve
from foretoken.training.captures.texts import check_taps, fused_layers
from foretoken.training.drafts.distilling import student
from foretoken.training.drafts.shape import HEAD, projection
from foretoken.training.drafts.words import frequent
from foretoken.training.features import Features, beside
from foretoken.training.objectives.guessing import GuessObjective, GuessTraining
from foretoken.training.objectives.sparse_laws import SparseCrossEntropy

ALIGNED = 8  # columns are a multiple of it where there are as many, as fused attention wants
FADING = 0.8  # weight of a step's loss, as a part of the one before; paper 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class UnrolledTraining(GuessTraining):
    """EAGLE-3's settings (arXiv 2503.01840), for a head that is narrower than its target."""

    rate: float = 3e-3  # peak learning rate
    matrix_rate: float = 0.02  # peak rate of Muon, for matrices inside; 0: AdamW for all
    embedding_rate: float = 3e-3  # peak rate of its embeddings; 0: they stay as they begin
    width: int = 256  # of the head, a multiple of 64
    layers: int = 1  # decoder layers; paper 1
    inner: int = 0  # width of the MLPs; 0: four times the head's
    embeds: bool = True  # tokens by the rows that score them; else by the target's embeddings
    own_rows: bool = True  # for its outputs; else a map of the target's embeddings (embeds=false)
    start: str = ""  # draft that it begins as, with its shape and tokens: a directory or a name
    taps: tuple[int, ...] | None = None  # layers it reads; none: a low, a middle and a high one
    vocabulary: int = 16384  # tokens it scores: the most frequent of the target's text
    unrolled: int = 4  # steps, the first on the target's states; paper 5 to 7
    likeliest: int = 16  # tokens of the target's laws that it learns from
    overlap: float = (
        0.0  # how soon the loss turns to what acceptance lacks (LK losses: 3); 0: never
    )

    def __post_init__(self) -> None:
        GuessTraining.__post_init__(self)
        for name in ("layers", "vocabulary", "unrolled", "likeliest"):
            check_values(self, (name, getattr(self, name) >= 1, "1 or more"))
        check_values(
            self,
            ("embedding_rate", self.embedding_rate >= 0, "0 (they stay) or more"),
            ("overlap", self.overlap >= 0, "0 (cross-entropy alone) or more"),
            ("width", self.width >= 64 and self.width % 64 == 0, "a multiple of 64"),
            ("taps", self.taps is None or min(self.taps, default=-1) >= 0, "layers, from 0 on"),
            ("embeds", self.embeds or not self.start, "left out beside start, which says it"),
            ("own_rows", self.own_rows or not self.embeds, "left out where embeds is true"),
            ("inner", self.inner >= 0, "0 (four times the width) or more"),
        )


class UnrolledObjective(GuessObjective):
    """Cross-entropy to the target's sparse laws, in every step."""

    @classmethod
    def completed(cls, config: Any, session: Session) -> Any:
        """With the layers read by the head that it begins as; ConfigError for any others, and for
        a size that the target does not allow.
        """
        check_taps(config.taps, innermost(session.target))
        check_size(config, innermost(session.target))
        if not config.start:
            return config
        taps = taps_of(config.start, innermost(session.target))
        if taps is not None and config.taps not in (None, taps):
            raise ConfigError(
                f"a head that reads the layers {listed(config.taps)} and begins as {config.start} "
                "was asked for.",
                f"what it begins as reads the layers {listed(taps)}, in this order.",
                "leave the option `taps` out, or the option `start`.",
            )
        check_begun(config, session)  # raises, too, for a draft that it cannot begin as
        usual = fused_layers(innermost(session.target).layers)
        return config if taps in (None, usual) else replace(config, taps=taps)

    def shape(self, session: Session) -> dict[str, Any]:
        config, lm = self.config, innermost(session.target)
        counts = self.train.mass(lm.vocab_size)
        shape = {"width": config.width, "layers": config.layers, "heads": config.width // HEAD,
                 "inner": config.inner or 4 * config.width, "embeds": config.embeds,
                 "own_rows": config.own_rows}  # fmt: skip
        self.counts = counts
        if config.start:
            self.start, self.tokens, shape = beginning(session, config.start)
        else:
            self.tokens = frequent(counts, config.vocabulary, session.eos)
        return {
            "taps": config.taps or fused_layers(lm.layers),
            "tokens": len(self.tokens) if len(self.tokens) < lm.vocab_size else 0,
            **shape,
        }

    def begin(self, head: Any, session: Session) -> None:
        """As what it goes on from; else with layers that do nothing and the target's embeddings."""
        vocab_size = innermost(session.target).vocab_size
        self.rows = torch.full((vocab_size,), -1)
        self.rows[self.tokens] = torch.arange(len(self.tokens))
        table = innermost(session.target).embed(list(range(vocab_size)))
        if not head.config.embeds:  # beside the head, where it is asked in every step
            self.table = table.to(head.enter.weight).clone()
        for tables in head.modules():
            if isinstance(tables, nn.Embedding):
                tables.requires_grad_(self.config.embedding_rate > 0)
        with torch.no_grad():
            head.scored.copy_(self.tokens)
            if isinstance(self.start, type(head)):
                head.load_state_dict(self.start.state_dict())
            elif self.start is not None:
                head.begin_as(self.start)
            if self.start is not None:
                return
            self.begin_with_embeddings(head, table)
            head.norm.weight.fill_(0.05)  # small first logits
            for layer in head.layers:
                layer.joined.weight.zero_()
                layer.down.weight.zero_()

    def begin_with_embeddings(self, head: Any, table: Float[Tensor, "V H"]) -> None:
        """The target's embeddings, in as many directions as the head is wide."""
        rows, into = projection(table.float().cpu(), self.counts, self.config.width)
        if head.config.embeds:
            head.embedding.weight.copy_(rows)
            return
        head.enter.load_state_dict(into.state_dict())
        if head.maps_outputs:
            head.score.weight.copy_(into.weight)  # what is added to all rows changes no law
        else:
            head.rows.weight.copy_(rows[self.tokens])

    def embedded(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n H"]:
        """The target's input embeddings."""
        return F.embedding(tokens, self.table)

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, agreed = self.steps(model, batch)
        loss = torch.stack([FADING**step * one for step, one in enumerate(losses)]).sum()
        return loss, {"loss": loss.detach(), **named(agreed)}

    def judge(self, head: Any, held_out: Features) -> dict[str, float]:
        """How often its best guess is the target's, by depth; shards count alike."""
        found = held_out.each(
            lambda texts: torch.stack(self.steps(head, beside(head, texts))[1])[None]
        )
        return named(found.mean(0).tolist())

    def steps(self, head: Any, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Loss and agreement of every step."""
        longest = int(batch["weights"].any(0).nonzero().max()) + 1
        longest = -(-longest // ALIGNED) * ALIGNED
        ids, hidden, weights, laws, log_probs = (
            batch[name][:, :longest]
            for name in ("input_ids", "hidden", "weights", "laws", "log_probs")
        )
        self.rows = self.rows.to(ids.device)
        fused = head.fused(hidden.float().view(*ids.shape, len(head.config.taps), -1))
        chosen = self.rows[laws.long()]
        probs = log_probs.float().exp().masked_fill(chosen < 0, 0.0)
        losses, agreed = [], []
        outputs = head.outputs(self.embedded(head.scored) if head.maps_outputs else None)
        outputs = outputs.float()  # so are sums of their gradients
        told: Any = SparseCrossEntropy.apply
        for step, states in enumerate(
            unrolled(head, ids, fused, self.config.unrolled, self.embedded)
        ):
            taught = weights[:, 1:] > 0  # whose law is learnt at the token before
            taught[:, :step] = False
            said = head.norm(states[:, :-1][taught])
            laws_here = chosen[:, 1:][taught], probs[:, 1:][taught]
            loss, figures = told(said, outputs, *laws_here, self.config.overlap)
            losses.append(loss)
            agreed.append(figures[0])
        return losses, agreed


def check_size(config: Any, lm: Any) -> None:
    """ConfigError for a head that the target's tables do not fit."""
    if not config.embeds and config.width > lm.hidden_size:
        raise ConfigError(
            f"a head of width={config.width} with embeds=false was asked for.",
            f"the target's embeddings have {lm.hidden_size} directions.",
            "pass a width of at most so many, or leave embeds out.",
        )
    if not config.own_rows and not tied(lm):
        raise ConfigError(
            "a head with own_rows=false was asked for.",
            "this target scores tokens by other rows than it embeds them by.",
            "leave own_rows out: the head then has outputs of its own.",
        )


def check_begun(config: Any, session: Session) -> None:
    """ConfigError for sizes that were asked for beside a start that has others."""
    _, tokens, own = beginning(session, config.start)
    usual = {option.name: option.default for option in fields(config)}
    asked = {name: getattr(config, name) for name in ("width", "layers", "inner", "vocabulary")}
    own = {**asked, **own, "vocabulary": len(tokens)}
    if len(tokens) == innermost(session.target).vocab_size:  # all, as whoever asks for more has
        own["vocabulary"] = max(len(tokens), config.vocabulary)
    other = [name for name, size in asked.items() if size not in (usual[name], own[name])]
    if other:
        raise ConfigError(
            f"a head of {named_sizes(asked, other)} that begins as {config.start} was asked for.",
            f"what it begins as has {named_sizes(own, other)}, and keeps it.",
            f"leave {' and '.join(other)} out, or the option `start`.",
        )


def named_sizes(sizes: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={sizes[name]}" for name in names)


def tied(lm: Any) -> bool:
    """Whether a language model scores tokens by its embeddings."""
    config = getattr(getattr(lm, "model", None), "config", None)
    return config is not None and bool(
        getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
    )


def listed(taps: tuple[int, ...]) -> str:
    return ", ".join(map(str, taps))


def taps_of(start: str, target: Any) -> tuple[int, ...] | None:
    """The layers that a head reads; None for a draft, which reads none.

    ConfigError for a published head, for one of another target, or of one with more layers.
    """
    place = str(resolve(start))
    if not Path(place, store.CARD).is_file():
        return None
    card = store.read_card(place, "eagle3")
    if card.kind != "eagle3":
        raise ConfigError(
            f"a head that begins as {start} was asked for.",
            f"that one is of the kind {card.kind}, which computes something else.",
            "pass a head of `foretoken train eagle3`, or leave the option `start` out.",
        )
    store.check_fits(card, start, target.hidden_size, target.vocab_size)
    taps: tuple[int, ...] = store.tuples(card.options.get("taps", (0,)))
    if max(taps, default=-1) >= target.layers:
        raise ConfigError(
            f"a head that begins as {start} was asked for.",
            f"that one reads the layers {listed(taps)}; the target has {target.layers}, counted "
            "from 0.",
            "pass a head of this target, or leave the option `start` out.",
        )
    return taps


def beginning(session: Session, start: str) -> tuple[Any, Int[Tensor, "n"], dict[str, Any]]:
    """A head, or a draft in its form; the tokens that it scores, and its shape."""
    place = resolve(start)
    if Path(str(place), store.CARD).is_file():
        head, card = store.load(str(place), "eagle3")
        shape = asdict(head.config)
        return head, head.scored, {name: shape[name] for name in card.options}
    model: Any = student(session, place, "beginning a head as")
    own = model.config
    asked = {
        "model_type": "llama", "num_key_value_heads": own.num_attention_heads,
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
        "head_dim": own.hidden_size // own.num_attention_heads,
    }  # fmt: skip
    other = [name for name, value in asked.items() if getattr(own, name, None) != value]
    if other:
        raise ConfigError(
            f"beginning a head as the draft {start} was asked for.",
            f"a head has the form of drafts that `foretoken train draft` makes; in this one "
            f"{', '.join(other)} differ.",
            "pass such a draft, or leave the option `start` out.",
        )
    rows = chosen_rows(None, place, own.vocab_size)
    return model, torch.arange(own.vocab_size) if rows is None else rows.tokens, {
        "width": own.hidden_size, "layers": own.num_hidden_layers,
        "heads": own.num_attention_heads, "inner": own.intermediate_size,
    }  # fmt: skip


def named(agreed: Any) -> dict[str, Any]:
    return {f"depth_{depth}": value for depth, value in enumerate(agreed, 1)}


def unrolled(
    head: Any,
    tokens: Int[Tensor, "n T"],
    fused: Float[Tensor, "n T W"],
    steps: int,
    embed: Any = None,
) -> Iterator[Float[Tensor, "n T W"]]:
    """The head's outputs at every token, step by step."""
    count, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(count, -1)
    memories = [fused.new_zeros(count, 0, layer.memory_size) for layer in head.layers]
    before = fused
    for step in range(steps):
        entering = head.entering(tokens, F.pad(before[:, :-1], (0, 0, 1, 0)), embed)
        sees = sight(length, step, tokens.device).expand(count, -1, -1)
        states, kept = head(entering, positions, sees, memories)
        memories = [torch.cat(pair, 1) for pair in zip(memories, kept, strict=True)]
        before = head.heard(states)
        yield states


def sight(
    length: int, step: int, device: torch.device | None = None
) -> Bool[Tensor, "1 T (step+1)T"]:
    """Which tokens of all steps so far each token of this step sees."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    text = ones.tril(-step)
    own = [ones.tril(past - step).triu(past - step) for past in range(1, step + 1)]
    return torch.cat([text, *own], 1)[None]
