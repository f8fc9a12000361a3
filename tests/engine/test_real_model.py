"""A real instruction model writes what transformers writes, in both precisions."""

import pytest
import torch

import foretoken
from foretoken import shipped
from foretoken.audit.greedy import ROUNDING, first_difference
from foretoken.lm.load import load_model, load_tokenizer

NAME = "smollm2-135m"
DRAFT = "smollm2-135m-draft"
TOKENS = 40
QUESTIONS = (
    "Repeat this sentence twice: the old man and the sea met in 1952.",
    "Write a Python function that adds two numbers.",
    "Count from 1 to 12.",
)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not shipped.is_whole(shipped.cache() / NAME),
        reason=f"the model is not here: foretoken minis get {NAME}",
    ),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def judged(request):
    """A model that nothing of ours has touched, and what it writes about each question."""
    model = load_model(NAME, dtype=request.param)
    tokenizer = load_tokenizer(NAME)
    texts = []
    for question in QUESTIONS:
        ids = encoded(tokenizer, question)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=TOKENS)  # fmt: skip
        texts.append(out[0, ids.shape[1] :].tolist())
    return request.param, model, tokenizer, texts


@pytest.fixture(scope="module")
def session(judged):
    with foretoken.load(NAME, method="plain", dtype=judged[0]) as opened:
        yield opened


def encoded(tokenizer, question: str) -> torch.Tensor:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return torch.tensor([tokenizer(text)["input_ids"]])


def margin(model, before: list[int], one: int, other: int) -> tuple[float, float]:
    """How far the lesser of two tokens is behind the best one, and how much of that is rounding."""
    with torch.no_grad():
        logits = model(torch.tensor([before])).logits[0, -1]
    lesser = min(float(logits[one]), float(logits[other]))
    return float(logits.max()) - lesser, ROUNDING[logits.dtype] * float(logits.abs().max())


@pytest.fixture(scope="module")
def drafting(judged):
    with foretoken.load(NAME, method="chain", draft=DRAFT, dtype=judged[0]) as opened:
        yield opened


@pytest.mark.parametrize("method", ["chain", "tree", "rasd", "hybrid"])
def test_greedy_text_with_the_trained_draft_is_that_of_generate(method, judged, drafting) -> None:
    check_greedy(method, judged, drafting)


@pytest.mark.parametrize(
    "method", ["plain", "prompt-lookup", "suffix", "token-recycling", "layerskip", "auto"]
)
def test_greedy_text_is_that_of_generate(method, judged, session) -> None:
    check_greedy(method, judged, session)


def check_greedy(method, judged, session) -> None:
    """Token for token; where rounding decides, between tokens that are as good as equal."""
    dtype, model, tokenizer, wanted = judged
    using, equal = session.using(method), 0
    for question, expected in zip(QUESTIONS, wanted, strict=True):
        found = using.generate([{"role": "user", "content": question}], max_new_tokens=TOKENS)
        at = first_difference(found.tokens, expected)
        equal += at is None
        if at is not None:
            before = [*encoded(tokenizer, question)[0].tolist(), *expected[:at]]
            gap, rounding = margin(model, before, found.tokens[at], expected[at])
            assert gap <= rounding, f"{method}: {gap} at token {at} of {question!r}"
    assert equal == len(QUESTIONS) or dtype == "bfloat16"


def test_guessing_needs_fewer_forwards(session) -> None:
    result = session.using("suffix").generate(
        [{"role": "user", "content": QUESTIONS[2]}], max_new_tokens=TOKENS, ignore_eos=True
    )
    assert result.stats.tokens == TOKENS and result.stats.target_steps < TOKENS


def test_a_chat_goes_through_the_template_and_ends_at_its_end_token(session) -> None:
    question = "What is the capital of France? Answer in one word."
    ids = encoded(session.tokenizer, question)[0].tolist()
    assert session.tokenizer.decode(ids).startswith("<|im_start|>system\n")
    asked = session.generate([{"role": "user", "content": question}], max_new_tokens=TOKENS)
    assert asked.tokens == session.generate(ids, max_new_tokens=TOKENS).tokens
    assert asked.finish_reason == "stop" and "Paris" in asked.text
    assert asked.tokens[-1] == session.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_tokenizer_splits_as_the_model_was_trained() -> None:
    tokenizer = load_tokenizer(NAME)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("a:\n\n1952").input_ids)
    assert tokens == ["a", ":", "\u010a\u010a", "1", "9", "5", "2"]


def test_output_head_and_input_table_are_one(judged) -> None:
    dtype, model, _, _ = judged
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert str(model.dtype) == f"torch.{dtype}" and model.num_parameters() == 134_515_008
