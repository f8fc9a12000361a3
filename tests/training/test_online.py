"""A draft that learns while it serves: what it hears, what it learns, and that texts stay."""

import copy
import dataclasses
import random
import threading
from pathlib import Path

import pytest
import torch

import foretoken
from foretoken.audit.law import BOUND, SETTINGS, law_gap
from foretoken.coins import SeededCoins
from foretoken.engine.assemble import assemble
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.training.config import options
from foretoken.training.dataset.records import Laws
from foretoken.training.objectives.sparse_laws import SparseLaws
from foretoken.training.online.draft import Allowance, OnlineDraft
from foretoken.training.online.evidence import Buffer, Evidence, Lesson, Notes, collated, parted
from foretoken.training.online.learner import Learner, slices
from foretoken.training.online.served import RoutedDrafts
from foretoken.training.online.serving import ServingSettings
from foretoken.training.online.settings import OnlineSettings
from foretoken.training.online.topics import Centroids
from foretoken.training.online.trial import Trial, accepted
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, SamplingParams, Scores, Step, StepTimes, Verdict

PROMPTS = [[random.Random(i).randrange(20) for _ in range(6)] for i in range(60)]
NOW = OnlineSettings(share=1.0, rate=1e-3, interval=4, updates=4, texts=16, accepted=0.0)


def disturbed(model, size, seed=3):
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight += size * torch.randn(weight.shape, generator=generator)
    return made


@pytest.fixture(scope="module")
def pair(make_llama):
    target = make_llama(64, 0)
    return target, disturbed(target, 0.04)


@pytest.fixture(scope="module")
def truth(pair):
    with foretoken.load(pair[0], "plain") as plain:
        return [plain.generate(ids, 24, temperature=0.0).tokens for ids in PROMPTS]


def chains(pair, method="chain", **options):
    return foretoken.load(pair[0], method, draft=pair[1], depth=3, **options)


def heard_of(draft, path, token, logits, accepted=0.0, prompt=(1, 2, 3)):
    """What evidence there is in one step behind a prompt that ends its row."""
    emitted = [*(draft.tree.tokens[node] for node in path), token]
    params = SamplingParams(max_new_tokens=len(emitted))
    row = make_row(list(prompt), params, SeededCoins(0), logits.shape[-1])
    row.extend(emitted)
    times = StepTimes(1, len(draft.tree), len(row.tokens), 0.0, 0.0, 0.0)
    step = Step((row,), (draft,), (Scores(logits),), (Verdict(path, token),), (emitted,), times)
    [heard] = Evidence(4, 64, accepted, 0).read(step)
    return heard


def test_a_rejection_is_kept_with_the_law_that_said_the_corrected_token():
    """Node 1 was accepted, node 2 rejected: the law is node 1's, its token the last of the text."""
    logits = torch.randn(3, 9)
    logits[1, 7] = 20.0
    heard = heard_of(Draft(chain(3, [4, 5]), Draw.POINT), (1,), 7, logits)
    [lesson] = heard.lessons
    assert lesson.tokens.tolist() == [1, 2, 3, 4, 7] and lesson.places.tolist() == [4]
    assert int(lesson.laws.tokens[0, 0]) == 7
    best = logits[1].log_softmax(-1).sort(descending=True)[0][:4]
    torch.testing.assert_close(lesson.laws.log_probs[0].float(), best, atol=2e-2, rtol=2e-3)
    assert (heard.accepted, heard.judged) == (1, 2)


def test_a_bonus_token_and_an_empty_draft_are_no_errors():
    logits = torch.randn(3, 9)
    assert heard_of(Draft(chain(3, [4, 5]), Draw.POINT), (1, 2), 7, logits).lessons == []
    assert heard_of(Draft(chain(3, []), Draw.POINT), (), 7, logits).lessons == []
    [lesson] = heard_of(Draft(chain(3, [4, 5]), Draw.POINT), (1, 2), 7, logits, 1.0).lessons
    assert lesson.places.tolist() == [3, 4]  # accepted places, where those are asked for


