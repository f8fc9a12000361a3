"""Inside transformers' generate: the ids of generate alone, its hooks honoured, no trace left."""

import copy
import threading

import pytest
import torch
from hf_calls import PROMPTS, Collect, encoded
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import foretoken
from foretoken.engine.hf_arguments import split_processors
from foretoken.errors import CapabilityError, ConfigError


@pytest.fixture(scope="module", params=["chain", "pearl", "tree", "prompt-lookup"])
def faster(request, tiny_pair):
    draft = None if request.param == "prompt-lookup" else tiny_pair[1]
    return foretoken.custom_generate(
        method=request.param, draft=draft, kernels="dense", controller="fixed"
    )


@pytest.fixture(scope="module")
def chain(tiny_pair):
    return foretoken.custom_generate(draft=tiny_pair[1], kernels="dense", depth=5)


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "padded batch"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 24},
        {"max_new_tokens": 24, "repetition_penalty": 1.3},
        {"max_new_tokens": 24, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 24, "encoder_no_repeat_ngram_size": 1},
        {"max_new_tokens": 24, "encoder_repetition_penalty": 1.7},
        {"max_new_tokens": 24, "eos_token_id": [7, 30, 90, 201]},
        {"max_new_tokens": 24, "eos_token_id": [7, 30, 90, 201], "min_new_tokens": 12},
        {"max_length": 31},
        {"max_new_tokens": 30, "suppress_tokens": list(range(60)), "sequence_bias": {(70, 3): 5.0}},
    ],
    ids=lambda o: "+".join(o),
)
def test_greedy_ids_are_those_of_generate(tiny_pair, byte_tokenizer, faster, texts, options):
    inputs = encoded(byte_tokenizer, texts)
    alone = tiny_pair[0].generate(**inputs, do_sample=False, **options)
    ours = tiny_pair[0].generate(**inputs, do_sample=False, custom_generate=faster, **options)
    assert torch.equal(ours, alone) and ours.dtype == alone.dtype


@pytest.mark.parametrize(
    "penalty", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}], ids=str
)
def test_each_of_several_texts_is_held_to_its_own_prompt(tiny_pair, byte_tokenizer, chain, penalty):
    """generate tells these processors of the prompts before it repeats them."""
    inputs = encoded(byte_tokenizer, PROMPTS[::2])
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 16}
    alone = tiny_pair[0].generate(**inputs, **options, **penalty)
    ours = tiny_pair[0].generate(**inputs, **options, **penalty, custom_generate=chain)
    assert torch.equal(ours, alone)


class EndsWith(StoppingCriteria):
    """Stops after a token; remembers every length it was asked about."""

    def __init__(self, tokens):
        self.tokens, self.lengths = tokens, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        ended = [int(row[-1]) in self.tokens for row in input_ids]
        return torch.tensor(ended, device=input_ids.device)


def test_stopping_criteria_are_asked_after_every_token(tiny_pair, byte_tokenizer, faster):
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    length = inputs["input_ids"].shape[1]
    written = tiny_pair[0].generate(**inputs, do_sample=False, max_new_tokens=40)
    wanted = {int(written[0, length + 17])}
    theirs, ours = EndsWith(wanted), EndsWith(wanted)
    alone = tiny_pair[0].generate(
        **inputs,
        do_sample=False,
        max_new_tokens=40,
        stopping_criteria=StoppingCriteriaList([theirs]),
    )
    got = tiny_pair[0].generate(
        **inputs,
        do_sample=False,
        max_new_tokens=40,
        stopping_criteria=StoppingCriteriaList([ours]),
        custom_generate=faster,
    )
    assert torch.equal(got, alone)
    assert ours.lengths == theirs.lengths == list(range(length + 1, alone.shape[1] + 1))


class OnlyEven(LogitsProcessor):
    """Depends on the place in the text, padding included."""

    def __call__(self, input_ids, scores):
        scores[:, (input_ids.shape[1] % 2) :: 2] -= 3.0
        return scores


def test_own_logits_processors_see_padded_rows(tiny_pair, byte_tokenizer, faster):
    inputs = encoded(byte_tokenizer, PROMPTS)
    options = {"do_sample": False, "max_new_tokens": 24}
    alone = tiny_pair[0].generate(
        **inputs, logits_processor=LogitsProcessorList([OnlyEven()]), **options
    )
    ours = tiny_pair[0].generate(
        **inputs,
        logits_processor=LogitsProcessorList([OnlyEven()]),
        custom_generate=faster,
        **options,
    )
    assert torch.equal(ours, alone)


