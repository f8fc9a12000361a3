"""What a caller passed, checked and turned into rows: prompts, sampling options, seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict

from torch import Tensor

from foretoken.engine.chat import Message, chat_ids, is_chat
from foretoken.engine.hf_arguments import for_row, refuse_processors
from foretoken.engine.memory.amounts import amount
from foretoken.engine.text import check_text
from foretoken.errors import ConfigError, ContextError, meant
from foretoken.row import Turn
from foretoken.types import SamplingParams

Prompt = str | Sequence[int] | Sequence[Message]  # a text, token ids, or chat messages


class Sampling(TypedDict, total=False):
    """Options of `generate` and `stream` beside max_new_tokens; defaults as in SamplingParams."""

    temperature: float  # 0 is greedy
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    banned_tokens: Iterable[int]
    min_new_tokens: int
    stop: str | Sequence[str] | None
    seed: int | Sequence[int] | None  # one for all (row i of a batch uses seed + i), or one per row
    ignore_eos: bool
    processors: Any  # a transformers LogitsProcessorList, or one processor
    guesses: int  # most tokens guessed for this text in a step; 0: written without speculation
    priority: int  # the lower, the sooner it gets a place in the batch
    owner: str  # whose text it is: places are shared evenly among these, kept prefixes are not
    requester: str  # whom of the owner's it is for: its places are shared evenly among these
    # What the text has to match: a mapping with one of json (a schema, or True for any object),
    # regex, choice (a list of texts) and grammar (Lark or GBNF); or one, or None, per prompt.
    guided: Any
    # A text or token ids that the answer is expected to be close to, for faster drafts; or one, or
    # None, per prompt. It changes no law.
    prediction: Any


BYTES = bytes | bytearray | memoryview  # sequences of numbers, which are no token ids
SAMPLING = frozenset(Sampling.__annotations__) | {"max_new_tokens"}
PLACING = (
    "guesses",
    "priority",
    "owner",
    "requester",
)  # how a row is decoded, which its law knows nothing of
KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(
        ("max_new_tokens", "top_k", "min_new_tokens", "guesses", "priority"),
        (Integral, "a whole number"),
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
         "frequency_penalty"),
        (Real, "a finite number"),
    ),
    "logit_bias": (Mapping, "a mapping from token ids to numbers, such as {17: -2.5}"),
    "banned_tokens": (Iterable, "a list or set of token ids, such as [17, 4]"),
    "ignore_eos": (bool, "True or False"),
    **dict.fromkeys(("owner", "requester"), (str, "a text, such as the name of a user")),
}  # fmt: skip


def is_number(value: Any, kind: type) -> bool:
    """A finite number of that kind; truth values are none."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    try:
        return kind is Integral or math.isfinite(float(value))  # type: ignore[arg-type]
    except OverflowError:  # a whole number that no float holds
        return False


BEAMS = "beams have methods of their own: load with 'beam-sampling' or 'dsbd', num_beams=4."


def check_sampling(options: Mapping[str, Any]) -> None:
    """Names and types; ranges are checked by SamplingParams. None is as good as not passed."""
    for name, value in options.items():
        if name not in SAMPLING:
            raise ConfigError(
                f"the option {name!r} was passed.",
                f"options are {', '.join(sorted(SAMPLING))}.",
                BEAMS if name == "num_beams" else meant(name, SAMPLING),
            )
        kind, what = KINDS.get(name, (object, ""))
        fits = is_number if kind in (Integral, Real) else isinstance
        if value is not None and not fits(value, kind):
            raise ConfigError(
                f"{name}={value!r} was asked for.", f"{name} is {what}.", f"pass {what}."
            )


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were given; None leaves one to the generation config, or to its default.

    What can be gone through once only is kept: every row of a batch reads it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if "banned_tokens" in given:
        given["banned_tokens"] = listed_ids(given["banned_tokens"])
    return {
        name: tuple(value) if isinstance(value, Iterator) else value
        for name, value in given.items()
    }


def listed_ids(value: Any) -> Any:
    """Ids in any kind of list as a tuple: the truth of an array or a tensor is not whether it has
    any. What is no list is left, and refused by its type.
    """
    if isinstance(value, str | BYTES):
        return value
    found = value.tolist() if hasattr(value, "tolist") else value
    return tuple(found) if isinstance(found, Iterable) else found


