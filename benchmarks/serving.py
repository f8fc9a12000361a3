"""Servers side by side under load: ours with and without speculation, vLLM's, llama.cpp's.

    python benchmarks/serving.py --tasks spec-bench.jsonl \
        --vllm-python ./vllm/bin/python --llama-server ./llama-server --gguf smollm2-bf16.gguf

All serve the same weights (of `foretoken minis get smollm2-135m`) in bfloat16 with two threads, and
all stay loaded; they take turns within every load, on prompts that none of them has seen. A server
that is not named is left out. Writes benchmarks/results/serving.json and .md.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gates
import httpx
from pair import WORK, console, main
from real import tasks

from foretoken.bench.load.address import Server
from foretoken.bench.load.arrivals import Level
from foretoken.bench.load.config import LoadConfig
from foretoken.bench.load.prompts import Writing
from foretoken.bench.load.run import run_load
from foretoken.errors import ConfigError
from foretoken.minis.fetch import get

MODEL, DRAFT = "smollm2-135m", "smollm2-135m-draft"
RESULTS = Path(__file__).parent / "results"
READY = 600.0  # seconds until a server answers: vLLM compiles
OVER_PEER = {1: 1.5, 4: 1.2, 16: 1.0, 64: 1.0}  # wanted over the better peer, by clients at once


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def ours(asked: argparse.Namespace, port: int, method: str | None) -> list[str]:
    """Our server; without a method the one that a user gets who names none."""
    command = [
        sys.executable, "-m", "foretoken", "serve", "--target", MODEL, "--draft", DRAFT,
        "--dtype", "bfloat16", "--port", str(port), "--max-rows", str(max(asked.concurrency)),
        "--queue", "1024",
    ]  # fmt: skip
    if asked.head and method != "plain":
        command += ["--set", f"draft_head={asked.head}"]
    return [*command, *(["--method", method] if method else [])]


def vllm(asked: argparse.Namespace, port: int, speculation: str | None) -> list[str]:
    """vLLM's own server, plain or looking up n-grams."""
    command = [
        asked.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(get(MODEL)),
        "--dtype", "bfloat16", "--port", str(port), "--max-model-len", "2048",
        "--max-num-seqs", str(max(asked.concurrency)), "--served-model-name", MODEL,
    ]  # fmt: skip
    return [*command, *(["--speculative-config", speculation] if speculation else [])]


def llama(asked: argparse.Namespace, port: int) -> list[str]:
    """llama.cpp's server, with a slot for every client."""
    slots = max(asked.concurrency)
    return [
        asked.llama_server, "-m", asked.gguf, "--port", str(port), "-t", str(asked.threads),
        "-np", str(slots), "-c", str(slots * 2048), "-fa", "on",
        "--alias", MODEL,
    ]  # fmt: skip


def commands(asked: argparse.Namespace) -> dict[str, list[str]]:
    """Servers by name, ours first."""
    found = {name: ours(asked, free_port(), method) for name, method in asked.methods.items()}
    if asked.vllm_python:
        ngram = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4}'
        found["vllm"] = vllm(asked, free_port(), None)
        if asked.ngram:
            found["vllm-ngram"] = vllm(asked, free_port(), ngram)
    if asked.llama_server:
        found["llama.cpp"] = llama(asked, free_port())
    return found


