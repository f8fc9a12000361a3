"""The plan of memory: what it counts, that more never takes less, and what fits."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from transformers import Gemma2Config

from foretoken.engine.assemble import assemble
from foretoken.engine.loading import load
from foretoken.engine.memory.amounts import amount, enough, told
from foretoken.engine.memory.bounded import Bounded, Room
from foretoken.engine.memory.keeping import most_guessed
from foretoken.engine.memory.layout import largest_draft, layout_of
from foretoken.engine.memory.plan import (
    CACHE,
    CHECK,
    GUESSING,
    JUDGING,
    SCORES,
    STEP,
    WEIGHTS,
    Layout,
    Need,
)
from foretoken.engine.memory.solver import (
    SIZES,
    Point,
    best,
    costs_of,
    frontier,
    largest,
    lower_bound,
    most,
)
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.footprint import footprint
from foretoken.lm.runtime.prefixes import Prefix, Prefixes
from foretoken.lm.table import TableLM
from foretoken.methods import method as method_row
from foretoken.methods import needs_draft
from foretoken.types import CostTable

NEED = Need(rows=2, context=300, nodes=8, depth=4)


@pytest.fixture(scope="module")
def layout(pair_folders):
    return layout_of(pair_folders[0], "tree", pair_folders[1])


@pytest.mark.parametrize(
    ("given", "count"),
    [("2GiB", 2**31), ("1.5 GB", 1_500_000_000), ("512MiB", 2**29), (4096, 4096), ("7k", 7168)],
)
def test_amounts_are_read_as_people_write_them(given, count):
    assert amount(given) == count


@pytest.mark.parametrize("given", ["", "much", "2 GiBs", -1, 0, True, None, "1e9"])
def test_what_is_no_amount_is_refused(given):
    with pytest.raises(ConfigError, match="memory_budget"):
        amount(given)


def test_amounts_are_told_in_a_fitting_unit():
    assert [told(n) for n in (12, 2048, 3 << 20, 5 << 29)] == [
        "12 bytes", "2.0 KiB", "3.0 MiB", "2.50 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 10239, 10241, 3 << 20, (10 << 20) + 1, (3 << 30) + 7])
def test_an_amount_that_is_named_is_enough(count):
    assert count <= amount(enough(count)) <= 1.1 * count + 1


def test_a_plan_is_the_sum_of_its_parts(layout):
    plan = layout.plan(NEED)
    assert plan.total == plan.weights + plan.generation
    assert plan.weights == sum(part.bytes for part in plan.parts if part.kind == WEIGHTS)
    cached = sum(part.bytes for part in plan.parts if part.kind == CACHE)
    assert cached < plan.generation
    document = plan.to_dict()
    assert document["total"] == plan.total and document["need"]["rows"] == 2
    assert {part["name"] for part in document["parts"]} >= {"target's cache", "draft's cache"}


def test_nothing_that_grows_takes_less(layout):
    sizes = itertools.product((1, 2, 9), (1, 100, 700), (0, 1, 16, 63))
    needs = [Need(rows, context, nodes, 4) for rows, context, nodes in sizes]
    totals = {need: layout.plan(need).total for need in needs}
    for one, other in itertools.permutations(needs, 2):
        pairs = zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
        if all(a <= b for a, b in pairs):
            assert totals[one] <= totals[other], (one, other)


def test_second_copies_are_counted_unless_kernels_have_none(pair_folders):
    target, draft = pair_folders
    full = layout_of(target, "chain", draft)
    spare = layout_of(target, "chain", draft, kernels="inplace")
    copies = full.target.copies + full.draft.copies
    assert full.plan(NEED).weights - spare.plan(NEED).weights == copies
    assert full.without_copies().plan(NEED) == spare.plan(NEED)


def test_a_method_without_a_draft_has_none_in_its_plan(pair_folders):
    layout = layout_of(pair_folders[0], "plain", pair_folders[1])
    assert layout.draft is None and largest_draft("plain") == (0, 0)


def test_the_largest_draft_of_a_method():
    assert largest_draft("chain", {"depth": 3}) == (3, 3)
    assert largest_draft("tree", {"depth": 4, "nodes": 20}) == (4, 20)
    depth, nodes = largest_draft("tree")
    assert depth <= 10 < nodes == 64
    assert largest_draft("chain")[1] == largest_draft("chain")[0], "a chain is as long as deep"


def test_data_is_counted_by_its_files(pair_folders, tmp_path):
    (tmp_path / "segment").mkdir()
    (tmp_path / "segment" / "ids").write_bytes(b"x" * 5000)
    layout = layout_of(pair_folders[0], "rest", config={"datastore": str(tmp_path)})
    assert layout.data == 5000


@pytest.mark.parametrize("method", ["dsbd", "eqspec", "exspec"])
def test_methods_with_caches_of_other_sizes_are_refused_by_name(method, pair_folders):
    with pytest.raises(CapabilityError, match=method):
        layout_of(pair_folders[0], method, pair_folders[1])


def test_the_largest_of_each_fits_and_one_more_does_not(layout):
    budget = layout.plan(Need(3, 400, 20, 4)).total
    found = largest(layout, budget, NEED)

    def fits(**changed):
        return layout.plan(dataclasses.replace(NEED, **changed)).total <= budget

    assert fits(rows=found.rows) and not fits(rows=found.rows + 1)
    assert fits(context=found.context)
    assert found.context == layout.target.max_length or not fits(context=found.context + 1)
    assert fits(nodes=found.nodes) and not fits(nodes=found.nodes + 1)
    assert largest(layout, 1000, NEED).nodes is None
    assert largest(layout, 1000, NEED).rows == 0


def test_the_most_that_fits_is_found_by_halving():
    for end, limit in itertools.product((1, 2, 7, 64), range(70)):
        assert most(lambda n, limit=limit: n <= limit, 1, end) == min(limit, end)


COSTS = CostTable({1: 1.0, 8: 1.2, 16: 1.5, 64: 3.5}, {1: 0.1, 4: 0.4}, 0.05)


def points(layout):
    return frontier(layout, dataclasses.replace(NEED, context=320), COSTS, (0.7, 0.15, 0.05))


def test_trees_are_nested_and_their_memory_grows(layout):
    found = points(layout)
    assert [point.nodes for point in found] == list(SIZES)
    for small, large in itertools.pairwise(found):
        assert small.tokens <= large.tokens and small.total <= large.total
    assert found[0].total < found[1].total < found[-1].total
    assert found[0].tokens == 1.0


def test_more_memory_never_scores_less_and_what_is_chosen_fits(layout):
    found = points(layout)
    budgets = sorted({point.total + add for point in found for add in (-1, 0, 1 << 20)})
    scores = []
    for budget in budgets:
        chosen = best(found, budget)
        assert chosen is None or chosen.total <= budget
        scores.append(0.0 if chosen is None else chosen.score)
    assert scores == sorted(scores) and scores[0] == 0.0 < scores[-1]


def test_below_the_lower_bound_there_is_no_tree(layout):
    found = points(layout)
    bound = lower_bound(found)
    assert bound is not None and best(found, bound).nodes > 1
    assert best(found, bound - 1).nodes == 1


def test_trees_that_do_not_pay_are_never_chosen(layout):
    dear = CostTable({1: 1.0, 8: 9.0, 64: 80.0}, {1: 1.0, 4: 4.0}, 0.05)
    found = frontier(layout, NEED, dear, (0.5, 0.1))
    assert lower_bound(found) is None and best(found, 1 << 40).nodes == 1


def test_the_smaller_of_equal_trees_is_taken():
    same = [Point(n, n, n, 1.0, 1.0, score) for n, score in ((1, 1.0), (8, 2.0), (16, 2.0))]
    assert best(same, 100).nodes == 8


def test_a_head_and_its_states_are_counted(make_llama, byte_tokenizer, tmp_path):
    from foretoken.heads.medusa import Medusa
    from foretoken.heads.sizes import sizes_of
    from foretoken.heads.store import save

    model = make_llama(len(byte_tokenizer))
    head = Medusa(Medusa.Config(hidden_size=64, vocab_size=len(byte_tokenizer)))
    folder = save(tmp_path / "head", "medusa", head, {})
    numbers = sum(one.numel() for one in (*head.parameters(), *head.buffers()))
    assert sizes_of(folder).weights == numbers
    layout = layout_of(model, "medusa", config={"draft_head": str(folder)}, dtype=model.dtype)
    assert layout.head == 4 * numbers and layout.taps == 1
    bare = Layout(footprint(model.config), copies=True)
    assert layout.plan(NEED).weights == bare.plan(NEED).weights + 4 * numbers


SAME = [
    ("token-recycling", {"depth": 6}, None, (6, 80)),
    ("lookahead", {"depth": 10}, None, (10, 56)),
    ("fused", {"depth": 4}, None, (4, 80)),
    ("hybrid", {"depth": 4}, None, (4, 64)),
    ("auto", {"depth": 6}, None, (6, 80)),
    ("auto", {"max_nodes": 20}, None, (32, 20)),
    ("tree", {"preset": "paper"}, None, (10, 60)),
    ("tree", {}, "smartspec", (8, 32)),
    ("chain", {}, "confidence", (20, 20)),
    ("chain", {"depth": 3, "nodes": 9}, None, (3, 3)),
    ("mcsd", {"k": (8, 4, 4)}, None, (3, 168)),
    ("mcsd", {}, "fixed", (3, 28)),
    ("spectr", {"preset": "paper"}, None, (8, 64)),
    ("rsd-s", {"width": 3, "depth": 5}, None, (5, 15)),
    ("plain", {}, None, (0, 0)),
]


@pytest.mark.parametrize(("method", "options", "controller", "sizes"), SAME)
def test_the_largest_draft_is_that_of_the_parts_put_together(method, options, controller, sizes):
    draft = TableLM.random(12, seed=2) if needs_draft(method_row(method)) else None
    engine = assemble(method, TableLM.random(12), draft, controller=controller, **options)
    assert largest_draft(method, options, controller) == sizes
    assert most_guessed(engine) == sizes[1]


def test_laws_of_sampled_text_are_counted_and_greedy_text_pays_for_none(pair_folders):
    layout = layout_of(pair_folders[0], "spectr", pair_folders[1])
    greedy, sampled = (
        {part.name: part.bytes for part in plan.parts if part.kind in (GUESSING, JUDGING)}
        for plan in map(layout.plan, (NEED, dataclasses.replace(NEED, sampled=True)))
    )
    vocab = 4 * layout.target.vocab
    assert sampled["target's laws"] == 2 * 9 * vocab and sampled["draft's laws"] == 2 * 8 * vocab
    assert "target's laws" not in greedy and "draft's logits" in greedy
    assert "draft's logits" not in sampled, "laws are in their place"
    fixed = layout_of(pair_folders[0], "tree", pair_folders[1])
    parts = fixed.plan(dataclasses.replace(NEED, sampled=True)).parts
    assert "draft's laws" not in {part.name for part in parts}, "its guesses are never drawn"
    assert {"target's laws"} < {part.name for part in parts}


def test_a_drafts_logits_lie_beside_the_targets_only_where_it_writes_meanwhile(pair_folders):
    kinds = {}
    for method in ("chain", "pearl"):
        parts = layout_of(pair_folders[0], method, pair_folders[1]).plan(NEED).parts
        kinds[method] = {part.kind for part in parts if part.name == "draft's logits"}
    assert kinds == {"chain": {GUESSING}, "pearl": {GUESSING, STEP, JUDGING}}


@pytest.mark.parametrize("method", ["spectr", "chain"])
def test_laws_that_are_held_are_no_more_than_the_plan_says(method, pair_folders):
    options = {"controller": "fixed", "depth": 4, "compile": "off", "kernels": "dense"}
    held = []

    def look(step):
        laws = [
            law
            for draft, score in zip(step.drafts, step.scores, strict=True)
            for law in (*(draft.q or ()), *score.p._rows.values(), score.p._all)
            if law is not None
        ]
        held.append(sum({law.data_ptr(): law.nbytes for law in laws}.values()))

    with load(pair_folders[0], method, pair_folders[1], **options) as session:
        session.engine.listeners.append(look)
        session.generate([[1, 2, 3], [4, 5]], 12, temperature=1.0, seed=0, ignore_eos=True)
        _, nodes = largest_draft(method, {"depth": 4}, "fixed")
        need = Need(2, 15, nodes, sampled=True)
        plan = layout_of(pair_folders[0], method, pair_folders[1]).plan(need)
        laws = sum(p.bytes for p in plan.parts if p.kind == JUDGING and p.name.endswith("s laws"))
        assert laws / 4 < max(held) <= laws


def test_a_loaded_model_is_planned_with_the_weights_that_it_has(make_llama):
    model = make_llama(97)
    dense = layout_of(model, "plain", dtype=torch.float32).target
    model.model.layers.half()
    found = layout_of(model, "plain", dtype=torch.float32).target
    halved = sum(2 * one.numel() for one in model.model.layers.parameters())
    assert found.weights == dense.weights - halved
    assert dense.copies == 0 or found.copies < dense.copies


def quantised(folder):
    """A folder whose configuration says that its weights are quantised."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    file.write_text(json.dumps(config))
    return folder


