"""What a mini can do: accuracy per family, entropy on held-out answers, and how far a draft agrees
with it.

Plain transformers forwards on purpose: these numbers describe the models, and must not depend on
our engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from foretoken.errors import CheckpointError, ConfigError

from . import tasks
from .example import Example


def load(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model in float32 and tokenizer of a mini's folder."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            asked=f"a model in {path}",
            possible="there is no config.json there",
            do="name the folder of a finished mini",
        )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(path)


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    limit: int = 128,
) -> list[list[int]]:
    """Greedy continuations of the prompts, with the end token where it came, in one left-padded
    batch.
    """
    prompts = [tokenizer(example.prompt).input_ids for example in examples]
    longest = max(map(len, prompts))
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id  # behind a mask
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=limit,
        do_sample=False,
        pad_token_id=pad,
    )
    found = []
    for row in out[:, longest:].tolist():
        found.append(row[: row.index(end) + 1] if end in row else row)
    return found


def accuracy(
    examples: Sequence[Example],
    answers: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerFast,
) -> float:
    """Part of the answers that pass their example's check."""
    end = tokenizer.eos_token_id
    said = [tokenizer.decode(a[:-1] if a and a[-1] == end else a) for a in answers]
    passed = [e.check(text) for e, text in zip(examples, said, strict=True)]
    return sum(passed) / len(passed)


@torch.inference_mode()
def entropy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]
) -> list[float]:
    """Entropy of the model's next-token law, in nats, at every token of the held-out answers."""
    found: list[float] = []
    for example in examples:
        prompt = tokenizer(example.prompt).input_ids
        answer = [
            *tokenizer(example.answer, add_special_tokens=False).input_ids,
            tokenizer.eos_token_id,
        ]
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        law = torch.log_softmax(logits, -1)
        found += (-(law.exp() * law).sum(-1)).tolist()
    return found


@torch.inference_mode()
def agreement(draft: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> list[bool]:
    """Whether the draft's greedy choice is the target's, at every token of the target's own
    greedy answer.
    """
    tokens = torch.tensor([[*prompt, *answer]])
    choices = draft(input_ids=tokens).logits[0, len(prompt) - 1 : -1].argmax(-1)
    agrees: Tensor = choices == tokens[0, len(prompt) :]
    return agrees.tolist()


def accepted_length(agrees: Sequence[bool], depth: int = 5) -> tuple[int, int]:
    """Tokens and target steps of greedy chain speculation, from the agreement along the target's
    answer.

    A step accepts the run of agreements (at most `depth`) and adds the target's own token. The
    draft always continues the target's text, so the agreement at each token says all there is to
    know.
    """
    position = steps = 0
    while position < len(agrees):
        run = 0
        while run < depth and position + run < len(agrees) and agrees[position + run]:
            run += 1
        position += run + 1
        steps += 1
    return len(agrees), steps


def report(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    count: int = 50,
    seed: int = 0,
    depth: int = 5,
    families: Sequence[str] = tasks.FAMILIES,
    split: str = "test",
) -> dict[str, Any]:
    """Everything the card states, per family and averaged over families. Numbers only, ready for
    JSON.
    """
    model, tokenizer = load(target)
    small: PreTrainedModel | None = None
    if draft:
        small, other = load(draft)
        _check_vocabularies(tokenizer, other, draft)
    rows: dict[str, Any] = {}
    for family in families:
        examples = tasks.examples(family, split, count, seed)
        answers = greedy(model, tokenizer, examples)
        row: dict[str, Any] = {
            "target_accuracy": accuracy(examples, answers, tokenizer),
            "entropy_per_token": statistics.fmean(entropy(model, tokenizer, examples)),
            "answer_tokens": statistics.fmean(map(len, answers)),  # with the end token, if it came
        }
        if small:
            row |= _pair(small, tokenizer, examples, answers, depth)
        rows[family] = row
    keys = next(iter(rows.values())).keys()
    mean = {key: statistics.fmean(row[key] for row in rows.values()) for key in keys}
    return {
        "families": rows,
        "mean": mean,
        "examples_per_family": count,
        "split": split,
        "seed": seed,
        "depth": depth,
    }


def _check_vocabularies(tokenizer: Any, other: Any, draft: str | Path) -> None:
    """A draft is asked about the target's token ids: they have to mean the same to both."""
    if other.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            asked=f"the draft {draft} has a tokenizer of its own",
            possible="a draft is compared by token ids, to which both give the same meanings",
            do="name a draft trained with the tokenizer of this target",
        )


def _pair(
    small: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    answers: Sequence[list[int]],
    depth: int,
) -> dict[str, float]:
    tokens = steps = agreed = 0
    for example, answer in zip(examples, answers, strict=True):
        agrees = agreement(small, tokenizer(example.prompt).input_ids, answer)
        emitted, needed = accepted_length(agrees, depth)
        tokens, steps, agreed = tokens + emitted, steps + needed, agreed + sum(agrees)
    return {
        "draft_accuracy": accuracy(examples, greedy(small, tokenizer, examples), tokenizer),
        "agreement": agreed / tokens,
        "mean_accepted_length": tokens / steps,
    }
