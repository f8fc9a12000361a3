"""Rounds against a clock that only the rows move."""

from types import SimpleNamespace

import pytest

from foretoken.bench.own import Outcome
from foretoken.bench.progress import Bar
from foretoken.bench.rows import RowSpec
from foretoken.bench.run import settled_heap
from foretoken.bench.tasks import Task, single
from foretoken.bench.tune.config import TuneConfig
from foretoken.bench.tune.page import tiles
from foretoken.bench.tune.prompts_in_turn import PromptsInTurn, digest, in_turn
from foretoken.bench.tune.race import Clock, Race
from foretoken.bench.tune.results import row_record
from foretoken.bench.tune.search import Search
from foretoken.bench.tune.words import COLUMNS, cells, summary
from foretoken.bench.words import MISSING
from foretoken.errors import ConfigError
from foretoken.types import SamplingParams


@pytest.fixture(autouse=True)
def quick_collections():
    """As in a tuning: what is loaded is out of the collector's sight."""
    with settled_heap():
        yield


SPEEDS = {"plain": 10.0, "slow": 8.0, "middle": 12.0, "fast": 20.0}  # tokens per second
TOKENS = 16


class Paced:
    """A row of known speed: its seconds pass on the clock of the test."""

    note = ""

    def __init__(self, label: str, speed: float, world: SimpleNamespace) -> None:
        self.spec, self.speed, self.world = RowSpec(label, label), speed, world

    def write(self, prompt, params) -> Outcome:
        if self.world.interrupt_at is not None and self.world.now > self.world.interrupt_at:
            raise KeyboardInterrupt
        if self.spec.label == self.world.broken:
            raise RuntimeError("it broke")
        self.world.order.append((self.spec.label, tuple(prompt)))
        seconds = params.max_new_tokens / self.speed
        self.world.now += seconds
        return Outcome(tokens=[7] * params.max_new_tokens, seconds=seconds, forwards=4)


def race(seconds: float, prompts: int = 30, speeds=SPEEDS, broken=None, interrupt_at=None):
    world = SimpleNamespace(now=0.0, order=[], renewed=[], broken=broken, interrupt_at=interrupt_at)
    asked = [single([n + 1], id=str(n), family="ab"[n % 2]) for n in range(prompts)]
    return world, Race(
        {label: Paced(label, speed, world) for label, speed in speeds.items()},
        lambda row: world.renewed.append(row.spec.label),
        PromptsInTurn(asked, None, TOKENS, None),
        lambda prompt: SamplingParams(max_new_tokens=prompt.max_new_tokens),
        Clock(seconds, now=lambda: world.now),
        Bar(),
    )


@pytest.mark.parametrize("seconds", [8.0, 15.0, 40.0, 61.0, 300.0])
def test_the_time_limit_is_kept_but_for_one_prompt(seconds) -> None:
    """The first prompt's time is unknown; from then on what does not fit is not begun."""
    world, run = race(seconds)
    run.run(list(SPEEDS), 1.0)
    assert world.now <= seconds + max(TOKENS / speed for speed in SPEEDS.values())
    assert world.now <= seconds or not run.records


def test_the_fastest_is_left_and_plain_is_always_beside_it() -> None:
    speeds = {**SPEEDS, "near": 19.5}
    world, run = race(300.0, speeds=speeds)
    alive = run.run(list(speeds), 1.0)
    assert "fast" in alive and "slow" not in alive
    written = {label: {p for name, p in world.order if name == label} for label in SPEEDS}
    assert written["fast"] == written["plain"]
    assert len(run.records["slow"].gains) < len(run.records["fast"].gains)


def test_whoever_is_ahead_beyond_doubt_ends_the_race_early() -> None:
    world, run = race(10_000.0)
    run.run(list(SPEEDS), 1.0)
    assert world.now < 1000.0


def test_the_order_rotates_so_that_drift_hits_all_alike() -> None:
    world, run = race(60.0)
    run.run(list(SPEEDS), 1.0)
    firsts = [world.order[n][0] for n in range(0, 12, 4)]
    assert len(set(firsts)) == 3
    for n in range(0, 12, 4):
        assert len({prompt for _, prompt in world.order[n : n + 4]}) == 1


def test_what_was_learned_is_forgotten_when_prompts_come_again() -> None:
    world, run = race(60.0, prompts=2)
    run.run(list(SPEEDS), 1.0)
    passes = run.prompts.passes
    assert passes > 1 and world.renewed.count("fast") >= passes - 1
    world, run = race(60.0, prompts=100)
    run.run(list(SPEEDS), 1.0)
    assert world.renewed == []


def test_a_candidate_that_fails_leaves_and_says_why() -> None:
    _, run = race(100.0, broken="fast")
    alive = run.run(list(SPEEDS), 1.0)
    assert "fast" not in alive and "it broke" in run.dropped["fast"]
    assert "middle" in run.gains


def test_an_interrupt_keeps_what_was_measured() -> None:
    _, run = race(1000.0, interrupt_at=20.0)
    alive = run.run(list(SPEEDS), 1.0)
    assert run.stopped and run.gains["fast"] and "fast" in alive
    counts = {label: len(found) for label, found in run.gains.items()}
    assert len(set(counts.values())) == 1, "a prompt that was not written by all does not count"


