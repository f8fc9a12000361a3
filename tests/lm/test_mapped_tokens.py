"""Drafts that know other ids than the target: the law is the target's, the cache is the draft's."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from foretoken.audit import law as exact
from foretoken.audit.checks import TABLE_PROMPTS, cache, greedy, neighbours
from foretoken.audit.rows import seeded_rows, write
from foretoken.coins import SeededCoins
from foretoken.engine.assemble import assemble
from foretoken.engine.beam_session import BeamSession
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.opening import open_draft, open_lm
from foretoken.lm.table import TableLM
from foretoken.lm.token_map import TokenMap
from foretoken.lm.views.mapped_tokens import MappedTokens
from foretoken.lm.views.table_views import TableColumns
from foretoken.row import make_row
from foretoken.types import Finish, SamplingParams

# Four ids of the target: one as itself, one as three ids of the draft, one elsewhere, one as two.
FEEDS = ((0,), (1, 2, 1), (3,), (4, 0))
SHARED = ((0, 0), (3, 2))  # ids of the draft and of the target


def token_map(begin=(), width=4):
    rows = torch.tensor([j for j, i in SHARED if i < width])
    tokens = torch.tensor([i for _, i in SHARED if i < width])
    return TokenMap(FEEDS[:width], OutputRows(rows, tokens, width), begin)


def mapped(width=4, begin=(), table=None):
    tokens = token_map(begin, width)
    table = table or TableLM.random(5, seed=22)
    return MappedTokens(TableColumns(table, tokens.rows.rows.tolist()), tokens)


def engine(method, width, depth=2, **config):
    return assemble(
        method, TableLM.random(width, seed=21), mapped(width), controller="fixed",
        depth=depth, **config,
    )  # fmt: skip


@pytest.mark.parametrize("setting", ["temperature 1", "temperature 0.7, top-p 0.8",
                                     "end token, minimum length, bias"])  # fmt: skip
@pytest.mark.parametrize("method", ["chain", "tree", "pearl", "mcsd", "rsd-s", "spectr"])
def test_the_law_is_the_targets(method, setting):
    width = 4 if method in ("chain", "tree", "pearl") else 3
    config = {} if method in ("chain", "pearl") else {"nodes": 4}
    gap = exact.law_gap(
        partial(engine, method, width, **config), TableLM.random(width, seed=21),
        exact.SETTINGS[setting],
    )  # fmt: skip
    assert gap.variation < exact.BOUND
    assert gap.law.drafted > 0


@pytest.mark.parametrize("method", ["chain", "tree", "pearl", "mcsd"])
def test_texts_alone_and_in_company(method):
    build = partial(engine, method, 4, 4)
    plain = partial(assemble, "plain", TableLM.random(4, seed=21))
    for good, told, _ in (
        greedy(plain, build, TABLE_PROMPTS, 40),
        neighbours(build, TABLE_PROMPTS, 40),
        cache(build, TABLE_PROMPTS, 16),
    ):
        assert good, told


@pytest.mark.parametrize("seed", range(4))
def test_beams_of_a_mapped_draft_follow_their_paths(seed):
    """The table raises where a pruned tree is not the text that was drafted."""
    draft = mapped(4)
    made = assemble("dsbd", TableLM.random(4, seed=21), draft, depth=3)
    session = BeamSession(made, method="dsbd", draft=draft)
    found = session.generate([0, 1, 2], 12, num_beams=4, temperature=1.0, seed=seed)
    assert found.stats.grown == 12 and draft.rows_held == 0
    assert found.stats.accepted > 0


def test_a_law_is_read_behind_the_last_id_of_a_token():
    table = TableLM.random(5, seed=22)
    lm = mapped(table=table)
    row = make_row([1, 3], SamplingParams(), SeededCoins(0), 4)
    lm.prefill([row])
    [score] = lm.grow([row], [[3, 1, 2]], [[-1, 0, 0]])
    text = [1, 2, 1, 4, 0]
    for node, path in enumerate(([], [1, 2, 1], [3])):
        expected = table.after([*text, *path])
        assert torch.equal(score.logits[node][[0, 2]], expected[[0, 3]])
        assert (score.logits[node][[1, 3]] == -torch.inf).all()
    [deeper] = lm.grow([row], [[0]], [[1]])
    assert torch.equal(deeper.few.logits[0], table.after([*text, 1, 2, 1, 0])[[0, 3]])
    row.tokens += [1, 0, 2]
    lm.commit([row], [[1, 3]])
    assert table.cached(lm._shadows[row.uid].row) == [*text, 1, 2, 1, 0]
    lm.free([row])
    assert table.rows_held == 0


def test_what_the_draft_expects_before_a_text_is_there_once():
    table = TableLM.random(5, seed=22)
    for prompt, shadow in (([2, 1], [0, 3, 1, 2, 1]), ([0, 2], [0, 3])):
        lm = mapped(begin=(0,), table=table)
        row = make_row(prompt, SamplingParams(), SeededCoins(0), 4)
        lm.prefill([row])
        assert lm._shadows[row.uid].row.tokens == shadow


def test_a_text_beyond_the_drafts_positions_gets_blind_guesses(make_llama):
    """Three ids for one: the draft's positions end long before the target's text does."""
    model = make_llama(5, max_position_embeddings=24)
    tokens = token_map()
    draft = open_draft(model, tokens.rows, tokens, compile="off")
    target = open_lm(make_llama(4, seed=3), compile="off")
    built = assemble("chain", target, draft, controller="fixed", depth=3)
    plain = assemble("plain", target)
    params = SamplingParams(max_new_tokens=30)
    prompts = [[1, 1, 1, 0], [1] * 9, [0]]
    with torch.inference_mode():
        expected = write(plain, seeded_rows(prompts, params, 4))
        assert write(built, seeded_rows(prompts, params, 4)) == expected
    assert draft.rows_held == 0
    draft.close()
    target.close()


class Leaving(TableLM):
    """Notes how rows ended that left it."""

    def free(self, rows):
        self.ended = [row.finish for row in rows]
        super().free(rows)


def test_a_text_that_is_over_is_over_for_the_draft():
    """Which keeps prefixes of such texts alone."""
    table = Leaving.random(5, seed=22)
    lm = mapped(table=table)
    row = make_row([1, 3], SamplingParams(), SeededCoins(0), 4)
    lm.prefill([row])
    row.finish = Finish("stop")
    lm.free([row])
    assert table.ended == [Finish("stop")]


def test_what_a_draft_reads_belongs_to_whom_the_text_belongs():
    lm = mapped()
    row = make_row([1, 3], SamplingParams(), SeededCoins(0), 4)
    row.owner, row.rehearsal = "a key", True
    lm.prefill([row])
    shadow = lm.follow_text(row).row
    assert (shadow.owner, shadow.rehearsal) == ("a key", True)
    row.tokens.append(2)
    assert lm.follow_text(row).row.prompt_len == len(FEEDS[1]) + len(FEEDS[3])