def test_what_a_request_gave_is_neither_judged_nor_learned():
    """Four tokens of a prediction; the draft guessed what is behind them, and nothing else."""
    logits = torch.randn(6, 9)
    alone = Draft(chain(3, [4, 5, 6, 7]), Draw.POINT, given=4)
    for path in ((1, 2, 3, 4), (1,)):  # all of it stands; its second token falls
        heard = heard_of(alone, path, 8, logits, 1.0)
        assert (heard.accepted, heard.judged, heard.lessons) == (0, 0, [])
    both = Draft(chain(3, [4, 5, 6, 7, 8]), Draw.POINT, given=4)
    for path, said, stood in (((1, 2, 3, 4), 0, 0), ((1, 2, 3, 4, 5), 8, 1)):
        heard = heard_of(both, path, 0, logits, 1.0)
        assert (heard.accepted, heard.judged) == (stood, 1)
        [lesson] = heard.lessons
        assert lesson.places.tolist() == [7] and int(lesson.tokens[7]) == said
        assert int(lesson.laws.tokens[0, 0]) == int(logits[4].argmax())


def test_a_long_text_comes_in_parts_and_no_place_twice():
    notes, places = Notes(random.Random(0)), [0, 1, 5, 30, 31, 70, 99]
    notes.places.extend(places)
    notes.counts.extend(float(place) for place in places)
    notes.laws.extend(([place], [1.0]) for place in places)
    text = list(range(100, 200))
    found = []
    for lesson in parted(text, notes, 16):
        assert len(lesson.tokens) <= 16
        told = lesson.tokens[lesson.places.long()] - 100
        assert told.tolist() == lesson.laws.tokens[:, 0].tolist() == lesson.counts.tolist()
        assert bool((lesson.places >= 8).all()) or int(lesson.tokens[0]) == 100
        found += told.tolist()
    assert found == places[1:]


def lesson_of(tokens, place, token, size=64):
    law = torch.full((size,), -30.0)
    law[token] = 0.0
    return Lesson(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor([place], dtype=torch.int32),
        Laws(torch.arange(size)[None], law[None]),
        torch.ones(1),
        greedy=True,
    )


def chances(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].softmax(-1)


def test_the_token_after_the_context_is_learned_not_the_one_behind_it(pair):
    """A teacher that says 7 after 3: q(7 | ... 3) rises, at the following place it does not."""
    model = copy.deepcopy(pair[1])
    learner = Learner(model, None, OnlineSettings(rate=1e-3))
    learner.buffer.add(lesson_of([1, 2, 3, 7], 3, 7))
    before = chances(model, [1, 2, 3, 7])
    list(learner.updates(1, lambda: None))
    after = chances(model, [1, 2, 3, 7])
    assert after[2, 7] > 1.2 * before[2, 7]
    assert after[2, 7] / before[2, 7] > 1.1 * after[3, 7] / before[3, 7]


def test_gradients_come_from_the_kept_places_alone(pair):
    """In padded company and in slices they are those of the plain loss at these places."""
    model = copy.deepcopy(pair[1])
    learner = Learner(model, None, OnlineSettings())
    lessons = [lesson_of([1, 2, 3, 7], 3, 7), lesson_of([4, 5, 6, 8, 9, 10, 11], 2, 20)]
    for part in slices(lessons, 4):
        learner.gradients(part, 2)
    found = {name: w.grad.clone() for name, w in model.named_parameters()}
    model.zero_grad()
    learner.gradients(lessons, 2)  # both in one batch, the short one padded
    torch.testing.assert_close(found, {n: w.grad for n, w in model.named_parameters()})
    model.zero_grad()
    for tokens, at, token in (([1, 2, 3], 2, 7), ([4, 5], 1, 20)):  # nothing behind is looked at
        law = model(torch.tensor([tokens])).logits[0, at].log_softmax(-1)
        (-law[token] / 2).backward()
    wanted = {name: w.grad for name, w in model.named_parameters()}
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-3)


def test_a_place_stands_for_those_of_its_kind_that_were_not_kept():
    """Every second accepted place is kept, and every refused one."""
    logits = torch.randn(9, 20)
    draft = Draft(chain(3, [4, 5, 6, 7, 8, 9, 10, 11]), Draw.POINT)
    [lesson] = heard_of(draft, (1, 2, 3, 4, 5, 6), 0, logits, 0.5).lessons
    assert 1 < len(lesson.places) <= 7
    assert lesson.counts.tolist() == [2.0] * (len(lesson.places) - 1) + [1.0]