def test_a_streamer_gets_the_prompt_then_every_token(tiny_pair, byte_tokenizer):
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    theirs, ours = Collect(), Collect()
    tiny_pair[0].generate(**inputs, do_sample=False, max_new_tokens=20, streamer=theirs)
    with_streamer = foretoken.custom_generate(
        draft=tiny_pair[1], streamer=ours, kernels="dense", depth=5
    )
    tiny_pair[0].generate(
        **inputs, do_sample=False, max_new_tokens=20, custom_generate=with_streamer
    )
    assert ours.got == theirs.got and ours.ended == theirs.ended == 1
    with pytest.raises(ConfigError, match="a streamer tells one text"):
        tiny_pair[0].generate(
            **encoded(byte_tokenizer, PROMPTS), max_new_tokens=4, custom_generate=with_streamer
        )


def test_stop_strings_go_to_custom_generate(tiny_pair, byte_tokenizer):
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    length = inputs["input_ids"].shape[1]
    options = {"do_sample": False, "max_new_tokens": 24}
    whole = tiny_pair[0].generate(**inputs, **options)[0, length:]
    text = byte_tokenizer.decode(whole)
    at = next(i for i in range(8, len(text)) if "\ufffd" not in text[i : i + 2])
    stop = text[at : at + 2]
    alone = tiny_pair[0].generate(
        **inputs, **options, stop_strings=[stop], tokenizer=byte_tokenizer
    )
    ours = tiny_pair[0].generate(
        **inputs,
        **options,
        custom_generate=foretoken.custom_generate(
            draft=tiny_pair[1], stop_strings=stop, tokenizer=byte_tokenizer, kernels="dense"
        ),
    )
    assert torch.equal(ours, alone) and alone.shape[1] < length + 24
    with pytest.raises(ConfigError, match="pass tokenizer="):
        foretoken.custom_generate(draft=tiny_pair[1], stop_strings="x")


def test_a_dictionary_is_returned_when_asked_for(tiny_pair, byte_tokenizer, chain):
    inputs = encoded(byte_tokenizer, PROMPTS)
    options = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    alone = tiny_pair[0].generate(**inputs, **options)
    ours = tiny_pair[0].generate(**inputs, **options, custom_generate=chain)
    assert type(ours) is type(alone)
    assert torch.equal(ours.sequences, alone.sequences)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("chain", {"temperature": 0.7, "top_k": 12}),
        ("chain", {"repetition_penalty": 1.5, "top_k": 0}),
        ("tree", {"top_p": 0.8}),
    ],
)
def test_sampling_follows_the_law_of_generate(tiny_pair, byte_tokenizer, method, options):
    """Counts of the first two tokens against their exact probabilities."""
    target, draft = tiny_pair
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    faster = foretoken.custom_generate(
        method=method, draft=draft, seed=11, kernels="dense", depth=5
    )
    draws = 160
    ids = target.generate(
        **inputs,
        do_sample=True,
        max_new_tokens=2,
        num_return_sequences=draws,
        custom_generate=faster,
        **options,
    )
    length = inputs["input_ids"].shape[1]
    law = exact_law(target, inputs["input_ids"], options)
    first = torch.bincount(ids[:, length], minlength=law.numel()) / draws
    impossible = first[law == 0].sum()
    assert impossible == 0
    # The expected distance of an honest sample of this size, and a generous margin on it.
    honest = (law * (1 - law) / draws).sqrt().sum() / (2 * torch.pi) ** 0.5 * 1.0
    assert (first - law).abs().sum() / 2 < 1.6 * honest + 0.02
    # second token, given the likeliest first one
    best = int(law.argmax())
    rows = ids[ids[:, length] == best]
    context = torch.cat([inputs["input_ids"], torch.tensor([[best]])], dim=1)
    law = exact_law(target, context, options)
    second = torch.bincount(rows[:, length + 1], minlength=law.numel()) / len(rows)
    assert second[law == 0].sum() == 0
    honest = (law * (1 - law) / len(rows)).sqrt().sum() / (2 * torch.pi) ** 0.5
    assert (second - law).abs().sum() / 2 < 1.6 * honest + 0.05


