import pytest

import foretoken
from foretoken.drafters.by_temperature import ByTemperature
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.priced_chain import PricedChain
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.errors import PairingError
from foretoken.methods import default_method
from foretoken.types import Budget, Draw, Layer, Traits
from foretoken.verifiers.recursive import Recursive

VOCAB = 12


@pytest.fixture
def drafter(pair):
    return ByTemperature(
        BestFirst(OrdinaryModel(pair[1]), BestFirst.Config(min_gain=0.0)),
        PricedChain(OrdinaryModel(pair[1])),
    )


def test_rows_of_one_batch_are_drafted_for_by_their_temperature(drafter, row):
    rows = [row([1, 2, 3], VOCAB, temperature=t, seed=4) for t in (1.0, 0.0, 0.7, 0.0)]
    for one in rows:
        drafter.start(one, None)
    drafts = drafter.propose(rows, [Budget(3, 8)] * 4)
    assert [draft.draw for draft in drafts] == [Draw.IID, Draw.POINT, Draw.IID, Draw.POINT]
    assert drafts[1].tree == drafts[3].tree and not drafts[1].tree.is_chain
    assert drafts[0].tree.is_chain and all(d.tree.tokens[0] == 3 for d in drafts)
    for one in rows:
        drafter.finish(one)


def test_mixed_batches_write_what_each_row_writes_alone(drafter, run, plain, row, pair, prompts):
    """The draft model's strict cache sees every row opened, told and closed once."""

    def rows():
        return [
            row(p, VOCAB, max_new_tokens=30, temperature=t, seed=5)
            for p, t in zip(prompts, (0.0, 1.0) * len(prompts), strict=False)
        ]

    together, records = run(pair[0], drafter, rows(), verifier=Recursive(), depth=3)
    assert any(len({d.draw for d in record.drafts}) == 2 for record in records)
    for number, text in enumerate(together):
        alone = run(pair[0], drafter, [rows()[number]], verifier=Recursive(), depth=3)[0]
        assert alone == [text]
    greedy = [one for one in rows() if one.warp.greedy]
    assert plain(pair[0], greedy) == together[::2]
    assert pair[1].rows_held == 0


def test_it_is_the_default_with_a_draft_model(pair_folders):
    assert default_method(None) == "auto" and default_method("draft") == "auto-draft"
    assert default_method("draft", "confidence") == default_method("d", None, "block") == "chain"
    with foretoken.load(pair_folders[0], draft=pair_folders[1]) as session:
        assert session.method == "auto-draft"
        hybrid, chain = session.engine.drafter.members
        assert hybrid.inner.source is chain.source, "a draft that learns is one for both"
        greedy, drawn = (
            session.generate([5, 6, 7, 8], 12, temperature=t, seed=1) for t in (0.0, 1.0)
        )
        assert greedy.lossless and drawn.lossless
        with foretoken.load(pair_folders[0], method="plain") as plain:
            assert plain.generate([5, 6, 7, 8], 12, temperature=0.0).tokens == greedy.tokens


def test_members_that_read_hidden_states_are_refused(drafter):
    class Reader(RowDrafter):
        traits = Traits(taps=(Layer(0),))

    with pytest.raises(PairingError, match="Reader"):
        ByTemperature(Reader(), PromptLookup())