def test_what_is_accepted_at_a_lesson_is_what_the_engine_would_accept(pair):
    """The overlap of both laws over the tokens that the draft scores, or whether its best fits."""
    model, few = pair[1], torch.arange(50)
    law = torch.randn(64).log_softmax(-1)
    some = lesson_of([1, 2, 3, 7], 3, 7)
    some = dataclasses.replace(some, laws=Laws(torch.arange(64)[None], law[None]), greedy=False)
    q = model(torch.tensor([[1, 2, 3]])).logits[0, -1, :50].softmax(-1)
    found = accepted(model, SparseLaws.over(few, 64), some)
    torch.testing.assert_close(found, torch.minimum(q, law[:50].exp()).sum()[None])
    for token in (int(q.argmax()), int(q.argmin()), 60):
        one = lesson_of([1, 2, 3, token], 3, token)
        [found] = accepted(model, SparseLaws.over(few, 64), one).tolist()
        assert found == (token == int(q.argmax()))


ON_TRIAL = dataclasses.replace(NOW, trial=6, accepted=0.3)


@pytest.mark.parametrize("better", [True, False])
def test_weights_serve_once_they_do_better_on_what_they_have_not_learned(pair, truth, better):
    """Learning that is turned round makes the draft worse, and is never served."""
    with chains(pair) as session, OnlineDraft(session, ON_TRIAL) as online:
        [learner], [served] = online.learners, online.served.drafts
        if not better:
            for weight in learner.learned:
                weight.register_hook(lambda slope: -slope)
        texts = [session.generate(ids, 24, temperature=0.0).tokens for ids in PROMPTS]
        assert texts == truth
        assert online.steps > 20 and online.failure is None
        assert better or sum(learner.trial.gains) < 0
        assert (learner.served_steps > 0) == better
        serving = learner.serving.state_dict()
        for name, weight in served.model.state_dict().items():
            assert torch.equal(weight, serving[name])
        begun = pair[1].state_dict()
        assert all(torch.equal(begun[name], weight) for name, weight in serving.items()) != better


def test_weights_on_trial_go_on_where_they_were(pair, tmp_path):
    with chains(pair) as session:
        with OnlineDraft(session, dataclasses.replace(ON_TRIAL, trial=8)) as online:
            for ids in PROMPTS:
                session.generate(ids, 24, temperature=0.0)
                gains = list(online.learners[0].trial.gains)
                if online.served_steps and gains:
                    break
            wanted = copy.deepcopy(online.learners[0].serving.state_dict())
            online.save(tmp_path)
        with OnlineDraft(session, dataclasses.replace(ON_TRIAL, trial=8)) as again:
            assert again.load(tmp_path) and again.served_steps == online.served_steps > 0
            assert again.steps == online.steps > online.served_steps
            assert list(again.learners[0].trial.gains) == gains
            for name, weight in again.served.drafts[0].model.state_dict().items():
                assert torch.equal(weight, wanted[name])
        with OnlineDraft(session, NOW) as none:  # without a trial what was learned serves
            assert none.load(tmp_path) and none.served_steps == none.steps


def test_nothing_is_learned_from_too_few_parts_of_texts(pair):
    few = dataclasses.replace(NOW, begin=10)
    with chains(pair) as session, OnlineDraft(session, few) as online:
        for ids in PROMPTS[:16]:
            session.generate(ids, 24, temperature=0.0)
            assert online.steps == 0 or len(online.learners[0].buffer) >= 10
        assert online.requests == 16 and online.steps > 0


def test_the_weights_that_pass_a_trial_are_those_that_serve(pair):
    """They serve before the step that follows, and a few lucky lessons are not enough."""
    learner = Learner(copy.deepcopy(pair[1]), None, OnlineSettings(rate=1e-3, trial=4, texts=2))
    served, names = [], []

    def serve():
        served.append(learner.steps)
        learner.promote()

    for at in range(40):
        learner.hear([lesson_of([at % 5, 2, 3, 7], 3, 7)])
        names += learner.updates(1, serve)
    assert served, "a lesson that comes again and again is learned"
    assert all(names[at - 1] == "trial" for at, name in enumerate(names) if name == "swap")
    assert learner.served_steps == served[-1] < learner.steps
    trial = Trial(learner.objective, 4)
    trial.restart([-1.0, 3.0, -1.0, 0.5])
    assert not trial.passed  # 1.5 with a standard error of 3.3
    trial.restart([1.0, 2.0, 1.0])
    assert not trial.passed
    trial.restart([1.0, 2.0, 1.0, 0.0])
    assert trial.passed


def test_a_trial_without_accepted_places_is_refused():
    """Of refused guesses alone every other draft does better."""
    with pytest.raises(ConfigError, match="trial"):
        OnlineSettings(trial=4, accepted=0.0)