def listed_processors(processors: Any) -> list[Any]:
    """The processors of a list, or the one that was passed alone."""
    if isinstance(processors, list):
        return processors
    return [] if processors is None else [processors]


def of_row(options: Mapping[str, Any], row: int, rows: int) -> dict[str, Any]:
    """The options of one of several rows: processors may know something of each."""
    processors = options.get("processors")
    if rows == 1 or not callable(processors):
        return dict(options)
    refuse_processors(listed_processors(processors), rows)
    if isinstance(processors, list):
        return {**options, "processors": for_row(processors, row, rows)}
    [own] = for_row([processors], row, rows)
    return {**options, "processors": own}


def sampling_params(
    options: Mapping[str, Any], vocab_size: int, eos: frozenset[int]
) -> SamplingParams:
    """Checked parameters of one row without its seed."""
    check_sampling(options)
    processors = options.get("processors")
    if processors is not None and not callable(processors):
        raise ConfigError(
            f"processors of type {type(processors).__name__} were passed.",
            "processors are a transformers LogitsProcessorList: called with ids and scores.",
            "wrap a list: processors=LogitsProcessorList([...]).",
        )
    refuse_processors(listed_processors(processors), 1)
    apart = ("seed", "ignore_eos", *PLACING)
    given: dict[str, Any] = {k: v for k, v in options.items() if k not in apart}
    given["stop"] = stop_texts(given.get("stop"))
    given["logit_bias"] = {
        token_id(token, vocab_size, "logit_bias"): bias_value(bias)
        for token, bias in dict(given.get("logit_bias") or {}).items()
    }
    given["banned_tokens"] = frozenset(
        token_id(token, vocab_size, "banned_tokens") for token in given.get("banned_tokens", ())
    )
    given["eos"] = frozenset() if options.get("ignore_eos") else eos
    return SamplingParams(**given)


def placing(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked about a row's place and its drafts."""
    found = {name: options[name] for name in PLACING if options.get(name) is not None}
    if found.get("guesses", 0) < 0:
        raise ConfigError(
            f"guesses={found['guesses']} was asked for.",
            "it is the most tokens guessed in a step: 0 (no speculation) or more.",
            "pass 0 or more, or leave it out: then as many as pay.",
        )
    return found


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One stop text or several, never an empty one."""
    listed: Any = () if stop is None else stop
    single = isinstance(listed, str) or not isinstance(listed, Iterable)
    texts = (listed,) if single else tuple(listed)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"stop={stop!r} was asked for.",
                "a stop is a text of at least one character, or a list of such texts.",
                'pass for example stop="\\n\\n" or stop=["###", "END"].',
            )
    return texts


def bias_value(bias: Any) -> float:
    """A bias as a float; `Warp` checks that it makes a law."""
    if isinstance(bias, Real) and not isinstance(bias, bool):
        return float(bias)
    raise ConfigError(
        f"a logit bias of {bias!r} was asked for.",
        "a bias is a number; -inf bans the token.",
        "pass numbers, for example logit_bias={17: -2.5}.",
    )


def token_id(token: Any, vocab_size: int, where: str) -> int:
    """`token` as an id inside the vocabulary."""
    if not is_number(token, Integral) or not 0 <= int(token) < vocab_size:
        raise ConfigError(
            f"{where} holds {token!r}.",
            f"token ids of this model run from 0 to {vocab_size - 1}.",
            "check that prompt and model use the same tokenizer.",
        )
    return int(token)


def as_batch(
    prompt: Any, tokenizer: Any = None, ends: frozenset[int] = frozenset()
) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether it was a batch.

    `tokenizer` and `ends` tell what fills up the rows of a tensor: it is no text, and refused.
    """
    if isinstance(prompt, Tensor):
        check_unpadded(prompt, tokenizer, ends)
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, Sequence):
        raise ConfigError(
            f"a prompt of type {type(prompt).__name__} was passed.",
            "a prompt is a text, a list of token ids, a list of chat messages, or a list of these.",
            "pass one of these.",
        )
    if not prompt:
        raise ConfigError(
            "an empty prompt was passed.",
            "a model continues something: at least one token, at least one prompt.",
            "pass a text, token ids, or a list of prompts.",
        )
    if isinstance(prompt[0], str | Sequence | Tensor) and not is_chat(prompt):
        return [p.tolist() if isinstance(p, Tensor) else p for p in prompt], True
    return [prompt], False


