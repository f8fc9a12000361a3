"""A captured forward in one call is the captured forward, whatever family, batch, cut or thread."""

from __future__ import annotations

import random
import threading
import weakref
from contextlib import contextmanager

import families
import pytest
import torch
from play import change_weight, closeness, point, random_tokens, random_tree, row_of

from foretoken.lm.kernels import choosing, position_tables, segmented, segments
from foretoken.lm.kernels.linears import NATIVE, PACKED, can_pack
from foretoken.lm.kernels.lowering import KIND, Place, Step
from foretoken.lm.kernels.position_tables import PositionTable
from foretoken.lm.runtime import slot_attention
from foretoken.lm.runtime.captured import Cut, Sublayer
from foretoken.native import library as native
from foretoken.native import scratch
from foretoken.types import Embedding, FinalNorm, Layer, TokenTree

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32) or isinstance(native.library(), native.Unavailable),
    reason="no oneDNN, no C compiler or no OpenMP here",
)
TYPES = [torch.float32, torch.bfloat16]
TAPS = (Embedding(), Layer(0), Layer(-1), FinalNorm())


@contextmanager
def without_segments(lm):
    """Every operation is torch's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segmented, "operation", lambda *_: None)
        lm.lean.variants.clear()
        yield
    lm.lean.variants.clear()


def scored_in_all_ways(lm, rows, drafts, taps=()):
    """Scores with products inside segments, with segments between products, and without any."""
    found = []
    with torch.inference_mode():
        for lm.lean.reach in (32, 0):
            found.append(lm.score(rows, drafts, taps))
        with without_segments(lm):
            found.append(lm.score(rows, drafts, taps))
    lm.lean.reach = 32
    return zip(*found, strict=True)


@pytest.mark.parametrize("family", families.REQUIRED)
def test_every_family_scores_the_same_with_segments(family, made):
    dice = random.Random(family)
    lm, found = made(family)
    rows = [row_of(random_tokens(dice, count)) for count in (6, 1, 3)]
    lm.prefill(rows)
    for some, sizes in (([0], (1,)), ([1], (7,)), ([0, 1, 2], (5, 1, 4)), ([0, 1, 2], (1, 1, 1))):
        asked = [rows[i] for i in some]
        drafts = [
            point(random_tree(dice, row.tokens[-1], n)) for row, n in zip(asked, sizes, strict=True)
        ]
        for few, many, their in scored_in_all_ways(lm, asked, drafts, TAPS):
            for mine in (few, many):
                assert closeness(mine.logits, their.logits) < 1e-5
                assert closeness(mine.hidden, their.hidden) < 1e-5
    assert len({type(one) for one in found}) == 2 or family in (
        "gemma2",
        "gemma3",
        "gpt2",
        "mistral",
        "phi3",
        "starcoder2",
    )


def test_products_of_odd_widths_stay_with_torch(made, monkeypatch):
    """A segment hands out whole lines of 32 numbers; the loading of such a model once failed."""
    kind, changes = families.FAMILIES["llama"]
    narrow = {**changes, "intermediate_size": 24}
    monkeypatch.setitem(families.FAMILIES, "llama", (kind, narrow))
    lm, _ = made("llama")
    row = row_of([3, 1, 4, 1, 5])
    lm.prefill([row])
    draft = point(random_tree(random.Random(0), 5, 7))
    for *ours, their in scored_in_all_ways(lm, [row], [draft]):
        assert all(closeness(mine.logits, their.logits) < 1e-5 for mine in ours)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_whole_model_is_one_segment(dtype, threads, made):
    dice = random.Random(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lm, found = made("llama", dtype, vocab_size=128)
        for site in lm.lean.sites:
            site.kernels = [NATIVE] * len(site.kernels)
        row = row_of(random_tokens(dice, 40))
        lm.prefill([row])
        for nodes in (1, 2, 9, 32):
            draft = point(random_tree(dice, 3, nodes))
            [(*ours, their)] = scored_in_all_ways(lm, [row], [draft])
            near = 1e-5 if dtype is torch.float32 else 0.05
            assert all(closeness(mine.logits, their.logits) < near for mine in ours)
        whole = [one for one in found if type(one) is segments.Segment]
        # embeddings and two angles, a layer's steps, the last norm, the states wanted and the head;
        # at load a prompt may have been fed so, which ends with the attention of the last layer
        assert {one.count for one in whole} <= {3 + 4 * 13 + 3, 3 + 3 * 13 + 5}
        whole = [one for one in whole if one.count == 3 + 4 * 13 + 3]
        assert len(whole) == 4  # one for each number of nodes: `without_segments` forgets them
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("first", "nodes"), [(40, 17), (61, 9), (63, 32), (64, 5), (125, 24)])
def test_nodes_of_a_tree_have_the_very_logits_of_a_text_without_branches(
    dtype, first, nodes, made, vectors_alone
):
    """Whatever columns the branches beside it fill, in a block of columns or across its edge."""
    dice = random.Random(first)
    lm, _ = made("llama", dtype, vocab_size=128)
    lm.in_slots.always()
    for site in lm.lean.sites:
        site.kernels = [NATIVE] * len(site.kernels)
    prompt = random_tokens(dice, first)
    row, alone = row_of(prompt), row_of(prompt)
    lm.prefill([row])
    tree = random_tree(dice, prompt[-1], nodes)
    [scored] = lm.score([row], [point(tree)])
    path = max((tree.path(node) for node in range(nodes)), key=len)
    lm.commit([row], [path])
    row.tokens += [tree.tokens[node] for node in path] + [5]
    lm.prefill([alone])
    for node in [0, *path]:
        [one] = lm.score([alone], [point(TokenTree((tree.tokens[node],), (-1,)))])
        assert torch.equal(one.logits[0], scored.logits[node])
        lm.commit([alone], [()])
        alone.tokens.append(tree.tokens[node])
    alone.tokens = list(row.tokens)
    behind = [lm.score([one], [point(TokenTree((5,), (-1,)))]) for one in (row, alone)]
    assert torch.equal(behind[0][0].logits, behind[1][0].logits)


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_texts_of_a_cache_are_what_they_are_later(count, made):
    lm, _ = made("llama", torch.bfloat16, vocab_size=128)
    lm.in_slots.always()
    for site in lm.lean.sites:
        site.kernels = [NATIVE] * len(site.kernels)
    dice = random.Random(count)
    prompts = [random_tokens(dice, 20 + 3 * i) for i in range(count)]
    told = []
    for _ in range(2):
        rows = [row_of(prompt) for prompt in prompts]
        lm.prefill(rows)
        drafts = [point(TokenTree((prompt[-1],), (-1,))) for prompt in prompts]
        told.append([score.logits for score in lm.score(rows, drafts)])
        lm.free(rows)
    assert all(torch.equal(*pair) for pair in zip(*told, strict=True))


def test_a_token_beyond_the_vocabulary_is_refused_before_anything_runs(made):
    lm, found = made("llama", vocab_size=128)
    row = row_of([3, 4, 5])
    lm.prefill([row])
    [right] = lm.score([row], [point(TokenTree((5,), (-1,)))])
    for token in (128, -1, 1 << 40):
        with pytest.raises(IndexError, match=rf"\[{token}\]\] are not all below 128"):
            lm.score([row], [point(TokenTree((token,), (-1,)))])
    assert any(type(one) is segments.Segment for one in found)
    [again] = lm.score([row], [point(TokenTree((5,), (-1,)))])
    assert torch.equal(again.logits, right.logits)


COPIED = {  # a table of rotations, one of embeddings, and a norm that multiplies by 1 + weight
    "llama": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "gpt2": lambda model: model.transformer.wpe.weight.mul_(3.0),
    "gemma2": lambda model: model.model.layers[0].input_layernorm.weight.add_(1.5),
}


@pytest.mark.parametrize("reach", [32, 0])
@pytest.mark.parametrize("family", COPIED)
def test_what_is_known_by_a_copy_is_followed_when_it_is_written_to(family, reach, made):
    lm, _ = made(family)
    row, draft = row_of([7]), point(random_tree(random.Random(1), 7, 9))
    lm.prefill([row])
    lm.lean.reach = reach
    [before] = lm.score([row], [draft])
    with torch.no_grad():
        COPIED[family](lm.model)
    [after] = lm.score([row], [draft])
    with without_segments(lm):
        [right] = lm.score([row], [draft])
    assert closeness(before.logits, right.logits) > 1e-3
    assert closeness(after.logits, right.logits) < 1e-5


def test_code_written_after_an_unnoticed_change_knows_of_it(made):
    lm, _ = made("llama")
    for site in lm.lean.sites:
        site.pack_once()
        site.kernels, site.many = [PACKED] * len(site.kernels), PACKED
    row, draft = row_of([7]), point(random_tree(random.Random(1), 7, 9))
    lm.prefill([row])
    lm.lean.reach = 0
    lm.score([row], [draft])
    with torch.no_grad():
        lm.model.model.layers[1].self_attn.o_proj.weight.mul_(2.0)
    [first] = lm.score([row], [draft], TAPS)  # by other code, with other results
    [after] = lm.score([row], [draft])
    with without_segments(lm):
        [right] = lm.score([row], [draft])
    assert closeness(first.logits, right.logits) < 1e-5 > closeness(after.logits, right.logits)


def test_weights_that_lie_otherwise_after_a_change_are_read_as_they_are(made):
    lm, _ = made("llama")
    row, draft = row_of([7]), point(random_tree(random.Random(1), 7, 9))
    lm.prefill([row])
    [right] = lm.score([row], [draft])
    embedding = lm.model.get_input_embeddings()
    embedding.weight.data = embedding.weight.data.t().contiguous().t()
    lm.refresh()
    [made_anew] = lm.score([row], [draft])
    assert closeness(made_anew.logits, right.logits) < 1e-6


def test_layers_left_out_and_early_exits_run_in_segments(made):
    lm, found = made("llama")
    row = row_of([5, 6, 7, 8, 9])
    lm.prefill([row])
    lm.score([row], [point(random_tree(random.Random(0), 9, 2))])
    ids, positions = torch.tensor([[9, 4, 2]]), torch.tensor([[4, 5, 6]])
    attend = lm.in_slots.over([slot_attention.Reading.of(0, 0, 3, 4, None)])
    entering = torch.randn(1, 3, 64 * 2)
    without = frozenset({Sublayer(1, 0), Sublayer(1, 1), Sublayer(2, 0)})
    for cut in (Cut(0, 2), Cut(0, 3, head=False), Cut(0, None, True, without), Cut(2), Cut(4)):
        given = (ids, positions, torch.arange(3), attend, (), cut)
        with torch.inference_mode():
            few = lm.lean.run(*given, entering=entering)
            lm.lean.reach = 0
            many = lm.lean.run(*given, entering=entering)
            with without_segments(lm):
                theirs = lm.lean.run(*given, entering=entering)
        lm.lean.reach = 32
        for a, b, c in zip(few, many, theirs, strict=True):
            assert a.shape == b.shape == c.shape
            assert closeness(a, c) < 1e-5 and closeness(b, c) < 1e-5
    assert found


@pytest.mark.parametrize("how", ["in place", "data", "parameter", "norm"])
def test_changed_weights_are_followed(how, made):
    lm, _ = made("llama")
    row = row_of([3, 1, 4, 1, 5])
    draft = point(random_tree(random.Random(1), 5, 7))
    lm.prefill([row])
    before = lm.score([row], [draft])[0].logits.clone()
    change_weight(lm.model.model.layers[1], how)
    lm.refresh()
    [(*ours, their)] = scored_in_all_ways(lm, [row], [draft])
    for mine in ours:
        assert closeness(mine.logits, their.logits) < 1e-5 < closeness(mine.logits, before)


@pytest.mark.parametrize("reach", [0, 32])
def test_several_threads_may_be_inside_one_segment(made, reach):
    lm, _ = made("llama")
    row = row_of(random_tokens(random.Random(0), 30))
    lm.prefill([row])
    lm.score([row], [point(random_tree(random.Random(0), 9, 2))])
    lm.lean.reach = reach
    attend = lm.in_slots.over([slot_attention.Reading.of(0, 0, 1, 30, None)])
    wrong, done = [], []

    silent = Cut(without=frozenset(Sublayer(i, 0) for i in range(4)))  # the cache is not read

    def ask(token):
        given = torch.tensor([[token]]), torch.tensor([[30]]), torch.tensor([0])
        with torch.inference_mode():
            [right] = lm.lean.run(*given, None, (), silent)
            for _ in range(200):
                [made] = lm.lean.run(*given, attend, (), silent)
                wrong.extend([token] * (not closeness(made, right) < 1e-5))
        done.append(token)

    threads = [threading.Thread(target=ask, args=(token,)) for token in (3, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sorted(done) == [3, 50]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_prompts_are_cached_the_same_with_segments_between_products(family, dtype, threads, made):
    """Lengths around the tokens that a thread takes at a time; nothing but the cache is asked."""
    dice, together = random.Random(threads), native.together()
    lm, found = made(family, dtype)
    lm.in_slots.most, lm.lean.reach, before = 1 << 20, 0, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for lengths in ((2,), (together,), (together + 1, 3), (5 * together + 7, 60, together)):
            prompts = [row_of(random_tokens(dice, 1 + count)) for count in lengths]
            again = [row_of(row.tokens) for row in prompts]
            lm.prefill(prompts)
            with without_segments(lm):
                lm.prefill(again)
            for mine, their in zip(prompts, again, strict=True):
                for layer in range(lm.layers):
                    pairs = zip(lm.columns(mine, layer), lm.columns(their, layer), strict=True)
                    near = 1e-5 if dtype is torch.float32 else 0.05
                    assert all(closeness(a, b) < near for a, b in pairs)
            lm.free([*prompts, *again])
    finally:
        torch.set_num_threads(before)
    assert any(type(one) is segments.Between for one in found)


def test_states_of_prompts_are_given_back_as_soon_as_they_were_read(made):
    lm, _ = made("llama")
    lm.prefill([row_of([3, 1, 4])])  # the first forward of all makes the buffers
    lm.lean.reach, alive, most = 0, weakref.WeakSet(), 0
    own = segments.Between.__call__

    def watched(self, *given):
        nonlocal most
        results = own(self, *given)
        alive.update(results)
        most = max(most, len(alive))
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments.Between, "__call__", watched)
        lm.prefill([row_of(random_tokens(random.Random(3), 30))])
    assert 0 < most <= 6  # whatever the number of layers


@pytest.mark.parametrize("apart", [96, 100, 0])
def test_tokens_are_read_where_they_lie_evenly_apart(apart):
    whole = torch.randn(1, 5, max(apart, 96))[..., :96] if apart else torch.randn(96)
    states = whole if apart else whole.expand(1, 5, -1)
    held, found = segments.by_token(states, 1, 96)
    assert torch.equal(held, states) and found == (apart or 96)
    assert (held.data_ptr() == states.data_ptr()) == bool(apart)
    heads = torch.randn(1, 3, 5, 32).transpose(1, 2)
    held, found = segments.by_token(heads, 1, 96)
    assert torch.equal(held, heads) and held.is_contiguous() and found == 96


def test_buffers_that_live_at_once_share_no_memory():
    dice = random.Random(4)
    for _ in range(200):
        sizes = [dice.choice((32, 64)) for _ in range(12)]
        steps = []
        for i in range(2, 12):
            read = [Place(dice.randrange(i), 0, 32) for _ in range(dice.choice((1, 2, 3)))]
            steps.append(Step(KIND["add"], 32, tuple(read), Place(i, 0, 32)))
        outside = {0, 1, 11}
        slots, rooms = segments.shared_memory(steps, sizes, outside)
        holds = {slots[buffer]: buffer for buffer in outside}
        assert len(holds) == 3
        for step in steps:
            assert all(holds[slots[place.buffer]] == place.buffer for place in step.places)
            holds[slots[step.to.buffer]] = step.to.buffer
        for buffer, size in enumerate(sizes):
            assert rooms[slots[buffer]] == (None if buffer in outside else size)


def test_tables_of_positions_grow_and_refuse_what_other_tokens_decide(made, monkeypatch):
    lm, _ = made("llama")
    program = lm.lean.program
    order = [node for node in program.capture.graph.nodes if node.op == "call_function"]
    known, read = position_tables.by_position(
        program, [n for n in order if n not in program.settled]
    )
    assert len(read) >= 2 and len(known) > len(read)
    table = PositionTable.of(program, read)
    far = torch.tensor([[5, 3 * position_tables.FIRST, 0]])
    for found, node in zip(table(far), read, strict=True):
        [right] = program.variant([node])(far, far, None, None)
        assert torch.equal(found, right)
    shifted = program.variant(read)
    odd = lambda ids, positions, *_: shifted(ids, positions - positions.min(), None, None)  # noqa: E731
    monkeypatch.setattr(program, "variant", lambda _: odd)
    assert PositionTable.of(program, read) is not None  # the least position is always zero here
    odd = lambda ids, positions, *_: shifted(ids, positions.cumsum(1), None, None)  # noqa: E731
    monkeypatch.setattr(program, "variant", lambda _: odd)
    assert PositionTable.of(program, read) is None


@pytest.mark.parametrize(
    ("rows", "asked"),
    [(700, {0: 512, 599: 664, 699: 700}), (300, {0: 80, 99: 164, 299: 300})],
)
def test_tables_grow_as_far_as_a_model_has_positions(rows, asked):
    weight = torch.randn(rows, 4)
    table = PositionTable(lambda positions: [torch.nn.functional.embedding(positions, weight)], [1])
    for last, size in asked.items():
        positions = torch.tensor([[0, last]])
        assert torch.equal(table(positions)[0], weight[positions])
        assert table.tables[0].shape[1] == size
    with pytest.raises(IndexError):
        table(torch.tensor([[rows]]))


def test_segments_reach_as_far_as_products_in_c_are_not_slower(made, monkeypatch):
    lm, _ = made("llama")
    sites = lm.lean.sites
    own = {rows: {NATIVE: 1.0, PACKED: 1.1} for rows in (1, 4, 8, 16, 32)}
    slower = {rows: {NATIVE: 3.0, PACKED: 1.0} for rows in (8, 16, 32)}
    for site in sites:
        site.kernels, site.many = [PACKED] * len(site.kernels), PACKED
    for table, right in ((own, 32), ({**own, **slower}, 4), ({**own, **slower, 1: {}}, 4), ({}, 0)):
        known = dict.fromkeys(choosing.by_shape(sites), table)
        monkeypatch.setattr(choosing, "_measured", known)
        assert choosing.reach_in_c(sites) == right


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_with_little_memory_operations_use_it_again_and_say_the_same(family, made, monkeypatch):
    """And what a forward says stays as it is while later ones use memory of their own."""
    monkeypatch.setattr(scratch, "LEAST", 1)
    dice, blocks = random.Random(family), []
    leave = scratch.Scratch.leave

    def count(self, results):
        blocks.append(len(self.blocks))
        leave(self, results)

    monkeypatch.setattr(scratch.Scratch, "leave", count)
    lm, _ = made(family)
    rows = [row_of(random_tokens(dice, count)) for count in (6, 3)]
    lm.prefill(rows)
    drafts = [point(random_tree(dice, row.tokens[-1], 9)) for row in rows]
    found, lm.lean.reach = [], 0
    with torch.inference_mode():
        for lm.lean.spared in (False, True, True):
            found.append(lm.score(rows, drafts, TAPS))
            found.append([(s.logits.clone(), s.hidden.clone()) for s in found[-1]])
    lm.lean.spared = False
    usual, _, first, then, last, _ = found
    for one, other, (logits, hidden), third in zip(usual, first, then, last, strict=True):
        assert torch.equal(one.logits, other.logits) and torch.equal(one.hidden, other.hidden)
        assert torch.equal(other.logits, logits) and torch.equal(other.hidden, hidden)
        assert torch.equal(third.logits, logits) and torch.equal(third.hidden, hidden)
    calls = lm.lean.layers * 5  # products, attention, what lies between them
    assert blocks and 0 < max(blocks) < calls, "each operation has memory of its own"
