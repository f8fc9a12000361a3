"""The model of lm-eval answers what lm-eval's own `hf` model answers."""

import copy
import logging

import pytest
import torch
from tokenizers import processors

from foretoken import shipped
from foretoken.errors import ConfigError

CONTEXTS = [
    "the then the", "a", "one two three ", "on the other", "<eos>the", "in" * 70, "x <turn> y",
    "the then the",
]  # fmt: skip


EOS, TURN = 262, 264  # ids of the tokenizer's end token and of its special one


@pytest.fixture(scope="module")
def theirs(make_model, pair_folders):
    return make_model("hf", pretrained=str(pair_folders[0]))


@pytest.fixture(scope="module")
def ours(make_model, pair_folders):
    target, draft = map(str, pair_folders)
    model = make_model("foretoken", target=target, draft=draft, method="chain", depth=3)
    yield model
    model.session.close()


@pytest.fixture(scope="module")
def several(make_model, pair_folders):
    """Rows in company, of a tree."""
    target, draft = map(str, pair_folders)
    model = make_model("foretoken", target=target, draft=draft, method="tree", depth=3, nodes=8,
                       batch_size=3)  # fmt: skip
    yield model
    model.session.close()


def asked(**options) -> list[tuple]:
    return [(context, options) for context in CONTEXTS]


