"""Chimera's head: what a trigram sees, and that branches are drafted as if computed anew."""

import pytest
import torch
from torch.nn import functional as F

from foretoken.audit.rows import seeded_rows, write
from foretoken.drafters.parts import trigram_reader
from foretoken.drafters.parts.trigram_reader import TrigramReader, trigram_at
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.heads import store
from foretoken.heads.chimera import Chimera
from foretoken.heads.medusa import Medusa
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.types import FinalNorm, SamplingParams

VOCAB, WIDTH, DEPTH = 37, 64, 3


@pytest.fixture(scope="module")
def target(make_llama):
    return open_lm(make_llama(VOCAB, seed=2))


def made(vocab=VOCAB, width=WIDTH, depth=DEPTH):
    torch.manual_seed(0)
    shape = {"hidden_size": width, "vocab_size": vocab}
    return Chimera(Chimera.Config(**shape, depth=depth, heads=2, inner=32))


def disturbed(head):
    """All parts matter: a fresh residual block is the identity, fresh heads are sums."""
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return head


class Tied:
    """Random embeddings, which score tokens as well."""

    ids = places = torch.arange(VOCAB)  # every token has an output

    def __init__(self):
        self.weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9))

    def embed(self, tokens):
        return self.weight[tokens]

    def unembed(self, states):
        return states @ self.weight.T


class Table:
    """A table's states are its logits."""

    ids = places = torch.arange(VOCAB)  # every token has an output

    def __init__(self, vocab):
        self.vocab = vocab

    def embed(self, tokens):
        return F.one_hot(tokens, self.vocab).float()

    def unembed(self, states):
        return states


class Lent:
    """The ends of a target."""

    ids = places = torch.arange(VOCAB)  # every token has an output

    def __init__(self, target):
        self.target = target

    def embed(self, tokens):
        return self.target.embed(tokens.flatten().tolist()).view(*tokens.shape, -1)

    def unembed(self, states):
        return self.target.unembed(states.flatten(0, -2)).view(*states.shape[:-1], -1)


def texts(count=2, length=9):
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(VOCAB, (count, length), generator=generator),
        "hidden": torch.randn(count, length, WIDTH, generator=generator),
        "weights": torch.ones(count, length),
    }


def along(head, batch):
    """Outputs [n T-1 H] of every step, in drafts from all places."""
    begun = torch.ones_like(batch["input_ids"][:, 1:], dtype=torch.bool)
    return [found.unflatten(0, begun.shape) for found, _ in head.drafts(batch, Tied(), begun)]


def row_of(tokens):
    return seeded_rows([tokens], SamplingParams(max_new_tokens=50), VOCAB)[0]


def states_of(target, tokens):
    """[T H], behind the last norm."""
    one = row_of([*tokens, 0])
    [states] = target.prefill([one], (FinalNorm(),))
    target.free([one])
    return states[:, 0]


def reader(target, head, folder):
    where = store.save(folder / "head", "chimera", head, {})
    return TrigramReader(target, "chimera", TrigramReader.Config(draft_head=where))


def opened(model, target, tokens):
    one = row_of(tokens)
    assert model.open(one, states_of(target, tokens)[:-1, None])
    return one


def anew(model, target, text, branch):
    """Logits behind a branch below a text, from the whole sequence and its two-by-two mask."""
    head, n = model.head, len(text) - 1
    states, known = states_of(target, text)[:-1], [*text, *branch]
    rows = head.encode(
        torch.stack([target.embed(trigram_at(known, i)) for i in range(1, len(known))])
    )
    places, outputs = torch.arange(len(known)), []
    for step in range(len(branch) + 1):
        last = n + step
        made_up = torch.stack([states[0], *outputs])[1:]  # d_1 to d_(step)
        x = torch.cat([states, made_up, rows[:last]])[None]
        at = torch.cat([places[:last], places[1 : last + 1]])[None]
        half = torch.ones(last, last).tril().bool()
        every = torch.ones(1, len(x[0]), len(x[0])).bool()
        sees = every if step else half.tile(1, 2, 2)  # of [h_0 .. h_(n-1); e_1 .. e_n]
        none = x.new_zeros(1, 0, head.layer.memory_size)
        outputs.append(head(x, at, sees, none)[0][0, -1])
    return target.unembed(head.saying(len(branch), states[-1], outputs[-1])[None])[0]