def test_quantised_weights_are_those_of_their_files_or_as_large_as_dense_ones(make_llama, tmp_path):
    model = make_llama(97)
    dense = footprint(model.config)
    half = make_llama(97).half()  # of the size that half as many bits make of it
    half.save_pretrained(tmp_path / "small")
    found = layout_of(quantised(tmp_path / "small"), "plain", dtype="float32").target
    assert found.weights < 0.6 * dense.weights and found.column == dense.column
    assert found.copies in (0, 97 * 64 * 4)
    (tmp_path / "small" / "model.safetensors").rename(tmp_path / "small" / "model.bin")
    found = layout_of(tmp_path / "small", "plain", dtype="float32", allow_pickle=True).target
    assert found.weights == dense.weights, "no file says what they take"


def test_weights_that_a_processor_makes_dense_are_counted_dense(make_llama, tmp_path):
    make_llama(97).half().save_pretrained(tmp_path / "small")
    folder = quantised(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    found = layout_of(folder, "plain", dtype="float32").target
    assert found.weights == footprint(make_llama(97).config).weights


def test_fixed_guesses_for_sampled_text_are_planned_along_one_path(pair_folders):
    """Rules for them ask for the law of each node that is reached, and of no other."""
    need = Need(2, 100, 40, sampled=True)
    laws = {}
    for method in ("tree", "chain"):
        layout = layout_of(pair_folders[0], method, pair_folders[1], config={"depth": 6})
        [part] = [one for one in layout.plan(need).parts if one.name == "target's laws"]
        laws[method] = part.bytes / (4 * layout.target.vocab)
    assert laws == {"tree": 2 * 7, "chain": 2 * 41}


def test_batches_are_priced_with_drafts_of_all_their_rows(pair_folders):
    options = {"compile": "off", "kernels": "dense", "depth": 3}
    with load(pair_folders[0], "chain", pair_folders[1], **options) as session:
        assert costs_of(session.engine, 1).rows == 1
        costs = costs_of(session.engine, 4)
        assert costs.rows == 4 and min(costs.target) == 4 and costs.draft
        assert session.target.rows_held == 0
    layout = layout_of(pair_folders[0], "chain", pair_folders[1])
    plain, *_ = frontier(layout, dataclasses.replace(NEED, rows=4), costs, (0.7, 0.1), (1, 4))
    # the least of it and of what larger batches took: what disturbs a measurement makes it longer
    assert plain.seconds == pytest.approx(min(costs.target.values()) + costs.overhead)


def gemma2():
    """A model whose own attention makes scores."""
    return Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip


def test_a_check_is_planned_with_its_scores_where_the_models_own_attention_makes_them(make_llama):
    """The text is read once without its cache: as many columns as tokens ask."""
    config = gemma2()
    need, scores = Need(1, 4096), 4 * 4096**2 * 4
    plan = Layout(footprint(config)).plan(need)
    assert plan.checked() >= plan.of(CACHE, CHECK) + scores
    assert plan.generation < scores
    room = Room(Layout(footprint(config)), plan.total, nodes=0, steady=False)
    waiting = Bounded(room, ())
    assert waiting.affords(4096, 1) and not waiting.affords_check(4096), "it is left out"
    room.budget = plan.weights + plan.checked()
    assert waiting.affords_check(4096)
    ordinary = Layout(footprint(make_llama(97).config)).plan(need)
    assert ordinary.of(SCORES) == 0 and ordinary.checked() <= ordinary.generation


def test_a_check_is_afforded_beside_granted_caches_and_kept_texts():
    layout = Layout(footprint(gemma2()))
    asked, granted = layout.plan(Need(1, 4096)), layout.plan(Need(8, 2048))
    room = Room(layout, asked.weights + asked.checked(), nodes=0, steady=False)
    waiting = Bounded(room, ())
    assert waiting.affords_check(4096)
    waiting.granted = granted.need
    assert granted.of(CACHE) > asked.of(CACHE) and not waiting.affords_check(4096)
    room.budget = asked.weights + asked.checked(granted.of(CACHE))
    assert waiting.affords_check(4096)
    kept, part = Prefixes(1 << 20), torch.zeros(1, 1, 100, 4)
    kept.keep(Prefix(np.arange(100), [(part, part.clone())]))
    waiting.wishes = {kept: kept.asked}
    assert kept.held and not waiting.affords_check(4096)
    room.budget += kept.held
    assert waiting.affords_check(4096)