def environment(threads: int) -> dict[str, str]:
    """What all servers are told: so many threads, and to let them sleep between their turns."""
    told = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "4", "KMP_BLOCKTIME": "5"}
    return {**os.environ, **told, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def running(name: str, command: Sequence[str], threads: int) -> Iterator[Server]:
    """A server from its first answer to its end."""
    with process_of(name, command, threads) as (_, url):
        yield Server(name, f"{url}/v1")


@contextmanager
def process_of(
    name: str, command: Sequence[str], threads: int, patience: float = 30.0
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server's process and address, from its first answer to its end, for which it has so many
    seconds; its output goes to a file."""
    url = f"http://127.0.0.1:{command[list(command).index('--port') + 1]}"
    log = WORK / f"serving-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(threads)
        )
        try:
            until_ready(name, process, f"{url}/health", log)
            yield process, url
        finally:
            process.send_signal(signal.SIGCONT)  # whoever was stopped could not end
            process.terminate()
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()


def until_ready(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait for a healthy answer."""
    began = time.monotonic()
    while time.monotonic() - began < READY:
        if process.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                console.print(f"{name} is ready after {time.monotonic() - began:.0f} s")
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise ConfigError(
        f"the server {name} was started.",
        f"it ended or did not answer within {READY:g} s.",
        f"read {log}.",
    )


@contextmanager
def all_of(found: Mapping[str, Sequence[str]], threads: int) -> Iterator[list[Server]]:
    """All servers, started one after another."""
    if not found:
        yield []
        return
    (name, command), *others = found.items()
    with (
        running(name, command, threads) as first,
        all_of(dict(others), threads) as rest,
    ):
        yield [first, *rest]


def figure(level: Mapping[str, Any], name: str, *path: str) -> float | None:
    """A number of a server at a load; None where it answered nothing."""
    found: Any = level["servers"].get(name, {})
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def speed(level: Mapping[str, Any], name: str) -> float | None:
    return figure(level, name, "throughput", "tokens_per_second", "value")


def verdicts(results: Mapping[str, Any], first: str, peers: Sequence[str]) -> list[gates.Gate]:
    """Ours against the better peer at each load, and against itself without speculation; what did
    not answer holds nothing."""
    found = []
    for level in results["levels"]:
        own = [name for name in level["servers"] if name not in peers]
        found += [answered(level, name) for name in own]
        if peers:
            found += over_peers(level, first, peers)
        if "plain" in own and first != "plain":
            found += over_plain(level, first)
    return found


def over_plain(level: Mapping[str, Any], first: str) -> list[gates.Gate]:
    """Never slower; a lone client far faster, by tokens and by when whole answers are there."""
    clients = int(level["value"])
    ratio = over(speed(level, first), speed(level, "plain"))
    bound = 1.8 if clients == 1 else 0.97
    found = [gates.Gate(f"{clients} at once, {first} over plain, tokens/s", ratio, bound, unit="x")]
    if clients == 1:
        later, sooner = (
            figure(level, name, "latency", "p50", "value") for name in ("plain", first)
        )
        claim = f"1 at once, whole answers of plain over those of {first}, s (p50)"
        found.append(gates.Gate(claim, over(later, sooner), 1.8, unit="x"))
    return found


def answered(level: Mapping[str, Any], name: str) -> gates.Gate:
    """Whether a server of ours answered everything it was asked."""
    row = level["servers"][name]
    claim = f"{int(level['value'])} at once, answered by {name}"
    return gates.Gate(claim, over(row["answered"], row["requests"]), 1.0)


def over_peers(level: Mapping[str, Any], first: str, peers: Sequence[str]) -> list[gates.Gate]:
    """Tokens per second and time to the first token, against the better of the peers."""
    clients = int(level["value"])
    speeds = {name: value for name in peers if (value := speed(level, name))}
    best = max(speeds, key=lambda name: speeds[name], default=None)
    at = f"{clients} at once, {first} over {best or 'peers, none of which answered'}"
    ratio = over(speed(level, first), None if best is None else speeds[best])
    waits = [figure(level, name, "ttft", "p50", "value") for name in speeds]
    least = min((one for one in waits if one), default=None)
    late = over(figure(level, first, "ttft", "p50", "value"), least)
    return [
        gates.Gate(f"{at}, tokens/s", ratio, OVER_PEER.get(clients, 1.0), unit="x"),
        gates.Gate(
            f"{clients} at once, time to first token over the better peer's",
            late, 1.0, at_least=False, unit="x",
        ),
    ]  # fmt: skip


def over(above: float | None, below: float | None) -> float | None:
    """The ratio of two figures; None where either is missing."""
    return above / below if above is not None and below else None


def markdown(results: Mapping[str, Any]) -> str:
    """A line for every load and server."""
    lines = [
        "| clients | server | tokens/s | first token, ms: p50, p95 | per token, ms: p50 | whole "
        "answer, s: p50, p95 | answered | client's CPU |",
        "|---:|---|---:|---|---:|---|---:|---:|",
    ]
    for level in results["levels"]:
        for name, row in level["servers"].items():
            if not row["answered"]:
                lines.append(f"| {level['value']:g} | {name} | none answered |" + " |" * 5)
                continue
            rate = row["throughput"]["tokens_per_second"]
            low, high = rate["interval"] or (rate["value"],) * 2
            cells = [
                f"{level['value']:g}", name, f"{rate['value']:.1f} ({low:.0f} to {high:.0f})",
                f"{1000 * row['ttft']['p50']['value']:.0f}, "
                f"{1000 * row['ttft']['p95']['value']:.0f}",
                f"{1000 * row['tpot']['p50']['value']:.1f}",
                f"{row['latency']['p50']['value']:.2f}, {row['latency']['p95']['value']:.2f}",
                f"{row['answered']}/{row['requests']}", f"{row['client']['cpu_share']:.2f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def methods_of(text: str) -> dict[str, str | None]:
    """Our servers: `default` names no method."""
    return {name: None if name == "default" else name for name in text.split(",")}


def run(description: str | None) -> int:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--tasks", type=Path, required=True, help="questions of Spec-Bench")
    options.add_argument("--methods", type=methods_of, default="default,plain", help="of ours")
    options.add_argument("--head", help="one trained for the target, for ours that guess")
    options.add_argument("--vllm-python", help="interpreter with vLLM's CPU build")
    options.add_argument("--ngram", action="store_true", help="vLLM with look-up as well")
    options.add_argument("--llama-server", help="llama.cpp's server")
    options.add_argument("--gguf", help="the same weights for llama.cpp, with their tokenizer")
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    options.add_argument("--requests", type=int, help="of each server at each load")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--name", default="serving", help="of the result files")
    options.add_argument("--out", type=Path, default=RESULTS)
    asked = options.parse_args()
    get(MODEL)
    found = commands(asked)
    with all_of(found, asked.threads) as servers:
        config = LoadConfig(
            servers=tuple(servers),
            levels=tuple(Level("closed", float(n)) for n in asked.concurrency),
            writing=Writing(max_tokens=asked.max_tokens, temperature=asked.temperature),
            requests=asked.requests,
            rounds=asked.rounds,
            seed=asked.seed,
            out=WORK / asked.name,
        )
        results = run_load(config, tasks(asked.tasks, 1000, 1))
    first = next(iter(asked.methods))
    peers = [name for name in found if name not in asked.methods]
    verdict = verdicts(results, first, peers)
    results |= {"commands": {name: shown(command) for name, command in found.items()}}
    results |= {"gates": [gate.to_dict() for gate in verdict]}
    told = "".join(f"- {line}\n" for line in results["warnings"])
    text = f"# Servers under load\n\n{markdown(results)}\n{told}\n{gates.markdown(verdict)}"
    gates.publish(asked.out, asked.name, results, text)
    gates.show(verdict, "Servers under load")
    return 0


def shown(command: Sequence[str]) -> str:
    """A command without the folders of this machine."""
    return " ".join(Path(part).name if part.startswith("/") else part for part in command)


if __name__ == "__main__":
    main(run, __doc__)
