"""llama.cpp through llama-cpp-python: plain, prompt look-up, and a draft model.

The loop is that of llama.cpp's own examples over its C interface: prompt in one call, then per step
one call for the last token and its guesses, logits for these only, and what was refused leaves the
cache. The package's `Llama.generate` would compute logits for the whole prompt as soon as it
guesses. Look-up is the package's. A draft guesses greedily, and stops where it is less sure than
`p_min`. Accepted is what the target itself picks: exact at every temperature.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import wire

PACKAGES = ("llama-cpp-python", "gguf")
if sys.argv[1:] == ["--probe"]:
    wire.probe(PACKAGES)
    sys.exit()

import gguf_file  # noqa: E402  (the two need the packages that the probe looks for)
import llama_cpp as cpp  # noqa: E402
import numpy as np  # noqa: E402
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # noqa: E402


class Context:
    """One model, the ids in its cache, and logits of the last call."""

    def __init__(self, path: str, room: int, threads: int, wide: bool, setting: dict[str, Any]):
        options = cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = cpp.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {Path(path).name}")
        params = cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = room
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(setting["flash_attn"])
        params.type_k = params.type_v = cpp.GGML_TYPE_F32 if wide else cpp.GGML_TYPE_F16
        self.context = cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not open a context of {room} tokens")
        self.vocabulary = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self.model))
        self.batch = cpp.llama_batch_init(room, 0, 1)
        self.cached: list[int] = []

    def feed(self, tokens: list[int], scored: int) -> None:
        """Cache `tokens`; the last `scored` of them get logits."""
        batch, start = self.batch, len(self.cached)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at] = token
            batch.pos[at] = start + at
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = 0
            batch.logits[at] = at >= len(tokens) - scored
        if status := cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode answered {status} for {len(tokens)} tokens")
        self.cached += tokens

    def keep(self, length: int) -> None:
        """Forget what lies beyond the first `length` ids."""
        if length < len(self.cached):
            cpp.llama_memory_seq_rm(cpp.llama_get_memory(self.context), 0, length, -1)
            del self.cached[length:]

    def logits(self, at: int) -> np.ndarray:
        """Logits after the token at place `at` of the last call."""
        found = cpp.llama_get_logits_ith(self.context, at)
        return np.ctypeslib.as_array(found, shape=(self.vocabulary,))


class Lookup:
    """Guesses from the text so far, by the package's own search."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.search = LlamaPromptLookupDecoding(
            setting["max_ngram_size"], setting["num_pred_tokens"]
        )

    def __call__(self, tokens: list[int]) -> list[int]:
        return self.search(np.array(tokens, np.intc)).tolist()


class Drafted:
    """Guesses of a smaller model, greedy, as long as it is sure."""

    def __init__(self, context: Context, setting: dict[str, Any]) -> None:
        self.context, self.most = context, setting["num_pred_tokens"]
        self.sure = setting["p_min"]

    def __call__(self, tokens: list[int]) -> list[int]:
        cached = self.context.cached
        pairs = enumerate(zip(cached, tokens, strict=False))
        self.context.keep(next((n for n, (a, b) in pairs if a != b), len(tokens) - 1))
        guessed: list[int] = []
        fed = tokens[len(cached) :]
        while len(guessed) < self.most:
            self.context.feed(fed, 1)
            logits = self.context.logits(-1)
            best = int(logits.argmax())
            if self.sure and 1.0 / np.exp(logits - logits[best]).sum() < self.sure:
                break
            guessed.append(best)
            fed = [best]
        return guessed


class Engine:
    """What the bench opened: the target, and what guesses for it."""

    def open(
        self,
        *,
        form: str,
        target: str,
        draft: str | None,
        files: list[str],
        dtype: str,
        threads: int,
        room: int,
        setting: dict[str, Any],
        together: int,
    ) -> None:
        """Write the GGUF files that are not there yet, and load them."""
        for folder, path in zip((target, draft), files, strict=True):
            if folder is not None and not Path(path).exists():
                gguf_file.write(Path(folder), Path(path), dtype)
        self.quiet = cpp.llama_log_callback(lambda level, text, data: None)
        cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        cpp.llama_backend_init()
        wide = dtype == "float32"
        self.target = Context(files[0], room, threads, wide, setting)
        self.draft = None
        self.guess = Lookup(setting) if form == "lookup" else lambda tokens: []
        if draft is not None:
            self.draft = Context(files[1], room, threads, wide, setting)
            self.guess = Drafted(self.draft, setting)

    def write(self, *, prompts: list[list[int]], **asked: Any) -> dict[str, Any]:
        """The continuation of one prompt."""
        (prompt,), (cap,) = prompts, asked["max_new_tokens"]
        self.target.keep(0)
        if self.draft is not None:
            self.draft.keep(0)
        pick = Pick(self.target, asked)
        found = self.decode(prompt, cap, set(asked["eos"]), pick)
        pick.close()
        return {**found, "memory": wire.peak_memory()}

    def decode(self, prompt: list[int], cap: int, eos: set[int], pick: Pick) -> dict[str, Any]:
        """The timed part."""
        steps: list[tuple[int, int, int, int]] = []
        drafting = scoring = 0.0
        fed, guessed, tokens, over = prompt, [], [], False
        began = perf_counter()
        while not over:
            called = perf_counter()
            self.target.feed(fed, len(guessed) + 1)
            scoring += perf_counter() - called
            written = 0
            for at in range(len(guessed) + 1):
                token = pick(at - len(guessed) - 1)
                tokens.append(token)
                written += 1
                over = token in eos or len(tokens) == cap
                if over or at == len(guessed) or token != guessed[at]:
                    break
            steps.append((len(guessed), len(guessed), written - 1, written))
            if over:
                break
            text = prompt + tokens
            self.target.keep(len(text) - 1)
            called = perf_counter()
            guessed = self.guess(text)[: cap - len(tokens) - 1] if len(tokens) + 1 < cap else []
            drafting += perf_counter() - called
            fed = [tokens[-1], *guessed]
        seconds = perf_counter() - began
        times = {"seconds": seconds, "draft": drafting, "target": scoring}
        return {"tokens": [tokens], "steps": steps, **times}


class Pick:
    """The law of a token: greedy by numpy, else llama.cpp's samplers in our order."""

    def __init__(self, context: Context, asked: dict[str, Any]) -> None:
        self.context, self.chain = context, None
        if asked["temperature"] == 0:
            return
        self.chain = cpp.llama_sampler_chain_init(cpp.llama_sampler_chain_default_params())
        stages = [cpp.llama_sampler_init_temp(asked["temperature"])]
        if asked["top_k"]:
            stages.append(cpp.llama_sampler_init_top_k(asked["top_k"]))
        if asked["top_p"] < 1:
            stages.append(cpp.llama_sampler_init_top_p(asked["top_p"], 1))
        stages.append(cpp.llama_sampler_init_dist(asked["seed"]))
        for stage in stages:
            cpp.llama_sampler_chain_add(self.chain, stage)

    def __call__(self, at: int) -> int:
        if self.chain is None:
            return int(self.context.logits(at).argmax())
        return int(cpp.llama_sampler_sample(self.chain, self.context.context, at))

    def close(self) -> None:
        if self.chain is not None:
            cpp.llama_sampler_free(self.chain)


if __name__ == "__main__":
    engine = Engine()
    wire.serve({"open": engine.open, "write": engine.write})