def test_at_first_trigrams_are_linear_and_heads_add_up():
    head, ends = made(), Tied()
    one, other = torch.randn(2, 5, 3, WIDTH)
    assert torch.allclose(
        head.encode(one + other), head.encode(one) + head.encode(other), atol=1e-5
    )
    state, output = torch.randn(2, 5, WIDTH)
    for step in range(DEPTH):
        said = ends.unembed(head.saying(step, state, output))
        assert torch.allclose(said, ends.unembed(state) + ends.unembed(output), atol=1e-4)
    bent = disturbed(head)
    assert not torch.allclose(bent.encode(one + other), bent.encode(one) + bent.encode(other))


def test_outputs_see_the_text_before_and_nothing_behind():
    head, batch, at = disturbed(made()), texts(), 4
    before = along(head, batch)
    behind = {name: value.clone() for name, value in batch.items()}
    behind["input_ids"][:, at + 2 :] += 1
    behind["input_ids"] %= VOCAB
    behind["hidden"][:, at + 1 :] += 1.0
    for one, other in zip(before, along(head, behind), strict=True):
        assert torch.allclose(one[:, : at + 1], other[:, : at + 1], atol=1e-5)
        assert not torch.allclose(one[:, at + 1], other[:, at + 1], atol=1e-2)
    first = {**batch, "hidden": batch["hidden"].clone()}
    first["hidden"][:, 0] += 1.0
    for one, other in zip(before, along(head, first), strict=True):
        assert ((one - other).abs().amax((0, 2)) > 1e-3).all(), "the whole text is seen"


def test_three_tokens_are_read_without_any_attention():
    head, batch, at = disturbed(made()), texts(), 4
    with torch.no_grad():
        head.layer.joined.weight.zero_()
    before = along(head, batch)[0]
    for place, read in (
        (at - 2, False),
        (at - 1, True),
        (at, True),
        (at + 1, True),
        (at + 2, False),
    ):
        other = {**batch, "input_ids": batch["input_ids"].clone()}
        other["input_ids"][:, place] = (other["input_ids"][:, place] + 1) % VOCAB
        after = along(head, other)[0]
        assert torch.allclose(before[:, at], after[:, at], atol=1e-5) is not read


def test_branches_are_drafted_as_if_computed_anew(target, tmp_path):
    """Of a text taken in piece by piece, in company, with trees opened and forgotten."""
    model = reader(target, disturbed(made()), tmp_path)
    rows = [opened(model, target, text) for text in ([3], [4, 1], [0, 4, 4, 1, 2, 3, 1, 9])]
    for new in ([[7], [2, 5, 8], [3, 3]], [[1, 1, 6, 4], [0], [2, 8, 1]]):
        model.grow(rows, [one.tokens[-1:] for one in rows], [[-1]] * 3)
        model.grow(rows, [[1], [2, 3], [4]], [[0], [0, 0], [0]])
        for one, tokens in zip(rows, new, strict=True):
            one.tokens += tokens
            states = states_of(target, one.tokens)[-1 - len(tokens) : -1]
            model.keep([one], [None], [states[:, None]])
    roots = model.grow(rows, [one.tokens[-1:] for one in rows], [[-1]] * 3)
    level = model.grow(rows, [[5, 6], [7], [8, 9, 5]], [[0, 0], [0], [0, 0, 0]])
    deep = model.grow(rows[::2], [[1, 1], [2]], [[2, 1], [2]])
    found = {
        0: [((), roots[0], 0), ((5,), level[0], 0), ((6,), level[0], 1), ((6, 1), deep[0], 0),
            ((5, 1), deep[0], 1)],
        1: [((), roots[1], 0), ((7,), level[1], 0)],
        2: [((), roots[2], 0), ((8,), level[2], 0), ((9,), level[2], 1), ((5,), level[2], 2),
            ((9, 2), deep[1], 0)],
    }  # fmt: skip
    for which, drafted in found.items():
        for branch, scores, place in drafted:
            with torch.inference_mode():
                wanted = anew(model, target, rows[which].tokens, branch)
            assert torch.allclose(scores.logits[place], wanted, atol=1e-3), (which, branch)
    assert not torch.allclose(deep[0].logits[0], deep[0].logits[1], atol=1e-2), "two branches"