@pytest.mark.parametrize(
    "options",
    [
        {"until": ["e"], "max_gen_toks": 12},
        {"until": "he", "max_gen_toks": 12},
        {"until": ["<turn>", "qq"], "max_tokens": 12},
        {"until": [""], "max_gen_toks": 12},
        {"max_gen_toks": 12, "repetition_penalty": 1.5},
        {"until": [], "max_new_tokens": 12, "no_repeat_ngram_size": 2, "do_sample": False},
        {"until": ["<turn>"], "max_gen_toks": 16, "sequence_bias": [[[TURN], 6.0]]},
        {"until": ["e"], "max_gen_toks": 16, "sequence_bias": [[[EOS], 6.0]]},
        {"until": ["e"], "max_gen_toks": 12, "do_sample": True, "temperature": 0.7, "top_k": 1},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_texts_are_those_of_hf(theirs, ours, several, requests, options) -> None:
    expected = theirs.generate_until(requests("generate_until", asked(**options)))
    assert ours.generate_until(requests("generate_until", asked(**options))) == expected
    assert several.generate_until(requests("generate_until", asked(**options))) == expected
    assert len(set(expected)) > 3


def test_of_a_context_that_leaves_no_room_the_end_is_continued(theirs, ours, requests) -> None:
    given = [("on the other hand " * 60 + word, {"max_gen_toks": 12}) for word in ("in", "the")]
    expected = theirs.generate_until(requests("generate_until", given))
    assert ours.generate_until(requests("generate_until", given)) == expected
    assert expected[0] != expected[1]


def test_requests_with_other_options_are_answered_in_order(theirs, several, requests) -> None:
    mixed = [
        (context, {"until": ["e"], "max_gen_toks": 4 + number % 3})
        for number, context in enumerate(CONTEXTS)
    ]
    expected = theirs.generate_until(requests("generate_until", mixed))
    assert several.generate_until(requests("generate_until", mixed)) == expected


PAIRS = [
    ("the then", " the"), ("the then", " there"), ("the then", " on"), ("", "the other"),
    ("", "<eos>the"), ("one two ", "three"), ("x" * 600, " the end"), ("a", "b" * 500),
]  # fmt: skip


def test_log_likelihoods_are_those_of_hf(theirs, ours, several, requests) -> None:
    expected = theirs.loglikelihood(requests("loglikelihood", PAIRS))
    for model in (ours, several):
        found = model.loglikelihood(requests("loglikelihood", PAIRS))
        for (chance, greedy), (other, is_greedy) in zip(found, expected, strict=True):
            assert chance == pytest.approx(other, abs=1e-4, rel=1e-6) and greedy is is_greedy


def test_rolling_log_likelihoods_are_those_of_hf(theirs, several, requests) -> None:
    texts = [("the then",), ("on the other hand " * 60,), ("a",)]
    expected = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    found = several.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-6)


@pytest.mark.parametrize("thought", ["e", 101])
def test_what_was_thought_before_the_answer_is_left_out(
    make_model, pair_folders, theirs, ours, requests, monkeypatch, thought
) -> None:
    for model in (theirs, ours):
        monkeypatch.setattr(model, "think_end_token", thought)
    given = asked(until=["th"], max_gen_toks=16)
    expected = theirs.generate_until(requests("generate_until", given))
    assert ours.generate_until(requests("generate_until", given)) == expected


def test_model_arguments_of_hf_mean_what_they_mean_there(
    make_model, pair_folders, requests
) -> None:
    target = str(pair_folders[0])
    same = {"max_length": 40, "prefix_token_id": 7, "softmax_dtype": "float64"}
    theirs = make_model("hf", pretrained=target, **same)
    ours = make_model("foretoken", target=target, method="plain", **same)
    assert ours.tokenizer_name == theirs.tokenizer_name
    given = asked(until=["e"], max_gen_toks=8)
    expected = theirs.generate_until(requests("generate_until", given))
    assert ours.generate_until(requests("generate_until", given)) == expected
    pairs = [("", "the other"), ("x" * 60, " the end")]
    chances = theirs.loglikelihood(requests("loglikelihood", pairs))
    found = ours.loglikelihood(requests("loglikelihood", pairs))
    assert [chance for chance, _ in found] == pytest.approx([c for c, _ in chances], abs=1e-4)


@pytest.fixture(scope="module")
def with_start_token(make_llama, byte_tokenizer, tmp_path_factory) -> str:
    """A model whose tokenizer puts a start token before each text."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    start = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=start
    )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_llama(len(tokenizer), **ends).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("options", [{}, {"add_bos_token": False}, {"add_bos_token": True}])
def test_start_tokens_are_put_where_hf_puts_them(
    make_model, with_start_token, requests, options
) -> None:
    theirs = make_model("hf", pretrained=with_start_token, **options)
    ours = make_model("foretoken", target=with_start_token, method="plain", batch_size=3, **options)
    texts = [(context, {"max_gen_toks": 6}) for context in (*CONTEXTS, "<s>the then the")]
    expected = theirs.generate_until(requests("generate_until", texts))
    assert ours.generate_until(requests("generate_until", texts)) == expected
    assert expected[0] == expected[-1] or options == {"add_bos_token": False}
    pairs = [*PAIRS[:6], ("<s>the", " then"), ("", "<s>the")]
    chances = theirs.loglikelihood(requests("loglikelihood", pairs))
    found = ours.loglikelihood(requests("loglikelihood", pairs))
    assert [c for c, _ in found] == pytest.approx([c for c, _ in chances], abs=1e-4)


def test_chats_are_told_through_the_tokenizers_template(theirs, ours, monkeypatch) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for model in (theirs, ours):
        monkeypatch.setattr(model.tokenizer, "chat_template", template)
    chat = [{"role": "system", "content": "short"}, {"role": "user", "content": "the then"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert ours.chat_template(True) == theirs.chat_template(True) == template


def test_sampled_texts_follow_the_seed_of_torch(ours, requests) -> None:
    given = asked(until=["\n"], max_gen_toks=8, do_sample=True, temperature=1.0)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(ours.generate_until(requests("generate_until", given)))
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][-1], "each repeat of a prompt has its own seed"


def test_a_temperature_of_nothing_is_refused_where_hf_refuses_it(theirs, ours, requests) -> None:
    given = requests("generate_until", asked(max_gen_toks=4, do_sample=True))
    for model in (theirs, ours):
        with pytest.raises(ValueError, match="strictly positive"):
            model.generate_until(given)


def test_what_leaves_no_room_for_a_context_is_refused(ours, requests) -> None:
    with pytest.raises(ConfigError, match=r"max_gen_toks=512(.|\n)*context of 512"):
        ours.generate_until(requests("generate_until", asked(max_gen_toks=512)))


def test_examples_before_a_question_are_read_once(make_model, pair_folders, requests) -> None:
    target = str(pair_folders[0])
    kept, apart = (
        make_model("foretoken", target=target, method="plain", **options)
        for options in ({}, {"keep_prefixes": 0})
    )
    before = "the other one then, " * 12
    given = requests("loglikelihood", [(before + word, " on") for word in ("a", "b", "c")])
    found, expected = (model.loglikelihood(given) for model in (kept, apart))
    assert kept.session.target.prefixes.reused > 2 * 100
    assert apart.session.target.prefixes is None
    assert [chance for chance, _ in found] == pytest.approx([c for c, _ in expected], abs=1e-4)


def test_log_likelihoods_within_a_memory_budget_are_refused(
    make_model, pair_folders, requests
) -> None:
    """Only what writes texts keeps to it."""
    model = make_model(
        "foretoken", target=str(pair_folders[0]), method="plain", memory_budget="1GiB"
    )
    with pytest.raises(ConfigError, match=r"budget of 1\.00 GiB(.|\n)*without memory_budget"):
        model.loglikelihood(requests("loglikelihood", PAIRS[:2]))
    [text] = model.generate_until(requests("generate_until", asked(max_gen_toks=4)[:1]))
    assert isinstance(text, str)
    model.session.close()


def test_a_lossy_method_is_said_to_be_one(make_model, pair_folders, caplog) -> None:
    target, draft = map(str, pair_folders)
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        model = make_model("foretoken", target=target, draft=draft, method="mcsd-target-init")
    assert "LOSSY: not the target's own law" in caplog.text
    info = model.get_model_info()
    assert info["foretoken_promise"]["lossless"] is False
    assert info["foretoken_promise"]["why"] in caplog.text
    assert info["model_num_parameters"] > 0


def test_a_lossless_method_warns_of_nothing(make_model, pair_folders, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        make_model("foretoken", target=str(pair_folders[0]), method="prompt-lookup")
    assert caplog.text == ""


def test_a_method_that_writes_several_texts_is_refused(make_model, pair_folders) -> None:
    with pytest.raises(ConfigError, match=r"'beam-sampling'(.|\n)*one text per prompt"):
        make_model("foretoken", target=str(pair_folders[0]), method="beam-sampling")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_no_wish_and_is_told(make_model, pair_folders, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        model = make_model(
            "foretoken", target=str(pair_folders[0]), method="plain", device="cuda:0"
        )
    assert str(model.device) == "cpu" and "cuda:0 is not here" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "rows"), [({"batch_size": "4"}, 4), ({"batch_size": "auto"}, 16),
                        ({"batch_size": "auto:2", "max_batch_size": 5}, 5), ({}, 1)]
)  # fmt: skip
def test_batch_sizes_are_rows(make_model, pair_folders, sizes, rows) -> None:
    model = make_model("foretoken", target=str(pair_folders[0]), method="plain", **sizes)
    assert model.batch_size == model.session.max_rows == rows


def test_a_batch_size_that_is_none_is_refused(make_model, pair_folders) -> None:
    with pytest.raises(ConfigError, match="max_rows='many'"):
        make_model("foretoken", target=str(pair_folders[0]), method="plain", batch_size="many")


@pytest.mark.slow
def test_a_task_with_the_shipped_pair_comes_out_as_with_hf(lm_eval, task_folder, tmp_path) -> None:
    """Greedy texts, choices and metrics; what the cache of answers holds is not written again."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_folder), include_defaults=False)

    def evaluated(model: str, **arguments) -> dict:
        return lm_eval.simple_evaluate(
            model,
            model_args={"dtype": "float32", **arguments},
            tasks=["local_written", "local_chosen"],
            task_manager=manager,
            device="cpu",
            bootstrap_iters=0,
            use_cache=str(tmp_path / model),
        )

    theirs = evaluated("hf", pretrained=str(shipped.path("text-target")))
    first, again = (
        evaluated("foretoken", target="text-target", draft="text-draft", method="chain", depth=4)
        for _ in range(2)
    )
    for found in (first, again):
        assert found["results"] == theirs["results"]
        assert texts(found) == texts(theirs) and len(set(map(str, texts(found)))) == 6
        assert choices(found) == pytest.approx(choices(theirs), abs=1e-4, rel=1e-6)
    assert first["config"]["foretoken_tokens"] > 40
    assert first["config"]["foretoken_tokens_per_forward"] > 1.5
    assert again["config"]["foretoken_tokens"] == 0


def texts(found: dict) -> list:
    return [sample["resps"] for sample in found["samples"]["local_written"]]


def choices(found: dict) -> list[float]:
    return [
        chance for sample in found["samples"]["local_chosen"] for [(chance, _)] in sample["resps"]
    ]
