"""The model `foretoken` of lm-eval: what its `hf` model answers, written by a session.

Tokenizing, special tokens, truncation, chat templates and the cutting of texts are those of the
`hf` model, inherited. Batches are not: rows join and leave between steps, and each is answered as
`hf` answers it in a batch of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from foretoken.coins import seed_from_torch
from foretoken.engine.generation_config import generation_defaults
from foretoken.engine.loading import load
from foretoken.engine.memory import amounts
from foretoken.engine.memory.bounded import Bounded
from foretoken.engine.scheduling import held, owner_of
from foretoken.errors import ConfigError
from foretoken.evaluation.generation import generation_config, most_new_tokens
from foretoken.evaluation.scoring import Answer, score
from foretoken.lm.views.view import innermost
from foretoken.types import DecodeState, Step

LOG = logging.getLogger(__name__)
PREFIXES = 256 << 20  # bytes kept of texts that are over: examples before a question are the same
# Model arguments of lm-eval's own `hf` model that mean here what they mean there; all others are
# options of `load`.
AS_HF = (
    "add_bos_token", "chat_template_args", "enable_thinking", "max_length", "prefix_token_id",
    "softmax_dtype", "think_end_token", "truncation", "use_fast_tokenizer",
)  # fmt: skip


@register_model("foretoken")
class ForetokenLM(HFLM):  # type: ignore[misc]
    """A session as a model of lm-eval; model arguments are those of `load`, and those of AS_HF.

    `batch_size` is the number of rows decoded together, whatever becomes of them; "auto" leaves it
    to the session. As with `hf`, `dtype` is the checkpoint's unless it is given.
    """

    def __init__(
        self,
        target: Any = None,
        method: str | None = None,
        draft: Any = None,
        *,
        tokenizer: Any = None,
        dtype: Any = "auto",
        device: Any = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        keep_prefixes: int = PREFIXES,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        inherited = {name: options.pop(name) for name in AS_HF if name in options}
        if "tuned" in options and dtype == "auto":
            dtype = None  # the tuned file says it
        self.session = load(
            target,
            method,
            draft,
            tokenizer,
            place(device),
            dtype,
            trust_remote_code=trust_remote_code,
            **rows_together(batch_size, max_batch_size),
            **options,
        )
        check_writes_texts(self.session)
        with silenced("lm_eval.models.huggingface"):  # it warns of models that are loaded already
            super().__init__(
                pretrained=owner_of(self.session.target),
                tokenizer=tokenizer,
                batch_size=self.session.max_rows,
                trust_remote_code=trust_remote_code,
                **inherited,
            )
        self.pretrained = self.model.name_or_path
        self.session.keep_prefixes(keep_prefixes)
        self.written = self.forwards = 0  # tokens, and the target's forwards for them, row by row
        promise = self.session.engine.promise
        if not promise.lossless:
            LOG.warning("results may differ from those of the target itself: %s", promise)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that continue contexts, in order, each up to a stop text or its cap."""
        order = Collator(
            [request.args for request in requests],
            sort_fn=lambda asked: (-len(self.tok_encode(asked[0])), asked[0]),
            group_fn=lambda asked: asked[1],
            group_by="gen_kwargs",
        )
        bar = tqdm(
            total=len(requests), disable=disable_tqdm, desc="Running generate_until requests"
        )
        with bar:
            texts = [text for alike in order.get_batched(n=0) for text in self.write(alike, bar)]
        original: list[str] = order.get_original(texts)
        return original

    def write(self, asked: Sequence[tuple[str, dict[str, Any]]], bar: Any) -> list[str]:
        """One text for each context of requests whose options are the same."""
        options = normalize_gen_kwargs(asked[0][1], self.max_gen_toks)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(options.pop("until"), eos=eos)
        rows = self.rows([context for context, _ in asked], until, options)
        places = {row.uid: place for place, row in enumerate(rows)}
        texts: dict[int, str] = {}

        def watch(step: Step, at: int) -> None:
            row = step.rows[at]
            self.written += len(step.emitted[at])
            self.forwards += 1
            if row.finish is not None:
                place = places[row.uid]
                texts[place] = self.text(row, until)
                self.cache_hook.add_partial("generate_until", asked[place], texts[place])
                bar.update(1)

        self.session.decode(rows, watch)
        return [texts[place] for place in range(len(rows))]

    def rows(
        self, contexts: Sequence[str], until: list[str], options: dict[str, Any]
    ) -> list[DecodeState]:
        """Rows with what `hf` would hand to `generate`: of a context that leaves no room for the
        new tokens, the end.
        """
        new_tokens = options.pop("max_gen_toks")
        room = self.max_length - new_tokens
        if room <= 0:
            raise ConfigError(
                f"max_gen_toks={new_tokens} was asked for.",
                f"prompt and text share a context of {self.max_length} tokens.",
                "ask for fewer tokens, as by --gen_kwargs max_gen_toks=64.",
            )
        sampled = options["do_sample"]
        if sampled:
            options.setdefault("temperature", 0.0)  # refused there and here
        else:
            options.pop("temperature", None)
        config = generation_config(self.model, options)
        self.session.generation = generation_defaults(self.model, config)
        cap = most_new_tokens(self.model, new_tokens, until)
        seeds = [seed_from_torch() for _ in contexts] if sampled else None
        stop = [text for text in until if text] or None  # none of its own: those of the config
        return self.session.rows(
            [self.prompt(context, room) for context in contexts], cap, stop=stop, seed=seeds
        )

    def prompt(self, context: str, room: int) -> list[int]:
        """Ids of one context, cut to the last `room` of them."""
        ids, _ = self.tok_batch_encode(
            [context], left_truncate_len=room, truncation=self.truncation
        )
        listed: list[int] = ids[0].tolist()
        return listed

    def text(self, row: DecodeState, until: list[str]) -> str:
        """The text of a row that is over, without stop texts and without what was thought before
        the answer.
        """
        tokens, thought = row.new_tokens, self.think_end_token
        if not isinstance(thought, int):
            words = self.tok_decode(tokens)
            return str(postprocess_generated_text(words, stop=until, think_end_token=thought))
        ends = [place for place, token in enumerate(tokens) if token == thought]
        words = self.tok_decode(tokens[ends[-1] + 1 :] if ends else tokens).lstrip()
        return str(postprocess_generated_text(words, stop=until, think_end_token=None))

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """Log-likelihoods under the target's own law; of a context that does not fit, the end."""
        check_unbounded(self.session)
        longest = self.max_length + 1
        pairs = []
        for _, context, continuation in requests:
            assert 0 < len(continuation) < longest, "a continuation fits into the context"
            whole = (context + continuation)[-longest:]
            pairs.append((whole[: -len(continuation)], continuation))
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests")

        def told(number: int, answer: Answer) -> None:
            bar.update(1)
            if requests[number][0] is not None:  # windows of a rolling one are no requests
                self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)

        lm = innermost(self.session.target)
        with bar, held(self.session.scheduler.turns):
            return score(lm, pairs, self.session.max_rows, self.softmax_dtype, told)

    def get_model_info(self) -> dict[str, Any]:
        """What `hf` says of the model, and how its texts were written."""
        promise = self.session.engine.promise
        return {
            **super().get_model_info(),
            "foretoken_method": self.session.method,
            "foretoken_promise": promise.to_dict(),
            "foretoken_tokens": self.written,
            "foretoken_tokens_per_forward": self.written / max(self.forwards, 1),
        }


