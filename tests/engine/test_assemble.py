import re

import pytest

from foretoken.audit.fixtures import needed
from foretoken.contract import Guided
from foretoken.controllers.cost_model import CostModel
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.growers.product import Product
from foretoken.engine.assemble import assemble, check_options, config_fields
from foretoken.engine.engine import Engine
from foretoken.engine.memory.layout import largest_draft
from foretoken.errors import ConfigError, PairingError
from foretoken.heads.table import HEADS
from foretoken.lm.table import TableLM
from foretoken.methods import CONTROLLERS, METHODS, needs_draft, paper_setting
from foretoken.training.recipes import RECIPES
from foretoken.types import Shape
from foretoken.verifiers.block import Block
from foretoken.verifiers.recursive import Recursive

BLIND = ("decision", "shows none")  # it judges trees, if it sees them


def tables(vocab=5, draft=5):
    return TableLM.random(vocab=vocab, seed=0), TableLM.random(vocab=draft, seed=1)


def shows_states(drafter):
    return isinstance(drafter, Guided) and drafter.model.hidden_size > 0


def built(name, controller=None, vocab=5, hidden=None, **options):
    target, draft = tables(vocab, vocab)
    models = (target, draft) if needs_draft(METHODS[name]) else (target,)
    options = {**needed(METHODS[name], vocab, controller, hidden), **options}
    return assemble(name, *models, controller=controller, **options)


@pytest.mark.parametrize("controller", [None, *CONTROLLERS])
@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.writes == "text"])
def test_every_method_is_built_with_every_controller_that_fits(name, controller):
    drafter = built(name, "fixed").drafter
    trees = drafter.traits.shape is Shape.TREE
    refusal = "shows none" if not shows_states(drafter) else "one chain" if trees else ""
    if refusal and (controller == "acceptance_head" or (controller, refusal) == BLIND):
        with pytest.raises(PairingError, match=refusal):
            built(name, controller)
        return
    engine = built(
        name, controller, hidden=drafter.model.hidden_size if shows_states(drafter) else None
    )
    assert isinstance(engine, Engine)
    place = CONTROLLERS[controller or METHODS[name].controller]
    assert type(engine.controller).__name__ == place.split(":")[1]
    if controller == "cost_model":
        assert engine.controller.traits is engine.drafter.traits


def test_options_reach_the_part_that_knows_them():
    engine = built("chain", depth=3, nodes=7)
    assert isinstance(engine.drafter, Chain) and isinstance(engine.controller, Fixed)
    assert (engine.controller.config.depth, engine.controller.config.nodes) == (3, 7)
    assert isinstance(engine.verifier, Block)
    assert isinstance(built("chain", verifier="recursive").verifier, Recursive)
    engine = built("prompt-lookup", "cost_model", max_ngram=5, max_depth=4, margin=1)
    assert engine.drafter.config.max_ngram == 5
    assert isinstance(engine.controller, CostModel) and engine.controller.config.max_depth == 4
    assert built("tree", template=[[0], [1], [0, 0]]).drafter.config.template == (
        (0,),
        (1,),
        (0, 0),
    )


def test_a_rows_own_defaults_stand_in_until_the_user_says_otherwise():
    budget = built("token-recycling", "fixed").controller.budget
    assert (budget.depth, budget.nodes) == (6, 80)
    budget = built("token-recycling", "fixed", depth=3).controller.budget
    assert (budget.depth, budget.nodes) == (3, 80)
    assert built("token-recycling", "fixed", nodes=9).controller.budget.nodes == 9
    assert config_fields("token-recycling", "fixed")["nodes"].default == 80
    built("token-recycling", "cost_model")  # has neither option


OWN_CONTROLLERS = {"plain", "specdec++", "mcsd-dynamic", "specee"}  # idle, or the method itself
TEXT = [name for name, row in METHODS.items() if row.writes == "text"]


@pytest.mark.parametrize("name", [name for name in TEXT if name not in OWN_CONTROLLERS])
def test_measured_costs_decide_where_nobody_names_a_size(name):
    assert isinstance(built(name).controller, CostModel)
    assert isinstance(built(name, preset="measured").controller, CostModel)
    assert isinstance(built(name, depth=2).controller, Fixed)
    assert built(name, nodes=4).controller.budget.nodes == 4


@pytest.mark.parametrize(
    ("name", "options"),
    [("mcsd", {"k": (2, 1)}), ("rsd-s", {"width": 2}), ("tree", {"template": (2, 1)})],
)
def test_who_names_a_shape_gets_it_in_every_step(name, options):
    assert isinstance(built(name, **options).controller, Fixed)
    assert isinstance(built(name, "cost_model", **options).controller, CostModel)


def test_a_template_of_recycled_tokens_brings_its_own_size():
    wide = (2,) * 8
    for options, size in (
        ({"template": wide}, (8, 510)),
        ({"template": wide, "depth": 3}, (3, 14)),
        ({"template": ((0,), (1,), (0, 0)), "nodes": 9}, (2, 9)),
        ({"template": (16,), "keep": 16}, (1, 16)),
    ):
        budget = built("token-recycling", **options).controller.budget
        assert (budget.depth, budget.nodes) == size
        assert largest_draft("token-recycling", options) == size, "plans know it, too"
    with pytest.raises(ConfigError, match="pass nodes=510"):
        built("token-recycling", template=wide, nodes=80)
    with pytest.raises(ConfigError, match="keep=8"):
        built("token-recycling", template=(16,))


