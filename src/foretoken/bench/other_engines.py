"""llama.cpp and vLLM as rows: the same weights, ids, precision, threads and end tokens.

A row's worker is opened with one setting; another setting is another worker. The clock runs in the
worker, around decoding only, from prompt ids to the last new id as for everybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench.interpreters import Interpreter, Worker, absent, find
from foretoken.bench.own import Outcome
from foretoken.bench.rows import RowSpec
from foretoken.bench.tuning import TunedRow
from foretoken.errors import ConfigError
from foretoken.shipped import user_cache
from foretoken.types import SamplingParams

LAYOUT = 1  # of the GGUF files that are written; another one makes other files
WARM_TOKENS = 8
SPARE = 64  # room for guesses beyond the last token


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a worker is opened with, beside the setting."""

    python: str
    target: Path  # a folder of config.json and safetensors
    draft: Path | None
    dtype: str
    threads: int
    room: int  # tokens of the longest text
    together: int = 1  # texts written at once, at most
    files: tuple[str | None, ...] = field(default=())  # GGUF of target and draft


class EngineRow(TunedRow):
    """One form of another engine."""

    def __init__(self, spec: RowSpec, handed: Handed) -> None:
        super().__init__(spec)
        self.handed = handed
        self.engine, self.form = spec.method.split(":")
        self._worker: Worker | None = None

    def apply(self, setting: Mapping[str, Any]) -> None:
        if setting != self.setting:
            self.close()
        super().apply(setting)

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome:
        return self.write_together([prompt], [params])

    def write_together(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Outcome:
        """Texts of prompts that arrive at once; a fresh worker first writes a few tokens."""
        if self._worker is None:
            self._worker = self._open()
            self._ask(self._worker, prompts, params, WARM_TOKENS)
        found = self._ask(self._worker, prompts, params)
        tokens = [token for text in found["tokens"] for token in text]
        return Outcome(
            tokens=tokens,
            seconds=found["seconds"],
            draft=found.get("draft"),
            target=found.get("target"),
            steps=[tuple(step) for step in found.get("steps", [])],
            forwards=self.forwards(found, tokens),
            each=[
                (len(text), self.forwards(found, text) or 0)
                for text in found["tokens"]
                if len(prompts) > 1
            ],
            memory=found["memory"],
        )

    def forwards(self, found: Mapping[str, Any], tokens: Sequence[int]) -> int | None:
        """Target forwards, where they are known."""
        if "steps" in found:
            return len(found["steps"])
        return len(tokens) if self.form == "plain" else None

    def _open(self) -> Worker:
        handed = self.handed
        worker = Worker(self.engine, handed.python, handed.threads)
        self._worker = worker  # closed with the row, should opening fail
        worker.ask(
            "open",
            form=self.form,
            target=str(handed.target),
            draft=None if handed.draft is None else str(handed.draft),
            files=handed.files,
            dtype=handed.dtype,
            threads=handed.threads,
            room=handed.room,
            together=handed.together,
            setting=self.setting,
        )
        return worker

    @staticmethod
    def _ask(
        worker: Worker,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        most: int | None = None,
    ) -> dict[str, Any]:
        first = params[0]
        caps = [one.max_new_tokens for one in params]
        found: dict[str, Any] = worker.ask(
            "write",
            prompts=[list(prompt) for prompt in prompts],
            max_new_tokens=caps if most is None else [min(most, cap) for cap in caps],
            eos=sorted(first.eos),
            temperature=first.temperature,
            top_k=first.top_k,
            top_p=first.top_p,
            seed=first.seed or 0,
        )
        return found

    def stop(self) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class LlamaPlain(EngineRow):
    """llama.cpp, one token per forward.

    Its flash attention rounds to half precision on a CPU: logits of a float32 model move by 0.01,
    without it by 0.00003. So float32 does not try it.
    """

    settings = ({"flash_attn": True}, {"flash_attn": False})

    def __init__(self, spec: RowSpec, handed: Handed) -> None:
        super().__init__(spec, handed)
        if handed.dtype == "float32":
            self.settings = tuple(one for one in self.settings if not one["flash_attn"])


class LlamaLookup(LlamaPlain):
    """llama.cpp with llama-cpp-python's prompt look-up; the last is the package's default."""

    settings = tuple(
        {"flash_attn": flash, "max_ngram_size": size, "num_pred_tokens": tokens}
        for flash in (True, False)
        for size, tokens in ((2, 3), (3, 3), (2, 5), (3, 5), (2, 10))
    )


class LlamaDraft(LlamaPlain):
    """llama.cpp with the same draft model."""

    settings = tuple(
        {"flash_attn": flash, "num_pred_tokens": tokens, "p_min": sure}
        for flash in (True, False)
        for tokens, sure in ((3, 0.0), (5, 0.0), (8, 0.0), (8, 0.4), (16, 0.75))
    )


class VllmPlain(EngineRow):
    """vLLM, one token per forward and request."""

    settings = ({"enforce_eager": True}, {"enforce_eager": False})


class VllmNgram(EngineRow):
    """vLLM with its n-gram look-up."""

    settings = tuple(
        {
            "enforce_eager": False,
            "num_speculative_tokens": tokens,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": size,
        }
        for tokens, size in ((3, 3), (3, 5), (5, 5))
    )


class VllmDraft(EngineRow):
    """vLLM with the same draft model."""

    settings = tuple({"enforce_eager": False, "num_speculative_tokens": n} for n in (3, 5))


FORMS: dict[str, type[EngineRow]] = {
    "llama:plain": LlamaPlain,
    "llama:lookup": LlamaLookup,
    "llama:draft": LlamaDraft,
    "vllm:plain": VllmPlain,
    "vllm:ngram": VllmNgram,
    "vllm:draft": VllmDraft,
}


def present(
    specs: Sequence[RowSpec], asked: Mapping[str, str | Path | None]
) -> tuple[list[RowSpec], dict[str, Interpreter], list[str]]:
    """The rows whose package is there, where other engines run, and a line for what is absent."""
    found: dict[str, Interpreter] = {}
    lines = []
    for name in dict.fromkeys(spec.engine for spec in specs if spec.engine is not None):
        place = find(name, asked.get(name))
        if place.versions:
            found[name] = place
        else:
            lines.append(absent(name, [spec.label for spec in specs if spec.engine == name]))
    kept = [spec for spec in specs if spec.engine is None or spec.engine in found]
    if not kept:
        raise ConfigError(
            f"a bench of {', '.join(spec.label for spec in specs)} alone.",
            "; ".join(lines) + ".",
            "install what is missing, or name rows of our own beside.",
        )
    return kept, found, lines


def gguf_path(folder: Path, dtype: str) -> Path:
    """Where the GGUF of a checkpoint lies, by its weights: in the user's cache, written once."""
    digest = hashlib.sha256()
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return user_cache() / "gguf" / f"{digest.hexdigest()[:16]}-{dtype}-{LAYOUT}.gguf"
