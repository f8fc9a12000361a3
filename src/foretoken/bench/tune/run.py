"""`foretoken tune`: all that is at hand is tried within a time limit; the fastest is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.bench import environment
from foretoken.bench.files import writable
from foretoken.bench.models import Models
from foretoken.bench.progress import shown
from foretoken.bench.run import settled_heap
from foretoken.bench.tasks import Task
from foretoken.bench.tune.candidates import candidates, check_datastores
from foretoken.bench.tune.config import TuneConfig
from foretoken.bench.tune.prompts_in_turn import PromptsInTurn
from foretoken.bench.tune.race import Clock
from foretoken.bench.tune.report import write_reports
from foretoken.bench.tune.results import results_of, tuned_of
from foretoken.bench.tune.search import Search
from foretoken.bench.warned import unlike_configured, warned
from foretoken.lm.load import check_source

FLAGS = ("temperature",)  # of the options of a text, those that `foretoken tune` takes


def run_tune(config: TuneConfig, tasks: Sequence[Task], *, spent: float = 0.0) -> dict[str, Any]:
    """Measure until the choice is made or the time is over; writes into `config.out`.

    `spent` seconds of the limit were over before. Ctrl-C ends it early, with the best so far.
    """
    clock = Clock(60.0 * config.minutes, spent)
    for source in (config.target, *config.drafts):
        check_source(source, config.allow_pickle)
    check_datastores(config.datastores)
    tried = candidates(config.drafts, config.datastores, config.heads)
    out = writable(config.out)
    started = environment.describe()
    models = Models(
        config.target,
        device=config.device,
        dtype=config.dtype,
        allow_pickle=config.allow_pickle,
        trust_remote_code=config.trust_remote_code,
    )
    target = models.own("target")
    told = [*few(tasks), *unlike_configured(target.model, config, FLAGS)]
    warnings = warned(started, told, config.quiet)
    most = target.max_length
    prompts = PromptsInTurn(tasks, models.tokenizer, config.max_new_tokens, most)
    with shown(config.quiet) as bar, settled_heap():
        search = Search(models, prompts, config.params, clock, bar)
        search.run(tried)
    results = results_of(search, config, tasks)
    results |= {"environment": started, "warnings": warnings}
    write_reports(results, tuned_of(search, config, results), out)
    return results


def few(tasks: Sequence[Task]) -> list[str]:
    """A warning where prompts are too few to tell much."""
    if sum(len(task.turns) for task in tasks) > 1:
        return []
    return ["there is one prompt only: what is fastest on it may be slow on the next"]
