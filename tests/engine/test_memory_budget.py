"""A budget of memory at run time: the same text, smaller trees, fewer rows, and a refusal."""

import ctypes
import dataclasses
import gc
import multiprocessing
import resource
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from foretoken.audit.fixtures import random_head
from foretoken.engine.loading import load
from foretoken.engine.memory.bounded import FEW, Bounded, Room, wanted
from foretoken.engine.memory.keeping import LEAST
from foretoken.engine.memory.layout import layout_of
from foretoken.engine.memory.plan import Need
from foretoken.engine.timings import batches_before
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.load import load_model
from foretoken.lm.runtime.heap import c_library
from foretoken.lm.runtime.probe import probe_row
from foretoken.lm.views.view import innermost

PROMPTS = [list(range(1, 1 + n)) for n in (5, 40, 17, 60)]
NEW = 66  # of the longest 126 tokens: one more node makes it three times 64 columns


def loaded(folders, method="tree", **options):
    target, draft = folders
    options = {"controller": "fixed", "compile": "off", "kernels": "inplace", **options}
    return load(target, method, draft, **options)


def planned(folders, rows, context, nodes, method="tree"):
    """Bytes of a budget that holds this, and no more."""
    layout = layout_of(folders[0], method, folders[1], kernels="inplace")
    return layout.plan(Need(rows, context, nodes)).total


def written(session, **options):
    results = session.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **options)
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def plain(pair_folders):
    with load(pair_folders[0], "plain", compile="off", kernels="dense") as session:
        return written(session)


@pytest.mark.parametrize(
    ("rows", "nodes"),
    [
        (1, 1),
        (2, 4),
        (4, 12),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in ((1, 12), (3, 12), (4, 4), (16, 12))
        ),
    ],
)
def test_text_is_the_same_for_every_budget(rows, nodes, pair_folders, plain):
    budget = planned(pair_folders, rows, 126, nodes)
    with loaded(pair_folders, memory_budget=budget, depth=4, nodes=12) as session:
        drafted, together, full = [], [], []

        def look(step):
            drafted.append(max(len(draft.tree) - 1 for draft in step.drafts))
            together.append(len(step.rows))
            if len(step.rows) == rows and max(map(wanted, step.rows)) == 126:
                full.append(drafted[-1])
            assert held(session) <= budget

        session.engine.listeners.append(look)
        assert written(session) == plain
        assert max(together) == min(rows, len(PROMPTS)) and max(drafted) <= 12
        assert max(full, default=0) <= max(nodes, 1)
        assert full or rows > 4, "trees shrink before the batch does"


def held(session):
    """Bytes of weights and caches."""
    caches = [lm.cache for lm in (session.target, session.draft)]
    kept = [b.nbytes for c in caches for g in c.groups for b in (g.keys, g.values)]
    weights = [
        one.nbytes for lm in (session.target, session.draft) for one in lm.model.parameters()
    ]
    return sum(kept) + sum(weights)


def test_seeded_sampling_does_not_follow_from_neighbours(pair_folders):
    """Trees of a row whose draws have to repeat are those it would have alone."""
    budget = planned(pair_folders, 3, 100, 12, "spectr")
    given = {"method": "spectr", "depth": 3, "nodes": 12, "memory_budget": budget}
    with loaded(pair_folders, **given) as session:
        alone = [
            session.generate(prompt, NEW, seed=i, temperature=1.0, ignore_eos=True).tokens
            for i, prompt in enumerate(PROMPTS)
        ]
        assert written(session, seed=0, temperature=1.0) == alone


