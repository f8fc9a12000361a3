"""The mean of several heads: its weights, what it keeps, and what has none."""

import json

import pytest
import torch
from test_store import SIZES, head, same
from typer.testing import CliRunner

from foretoken.cli.commands import app
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import store
from foretoken.heads.medusa import Medusa
from foretoken.heads.table import HEADS, HeadConfig, resolve
from foretoken.lm import draft_vocabulary
from foretoken.training.averaging import average


def saved(folder, one, name="acceptance", **notes):
    return store.save(folder, name, one, notes)


@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_has_a_mean(name, tmp_path):
    one, other = head(1, name), head(2, name)
    for at, made in enumerate((one, other)):
        saved(tmp_path / f"{at}", made, name)
    average([tmp_path / "0", tmp_path / "1"], [1, 3], tmp_path / "mean")
    found, card = store.load(tmp_path / "mean", name)
    assert isinstance(found.config, HeadConfig) and found.config == one.config
    for key, value in found.state_dict().items():
        pair = one.state_dict()[key], other.state_dict()[key]
        wanted = 0.25 * pair[0] + 0.75 * pair[1] if value.is_floating_point() else pair[0]
        torch.testing.assert_close(value, wanted)
    assert [part["share"] for part in card.notes["average_of"]] == [0.25, 0.75]
    assert [part["head"] for part in card.notes["average_of"]] == ["0", "1"]


def test_it_reads_as_much_of_a_text_as_its_parts_learned_from(tmp_path):
    for at, windows, wanted in (("a", (128, 320), 320), ("b", (128, None), None)):
        folders = [
            saved(tmp_path / at / str(n), head(n), settings={"window": window} if window else {})
            for n, window in enumerate(windows)
        ]
        average(folders, [1, 1], tmp_path / at / "mean")
        notes = store.card_of(tmp_path / at / "mean").notes
        assert (notes.get("settings") or {}).get("window") == wanted


def test_it_is_as_small_as_its_parts_and_sums_wider_than_them(tmp_path):
    parts = [head(seed).to(torch.bfloat16) for seed in range(3)]
    for at, part in enumerate(parts):
        saved(tmp_path / f"{at}", part)
    average([tmp_path / f"{at}" for at in range(3)], [1, 1, 1], tmp_path / "mean")
    card = store.card_of(tmp_path / "mean")
    for key, value in store.read_weights(tmp_path / "mean", card).items():
        wide = sum(part.state_dict()[key].float() for part in parts) / 3
        assert value.dtype == torch.bfloat16
        # half of the last place of bfloat16, and what the order of sums leaves
        torch.testing.assert_close(value.float(), wide, rtol=2.0**-8 + 1e-6, atol=1e-7)


def test_a_mean_may_stand_where_one_of_its_parts_stood(tmp_path):
    folders = [saved(tmp_path / f"{at}", head(at)) for at in range(2)]
    average(folders, [1, 1], tmp_path / "new")
    average(folders, [1, 1], folders[0])
    assert same(
        store.load(folders[0], "acceptance")[0], store.load(tmp_path / "new", "acceptance")[0]
    )


def test_the_list_of_tokens_goes_with_it(tmp_path):
    config = Medusa.Config(**SIZES, tokens=3)
    folders = [saved(tmp_path / f"{at}", Medusa(config), "medusa") for at in range(2)]
    for folder in folders:
        draft_vocabulary.write(folder / draft_vocabulary.NAME, [1, 4, 6], SIZES["vocab_size"])
    average(folders, [1, 1], tmp_path / "mean")
    kept = tmp_path / "mean" / draft_vocabulary.NAME
    assert draft_vocabulary.read(kept, SIZES["vocab_size"]) == [1, 4, 6]
    draft_vocabulary.write(folders[1] / draft_vocabulary.NAME, [1, 4, 5], SIZES["vocab_size"])
    with pytest.raises(ConfigError, match="vocabularies"):
        average(folders, [1, 1], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_has_no_mean_is_told_and_nothing_is_written(tmp_path):
    one = saved(tmp_path / "one", head(1))
    other = saved(tmp_path / "other", head(2, "decision"), "decision")
    module = resolve(HEADS["acceptance"].module)
    deeper = saved(tmp_path / "deeper", module(module.Config(**SIZES, blocks=3)))
    out = tmp_path / "out"
    for folders, shares, told in (
        ([one], [1.0], "two heads or more"),
        ([one, deeper], [1.0], "one above 0"),
        ([one, deeper], [1.0, 0.0], "one above 0"),
        ([one, deeper], [1.0, float("nan")], "one above 0"),
        ([one, other], [1.0, 1.0], "different kinds"),
        ([one, deeper], [1.0, 1.0], "different kinds"),
    ):
        with pytest.raises(ConfigError, match=told):
            average(folders, shares, out)
    with pytest.raises(CheckpointError):
        average([one, tmp_path / "nothing"], [1.0, 1.0], out)
    assert not out.exists()


def test_heads_that_score_other_tokens_have_no_mean(tmp_path):
    eagle3 = resolve(HEADS["eagle3"].module)
    folders = []
    for at, tokens in enumerate(([0, 2, 5], [0, 2, 6])):
        made = eagle3(eagle3.Config(**SIZES, tokens=3))
        made.scored.copy_(torch.tensor(tokens))
        folders.append(saved(tmp_path / f"{at}", made, "eagle3"))
    with pytest.raises(ConfigError, match="scored differs"):
        average(folders, [1, 1], tmp_path / "out")


def test_the_command(tmp_path):
    folders = [str(saved(tmp_path / f"{at}", head(at))) for at in range(2)]
    out, run = tmp_path / "out", CliRunner().invoke
    options = ["--share", "1", "--share", "2", "--out", str(out), "--json"]
    done = run(app, ["heads", "average", *folders, *options])
    assert json.loads(done.stdout)["folder"] == str(out)
    shares = [part["share"] for part in store.card_of(out).notes["average_of"]]
    assert shares == pytest.approx([1 / 3, 2 / 3])
    alike = run(app, ["heads", "average", *folders, "--out", str(tmp_path / "alike")])
    assert alike.exit_code == 0
    refused = run(app, ["heads", "average", folders[0], "--out", str(tmp_path / "no")])
    assert refused.exit_code != 0 and "two heads or more" in refused.stderr