def test_a_dialogue_goes_on_with_plains_answers(byte_tokenizer) -> None:
    talk = Task(id="t", family="talk", turns=("hello", "more"), chat=False)
    prompts = PromptsInTurn([talk, single([1], id="x", family="x")], byte_tokenizer, 4, None)
    first = prompts.take()
    prompts.answered(first, byte_tokenizer("yes")["input_ids"])
    second = prompts.take()
    said = byte_tokenizer.decode(second.ids)
    assert said.startswith("hello\nyes\n") and said.endswith("more")
    assert second.id != first.id and prompts.take().family == "x" and prompts.passes == 1
    assert prompts.take().ids == first.ids and prompts.passes == 2
    unanswered = PromptsInTurn([talk, single([1], id="x", family="x")], byte_tokenizer, 4, None)
    assert [unanswered.take().family for _ in range(3)] == ["talk", "x", "talk"]


def test_prompts_too_long_are_left_out_and_none_left_is_refused() -> None:
    long, short = single([1] * 50, id="long", family="a"), single([1], id="short", family="b")
    prompts = PromptsInTurn([long, short], None, 8, 20)
    assert prompts.take().ids == (1,) and list(prompts.skipped) == ["0: long"]
    with pytest.raises(ConfigError, match="none fits the context of 20 tokens"):
        PromptsInTurn([long], None, 8, 20).take()


def test_families_take_turns_and_the_digest_is_of_what_was_asked() -> None:
    tasks = [single([n], id=str(n), family="aab"[n]) for n in range(3)]
    assert [task.id for task in in_turn(tasks)] == ["0", "2", "1"]
    assert digest(tasks) == digest(tasks[::-1]) != digest(tasks[:2])


def test_a_first_prompt_that_not_all_could_write_still_tells_of_those_that_did() -> None:
    """Plain writes first; whoever had no time is left out and says so."""
    world, run = race(3.0)
    alive = run.run(list(SPEEDS), 0.75)
    assert world.order[0][0] == "plain" and "plain" in alive
    assert set(run.records) == {"plain", "slow"}
    assert all("too little time" in run.dropped[label] for label in ("middle", "fast"))
    world, run = race(1.0)
    run.run(list(SPEEDS), 0.75)
    assert not run.records, "plain alone tells nothing"


def test_a_prompt_that_plain_cannot_write_is_passed_over() -> None:
    """Nobody is dropped for it, and what was measured before stands."""
    _, run = race(60.0)
    hard = (5,)
    for row in run.rows.values():
        write = row.write

        def writes(prompt, params, write=write):
            if tuple(prompt) == hard:
                raise RuntimeError("out of memory")
            return write(prompt, params)

        row.write = writes
    run.run(list(SPEEDS), 1.0)
    assert run.prompts.skipped == {"4: 4": "RuntimeError: out of memory"} and not run.dropped
    assert len(run.gains["fast"]) >= 4 and "4: 4" not in run.gains["plain"]

    def never(prompt, params):
        raise RuntimeError("out of memory")

    _, run = race(60.0)
    run.rows["plain"].write = never
    with pytest.raises(RuntimeError, match="out of memory"):
        run.run(list(SPEEDS), 1.0)


def test_a_race_ends_where_everybody_failed() -> None:
    _, run = race(60.0, speeds={"plain": 10.0, "fast": 20.0}, broken="fast")
    assert run.run(["fast"], 1.0) == [] and "fast" in run.dropped


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drawn_texts_are_not_held_against_plains(temperature) -> None:
    _, run = race(60.0, speeds={"plain": 10.0, "suffix": 20.0})
    run.run(["plain", "suffix"], 1.0)
    specs = {label: RowSpec(label, label) for label in run.rows}
    search = Search(None, run.prompts, run.params, run.clock, run.bar, specs)
    search.race = run
    row = row_record(search, "suffix", TuneConfig(target="x", temperature=temperature))
    count = run.records["suffix"].texts
    assert count and row["same_text"] == (None if temperature else {"equal": count, "of": count})
    shown = cells("suffix", row, "suffix")[COLUMNS.index("text as plain")]
    assert shown == (MISSING if temperature else f"{count}/{count}")


def plain_chosen(fastest: str = "plain", interrupted: bool = False, **other) -> dict:
    """Results of a tuning that chose plain decoding beside one other candidate."""
    plain = {"speedup": {}, "tokens_per_second": 10.0, "failed": None, "prompts": 6}
    over = {"value": 1.0, "interval": None}
    suffix = {"speedup": {"plain": over}, "tokens_per_second": 10.0, "failed": None, "prompts": 6}
    return {
        "chosen": "plain", "fastest": fastest, "unsure": [],
        "rows": {"plain": plain, "suffix": other or suffix},
        "minutes": {"spent": 1.0, "limit": 2.0, "interrupted": interrupted},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (plain_chosen(), "is the fastest: no way of guessing that was tried pays here"),
        (
            plain_chosen(fastest="suffix"),
            "is the one to use: suffix was no faster than can be felt (2 %), and plain is simpler",
        ),
        (
            plain_chosen(speedup={}, failed="it broke", prompts=0),
            "is the one to use: no way of guessing could be measured",
        ),
        (plain_chosen(interrupted=True), "is the fastest so far"),
    ],
    ids=["nothing pays", "not felt", "all failed", "interrupted"],
)
def test_that_no_guessing_pays_is_said_only_where_it_was_found(results, said) -> None:
    text = summary(results)
    assert text.startswith(f"**plain** decoding {said}.") and text.count("no faster") <= 1
    assert ("interrupted" in text) == results["minutes"]["interrupted"]
    assert f"<span>{said}</span>" in tiles(results)[0]