def test_outputs_of_a_branch_stand_for_states(target, tmp_path):
    """The corrected mask: what is guessed below a node sees the layer's output at it."""
    model = reader(target, disturbed(made()), tmp_path)
    one = opened(model, target, [3, 1, 4, 1, 5])
    model.grow([one], [[5]], [[-1]])
    [before] = model.grow([one], [[9]], [[0]])
    model.grow([one], [[5]], [[-1]])
    known = one.private[model]
    trigram, output = known.below[0]
    known.below[0] = torch.stack([trigram, 0 * output])
    [after] = model.grow([one], [[9]], [[0]])
    assert not torch.allclose(before.logits, after.logits, atol=1e-3)


@pytest.mark.parametrize(("limit", "least", "most"), [(8192, 60, 8192), (20, 1, 40)])
def test_tabulated_trigrams_are_those_computed(limit, least, most, target, tmp_path, monkeypatch):
    monkeypatch.setattr(trigram_reader, "TABULATED", limit)
    head = disturbed(made()).requires_grad_(False)
    where = store.save(tmp_path / "head", "chimera", head, {})
    engine = assemble("chimera", target, draft_head=where, controller="fixed", depth=3, nodes=8)
    for seed in range(3):
        prompt = [(7 * i * i + seed) % VOCAB for i in range(12)]
        write(engine, seeded_rows([prompt], SamplingParams(max_new_tokens=12), VOCAB))
    table = engine.drafter.model.table
    assert least <= len(table) <= most
    for trigram, encoded in table.items():
        assert torch.allclose(encoded, head.encode(target.embed(trigram)), atol=1e-5)
    engine.close()


def test_a_step_of_training_is_what_a_draft_computes(target, tmp_path):
    """Its figures are those of chains drafted greedily at every place of a text."""
    head = disturbed(made()).requires_grad_(False)
    model = reader(target, head, tmp_path)
    ids = [(5 * i * i + 1) % VOCAB for i in range(12)]
    states = states_of(target, ids)
    batch = {
        "input_ids": torch.tensor([ids]), "hidden": states[None], "weights": torch.ones(1, 12),
    }  # fmt: skip
    begun = torch.ones(1, 11, dtype=torch.bool)
    with torch.inference_mode():
        learnt = [said for _, said in head.drafts(batch, Lent(target), begun)]
    for place in range(11):
        one, token, above = opened(model, target, ids[: place + 2]), ids[place + 1], -1
        for step in range(DEPTH):
            [score] = model.grow([one], [[token]], [[above]])
            assert torch.allclose(score.logits[0], learnt[step][place], atol=1e-3)
            token, above = score.logits[0].argmax().item(), above + 1


def test_the_loss_is_the_sum_of_the_steps_entropies():
    head, batch, ends = disturbed(made()), texts(), Tied()
    begun = torch.ones_like(batch["input_ids"][:, 1:], dtype=torch.bool)
    loss, right = head.learn(batch, ends)
    wanted = torch.zeros(())
    for step, (_, said) in enumerate(head.drafts(batch, ends, begun)):
        ahead = step + 2
        said = said.unflatten(0, begun.shape)[:, : 9 - ahead].flatten(0, 1)
        labels = batch["input_ids"][:, ahead:].flatten()
        wanted = wanted + F.cross_entropy(said, labels)
        hits = (said.argmax(-1) == labels).float().mean()
        assert torch.allclose(right[f"depth_{step + 1}"], hits)
    assert torch.allclose(loss, wanted, atol=1e-4)
    apart = F.mse_loss(along(head, batch)[0][:, :7], batch["hidden"][:, 1:8])
    assert torch.allclose(head.learn(batch, ends, 0.5)[0], loss + 0.5 * apart, atol=1e-4)


def test_drafts_from_inside_a_prompt_and_padding_do_not_count():
    head, batch, ends = disturbed(made()), texts(), Tied()
    batch["weights"] = torch.tensor([[0.0, 0, 0, 1, 1, 1, 0, 0, 0]] * 2)
    loss, _ = head.learn(batch, ends)
    later = {name: value.clone() for name, value in batch.items()}
    later["hidden"][:, 5:] += 1.0
    later["input_ids"][:, 6:] = 0
    assert torch.allclose(head.learn(later, ends)[0], loss, atol=1e-5)
    later["input_ids"][:, 5] = (later["input_ids"][:, 5] + 1) % VOCAB
    assert not torch.allclose(head.learn(later, ends)[0], loss, atol=1e-3)
    longer = {**batch, "weights": torch.tensor([[0.0, 0, 1, 1, 1, 1, 0, 0, 0]] * 2)}
    assert not torch.allclose(head.learn(longer, ends)[0], loss, atol=1e-3)