def exact_law(model, ids, options):
    """The law of the next token under generate's own processors."""
    config = GenerationConfig(do_sample=True, **options)
    processors = model._get_logits_processor(
        config, input_ids_seq_length=ids.shape[1], device="cpu", logits_processor=[]
    )
    with torch.no_grad():
        return processors(ids, model(ids).logits[:, -1]).softmax(-1)[0]


def test_sampling_follows_manual_seed(tiny_pair, byte_tokenizer, chain):
    inputs = encoded(byte_tokenizer, PROMPTS)

    def write(seed):
        torch.manual_seed(seed)
        return tiny_pair[0].generate(
            **inputs, do_sample=True, max_new_tokens=10, custom_generate=chain
        )

    assert torch.equal(write(1), write(1))
    assert not torch.equal(write(1), write(2))


def test_the_warpers_at_the_end_become_our_options(tiny_pair):
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.2
    )
    processors = tiny_pair[0]._get_logits_processor(
        config, input_ids_seq_length=3, device="cpu", logits_processor=[]
    )
    options, rest = split_processors(processors, True)
    assert options == {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}
    assert [type(p).__name__ for p in rest] == ["RepetitionPenaltyLogitsProcessor"]
    penalty, *warpers = processors
    options, rest = split_processors(type(processors)([penalty, *reversed(warpers)]), True)
    assert options == {"temperature": 0.5}  # what stands out of order is left to the list
    assert len(rest) == 4


@pytest.mark.parametrize("kernels", ["dense", "auto"])
def test_the_models_are_left_as_they_were(tiny_pair, byte_tokenizer, kernels):
    target, draft = (copy.deepcopy(model) for model in tiny_pair)
    target.train()
    draft.model.layers[0].train()

    def state(model):
        return (
            {name: tensor.clone() for name, tensor in model.state_dict().items()},
            [module.training for module in model.modules()],
            [sorted(module.__dict__) for module in model.modules()],
            model.config.to_dict(),
            model.config._attn_implementation,
            model.generation_config.to_dict(),
            len(list(model.named_buffers())),
        )

    before = [state(model) for model in (target, draft)]
    faster = foretoken.custom_generate(draft=draft, kernels=kernels)
    inputs = encoded(byte_tokenizer, PROMPTS)
    first = target.generate(**inputs, do_sample=False, max_new_tokens=8, custom_generate=faster)
    with pytest.raises(CapabilityError):
        target.generate(**inputs, max_new_tokens=4, num_beams=2, custom_generate=faster)
    again = target.generate(**inputs, do_sample=False, max_new_tokens=8, custom_generate=faster)
    assert torch.equal(first, again)
    for model, old in zip((target, draft), before, strict=True):
        new = state(model)
        assert old[0].keys() == new[0].keys()
        assert all(torch.equal(old[0][name], new[0][name]) for name in old[0])
        assert old[1:] == new[1:]
    target.eval()
    alone = target.generate(**inputs, do_sample=False, max_new_tokens=8)
    assert torch.equal(first, alone)


def test_the_engine_is_kept_between_calls_and_renewed_for_other_weights(
    tiny_pair, byte_tokenizer, make_llama
):
    faster = foretoken.custom_generate(method="prompt-lookup", kernels="auto")
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    options = {"do_sample": False, "max_new_tokens": 8, "custom_generate": faster}
    target = copy.deepcopy(tiny_pair[0])
    target.generate(**inputs, **options)
    engine = faster._kept[-1]
    target.generate(**inputs, **options)
    assert faster._kept[-1] is engine
    other = make_llama(len(byte_tokenizer), seed=5)
    ours = other.generate(**inputs, **options)
    assert torch.equal(ours, other.generate(**inputs, do_sample=False, max_new_tokens=8))
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.down_proj.weight = torch.nn.Parameter(-layer.mlp.down_proj.weight)
    ours = other.generate(**inputs, **options)
    assert torch.equal(ours, other.generate(**inputs, do_sample=False, max_new_tokens=8))