def test_a_buffer_keeps_the_newest_within_its_bounds():
    lessons = [lesson_of([i, 1, 2], 1, 5) for i in range(40)]
    few, small = Buffer(10, 2**30), Buffer(1000, 5 * lessons[0].nbytes)
    for lesson in lessons:
        few.add(lesson)
        small.add(lesson)
    assert [int(one.tokens[0]) for one in few.lessons] == list(range(30, 40))
    assert len(small) == 5 and small.nbytes == 5 * lessons[0].nbytes
    few.draw(10, random.Random(0))
    few.add(lessons[0])
    older, new = few.draw(4, random.Random(0))
    assert len(older) == 3 and new == [lessons[0]]
    batch = collated(older + new)
    assert batch["weights"].sum() == 4


FEW = list(range(60))  # tokens that the draft scores


@pytest.mark.parametrize(
    ("method", "vocabulary"),
    [
        *((method, None) for method in ("chain", "tree", "pearl", "auto-draft")),
        ("chain", FEW),
        *(pytest.param(method, FEW, marks=pytest.mark.slow) for method in ("tree", "pearl")),
        pytest.param("auto-draft", FEW, marks=pytest.mark.slow),
    ],
)
def test_greedy_texts_stay_while_the_draft_learns(pair, truth, method, vocabulary):
    weights = copy.deepcopy(pair[1].state_dict())
    with (
        chains(pair, method, draft_vocabulary=vocabulary) as session,
        OnlineDraft(session, NOW) as online,
    ):
        first = [session.generate(ids, 24, temperature=0.0).tokens for ids in PROMPTS[:20]]
        rows = session.generate(PROMPTS[20:], 24, temperature=0.0)  # swaps while rows are written
        assert [*first, *(row.tokens for row in rows)] == truth
        assert online.steps > 20 and online.failure is None
        served = online.served.drafts[0].model.get_input_embeddings().weight
        assert not torch.equal(served, weights["model.embed_tokens.weight"])
        assert online.served.topics == {}, "rows that ended are held"
        online.learn(1)
        assert session.generate(PROMPTS[0], 24, temperature=0.0).tokens == truth[0]
    for name, weight in pair[1].state_dict().items():
        assert torch.equal(weight, weights[name]), "the caller's draft was changed"


def test_learned_weights_serve_as_if_they_had_been_loaded(pair):
    """Packed copies, rows of a reduced output layer and caches follow: the same drafts."""
    given = copy.deepcopy(pair[1])
    with chains(pair, draft_vocabulary=list(range(60))) as session:
        online = OnlineDraft(session, NOW)
        session.generate(PROMPTS, 24, temperature=0.0)
        online.freeze()
        steps = online.steps
        learned = session.generate(PROMPTS[0], 24, temperature=0.0).steps
        assert online.steps == steps > 0, "a frozen draft learns"
        online.give(given)
        online.close()
    with chains((pair[0], given), draft_vocabulary=list(range(60))) as session:
        assert session.generate(PROMPTS[0], 24, temperature=0.0).steps == learned


def accepted_by(session, prompts):
    lengths = [session.generate(ids, 24, temperature=0.0).stats for ids in prompts]
    return sum(one.tokens for one in lengths) / sum(one.target_steps for one in lengths)


def test_acceptance_rises_falls_with_the_topic_and_recovers(pair):
    """Two domains of prompts; the frozen draft stays where it was in both."""
    one = [ids for ids in PROMPTS[:2] for _ in range(24)]
    other = [[token + 30 for token in ids] for ids in one]
    settings = OnlineSettings(share=1.0, rate=1e-3, interval=4, updates=4, texts=16)
    with chains(pair) as session:
        frozen = [accepted_by(session, some) for some in (one[-12:], other[-12:])]
        losses = []
        with OnlineDraft(session, settings) as online:
            rising = [accepted_by(session, one[at : at + 12]) for at in range(0, 48, 12)]
            for at in range(0, 48, 12):
                rising.append(accepted_by(session, other[at : at + 12]))
                losses.append(online.learners[0].loss)
    assert rising[3] > frozen[0] + 0.5 and rising[3] > rising[0] + 0.2
    assert rising[4] < rising[3]  # the topic has changed
    assert rising[7] > frozen[1] + 0.5 and rising[7] > rising[4] + 0.2
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("setting", ["temperature 1", "temperature 0.7, top-p 0.8"])
def test_the_law_is_exact_where_the_draft_changes_between_steps(setting):
    """Every coin enumerated: after each step the draft is another table, its cache made anew."""
    target = TableLM.random(3, 2, seed=1)
    tables = [TableLM.random(3, 2, seed=seed).logits for seed in (5, 6, 7, 8)]

    def build():
        draft = TableLM(tables[0])
        routed = RoutedDrafts([draft], lambda prompt: 0, draft)
        engine = assemble("chain", TableLM(target.logits), routed, depth=2, controller="fixed")

        waiting = iter(tables[1:])

        def swap(step):
            draft.logits = next(waiting)
            rows = [row for row in step.rows if row.finish is None]
            routed.drafts[0].free(rows)
            routed.drafts[0].prefill(rows)

        engine.listeners.append(swap)
        return engine

    assert law_gap(build, target, SETTINGS[setting]).variation < BOUND


