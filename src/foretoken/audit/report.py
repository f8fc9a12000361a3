"""One page: every check on every method, pass or fail, for people and for programs."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from foretoken.audit.checks import Checked, all_jobs
from foretoken.contract import LanguageModel
from foretoken.engine.models import opened_draft
from foretoken.errors import CapabilityError, ForetokenError, WrongLogits
from foretoken.methods import METHODS, method

PASS, FAIL, NOT_RUN = "pass", "fail", "not run"

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One check of one subject."""

    check: str
    subject: str
    verdict: str
    detail: str
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All rows of an audit."""

    rows: tuple[AuditRow, ...]

    @property
    def failed(self) -> list[AuditRow]:
        return [row for row in self.rows if row.verdict == FAIL]

    @property
    def passed(self) -> bool:
        return bool(self.rows) and not self.failed

    def to_dict(self) -> dict[str, Any]:
        """The verdict and every row as plain data."""
        return {
            "verdict": PASS if self.passed else FAIL,
            "checks": len(self.rows),
            "failed": len(self.failed),
            "not_run": sum(row.verdict == NOT_RUN for row in self.rows),
            "rows": [asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        # An infinite measure (a NaN was seen, nothing was drafted) is written as text.
        return json.dumps(finite(self.to_dict()), indent=2)

    def render(self, width: int | None = None) -> str:
        """The page as text, coloured when it goes to a terminal."""
        terminal = sys.stdout.isatty()
        width = width or (None if terminal or "COLUMNS" in os.environ else 150)
        console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
        with console.capture() as page:
            console.print(self.page())
        return page.get()

    def page(self) -> RenderableType:
        """The page as a rich object."""
        table = Table(title="foretoken audit", title_justify="left", header_style="bold")
        for name in ("check", "subject", "verdict", "what was seen", "seconds"):
            table.add_column(name, justify="right" if name == "seconds" else "left")
        last = ""
        for row in self.rows:
            if last and row.check != last:
                table.add_section()
            colour = {PASS: "green", FAIL: "bold red", NOT_RUN: "yellow"}[row.verdict]
            table.add_row(
                "" if row.check == last else row.check,
                row.subject,
                Text(row.verdict, style=colour),
                Text(row.detail),
                f"{row.seconds:.1f}",
            )
            last = row.check
        good = sum(row.verdict == PASS for row in self.rows)
        idle = sum(row.verdict == NOT_RUN for row in self.rows)
        line = f"{good} passed, {len(self.failed)} failed, {idle} not run"
        return Group(table, Text(line, style="bold green" if self.passed else "bold red"))


def run(
    methods: Iterable[str] | None = None,
    mutate: bool = False,
    target: Any = None,
    draft: Any = None,
    progress: bool | Told = False,
    draft_vocabulary: Any = None,
) -> AuditReport:
    """Audit `methods` (all by default); with `mutate`, also find every injected bug.

    `target` and `draft` are language models of `lm`, transformers models, directories or hub
    names. Without a target real models are left out, and the report says so. `progress` shows a
    bar, or is called with the name of each check before it runs.
    """
    chosen = [method(name) for name in (methods or METHODS)]
    jobs = all_jobs(chosen, *language_models(target, draft, draft_vocabulary), mutate)
    rows = []
    with telling(progress, len(jobs)) as told:
        for check, subject, job in jobs:
            told(f"{check}: {subject}")
            rows.append(run_one(check, subject, job))
    return AuditReport(tuple(rows))


def language_models(
    target: Any, draft: Any, draft_vocabulary: Any = None
) -> tuple[LanguageModel | None, LanguageModel | None]:
    """What a check can ask for scores: language models themselves, or those loaded from where
    `target` and `draft` say. A draft with other ids is told what the target's stand for."""
    from foretoken.lm.load import load_model, load_tokenizer
    from foretoken.lm.opening import open_lm

    target_lm, draft_lm = target, draft
    if not opened(target):
        target_lm = open_lm(load_model(target), name="target")
    if not opened(draft):
        draft_lm = opened_draft(
            load_model(draft),
            draft,
            draft_vocabulary,
            tokenizer=None if opened(target) else load_tokenizer(target),
            width=None if target_lm is None else target_lm.vocab_size,
        )
    return target_lm, draft_lm


def opened(source: Any) -> bool:
    """Whether nothing is to be loaded: there is none, or it is a language model."""
    return source is None or hasattr(source, "score")


def run_one(check: str, subject: str, job: Callable[[], Checked]) -> AuditRow:
    """One row; a broken promise of a model or a part is a failed row, not the end of the audit."""
    began = perf_counter()
    try:
        good, detail, values = job()
        verdict = PASS if good else FAIL
    except WrongLogits as error:  # a model that cannot be trusted, and not one that cannot do it
        verdict, detail, values = FAIL, str(error), {}
    except CapabilityError as error:
        verdict, detail, values = NOT_RUN, error.possible, {}
    except (ForetokenError, AssertionError) as error:
        verdict, detail, values = FAIL, f"{type(error).__name__}: {error}", {}
    return AuditRow(check, subject, verdict, detail, values, perf_counter() - began)


@contextmanager
def telling(progress: bool | Told, total: int) -> Iterator[Told]:
    """Who hears the name of each check: a bar on the terminal, a function, or nobody."""
    if callable(progress):
        yield progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not progress) as bar:
        task = bar.add_task("audit", total=total)
        begun = False

        def told(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, advance=1 if begun else 0)
            begun = True

        yield told
        bar.update(task, description="audit", completed=total)


def finite(value: Any) -> Any:
    """Plain data with infinities and NaN as text: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if (isinstance(value, float) and abs(value) in (float("inf"),)) or value != value:
        return str(value)
    return value