@pytest.mark.parametrize("kernels", ["packed", "dense"])
def test_a_model_changed_between_two_calls_writes_its_new_text(make_llama, kernels):
    model, draft = make_llama(97), make_llama(97, seed=3)
    faster = foretoken.custom_generate("chain", draft, kernels=kernels)
    ids = torch.tensor([[5, 9, 2, 41]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    texts = []
    for step in range(3):
        ours = model.generate(ids, custom_generate=faster, **options)
        assert torch.equal(ours, model.generate(ids, **options))
        texts.append(ours.tolist())
        engine = faster._kept[-1]
        generator = torch.Generator().manual_seed(step)
        for weight in (*model.parameters(), *draft.parameters()):  # as an adapter is merged
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    assert texts[0] != texts[1] != texts[2]
    model.generate(ids, custom_generate=faster, **options)
    assert faster._kept[-1] is engine
    model.resize_token_embeddings(101)
    draft.resize_token_embeddings(101)
    ours = model.generate(ids, custom_generate=faster, **options)
    assert torch.equal(ours, model.generate(ids, **options))


def test_a_call_beside_an_open_session_takes_nothing_from_it(make_llama):
    model = make_llama(97).train()
    ids = torch.tensor([[5, 9, 2, 41]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    faster = foretoken.custom_generate("prompt-lookup")
    with foretoken.load(model, "prompt-lookup", kernels="packed") as session:
        before = [module.__dict__.get("forward") for module in model.modules()]
        ours = model.generate(ids, custom_generate=faster, **options)
        assert [module.__dict__.get("forward") for module in model.modules()] == before
        session.target.check_usable()
        assert session.generate(ids[0].tolist(), 12).tokens == ours[0, 4:].tolist()
    assert model.training and not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(model.generate(ids, custom_generate=faster, **options), ours)


REFUSED = [
    ({"num_beams": 3}, "num_beams"),
    ({"use_cache": False}, "use_cache=False"),
    (
        {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
        "output_scores, output_hidden_states",
    ),
    ({"guidance_scale": 1.5}, "guidance_scale|ClassifierFree"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda v: str(v)[:24])
def test_what_cannot_be_honoured_is_refused(tiny_pair, byte_tokenizer, chain, options, message):
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    with pytest.raises(CapabilityError, match=message):
        tiny_pair[0].generate(**inputs, custom_generate=chain, max_new_tokens=4, **options)


def test_embeddings_other_masks_and_other_positions_are_refused(tiny_pair, byte_tokenizer, chain):
    target = tiny_pair[0]
    ids = encoded(byte_tokenizer, PROMPTS[:1])["input_ids"]
    with pytest.raises(CapabilityError, match="inputs_embeds"):
        embeds = target.get_input_embeddings()(ids)
        target.generate(inputs_embeds=embeds, max_new_tokens=4, custom_generate=chain)
    right = torch.ones_like(ids)
    right[0, -1] = 0
    with pytest.raises(ConfigError, match="left padding"):
        target.generate(ids, attention_mask=right, custom_generate=chain, max_new_tokens=4)
    filled = target(ids, use_cache=True).past_key_values
    with pytest.raises(CapabilityError, match="past_key_values"):
        target.generate(
            torch.cat([ids, ids[:, :1]], 1),
            past_key_values=filled,
            max_new_tokens=4,
            custom_generate=chain,
        )


def test_processors_that_look_across_rows_are_refused_in_a_batch(tiny_pair, byte_tokenizer, chain):
    def allowed(row, ids):
        return list(range(20, 60))

    one, many = (encoded(byte_tokenizer, texts) for texts in (PROMPTS[:1], PROMPTS))
    options = {"do_sample": False, "max_new_tokens": 8, "prefix_allowed_tokens_fn": allowed}
    ours = tiny_pair[0].generate(**one, **options, custom_generate=chain)
    assert torch.equal(ours, tiny_pair[0].generate(**one, **options))
    with pytest.raises(CapabilityError, match="PrefixConstrained"):
        tiny_pair[0].generate(**many, **options, custom_generate=chain)


def test_another_model_in_the_middle_of_a_call_takes_nothing_from_it(make_llama):
    """From another thread, or from code that the call itself runs."""
    faster = foretoken.custom_generate("prompt-lookup", kernels="dense")
    first, second = make_llama(97), make_llama(97, seed=3)
    ids = torch.tensor([[5, 9, 2, 41]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    wanted = [model.generate(ids, **options) for model in (first, second)]
    found = []

    def inner():
        found.append(second.generate(ids, custom_generate=faster, **options))

    def interrupt(so_far, scores):
        if not found:
            thread = threading.Thread(target=inner)
            thread.start()
            thread.join()
            inner()
        return torch.zeros(len(so_far), dtype=torch.bool)

    criteria = StoppingCriteriaList([interrupt])
    ours = first.generate(ids, custom_generate=faster, stopping_criteria=criteria, **options)
    assert torch.equal(ours, wanted[0])
    assert len(found) == 2 and all(torch.equal(one, wanted[1]) for one in found)