def check_unpadded(prompts: Tensor, tokenizer: Any, ends: frozenset[int]) -> None:
    """Refuse a batch some of whose rows begin or end with padding, which would be read as text.

    Where all rows do, it may as well be a start token, and an end token may be meant.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    if prompts.dim() != 2 or not prompts.numel() or pad is None or pad in ends:
        return
    padded = (prompts[:, [0, -1]] == pad).any(dim=1)
    if bool(padded.any()) and not bool(padded.all()):
        raise ConfigError(
            f"a batch of {len(prompts)} rows was passed as one tensor, padded with token {pad}.",
            "every token of a prompt is read, padding too; prompts may have different lengths.",
            "pass a list of unpadded ids, or texts.",
        )


def prompt_ids(
    prompt: Any, tokenizer: Any, vocab_size: int, max_length: int | None, which: str
) -> list[int]:
    """Checked token ids of one prompt; a `Turn` where an answer begins behind them."""
    fresh = isinstance(prompt, Turn)
    if isinstance(prompt, str) and prompt:
        if tokenizer is None:
            raise ConfigError(
                f"{which} is a text.",
                "this session has no tokenizer, so it takes token ids only.",
                "pass tokenizer= to load, or a list of token ids.",
            )
        check_text(prompt, which)
        prompt = tokenizer(prompt)["input_ids"]
    elif is_chat(prompt):
        last, prompt = prompt[-1], chat_ids(prompt, tokenizer, which)
        fresh = last["role"] != "assistant"
    if not isinstance(prompt, Sequence) or isinstance(prompt, BYTES):
        raise ConfigError(
            f"{which} is a {type(prompt).__name__}.",
            "a prompt is a text, a list of token ids, or a list of chat messages.",
            "pass one of these (bytes decoded to a text); do not mix prompts and ids in one list.",
        )
    check_length(len(prompt), max_length, which)  # before each token is looked at
    ids = [token_id(token, vocab_size, which) for token in prompt]
    if not ids:
        raise ConfigError(
            f"{which} is empty.",
            "a model continues something: a prompt needs at least one token.",
            "pass a text or ids; the id of the start token alone will do.",
        )
    return Turn(ids) if fresh else ids


def check_length(tokens: int, longest: int | None, which: str) -> None:
    """Refuse a prompt that is longer than the model's context."""
    if longest is not None and tokens > longest:
        raise ContextError(
            f"{which} has {tokens} tokens.",
            f"the context of this model is {longest} tokens.",
            "shorten the prompt, or use a model with a longer context.",
        )


def row_seeds(seed: Any, rows: int) -> list[int | None]:
    """A seed per row: row i of a batch uses seed + i, so that it can be repeated alone."""
    if seed is None:
        return [None] * rows
    if is_number(seed, Integral):
        return [int(seed) + i for i in range(rows)]
    if isinstance(seed, Sequence) and not isinstance(seed, str) and len(seed) == rows:
        return [row_seeds(one, 1)[0] for one in seed]
    raise ConfigError(
        f"seed={seed!r} was asked for with {rows} prompt(s).",
        "a seed is a whole number, or a list with one for each prompt.",
        "pass for example seed=7; row i of a batch then uses 7 + i.",
    )


def kept_bytes(limit: Any) -> int:
    """Bytes of texts to keep: a whole number, or a text as a memory budget is written."""
    if isinstance(limit, str):
        return 0 if limit.strip() == "0" else amount(limit, "keep_prefixes")
    if is_number(limit, Integral) and limit >= 0:
        return int(limit)
    raise ConfigError(
        f"keep_prefixes={limit!r} was asked for.",
        "it is bytes: a whole number of 0 (none) or more, or a text with a unit.",
        "pass for example 0, 1 << 29 or '512MiB'.",
    )