def test_sampled_texts_follow_the_targets_law_while_the_draft_learns(make_llama):
    """Frequencies over many texts, rows of a batch going on across swaps."""
    target, draft = make_llama(6, seed=1), make_llama(6, seed=2)
    with torch.no_grad():
        for model in (target, draft):
            model.lm_head.weight /= 3.0
        law = target(torch.tensor([[1, 2]])).logits[0, -1].softmax(-1)
        second = torch.stack(
            [target(torch.tensor([[1, 2, t]])).logits[0, -1].softmax(-1) for t in range(6)]
        )
    joint = law[:, None] * second
    count = 3000
    settings = OnlineSettings(share=1.0, rate=3e-3, interval=60, updates=1, texts=8)
    with (
        foretoken.load(target, "chain", draft, kernels="dense", depth=2) as session,
        OnlineDraft(session, settings) as online,
    ):
        texts = session.generate([[1, 2]] * count, 2, temperature=1.0, seed=0)
        assert online.steps > 20
    seen = torch.zeros(6, 6)
    for text in texts:
        seen[tuple(text.tokens)] += 1 / count
    assert 0.5 * float((seen - joint).abs().sum()) < 0.06


def test_threads_write_the_right_texts_while_weights_are_swapped(pair, truth):
    found = {}
    with chains(pair) as session, OnlineDraft(session, NOW) as online:

        def write(first):
            for at in range(first, len(PROMPTS), 3):
                found[at] = session.generate(PROMPTS[at], 24, temperature=0.0).tokens

        threads = [threading.Thread(target=write, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        idle = 0
        while any(thread.is_alive() for thread in threads):
            idle += online.learn(1)
        for thread in threads:
            thread.join()
        assert online.failure is None and idle > 0
    assert [found[at] for at in range(len(PROMPTS))] == truth


def test_learning_that_fails_leaves_serving_as_it_is_and_says_so(pair, truth, caplog):
    with chains(pair) as session, OnlineDraft(session, NOW) as online:
        learner = online.learners[0]
        session.generate(PROMPTS[:8], 24, temperature=0.0)
        good, steps = copy.deepcopy(learner.model.state_dict()), learner.steps
        learner.model.model.norm.weight.register_hook(lambda slope: slope * float("nan"))
        texts = [row.tokens for row in session.generate(PROMPTS, 24, temperature=0.0)]
        assert texts == truth
        assert isinstance(online.failure, ConfigError) and "no numbers" in str(online.failure)
        assert "learning has ended" in caplog.text and online.frozen
        assert learner.steps == steps
        for name, weight in learner.model.state_dict().items():
            assert torch.equal(weight, good[name])
        served = online.served.drafts[0].model.state_dict()
        assert torch.equal(served["model.norm.weight"], good["model.norm.weight"])


def test_learning_takes_its_share_of_the_time_and_no_more():
    """On a clock of our own: what is spent never passes the share by more than one slice."""
    allowance = Allowance(0.2)
    slices, step, slice_seconds, longest = 0, 0.03, 0.05, 0.0
    for turn in range(2000):
        allowance.earn(step)
        if allowance.allows("learning"):
            took = slice_seconds * (1 + turn % 3)
            allowance.last["learning"] = took
            allowance.charge(took)
            slices, longest = slices + 1, max(longest, took)
    decoding = 2000 * step
    assert slices > 50
    assert allowance.spent <= 0.2 * decoding + longest
    assert allowance.spent >= 0.15 * decoding


def test_a_state_goes_on_where_it_was(pair, tmp_path):
    """Half the requests, save, load, the other half: the weights of one run."""
    finals = []
    for stop in (False, True):
        session = chains(pair)
        online = OnlineDraft(session, NOW)
        for at, ids in enumerate(PROMPTS[:16]):
            if stop and at == 6:
                online.save(tmp_path)
                online.close()
                online = OnlineDraft(session, NOW)
                assert online.load(tmp_path) and online.requests == 6
            session.generate(ids, 24, temperature=0.0)
        finals.append(copy.deepcopy(online.learners[0].model.state_dict()))
        assert online.requests == 16
        session.close()
    for name in finals[0]:
        torch.testing.assert_close(finals[0][name], finals[1][name])


def test_a_rate_given_anew_counts_behind_a_restart(pair, tmp_path):
    with chains(pair) as session:
        with OnlineDraft(session, NOW) as online:
            session.generate(PROMPTS[:8], 24, temperature=0.0)
            online.learn(1)
            online.save(tmp_path)
        other = dataclasses.replace(NOW, rate=2e-5, warmup=1000)
        with OnlineDraft(session, other) as online:
            assert online.load(tmp_path)
            steps = online.steps
            online.learn(1)
            [group] = online.learners[0].optimizer.param_groups
            assert group["lr"] == pytest.approx(2e-5 * (steps + 1) / 1000)


def test_a_text_that_no_draft_was_asked_about_is_learned_by_its_topic(pair):
    settings = OnlineSettings(share=1.0, topics=2, interval=1000, accepted=0.0)
    with (
        chains(pair, "auto-draft") as session,
        OnlineDraft(session, settings, router=lambda ids: ids[0] % 2) as online,
    ):
        session.generate(PROMPTS, 24, temperature=0.0)
        assert [learner.requests for learner in online.learners] == [
            sum(ids[0] % 2 == topic for ids in PROMPTS) for topic in range(2)
        ]
        assert online.served.topics == {}


def test_another_number_of_topics_and_an_empty_folder(pair, tmp_path):
    with chains(pair) as session:
        with OnlineDraft(session, NOW) as online:
            assert not online.load(tmp_path / "none")
            online.save(tmp_path)
        two = OnlineSettings(topics=2)
        with OnlineDraft(session, two) as online, pytest.raises(ConfigError, match="2 topics"):
            online.load(tmp_path)


def test_topics_learn_apart_and_texts_of_a_mixed_batch_stay(pair, truth):
    settings = OnlineSettings(share=1.0, rate=1e-3, interval=4, updates=4, topics=2)
    with (
        chains(pair) as session,
        OnlineDraft(session, settings, router=lambda ids: ids[0] % 2) as online,
    ):
        rows = session.generate(PROMPTS, 24, temperature=0.0)
        assert [row.tokens for row in rows] == truth
        assert all(learner.steps > 0 for learner in online.learners)
        one, other = (learner.model.lm_head.weight for learner in online.learners)
        assert not torch.equal(one, other)


def test_rows_that_a_batch_is_tried_on_go_to_their_own_topics(pair, truth, monkeypatch):
    """The draft meets their texts for the first time there, and a text is routed once."""
    kinds = [[at for at, ids in enumerate(PROMPTS) if ids[0] % 2 == kind] for kind in (0, 1)]
    places, tried, found = [*kinds[0][:2], *kinds[1][:2]], [], []
    settings = OnlineSettings(share=1.0, interval=1000, topics=2)
    with (
        foretoken.load(pair[0], "chain", draft=pair[1], controller="cost_model") as session,
        OnlineDraft(session, settings, router=lambda ids: ids[0] % 2) as online,
    ):
        price = session.engine.price
        monkeypatch.setattr(session.engine, "price", lambda rows: tried.append(rows) or price(rows))
        session.engine.listeners.append(lambda step: found.append(dict(online.served.topics)))
        rows = session.rows([PROMPTS[at] for at in places], 24, temperature=0.0)
        session.decode(rows)
        assert [row.new_tokens for row in rows] == [truth[at] for at in places]
    assert len(tried[0]) == 4
    assert found[0] == {row.uid: PROMPTS[at][0] % 2 for row, at in zip(rows, places, strict=True)}


def test_two_drafts_and_a_router_beat_one_draft_where_a_domain_comes_back(pair):
    """The same requests and as many steps in all; one draft forgets what it does not meet."""
    one, other = [PROMPTS[0]] * 24, [[token + 30 for token in PROMPTS[1]]] * 24
    found, steps = {}, {}
    for topics in (1, 2):
        settings = OnlineSettings(
            share=1.0, rate=2e-3, interval=4, updates=4, topics=topics, buffer=4, accepted=0.0
        )
        with (
            chains(pair) as session,
            OnlineDraft(session, settings, router=lambda ids, n=topics: int(ids[0] >= 30) % n) as o,
        ):
            accepted_by(session, [*one, *other])
            found[topics], steps[topics] = accepted_by(session, one[:3]), o.steps
    assert steps[1] == steps[2]
    assert found[2] > found[1] + 0.2


def test_a_router_that_leaves_the_topics_ends_its_own_request_only(pair, truth):
    with (
        chains(pair) as session,
        OnlineDraft(session, NOW, router=lambda ids: 5 if ids[0] == 63 else 0),
    ):
        with pytest.raises(ConfigError, match="topic 5"):
            session.generate([63, 1, 2], 8, temperature=0.0)
        assert session.generate(PROMPTS[0], 24, temperature=0.0).tokens == truth[0]


def test_prompts_of_two_kinds_are_told_apart_by_their_tokens():
    rng, route = random.Random(0), Centroids(2)
    head = [1, 2, 3, 4]
    kinds = [
        [*head, *(rng.randrange(10 + 300 * (i % 2), 60 + 300 * (i % 2)) for _ in range(30))]
        for i in range(60)
    ]
    found = [route(ids) for ids in kinds]
    assert found[10::2] == [found[10]] * 25 and found[11::2] == [1 - found[10]] * 25
    other = Centroids(2)
    other.restore(route.state())
    assert [other(ids) for ids in kinds[:4]] == [route(ids) for ids in kinds[:4]]


def test_what_cannot_learn_is_refused(pair, make_llama):
    with foretoken.load(pair[0], "plain") as session, pytest.raises(CapabilityError, match="chain"):
        OnlineDraft(session)
    with chains(pair) as session, OnlineDraft(session), pytest.raises(ConfigError, match="already"):
        OnlineDraft(session)


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"interval": 0}, {"rate": 0.0}, {"window": 1}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        OnlineSettings(**wrong)


@pytest.mark.parametrize("method", ["chain", "auto-draft"])
def test_moments_without_work_are_used_and_end(pair, truth, method):
    settings = OnlineSettings(share=0.5, passes=3.0, texts=8, rate=1e-3, interval=1000)
    with chains(pair, method) as session, OnlineDraft(session, settings) as online:
        assert not online.rest(), "nothing was heard"
        for ids in PROMPTS[:20]:
            session.generate(ids, 24, temperature=0.0)
        learner = learner_of(online)
        heard = len(learner.buffer)
        assert online.steps == 0 and 0 < learner.left <= 3 * heard
        slices = 0
        while online.rest():
            slices += 1
            assert slices < 1000, "learns for ever"
        assert heard > 8 and 3 * heard // 8 <= online.steps <= 3 * heard // 8 + 1
        assert online.allowance.spent == online.allowance.listening, "idle moments cost no share"
        rows = session.generate(PROMPTS, 24, temperature=0.0)
        assert [row.tokens for row in rows] == truth


def learner_of(online):
    return online.learners[0]


def test_greedy_and_sampled_rows_are_guessed_by_the_draft_that_learned(pair):
    with chains(pair, "auto-draft") as session:
        with OnlineDraft(session, NOW) as online:
            greedy, sampled = (one.model for one in guided(session.engine.drafter))
            assert greedy.lm is sampled.lm is online.served
        assert greedy.lm is sampled.lm is session.draft


def guided(drafter):
    """What grows trees for greedy rows, and chains for sampled ones."""
    hybrid, chain_ = drafter.members
    return hybrid.inner, chain_


def test_no_draft_model_nothing_learns(pair):
    with (
        foretoken.load(pair[0], "suffix") as session,
        pytest.raises(CapabilityError, match="with a draft"),
    ):
        OnlineDraft(session, NOW)


def test_an_error_in_a_moment_without_work_ends_learning_there(pair, caplog):
    with chains(pair) as session, OnlineDraft(session, OnlineSettings(rate=1e-3)) as online:
        session.generate(PROMPTS[:8], 24, temperature=0.0)
        learner_of(online).model.model.norm.weight.register_hook(lambda slope: slope * float("nan"))
        while online.rest():
            pass
        assert online.failure is not None and "learning has ended" in caplog.text
        assert learner_of(online).left >= 1 and not online.rest()


@pytest.mark.parametrize("trial", [0, 2])
def test_a_slice_that_is_disturbed_is_given_up_at_once_and_learned_later(pair, trial):
    """Between whichever layers it was disturbed, the same is learned in the end."""
    settings = OnlineSettings(rate=1e-3, trial=trial, slice_tokens=8, texts=4)

    def learned(disturbed):
        learner = Learner(copy.deepcopy(pair[1]), None, settings)
        learner.way.disturbed = disturbed
        asked_again = 0
        for round_ in range(3):
            for last in (7, 9, 11):
                learner.buffer.add(lesson_of([1, 2, 3 + round_, last], 3, last))
            for _ in learner.updates(2, learner.promote):
                learner.way.disturbed = disturbed  # as each moment without work sets it anew
                asked_again += 1
        return learner, asked_again

    calm, slices = learned(lambda: False)
    asked, moments = [0], {3, 10, 40, 77, 200, 201, 350, 500}

    def disturbed():
        asked[0] += 1
        return asked[0] in moments

    hasty, more = learned(disturbed)
    assert max(moments) < asked[0] and more == slices + len(moments)
    assert hasty.served_steps == calm.served_steps and hasty.steps == calm.steps == 6
    for name, weight in calm.model.state_dict().items():
        assert torch.equal(weight, hasty.model.state_dict()[name]), name


def test_whoever_comes_waits_for_a_layer_and_not_for_a_slice(pair):
    settings = OnlineSettings(rate=1e-3, interval=1000)
    with chains(pair) as session, OnlineDraft(session, settings) as online:
        session.generate(PROMPTS[:8], 24, temperature=0.0)
        asked = []

        def disturbed():
            asked.append(True)
            return len(asked) >= 5

        assert online.rest(disturbed) and len(asked) == 5
        assert online.rest(disturbed) and len(asked) == 6, "it is asked before the first layer ends"
        assert online.steps == 0 and all(one.grad is None for one in learner_of(online).learned)
        while online.rest():
            pass
        assert online.steps > 0


def test_without_tables_the_layers_alone_learn(pair):
    whole = Learner(copy.deepcopy(pair[1]), None, NOW)
    model = copy.deepcopy(pair[1])
    learner = Learner(model, None, OnlineSettings(rate=1e-3, tables=False))
    assert learner.nbytes < whole.nbytes
    learner.buffer.add(lesson_of([1, 2, 3, 7], 3, 7))
    before = chances(model, [1, 2, 3, 7])
    list(learner.updates(3, lambda: None))
    assert chances(model, [1, 2, 3, 7])[2, 7] > 1.2 * before[2, 7]
    for name, weight in pair[1].state_dict().items():
        table = name in ("model.embed_tokens.weight", "lm_head.weight")
        assert torch.equal(weight, model.state_dict()[name]) == table, name


def test_what_was_begun_in_an_idle_moment_is_not_finished_in_a_request(pair):
    """Its time is no share of decoding, unless learning is due; what is given up has no time."""
    settings = OnlineSettings(rate=1e-3, interval=1000, share=0.5)
    with chains(pair) as session, OnlineDraft(session, settings) as online:
        session.generate(PROMPTS[:8], 24, temperature=0.0)
        assert online.rest(lambda: True) and online.work is not None
        assert "gradients" not in online.allowance.last
        session.generate(PROMPTS[8:16], 24, temperature=0.0)
        assert online.allowance.spent == online.allowance.listening
        assert online.work is not None and online.steps == 0
        online.learners[0].requests = 1000
        session.generate(PROMPTS[16:20], 24, temperature=0.0)
        assert online.allowance.spent > online.allowance.listening


def test_a_slice_longer_than_all_gaps_is_learned_in_the_end(pair):
    with chains(pair) as session, OnlineDraft(session, OnlineSettings(rate=1e-3)) as online:
        session.generate(PROMPTS[:8], 24, temperature=0.0)
        for _ in range(200):
            online.rest(lambda: True)
        assert online.steps > 0


def test_the_page_about_serving_tells_every_default_of_a_draft_that_learns():
    page = (Path(__file__).parent.parent.parent / "docs" / "serving.md").read_text()
    part = page.split("## A draft that learns from its traffic")[1].split("\n## ")[0]
    for one in options(ServingSettings):
        value = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
        written = f"`{one.name}={value.removeprefix('0') if '.' in value else value}`"
        assert written in part or f"| `{one.name}`" in part or f"`{one.name}` |" in part, written
