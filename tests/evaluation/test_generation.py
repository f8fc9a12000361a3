"""What tasks ask of generation, as a generation config."""

import pytest

from foretoken.errors import ConfigError
from foretoken.evaluation.generation import generation_config, most_new_tokens


def test_what_was_asked_is_in_the_config_and_nothing_else(tiny_pair) -> None:
    asked = {"do_sample": True, "temperature": 0.7, "top_k": 5}
    config = generation_config(tiny_pair[0], asked)
    assert type(config) is type(tiny_pair[0].generation_config)
    assert asked.items() <= vars(config).items() and config.top_p is None


@pytest.mark.parametrize(
    ("name", "instead"), [("max_length", "max_gen_toks"), ("eos_token_id", "until")]
)
def test_what_has_another_way_to_be_told_is_refused(tiny_pair, name, instead) -> None:
    with pytest.raises(ConfigError, match=rf"asks for {name}(.|\n)*use {instead}"):
        generation_config(tiny_pair[0], {name: 3})


def test_a_misspelt_option_is_refused_by_its_name(tiny_pair) -> None:
    with pytest.raises(ConfigError, match=r"'temprature'(.|\n)*did you mean temperature"):
        generation_config(tiny_pair[0], {"temprature": 1.0})


def test_lengths_follow_generate(tiny_pair, monkeypatch) -> None:
    model = tiny_pair[0]
    assert most_new_tokens(model, 9, ["x"]) == 9
    assert most_new_tokens(model, 9, ["x", ""]) == 1, "every text holds the empty one"
    monkeypatch.setattr(model.generation_config, "max_new_tokens", 4)
    assert most_new_tokens(model, 9, ["x"]) == 4
