"""On a real instruction model: the texts and the numbers of lm-eval's own `hf` model."""

import gc

import pytest

from foretoken import shipped

NAME, DRAFT = "smollm2-135m", "smollm2-135m-draft"
QUESTIONS = (
    "Repeat this sentence twice: the old man and the sea met in 1952.",
    "Write a Python function that adds two numbers.",
    "Count from 1 to 12.",
    "Name three colours of a flag, and say where that flag is flown.",
)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not shipped.is_whole(shipped.cache() / NAME),
        reason=f"the model is not here: foretoken minis get {NAME}",
    ),
]


@pytest.fixture(scope="module")
def judged(make_model, requests):
    """What `hf` answers: written texts, choices, whole texts."""
    model = make_model("hf", pretrained=str(shipped.path(NAME)))
    found = answers(model, requests)
    del model
    gc.collect()
    return found


def answers(model, requests) -> tuple[list, list, list]:
    chats = [
        model.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS
    ]
    written = [(chat, {"until": ["\n\n"], "max_gen_toks": 40}) for chat in chats]
    chosen = [
        (chat, choice) for chat in chats for choice in ("Yes", "The first one is red", "1, 2")
    ]
    return (
        model.generate_until(requests("generate_until", written)),
        model.loglikelihood(requests("loglikelihood", chosen)),
        model.loglikelihood_rolling(requests("loglikelihood_rolling", [(" ".join(QUESTIONS),)])),
    )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("chain", {"depth": 4}),
        ("tree", {"depth": 4, "nodes": 12, "batch_size": 4}),
        ("prompt-lookup", {"depth": 4}),
    ],
    ids=["chain", "tree", "prompt-lookup"],
)
def test_answers_are_those_of_hf(make_model, requests, judged, method, options) -> None:
    model = make_model("foretoken", target=NAME, draft=DRAFT, method=method, **options)
    texts, choices, whole = answers(model, requests)
    kept = model.written / model.forwards
    model.session.close()
    assert texts == judged[0]
    assert [best for _, best in choices] == [best for _, best in judged[1]]
    assert [c for c, _ in choices] == pytest.approx([c for c, _ in judged[1]], abs=1e-4, rel=1e-6)
    assert whole == pytest.approx(judged[2], abs=1e-4, rel=1e-6)
    assert kept > 1.0, "something was guessed, and right"