def test_nothing_passes_back_through_what_was_guessed():
    head, batch = disturbed(made()), texts()
    begun = torch.ones_like(batch["input_ids"][:, 1:], dtype=torch.bool)
    steps = list(head.drafts(batch, Tied(), begun))
    steps[2][1].sum().backward()
    gradients = [one.weight.grad for one in head.residual]
    assert gradients[0] is None and gradients[1] is None
    assert gradients[2].abs().sum() > 0 and head.layer.attention.weight.grad.abs().sum() > 0


def sampled(table, count, length, seed):
    """Texts of a table from its own law, with its logits as states."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(table.vocab_size, (count, length + 2), generator=generator)
    for place in range(2, length + 2):
        laws = table.logits[ids[:, place - 2], ids[:, place - 1]].softmax(-1)
        ids[:, place] = torch.multinomial(laws, 1, generator=generator)[:, 0]
    states = table.logits[ids[:, 1:-1], ids[:, 2:]].float()
    return {"input_ids": ids[:, 2:], "hidden": states, "weights": torch.ones(count, length)}


@pytest.fixture(scope="module")
def table():
    return TableLM.random(6, seed=3, scale=3.0)


def taught(head, table, steps=150):
    optimizer = torch.optim.AdamW(head.parameters(), 5e-3, weight_decay=0.0)
    for step in range(steps):
        loss, _ = head.learn(sampled(table, 32, 20, step), Table(table.vocab_size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False)


@pytest.fixture(scope="module")
def learnt(table):
    """A head for the table, and its losses by depth, before training and after it, on new texts."""
    head = made(table.vocab_size, table.vocab_size, depth=4)
    batch, begun = sampled(table, 200, 20, -1), torch.zeros(200, 19, dtype=torch.bool)
    begun[:, :15] = True

    def losses():
        labels = [batch["input_ids"][:, step + 2 : step + 17].flatten() for step in range(4)]
        told = zip(head.drafts(batch, Table(table.vocab_size), begun), labels, strict=True)
        with torch.no_grad():
            return [F.cross_entropy(said, label).item() for (_, said), label in told]

    before = losses()
    return taught(head, table), before, losses()


def test_every_depth_learns_and_near_ones_learn_more(learnt):
    _, before, after = learnt
    assert all(late < early - 0.3 for early, late in zip(before, after, strict=True))
    assert after == sorted(after) and after[3] > after[0] + 0.1


def test_greedy_text_is_plains_with_a_trained_head_whose_guesses_stand(learnt, table, tmp_path):
    where = store.save(tmp_path / "head", "chimera", learnt[0], {})
    prompts = [[1, 2, 3], [5], [0, 4, 2, 2, 1]]
    rows = [
        seeded_rows(prompts, SamplingParams(max_new_tokens=40, temperature=0.0), 6)
        for _ in range(2)
    ]
    engine = assemble("chimera", table, draft_head=where, controller="fixed", depth=4, nodes=12)
    plain = assemble("plain", table)
    steps = len(list(decode(rows[0], engine)))
    assert [row.new_tokens for row in rows[0]] == write(plain, rows[1])
    assert steps < 25, "guesses stood"


def test_knowing_the_token_before_beats_heads_that_do_not(learnt, table):
    """Medusa's head sees the same state and neither the root nor what was guessed behind it."""
    config = Medusa.Config(hidden_size=6, vocab_size=6, depth=2)
    torch.manual_seed(0)
    medusa = Medusa(config)
    medusa.start_from(torch.eye(6))
    taught(medusa, table)
    batch = sampled(table, 200, 20, -1)
    rights = [head.learn(batch, Table(6))[1] for head in (learnt[0], medusa)]
    for depth in ("depth_1", "depth_2"):
        assert rights[0][depth] > rights[1][depth] + 0.03


def test_the_draft_is_the_papers_tree_as_deep_as_there_are_heads(tmp_path):
    table = TableLM.random(6, seed=2, scale=0.5)
    for depth, wanted in ((5, [1, 4, 8, 8, 3, 2]), (4, [1, 4, 8, 8, 3])):
        where = store.save(tmp_path / str(depth), "chimera", made(6, 6, depth), {})
        engine = assemble("chimera", table, draft_head=where, preset="paper")
        [row] = seeded_rows([[1, 2, 3]], SamplingParams(max_new_tokens=50), 6)
        engine.submit(row)
        depths = engine.step().drafts[0].tree.depths()
        assert [depths.count(level) for level in range(max(depths) + 1)] == wanted
        engine.close()