def test_an_option_that_two_sources_share_reaches_both():
    options = {"sources": ("suffix", "rest"), "occurrences": 5, **needed(METHODS["rest"], 5)}
    merged = assemble("fused", TableLM.random(5), **options).drafter
    assert [source.config.occurrences for source in merged.members] == [5, 5]


def test_a_preset_is_the_papers_setting_and_may_be_departed_from():
    engine = built("token-recycling", preset="paper")
    assert (engine.controller.budget.depth, engine.controller.budget.nodes) == (6, 80)
    assert engine.drafter.config.from_prompt is False
    engine = built("token-recycling", preset="paper", nodes=12, from_prompt=True)
    assert (engine.controller.budget.depth, engine.controller.budget.nodes) == (6, 12)
    assert engine.drafter.config.from_prompt is True
    with pytest.raises(ConfigError, match="controller is 'fixed'"):
        built("token-recycling", "cost_model", preset="paper")
    setting = paper_setting(METHODS["lookahead"])
    size = {"window": 15, "guesses": 15, "depth": 18, "nodes": 120}
    assert setting == {"controller": "fixed", "from_text": False, **size}


@pytest.mark.parametrize("name", [name for name in TEXT if METHODS[name].paper])
def test_every_paper_has_a_setting_that_can_be_built(name):
    setting = paper_setting(METHODS[name])
    engine = built(name, vocab=12, preset="paper")
    assert type(engine.controller).__name__ == CONTROLLERS[setting["controller"]].split(":")[1]
    assert not isinstance(engine.controller, CostModel)


@pytest.mark.parametrize("name", [name for name in TEXT if METHODS[name].paper])
def test_trees_of_a_paper_have_no_bar_and_no_calibration_of_ours(name):
    drafter = built(name, vocab=12, preset="paper").drafter
    for one in (drafter, getattr(drafter, "inner", None)):
        if isinstance(one, BestFirst | Product):
            assert one.ranker.calibration is None
            assert one.ranker.template is not None or one.ranker.min_gain == 0.0


def test_the_depth_that_is_told_is_the_one_that_is_drafted():
    told = {name: config_fields(name) for name in TEXT}
    depths = {name: fields["depth"].default for name, fields in told.items() if "depth" in fields}
    assert {"specdec++", "mcsd-dynamic"} < set(depths)
    assert {name: built(name).controller.budget.depth for name in depths} == depths


def test_presets_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="did you mean paper"):
        built("chain", preset="papers")
    for name in ("plain", "auto", "fused"):
        with pytest.raises(ConfigError, match="has no paper"):
            built(name, preset="paper")


def test_an_unknown_option_is_refused_with_the_nearest_name_and_the_list():
    with pytest.raises(ConfigError) as refused:
        built("prompt-lookup", max_ngrams=4)
    message = str(refused.value)
    assert "'max_ngrams'" in message and "did you mean max_ngram" in message
    assert all(name in message for name in ("depth", "nodes", "matches", "min_ngram"))
    with pytest.raises(ConfigError, match="depth"):  # an option of another controller
        built("chain", "cost_model", depth=3)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"depth": "three"}, "a whole number"),
        ({"depth": 2.5}, "a whole number"),
        ({"depth": True}, "a whole number"),
        ({"nodes": "all"}, "a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        built("chain", **options)
    with pytest.raises(ConfigError, match="template"):
        built("tree", template="wide")


@pytest.mark.parametrize("name", [row.name for row in METHODS.values() if row.needs])
def test_what_a_method_needs_is_named_with_the_command_that_makes_it(name):
    with pytest.raises(ConfigError) as caught:
        check_options(name)
    told = str(caught.value)
    [command] = re.findall(r"make one with `foretoken (train|datastore build) (\S+)", told)
    assert command[0] != "train" or command[1] in {**HEADS, **RECIPES}


def test_unknown_names_are_refused_with_the_nearest():
    target, draft = tables()
    with pytest.raises(ConfigError, match="did you mean chain"):
        assemble("chains", target, draft)
    with pytest.raises(ConfigError, match="did you mean cost_model"):
        built("chain", "cost-model")
    with pytest.raises(ConfigError, match="did you mean block"):
        built("chain", verifier="blocks")


def test_a_missing_draft_and_an_idle_one_are_refused():
    target, draft = tables()
    for name in ("chain", "tree"):
        with pytest.raises(ConfigError, match="without a draft model"):
            assemble(name, target)
    for name in ("plain", "prompt-lookup"):
        with pytest.raises(ConfigError, match="uses no second model"):
            assemble(name, target, draft)


def test_vocabularies_that_differ_are_refused_naming_both():
    target, draft = tables(vocab=5, draft=6)
    with pytest.raises(ConfigError, match=r"(?s)5 tokens.*6.*share one vocabulary"):
        assemble("chain", target, draft)


def test_a_rule_that_would_change_the_law_is_refused():
    with pytest.raises(PairingError, match="Point"):
        built("chain", verifier="point")
    with pytest.raises(PairingError, match="chains only"):
        built("tree", verifier="block")


def test_option_names_of_a_method_never_collide():
    for name, row in METHODS.items():
        for controller in CONTROLLERS if row.writes == "text" else (row.controller,):
            fields = config_fields(name, controller)
            parts = {field.part for field in fields.values()}
            assert parts <= {"model", "drafter", "verifier", "controller"}
    fields = config_fields("prompt-lookup", "fixed")
    assert fields["max_ngram"].part == "drafter" and fields["max_ngram"].default == 3
    assert fields["depth"].part == "controller" and fields["depth"].kind == "int"
