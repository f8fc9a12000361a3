"""Several language models over one module, or over one configuration, in several threads."""

import copy
import random
import threading

import pytest
from play import closeness, fresh_tree, point, random_path, random_tokens, random_tree, row_of

from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.kernels import capture as captures
from foretoken.lm.opening import open_draft, open_lm
from foretoken.lm.runtime.attention import NAME, Switch
from foretoken.lm.runtime.sharing import shared_by
from foretoken.lm.views.wrapping import early_exits

CLOSE = 2e-5


def in_threads(*jobs):
    """Run the jobs at once; whatever one of them raised is raised here."""
    raised = []

    def guarded(job):
        try:
            job()
        except BaseException as error:  # handed on below
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if raised:
        raise raised[0]


def play(lm, model, seed, rounds=25):
    """Score, commit and free random trees; every node against a forward of a copy of the model."""
    dice = random.Random(seed)
    view = early_exits(lm, (2,)) if seed % 2 else lm
    rows = []
    for _ in range(rounds):
        if len(rows) < 2:
            rows.append(row_of(random_tokens(dice, dice.randrange(1, 9))))
            view.prefill([rows[-1]])
        trees = [random_tree(dice, row.tokens[-1], dice.randrange(1, 7)) for row in rows]
        if view is not lm:
            view.draft(rows, [t.tokens[:1] for t in trees], [(-1,)] * len(rows), [2] * len(rows))
        scores = view.score(rows, [point(tree) for tree in trees])
        for row, tree, score in zip(rows, trees, scores, strict=True):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
            path = random_path(dice, tree)
            view.commit([row], [path])
            row.tokens += [tree.tokens[node] for node in path] + random_tokens(dice, 1)
        if dice.random() < 0.3:
            view.free([rows.pop(0)])


@pytest.mark.parametrize("own", [True, False])
def test_one_module_in_several_threads_scores_as_in_one(own, make_tiny):
    """Two language models over it, or one that two threads use: trees, early exits, freed rows."""
    model = make_tiny("llama")
    copies = [copy.deepcopy(model) for _ in range(4)]
    first = open_lm(model, kernels="dense")
    lms = [first, open_lm(model, kernels="dense") if own else first]
    in_threads(*(lambda i=i: play(lms[i % 2], copies[i], i) for i in range(4)))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_models_that_share_a_configuration_leave_its_attention_as_it_was(make_tiny):
    target = make_tiny("llama")
    draft = make_tiny("llama", seed=1)
    for module in draft.modules():
        if hasattr(module, "config"):
            module.config = target.config
    copies = [copy.deepcopy(target), copy.deepcopy(draft)]
    lms = [open_lm(target, kernels="dense"), open_lm(draft, kernels="dense")]
    in_threads(*(lambda i=i: play(lms[i], copies[i], 2 * i) for i in range(2)))
    assert target.config._attn_implementation == "sdpa"


def test_the_last_to_leave_puts_the_attention_back_and_other_functions_wait(make_tiny):
    config = make_tiny("llama").config
    one, two, other = Switch([config]), Switch([config]), Switch([config])
    with one.to(NAME):
        with two.to(NAME):
            assert config._attn_implementation == NAME
        assert config._attn_implementation == NAME, "one forward is still inside"
        seen = []

        def later():
            with other.to("eager"):
                seen.append(config._attn_implementation)

        waiting = threading.Thread(target=later)
        waiting.start()
        waiting.join(timeout=0.2)
        assert not seen and config._attn_implementation == NAME
    waiting.join(timeout=60)
    assert seen == ["eager"] and config._attn_implementation == "sdpa"


def test_a_model_is_given_back_when_its_last_user_leaves(make_tiny):
    model = make_tiny("llama").train()
    one, two, three = (open_lm(model, kernels="packed") for _ in range(3))
    for leaving in (one, two):
        leaving.close()
        assert any("forward" in module.__dict__ for module in model.modules())
        assert not model.training, "the third one still writes with it"
    three.close()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert model.training


@pytest.mark.parametrize("reduced", [False, True])
def test_nobody_runs_a_model_while_it_is_being_opened(reduced, make_tiny, monkeypatch):
    """A trace puts symbols in the place of its weights, also of the model that a copy shares."""
    model, free = make_tiny("llama"), []
    trace = captures.trace

    def tried(*given):
        lock = shared_by(model).lock

        def look():
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

        in_threads(look)
        return trace(*given)

    monkeypatch.setattr(captures, "trace", tried)
    monkeypatch.setattr(captures, "_outlines", {})
    rows = OutputRows.of_tokens(range(0, 60, 2), 61) if reduced else None
    open_draft(model, rows, kernels="dense").close()
    assert free and not any(free)
