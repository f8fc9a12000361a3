"""The bench itself: interleaved, paired, resumable.

For each repetition and prompt every row writes once, in an order that rotates, so that drift of the
machine falls on all rows alike. Each finished cell is on disk before the next begins.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from foretoken.bench import catalogue, environment, memory
from foretoken.bench.files import writable
from foretoken.bench.identity import apart, forgetful, header, row_contents
from foretoken.bench.journal import Cell, Journal, cell_of, open_journal
from foretoken.bench.limit import hold_against_limit, note_bandwidth
from foretoken.bench.metrics import summarise
from foretoken.bench.models import Models, check_rows, remembers
from foretoken.bench.other_engines import present
from foretoken.bench.own import Outcome, Row, Together
from foretoken.bench.progress import Bar, shown
from foretoken.bench.prompts import Requests, TimedPrompt, at_once, timed_prompts
from foretoken.bench.report import write_reports
from foretoken.bench.rows import RowSpec, default_methods, left_out, parse_methods
from foretoken.bench.scoring import scoring_costs
from foretoken.bench.tasks import Task
from foretoken.bench.tuning import TunedRow
from foretoken.bench.warned import tell, unlike_configured, warned
from foretoken.errors import ForetokenError, check_values
from foretoken.lm.draft_vocabulary import check_asked
from foretoken.types import SamplingParams

# What may stop one row without stopping the bench: it is written down and shown.
FAILURES = (
    ForetokenError, RuntimeError, ValueError, TypeError, LookupError, AttributeError,
    AssertionError, MemoryError, OSError, ImportError,
)  # fmt: skip


WARM_TOKENS = 16  # hf:compiled warms with all: its static cache is sized by them


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What to compare and how."""

    target: Any  # directory, hub name or loaded model
    draft: Any = None
    draft_vocabulary: Any = None  # tokens that the draft scores; None: as its directory says
    tokenizer: Any = None
    methods: str | Sequence[str | RowSpec] | None = (
        None  # None: the common ones that this pair can run
    )
    out: Path = Path("bench-results")
    repetitions: int = 3
    requests: int = 1  # continued at once: more are one cell, of rows that can
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # repetition r of every prompt samples with seed + r
    ignore_eos: bool = False  # write to the cap: equal work for models that never stop
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None  # torch threads; None leaves them
    llama_python: str | Path | None = None  # interpreters of llama:* and vllm:* rows; None: those
    vllm_python: str | Path | None = None  # that the environment names, else this one
    tuning_prompts: int = 3  # for the settings of peers
    tuning_tokens: int = 64
    scoring_nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    resume: bool = False
    quiet: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    title: str = "Speculative decoding, compared"

    def __post_init__(self) -> None:
        counts = ("repetitions", "requests", "max_new_tokens", "tuning_prompts", "tuning_tokens")
        check_values(self, *((name, getattr(self, name) >= 1, "1 or more") for name in counts))
        check_values(self, ("threads", self.threads is None or self.threads >= 1, "1 or more"))
        self.params(1, self.seed, frozenset())  # raises for a sampling option that cannot be

    def writing(self) -> dict[str, Any]:
        """What every row is asked to write, for reports and for resuming."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos")
        several = {"requests": self.requests} if self.requests > 1 else {}
        return {name: getattr(self, name) for name in names} | several

    def params(self, cap: int, seed: int, eos: frozenset[int]) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=cap,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
            eos=frozenset() if self.ignore_eos else eos,
        )


def run_bench(config: BenchConfig, tasks: Sequence[Task]) -> dict[str, Any]:
    """Measure, write JSON, Markdown, plots and page into `config.out`; returns the results."""
    asked = config.methods
    named = default_methods(config.draft, config.requests) if asked is None else asked
    specs = parse_methods(named)
    check_rows(specs, config.draft, config.requests)
    check_asked(config.draft_vocabulary)
    pythons = {"llama": config.llama_python, "vllm": config.vllm_python}
    specs, engines, absent = present(specs, pythons)
    out = writable(config.out)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    started = environment.describe()
    started["engines"] = {name: one.versions for name, one in engines.items()}
    warnings = warned(started, [*left_out(named), *absent], config.quiet)
    models = Models(
        config.target,
        config.draft,
        config.tokenizer,
        config.draft_vocabulary,
        device=config.device,
        dtype=config.dtype,
        allow_pickle=config.allow_pickle,
        trust_remote_code=config.trust_remote_code,
    )
    journal = open_journal(out / "journal.jsonl", header(config, tasks, models), config.resume)
    plain = models.row(RowSpec("plain", "plain"))

    def answer(ids: list[int], cap: int) -> list[int]:
        params = SamplingParams(max_new_tokens=cap, eos=models.eos)
        return plain.write(ids, params).tokens

    target = models.own("target")
    warnings += tell(unlike_configured(target.model, config), config.quiet)
    prompts, skipped = timed_prompts(
        tasks, models.tokenizer, journal, answer,
        max_new_tokens=config.max_new_tokens, max_length=target.max_length,
    )  # fmt: skip
    models.interpreters, models.requests = engines, config.requests
    models.room = max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts)
    known = len(journal.cells)
    note_bandwidth(journal, models.weights, models.device)
    try:
        with shown(config.quiet) as bar:
            rows = prepare(specs, models, prompts, config, journal, bar)
            with settled_heap():
                measure(rows, prompts, config, models, journal, bar)
        fresh = {cell.row for cell in journal.cells[known:]}
        for row in rows:
            if row.note and row.spec.label in fresh:  # some can only be told afterwards
                journal.note("row", row.spec.label, row.note)
        note_bandwidth(journal, models.weights, models.device)  # the machine may be calmer by now
    except KeyboardInterrupt:
        kept = f"interrupted: {len(journal.cells)} finished cells are kept in {out}"
        Console(stderr=True).print(f"{kept}; go on with --resume")
        raise
    finally:
        models.close()
    results = summarise(
        journal.cells,
        [spec.label for spec in specs],
        failed=journal.failed,
        greedy=config.temperature == 0,
    )
    results |= {
        "memory_limit": hold_against_limit(
            results["rows"], journal, models.weights, config.requests
        ),
        "title": config.title,
        "environment": started,
        "warnings": warnings + forgetful(journal) + apart(journal, list(results["rows"])),
        "setting": setting(config, specs, prompts, skipped, models),
        "notes": {label: journal.notes.get("row", {}).get(label, "") for label in results["rows"]},
        "scoring": scoring(config, models, prompts, journal),
    }
    write_reports(results, out)
    journal.finish()
    return results


def prepare(
    specs: Sequence[RowSpec],
    models: Models,
    prompts: Sequence[TimedPrompt],
    config: BenchConfig,
    journal: Journal,
    bar: Bar,
) -> list[Row]:
    """Load, tune and warm every row; one that fails is written down and left out."""
    rows: list[Row] = []
    longest = max(prompts, key=lambda prompt: len(prompt.ids) + prompt.max_new_tokens)
    bar.begin("preparing", len(specs))
    for spec in specs:
        bar.say(f"preparing {spec.label}")
        journal.same(spec.label, row_contents(spec, models.interpreters))
        try:
            row = models.row(spec)
            if isinstance(row, TunedRow):
                tune(row, prompts, config, models, journal, bar)
            # The longest first: a static cache is then never made, and compiled for, again.
            for prompt in (longest, prompts[0]):
                cap = prompt.max_new_tokens if spec.method == "hf:compiled" else WARM_TOKENS
                cap = min(cap, prompt.max_new_tokens)
                row.write(prompt.ids, config.params(cap, 0, models.eos))
            if config.requests > 1:
                write(row, at_once(prompts, config.requests)[0], config, 0, models, WARM_TOKENS)
        except FAILURES as problem:
            journal.fail(spec.label, reason(problem))
        else:
            if spec.label not in journal.notes.get("row", {}):
                journal.note("row", spec.label, row.note)
            rows.append(row)
        bar.advance()
    return rows


def tune(
    row: TunedRow,
    prompts: Sequence[TimedPrompt],
    config: BenchConfig,
    models: Models,
    journal: Journal,
    bar: Bar,
) -> None:
    """A peer's best setting, from prompts spread over all families."""
    together = at_once(prompts, config.requests)
    count = min(config.tuning_prompts, len(together))
    some = [together[n * len(together) // count].prompts for n in range(count)]
    cap = min(config.tuning_tokens, config.max_new_tokens)
    known = journal.notes.get("setting", {}).get(row.spec.label)
    found = row.tune(
        [[prompt.ids for prompt in several] for several in some],
        config.params(cap, config.seed, models.eos),
        known,
        lambda text: bar.say(f"{row.spec.label}: {text}"),
        FAILURES,
    )
    if found and found != known:
        journal.note("setting", row.spec.label, found)


def measure(
    rows: list[Row],
    prompts: Sequence[TimedPrompt],
    config: BenchConfig,
    models: Models,
    journal: Journal,
    bar: Bar,
) -> None:
    """Every cell that is not done yet."""
    alive = list(rows)
    asked = at_once(prompts, config.requests)
    for row in filter(remembers, rows):
        if journal.begun(row.spec.label, len(asked)):
            journal.note("forgot", row.spec.label, True)
    done = journal.done()
    bar.begin("measuring", len(rows) * len(asked) * config.repetitions)
    for repetition in range(config.repetitions):
        for row in alive:
            models.renew(row)
        for n, prompt in enumerate(asked):
            turn = (n + repetition) % max(len(rows), 1)
            for row in rows[turn:] + rows[:turn]:
                bar.advance()
                if row not in alive or (row.spec.label, prompt.id, repetition) in done:
                    continue
                bar.say(f"{row.spec.label} on {prompt.id}")
                try:
                    cell = measure_cell(row, prompt, repetition, config, models)
                except FAILURES as problem:
                    journal.fail(row.spec.label, f"{reason(problem)} (prompt {prompt.id})")
                    alive.remove(row)
                else:
                    journal.add(cell)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Models and modules out of the collector's sight: collecting between cells is then cheap."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_cell(
    row: Row, asked: Requests, repetition: int, config: BenchConfig, models: Models
) -> Cell:
    """One row, one prompt or several at once, once; load and memory beside the clock."""
    gc.collect()
    before = environment.load()[:1]
    with memory.Peak() as peak:
        outcome = write(row, asked, config, config.seed + repetition, models)
    prompt, correct = asked.prompts[0], None
    if len(asked.prompts) == 1 and prompt.check is not None and models.tokenizer is not None:
        correct = bool(
            prompt.check(models.tokenizer.decode(outcome.tokens, skip_special_tokens=True))
        )
    return cell_of(
        outcome,
        row=row.spec.label,
        prompt=asked.id,
        family=asked.family,
        repetition=repetition,
        prompt_tokens=sum(len(one.ids) for one in asked.prompts),
        correct=correct,
        load=[round(value, 2) for value in (*before, *environment.load()[:1])],
        peak_rss=outcome.memory or peak.rss,
        rss_growth=None if outcome.memory else peak.growth,
        peak_cuda=peak.cuda,
    )


def write(
    row: Row,
    asked: Requests,
    config: BenchConfig,
    seed: int,
    models: Models,
    most: int | None = None,
) -> Outcome:
    """One text, or those of several requests at once, of `most` tokens where that is given."""
    caps = [min(one.max_new_tokens, most or one.max_new_tokens) for one in asked.prompts]
    params = [config.params(cap, seed, models.eos) for cap in caps]
    if len(params) == 1:
        return row.write(asked.prompts[0].ids, params[0])
    assert isinstance(row, Together)  # as `check_rows` saw to
    return row.write_together([one.ids for one in asked.prompts], params)


def scoring(
    config: BenchConfig, models: Models, prompts: Sequence[TimedPrompt], journal: Journal
) -> dict[str, Any]:
    """The cost of scoring n nodes, measured once and kept for a resumed run."""
    known = journal.notes.get("scoring", {}).get("target")
    if known is None:
        context = max((list(prompt.ids) for prompt in prompts), key=len)
        known = scoring_costs(models.own("target"), context, config.scoring_nodes)
        journal.note("scoring", "target", known)
    return dict(known)


def setting(
    config: BenchConfig,
    specs: Sequence[RowSpec],
    prompts: Sequence[TimedPrompt],
    skipped: list[str],
    models: Models,
) -> dict[str, Any]:
    """What was compared on what, for the record."""
    return {
        "models": models.names(),
        "draft_vocabulary": models.draft_vocabularies(),
        "parameters": models.parameters,
        "dtype": models.dtype,
        "device": models.device.type,
        "methods": [spec.label for spec in specs],
        "lossy": [s.label for s in specs if catalogue.lossless(s.method) is False],
        "prompts": len(prompts),
        "families": list(dict.fromkeys(prompt.family for prompt in prompts)),
        "skipped": skipped,
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts) / len(prompts),
        "repetitions": config.repetitions,
        **config.writing(),
    }


def reason(problem: BaseException) -> str:
    """One line that says why; our own errors in full."""
    text = str(problem).strip()
    if not isinstance(problem, ForetokenError):
        text = f"{type(problem).__name__}: {text.splitlines()[0] if text else 'no message'}"
    return " ".join(text.split())