def place(device: Any) -> Any:
    """A device that is here: lm-eval's command line names cuda:0 whatever the machine has, and its
    `hf` model takes that for no wish at all.
    """
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        LOG.warning("device %s is not here: the model runs on the CPU", device)
        return None
    return device


@contextmanager
def silenced(logger: str) -> Iterator[None]:
    """That logger says nothing inside."""
    said = logging.getLogger(logger)
    said.disabled = True
    try:
        yield
    finally:
        said.disabled = False


def rows_together(batch_size: int | str, most: int | None) -> dict[str, Any]:
    """lm-eval's batch sizes as an option of `load`."""
    if str(batch_size).startswith("auto"):
        return {} if most is None else {"max_rows": most}
    return {"max_rows": int(batch_size) if str(batch_size).isdigit() else batch_size}


def check_writes_texts(session: Any) -> None:
    """ConfigError for a method that writes several texts after one prompt."""
    if session.writes != "text":
        raise ConfigError(
            f"method {session.method!r} was asked for in an evaluation.",
            "a task takes one text per prompt; this method writes a scored set of them.",
            "use another method, such as chain.",
        )


def check_unbounded(session: Any) -> None:
    """ConfigError for log-likelihoods under a budget of memory: it is kept where texts are written,
    and a batch of contexts that is read beside them is in nobody's plan.
    """
    waiting = session.engine.waiting
    if isinstance(waiting, Bounded):
        budget = amounts.told(waiting.room.budget)
        raise ConfigError(
            f"log-likelihoods were asked for within a memory budget of {budget}.",
            "a budget is kept for texts that are written; contexts that are scored may take more.",
            "load without memory_budget, with batch_size=1 where memory is short; tasks that write "
            "texts keep to a budget.",
        )


def main(arguments: Sequence[str]) -> None:
    """lm-eval's own command line, in which `--model foretoken` is known."""
    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()