def test_a_text_that_can_never_fit_is_refused_with_numbers_while_others_go_on(pair_folders):
    budget = planned(pair_folders, 2, 120, 0)
    with loaded(pair_folders, memory_budget=budget, depth=4, nodes=12) as session:
        others = []

        def go_on():
            others.append(session.generate(PROMPTS[1], max_new_tokens=NEW, ignore_eos=True))

        stream = session.stream(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
        next(stream)
        thread = threading.Thread(target=go_on)
        thread.start()
        with pytest.raises(CapabilityError) as refused:
            session.generate(list(range(1, 60)), max_new_tokens=400)
        thread.join()
        list(stream)
        said = refused.value
        assert "59 prompt tokens" in said.asked and "400 new" in said.asked
        assert "MiB" in said.possible and "at most" in said.do
        room = session.engine.waiting.room
        most = room.longest()
        assert f"at most {most - 59} new tokens" in said.do
        assert len(others[0].tokens) == NEW and len(stream.result.tokens) == NEW
        fitting = session.generate(list(range(1, 60)), max_new_tokens=most - 59)
        assert len(fitting.tokens) <= most - 59
        assert session.engine.idle


def test_what_is_refused_says_a_budget_that_would_do(pair_folders):
    room = Room(layout_of(pair_folders[0], "plain", kernels="inplace"), 1 << 40, 0, False)
    row = probe_row(range(1, 200))
    small = dataclasses.replace(room.layout)
    budget = small.plan(Need(1, wanted(row), 0)).total
    assert Room(small, budget, 0, False).refusal(row) is None
    assert Room(small, budget - 1, 0, False).refusal(row) is not None


def test_rows_wait_until_there_is_room_and_nobody_waits_for_ever(pair_folders):
    layout = layout_of(pair_folders[0], "tree", pair_folders[1], kernels="inplace")
    room = Room(layout, layout.plan(Need(2, 90, 4)).total, 12, False)
    waiting, rows = Bounded(room, []), [probe_row(range(1, 51)) for _ in range(5)]
    for row in rows:
        row.limit = 40, "length"
        waiting.add(row)
    inside, most = [], 0
    while len(waiting) or inside:
        while (row := waiting.next(inside)) is not None:
            waiting.take(row)
            inside.append(row)
        most = max(most, len(inside))
        assert inside and room.fits(len(inside), 90, max(row.guesses for row in inside))
        inside.pop(0)
    assert most == 2 and all(row.finish is None for row in rows)


def test_trees_grow_again_when_neighbours_have_left(pair_folders):
    layout = layout_of(pair_folders[0], "tree", pair_folders[1], kernels="inplace")
    room = Room(layout, layout.plan(Need(3, 90, 4)).total, 64, False)
    waiting, rows = Bounded(room, []), [probe_row(range(1, 51)) for _ in range(3)]
    rows[0].guesses = 7  # its owner's wish stays
    inside = []
    for row in rows:
        row.limit = 40, "length"
        waiting.add(row)
        assert waiting.next(inside) is row
        waiting.take(row)
        inside.append(row)
    assert rows[1].guesses == room.cap(3, 90) <= room.cap(2, 90)
    waiting.next(inside[:2])
    assert rows[1].guesses == room.cap(2, 90) and rows[0].guesses <= 7


@pytest.mark.parametrize(("wish", "together"), [(None, 2), (0, 3)])
def test_a_row_waits_rather_than_take_all_trees_away(wish, together, pair_folders):
    layout = layout_of(pair_folders[0], "tree", pair_folders[1], kernels="inplace")
    room = Room(layout, layout.plan(Need(3, 96, 0)).total, 12, False)
    assert room.cap(3, 96) < FEW < room.cap(2, 96)
    waiting, inside = Bounded(room, []), []
    for _ in range(3):
        row = probe_row(range(1, 51))
        row.limit, row.guesses = (46, "length"), wish
        waiting.add(row)
    while (row := waiting.next(inside)) is not None:
        waiting.take(row)
        inside.append(row)
    assert len(inside) == together


def test_caches_have_the_size_that_is_needed_and_never_double(pair_folders):
    budget = planned(pair_folders, 4, 126, 12)
    with loaded(pair_folders, memory_budget=budget, depth=4, nodes=12) as session:
        sizes = set()
        session.engine.listeners.append(
            lambda step: sizes.add((session.target.cache.slots, session.target.cache.columns))
        )
        written(session)
        assert max(slots for slots, _ in sizes) == 4
        assert all(columns % 16 == 0 and columns <= 144 for _, columns in sizes)


def test_memory_is_flat_from_the_second_round_on(pair_folders):
    """Addresses of all buffers stay: nothing is allocated anew while texts are written."""
    budget = planned(pair_folders, 2, 140, 12)
    with loaded(pair_folders, memory_budget=budget, depth=4, nodes=12) as session:
        seen = []

        def look(step):
            caches = [lm.cache for lm in (session.target, session.draft)]
            buffers = [b for c in caches for g in c.groups for b in (g.keys, g.values)]
            seen.append([(b.data_ptr(), b.nbytes) for b in buffers])

        session.engine.listeners.append(look)
        session.generate(PROMPTS[1:3], max_new_tokens=60, ignore_eos=True)
        assert len(seen) > 3 and all(one == seen[2] for one in seen[2:])


def test_what_is_kept_of_other_texts_yields_to_new_ones(pair_folders):
    """Kept prefixes have what is left, whatever was allowed to them; texts go on as before."""
    budget = planned(pair_folders, 2, 128, 0)
    with loaded(pair_folders, memory_budget=budget, method="chain", depth=2) as session:
        wanted = [session.generate(one, 20, ignore_eos=True).tokens for one in PROMPTS]
        session.keep_prefixes(1 << 30)
        waiting = session.engine.waiting

        def look(step):
            granted = waiting.granted
            taken = waiting.room.takes(granted.rows, granted.context, granted.nodes)
            kept = [innermost(lm).prefixes for lm in session.models]
            assert sum(one.held for one in kept) <= max(waiting.room.left - taken, 0)
            assert all(one.limit < 1 << 29 for one in kept)

        session.engine.listeners.append(look)
        for _ in range(2):
            told = [session.generate(one, 20, ignore_eos=True).tokens for one in PROMPTS]
            assert told == wanted
            together = session.generate(PROMPTS, 20, ignore_eos=True)
            assert [one.tokens for one in together] == wanted


def test_states_that_a_head_was_told_are_kept_within_the_budget(pair_folders, byte_tokenizer):
    """Rows that write keep those of their prompts for texts that begin alike, if there is room."""
    options = {"draft_head": str(random_head("eagle", len(byte_tokenizer), 64)), "depth": 2}
    layout = layout_of(pair_folders[0], "eagle", kernels="inplace", config=options)
    need = Need(2, 128, 4)
    for spare in (0, 3 * layout.target.states(2 * 128, layout.taps)):
        budget, held = layout.plan(need).total + spare, []
        given = {**options, "memory_budget": budget, "method": "eagle"}
        with loaded((pair_folders[0], None), **given) as session:
            session.keep_prefixes(1 << 30)
            lm, waiting = innermost(session.engine.target), session.engine.waiting

            def look(step, lm=lm, waiting=waiting, held=held):
                heard = sum(part.nbytes for one in lm._rows.values() for part in one.fed)
                kept = sum(prefixes.held for prefixes in waiting.wishes)
                taken = waiting.room.layout.plan(waiting.granted).generation
                held.append(heard)
                assert heard + kept <= max(waiting.room.left - taken, 0)

            session.engine.listeners.append(look)
            for _ in range(3):
                session.generate(PROMPTS, 20, ignore_eos=True)
        assert max(held) > 0 or not spare


def test_more_is_kept_of_texts_where_memory_is_left(pair_folders):
    with loaded(pair_folders, memory_budget="1GiB", method="chain", depth=2) as session:
        session.keep_prefixes(1 << 20)
        for _ in range(2):
            session.generate(PROMPTS[3], 20, ignore_eos=True)
        kept = [innermost(lm).prefixes for lm in session.models]
        assert all(one.reused > 0 for one in kept)
        assert sum(one.limit for one in kept) <= 1 << 20 and sum(one.held for one in kept) > 0


def new_pages():
    """Page faults of fifty blocks of 16 MiB, one after the other, of 4,096 pages each."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.ones(2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def freed_blocks_are_used_again(folders):
    """One of several budgets in a process that is short has all of them given back."""
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which a block has a few only
    tight = planned(folders, 1, 126, 4)
    with loaded(folders, memory_budget=tight + 2**27, depth=4, nodes=4) as roomy:
        written(roomy)
        assert new_pages() < 50 * 1024
        with loaded(folders, memory_budget=tight, depth=4, nodes=4) as short:
            written(short)
            written(roomy)
            assert new_pages() >= 50 * 4096
        del short
        gc.collect()
        written(roomy)
        assert new_pages() < 50 * 1024


@pytest.mark.skipif(c_library() is None, reason="another C library")
def test_freed_blocks_are_used_again_where_a_budget_leaves_room(pair_folders):
    """In a process of its own: holes that others left in the heap take blocks of any size."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        apart.submit(freed_blocks_are_used_again, pair_folders).result()


def test_a_budget_below_the_weights_is_refused_before_they_are_read(pair_folders, monkeypatch):
    from foretoken.lm import load as reading

    def unread(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(reading, "read_weights", unread)
    with pytest.raises(CapabilityError) as refused:
        loaded(pair_folders, memory_budget="300KiB")
    assert "weights take" in refused.value.possible and "memory_budget=" in refused.value.do
    with pytest.raises(ConfigError, match="memory_budget"):
        loaded(pair_folders, memory_budget="a lot")


def test_the_budget_that_a_refusal_names_is_enough(pair_folders):
    with pytest.raises(CapabilityError) as refused:
        loaded(pair_folders, memory_budget=1 << 20)
    named = refused.value.do.split("'")[1]
    with loaded(pair_folders, memory_budget=named) as session:
        assert session.generate(PROMPTS[0], max_new_tokens=20, ignore_eos=True).tokens


def test_costs_are_measured_within_the_budget(pair_folders):
    budget = planned(pair_folders, 1, 129, 3)
    with loaded(pair_folders, memory_budget=budget, controller="cost_model") as session:
        session.prepare()
        costs, room = session.engine.controller.costs, session.engine.waiting.room
        assert costs.cached < 128 and len(costs.target) > 2
        assert all(room.fits(1, costs.cached, size - 1) for size in costs.target)
        assert session.target.cache.columns <= 192


def test_batches_are_measured_within_the_budget(pair_folders):
    """As a server does before it answers: sizes that do not fit are left to the rows that do."""
    budget = planned(pair_folders, 2, 129, 16)
    with loaded(pair_folders, memory_budget=budget, controller="cost_model") as session:
        session.prepare(batches=True)
        priced = [size for size in (2, 4, 8, 16) if not session.engine.unpriced(size)]
        assert priced == [2] and session.target.cache.slots == 2
        assert held(session) <= budget
        known = batches_before(session.target)[2]
        assert max(known.target) > 2 and known.draft, "forwards of trees, and drafts"


def test_costs_can_be_measured_in_the_least_memory_that_holds_a_text(pair_folders):
    budget = planned(pair_folders, 1, LEAST, 0)
    with loaded(pair_folders, memory_budget=budget, controller="cost_model") as session:
        session.prepare()
        assert 1 in session.engine.controller.costs.target
        told = session.generate(PROMPTS[1], LEAST - len(PROMPTS[1]), ignore_eos=True)
        assert len(told.tokens) == LEAST - len(PROMPTS[1])


def test_another_method_around_the_same_budget_is_refused(pair_folders):
    budget = planned(pair_folders, 2, 100, 4)
    session = loaded(pair_folders, memory_budget=budget)
    with session, pytest.raises(ConfigError, match="memory_budget"):
        session.using("plain")


def test_second_copies_are_left_out_where_they_would_crowd_out_texts(pair_folders):
    target, draft = pair_folders
    whole = layout_of(target, "chain", draft)
    usual = Need(16, 512, 10)
    roomy = whole.plan(usual).total + (64 << 20)
    from foretoken.engine.memory.keeping import Budget

    for budget, mode in ((roomy, "auto"), (whole.plan(usual).total // 2, "inplace")):
        asked = Budget.asked(budget, target, "chain", draft, {})
        assert asked.kernels("auto", 16) == mode and asked.kernels("dense", 16) == "dense"


def test_prompts_that_would_be_padded_beyond_the_grant_are_fed_one_by_one(pair_folders):
    """A padded batch has columns for the sum of the longest start and the longest chunk."""
    budget = planned(pair_folders, 2, 100, 2)
    with loaded(pair_folders, memory_budget=budget, depth=2, nodes=2) as session:
        lm, rows = session.target, [probe_row(range(1, 60)), probe_row(range(1, 62))]
        lm.grant(2, 64)
        with torch.inference_mode():
            lm.prefill(rows[:1])
            lm.prefill([rows[1]])
            assert lm.cache.columns == 64
            rows[0].tokens.extend([3, 4])
            lm.prefill(rows[:1])
            assert lm.cache.columns == 64 and not lm.missing(rows[0])
        lm.free(rows)


@pytest.mark.parametrize(
    ("method", "options", "nodes"),
    [
        ("token-recycling", {"depth": 6}, 80),
        ("chain", {"controller": "confidence"}, 20),
        ("mcsd", {"k": (8, 4, 4)}, 168),
        ("tree", {"preset": "paper"}, 60),
        ("plain", {}, 0),
    ],
)
def test_trees_are_capped_at_what_the_method_makes_of_its_options(
    method, options, nodes, pair_folders
):
    given = {"controller": None, "memory_budget": "1GiB", **options}
    with loaded(pair_folders, method, **given) as session:
        assert session.engine.waiting.room.nodes == nodes


def test_a_budget_holds_laws_while_text_is_sampled(pair_folders):
    """Logits of so small a model are little, so the plan says what the laws of rows take."""
    with loaded(pair_folders, "spectr", memory_budget="1GiB", depth=3, nodes=12) as session:
        waiting = session.engine.waiting
        written(session)
        assert not waiting.granted.sampled
        written(session, temperature=1.0, seed=0)
        assert waiting.granted.sampled
        room, sizes = waiting.room, (4, 126, 12)
        assert room.takes(*sizes, sampled=True) >= room.takes(*sizes)
        parts = room.layout.plan(Need(*sizes, sampled=True)).parts
        assert {"target's laws", "draft's laws"} < {part.name for part in parts}


def test_a_draft_in_another_type_than_the_target_is_counted_in_its_own(pair_folders):
    model = load_model(pair_folders[0], dtype="bfloat16")
    budget = planned(pair_folders, 4, 126, 12)
    with loaded((model, pair_folders[1]), memory_budget=budget) as session:
        room = session.engine.waiting.room.layout
        assert session.draft.model.dtype is torch.float32
        assert (room.target.element, room.draft.element) == (2, 4)
        assert room.draft.column == layout_of(pair_folders[1], "plain").target.column
