"""The measuring scripts run, small, on tiny models."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from foretoken.bench.journal import Cell

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def folders(make_llama, byte_tokenizer, tmp_path_factory) -> tuple[str, str]:
    """A pair whose context holds the families' prompts byte by byte."""
    root = tmp_path_factory.mktemp("script-pair")
    ends = {
        "eos_token_id": byte_tokenizer.eos_token_id,
        "pad_token_id": byte_tokenizer.pad_token_id,
        "max_position_embeddings": 8192,
    }
    for name, layers in (("target", 2), ("draft", 1)):
        model = make_llama(len(byte_tokenizer), num_hidden_layers=layers, **ends)
        model.save_pretrained(root / name)
        byte_tokenizer.save_pretrained(root / name)
    return str(root / "target"), str(root / "draft")


@pytest.fixture
def script(monkeypatch, tmp_path, folders):
    """Runs a script's `run` with options, its work and results in a folder of the test."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("COLUMNS", "200")
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(name: str, *options: str) -> tuple[int, Path]:
        module = importlib.import_module(name)
        if hasattr(module, "WORK"):
            monkeypatch.setattr(module, "WORK", tmp_path / "work")
        out = tmp_path / "out"
        given = ["--target", folders[0], "--draft", folders[1], "--out", str(out), *options]
        monkeypatch.setattr(sys, "argv", [name, *given])
        return module.run(module.__doc__), out

    yield run
    torch.set_num_threads(before)


def test_stage_a_writes_its_four_files_and_its_verdicts(script, capsys) -> None:
    code, out = script("stage_a", "--quick", "--methods", "plain,chain,hf:plain,hf:assisted")
    assert code == 0 and "holds" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        "stage_a.json",
        "stage_a.md",
        "stage_a.svg",
        "stage_a.html",
    }
    found = json.loads((out / "stage_a.json").read_text())
    claims = {gate["claim"]: gate for gate in found["gates"]}
    # The efficiency of the chain and of our best row: one bound where they are the same.
    assert len(claims) == (5 if found["best"]["ours"] == "chain" else 6)
    assert claims["plain over hf:plain"]["measured"] == pytest.approx(
        found["rows"]["plain"]["total_tokens_per_second"]
        / found["rows"]["hf:plain"]["total_tokens_per_second"]
    )
    assert "plots/" not in (out / "stage_a.md").read_text()
    page = (out / "stage_a.html").read_text()
    assert page.count("<h2>Bounds</h2>") == 1 and "plain over hf:plain" in page


@pytest.mark.slow
def test_never_slower_judges_a_useless_and_a_good_draft(script) -> None:
    code, out = script("never_slower", "--quick", "--parts", "drafts")
    document = json.loads((out / "never_slower.json").read_text())
    claims, found = [gate["claim"] for gate in document["gates"]], document["drafts"]
    assert code == 0 and len(claims) == 6
    assert sum(claim.startswith("useless draft") for claim in claims) == 3
    useless = found["useless"]["rows"]["chain[depth=5]"]["accepted_length"]["emitted_per_forward"]
    good = found["sweep"]["rows"]["chain[depth=2]"]["accepted_length"]["emitted_per_forward"]
    assert useless < 1.5 and good >= 1.0


def test_never_slower_holds_every_default_against_plain_on_both_kinds_of_text(script) -> None:
    rows = ("plain", "prompt-lookup", "token-recycling", "auto")
    options = ("--parts", "defaults", "--methods", ",".join(rows))
    code, out = script("never_slower", "--quick", *options)
    document = json.loads((out / "never_slower.json").read_text())
    assert code == 0 and set(document["defaults"]) == {"greedy", "temperature 1"}
    for kind, found in document["defaults"].items():
        assert tuple(found) == rows
        assert found["plain"]["tokens_per_forward"] == 1.0
        value, span = found["plain"]["over_plain"]
        assert value == 1.0 and span in (None, [1.0, 1.0]), "none of fewer than three prompts"
        claims = [gate["claim"] for gate in document["gates"] if gate["claim"].startswith(kind)]
        families = len(found["plain"]["by_family"]) if kind == "greedy" else 0
        assert len(claims) == len(rows) - 1 + families
    assert (out / "never_slower.md").read_text().count("| auto |") == 4


def test_a_sweep_goes_on_while_speed_rises(script, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    swept = importlib.import_module("never_slower").swept
    labels = [str(n) for n in range(10)]
    rising = {str(n): float(n) for n in range(10)}
    assert swept(labels, rising.get) == labels
    peak = {str(n): float(-abs(n - 4)) + 10 for n in range(10)}
    assert swept(labels, peak.get) == labels[:7], "two behind the best"


def test_overhead_is_measured_at_two_contexts(script) -> None:
    code, out = script("overhead", "--quick", "--contexts", "20,200")
    found = json.loads((out / "overhead.json").read_text())["ms_per_step"]
    assert code == 0 and set(found) >= {"plain", "chain", "chain[depth=5]", "auto"}
    for by_length in found.values():
        for ms in by_length.values():
            assert 0 < ms["loop"] < ms["whole"] and 0 < ms["outside_forwards"] < ms["whole"]


def test_orderings_are_counted_and_compared(script) -> None:
    rows = ("chain[depth=1]", "mcsd[k=3,depth=1]", "mcsd[k=3,depth=1,replacement=true]")
    code, out = script("orderings", "--quick", "--max-new-tokens", "6", "--methods", ",".join(rows))
    found = json.loads((out / "orderings.json").read_text())
    assert code == 0 and tuple(found["rows"]) == rows
    for row in found["rows"].values():
        assert row["prompts"] == 6 and 1.0 <= row["emitted_per_forward"] <= 2.0
    first, second = found["orderings"]
    lengths = {label: row["emitted_per_forward"] for label, row in found["rows"].items()}
    assert first["difference"] == pytest.approx(lengths[rows[2]] - lengths[rows[0]])
    assert second["difference"] == pytest.approx(lengths[rows[1]] - lengths[rows[2]])
    assert all(
        one["interval"][0] <= one["difference"] <= one["interval"][1] for one in (first, second)
    )
    assert len(first["by_family"]) == 6
    for one in (first, second):
        assert all(each["interval"] == [None, None] for each in one["by_family"].values())
        lost = [name for name, each in one["by_family"].items() if each["difference"] < 0.0]
        assert one["fails_in"] == lost
    text = (out / "orderings.md").read_text()
    assert all(label in text for label in rows) and "over one candidate" in text


def test_rules_are_judged_on_the_same_trees(script, capsys) -> None:
    options = ("--text", "6", "--every", "3", "--times", "4", "--noise", "0.5")
    code, out = script("same_trees", "--quick", *options)
    found = json.loads((out / "same_trees-weak.json").read_text())
    assert code == 0 and "leaves first over recursive" in capsys.readouterr().err
    kept = {(row["tree"], row["rule"]): row["accepted"] for row in found["rows"]}
    assert len(kept) == 16 and all(0.0 <= value <= 3.0 for value in kept.values())
    for one in found["orderings"]:
        if one["claim"] == "mcsd[k=2x2x2]: leaves first over recursive":
            above, below = (kept["mcsd[k=2x2x2]", rule] for rule in ("traversal", "recursive"))
            assert one["difference"] == pytest.approx(above - below)
            break
    else:
        raise AssertionError("the claim is gone")
    assert "noise of 0.5" in found["setting"]


def test_methods_without_a_second_model_are_held_against_their_bounds(script) -> None:
    given = ("--methods", "plain", "prompt-lookup", "suffix", "fused", "layerskip", "auto")
    code, out = script("stage_c", "--quick", *given)
    found = json.loads((out / "stage_c.json").read_text())
    assert code == 0 and set(found["rows"]) == set(given[1:])
    measured = {gate["claim"]: gate["measured"] for gate in found["gates"]}
    whole = {name: row["total_tokens_per_second"] for name, row in found["rows"].items()}
    best = max(("prompt-lookup", "suffix"), key=whole.__getitem__)
    assert measured[f"fused over {best}"] == pytest.approx(whole["fused"] / whole[best])
    assert "rasd over its tree" not in measured, "rows that were not asked for miss no bound"


def test_beams_are_compared_in_time_and_in_score(script, capsys) -> None:
    code, out = script("beams", "--quick", "--depths", "2")
    found = json.loads((out / "beams.json").read_text())
    assert code == 0 and len(found["gates"]) == 4 and "beams.md" in {p.name for p in out.iterdir()}
    assert found["rows"]["beam-sampling"]["speedup"]["value"] == 1.0
    assert found["rows"]["dsbd[depth=2]"]["tokens_per_forward"] >= 1.0
    assert found["rows"]["beam-sampling"]["tokens_per_forward"] == 1.0


def test_pearl_is_modelled_at_every_ratio_and_measured(script) -> None:
    code, out = script("pearl", "--quick")
    found = json.loads((out / "pearl.json").read_text())
    assert code == 0 and len(found["gates"]) == 2 and found["environment"]["threads"] == 1
    by_ratio = {row["ratio"]: row for row in found["modelled"] if row["g"] == 4}
    assert len(by_ratio) == 6
    # A slow draft is what pearl waits for; a fast one is hidden whole, and no longer matters.
    assert by_ratio[0.5]["pearl"] > by_ratio[1.0]["pearl"] == by_ratio[4.0]["pearl"]
    assert by_ratio[1.0]["chain"] > by_ratio[4.0]["chain"] > 0.2
    measured = found["measured"]
    assert measured["pearl[depth=4]"]["clock"] == "wall"
    assert measured["pearl[depth=4,overlap=emulated]"]["clock"] == "modelled"
    assert all(row["tokens_per_second"] > 0 for row in measured.values())
    assert "## Measured" in (out / "pearl.md").read_text()


def test_the_model_of_pearl_needs_counts_only(monkeypatch) -> None:
    """Two steps of four draft forwards each and one without, seven tokens."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    pearl = importlib.import_module("pearl")
    cell = pearl.Cell(0, 7, 1.0, 1.0, 1.0, [4, 4, 0])
    assert pearl.cost([cell], 0.25, at_once=False) == pytest.approx((2 + 2 + 1) / 7)
    assert pearl.cost([cell], 0.25, at_once=True) == pytest.approx(3 / 7)
    assert pearl.cost([cell], 0.5, at_once=True) == pytest.approx((2 + 2 + 1) / 7)


def test_the_gpu_script_runs_dry(script) -> None:
    code, out = script("gpu", "--dry-run", "--methods", "plain,plain[kernels=dense],chain,hf:plain")
    found = json.loads((out / "gpu-dry-run.json").read_text())["sizes"]["as given"]
    assert code == 0 and found["divergences"] == []
    assert [row["failed"] for row in found["rows"].values()] == [None] * 4
    assert found["scoring"]["nodes"] == [1, 2, 4, 8]
    assert "Scoring n nodes" in (out / "gpu-dry-run.md").read_text()


def test_divergences_carry_the_targets_own_margin(script, folders, monkeypatch) -> None:
    gpu = importlib.import_module("gpu")
    from foretoken.bench.journal import Cell
    from foretoken.bench.run import BenchConfig
    from foretoken.bench.tasks import single

    def cell(row: str, tokens: list[int]) -> Cell:
        return Cell(
            row=row, prompt="p", family="f", repetition=0, prompt_tokens=3, tokens=tokens,
            seconds=1.0,
        )  # fmt: skip

    config = BenchConfig(target=folders[0])
    task = single([1, 2, 3], id="p", family="f")
    found = gpu.divergences(config, [task], [cell("plain", [4, 5, 6]), cell("tree", [4, 7, 6])])
    (entry,) = found
    assert entry["row"] == "tree" and entry["at"] == 1
    assert entry["margin"] > 0 and entry["top_two_gap"] >= 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here and would be measured")
def test_without_a_gpu_the_script_says_so_and_ends_well(script, capsys) -> None:
    code, out = script("gpu")
    assert code == 0 and "No CUDA device" in capsys.readouterr().err
    assert not out.exists()


def test_gates_hold_at_their_bound_and_fail_when_nothing_was_measured(script) -> None:
    gates = importlib.import_module("gates")
    assert gates.Gate("faster", 1.1, 1.1).holds
    assert not gates.Gate("cheap", 2.1, 2.0, at_least=False).holds
    assert not gates.Gate("lost", None, 0.0).holds
    assert gates.ratio({"rows": {"a": {"failed": "x"}}}, "a", "b") is None


def test_the_datastore_script_measures_look_ups(script) -> None:
    code, out = script("datastore", "--quick")
    found = json.loads((out / "datastore.json").read_text())
    assert code == 0 and found["tokens"] > 50_000 and found["segments"] == 2
    assert found["mean_match"] > 4 and len(found["gates"]) == 3
    assert found["find_and_trie_ms"]["p99"] >= found["find_and_trie_ms"]["p50"] > 0
    assert "p99" in (out / "datastore.md").read_text()


def test_the_dense_script_plots_bytes_against_tokens(script) -> None:
    code, out = script("dense", "--quick")
    found = json.loads((out / "dense.json").read_text())["keys"]
    assert code == 0 and len(found) == 24
    assert all(row["tokens_per_step"] >= 1.0 for row in found)
    sizes = {(row["dtype"], row["dims"]): row["bytes"] for row in found}
    assert sizes["float8_e4m3", 64] == 64 and sizes["binary", 64] == 8
    assert (out / "dense.svg").read_text().count("<polyline") == 6


@pytest.mark.slow
def test_learned_lengths_are_held_against_fixed_ones(script) -> None:
    code, out = script("specdecpp", "--quick")
    found = json.loads((out / "specdecpp.json").read_text())
    assert code == 0 and set(found["best"]) == {"fixed", "specdec++", "confidence"}
    assert all(label for label in found["best"].values()), "a row failed"
    gap = found["oracle"]
    assert gap["oracle"] > max(gap["fixed"].values()), "lengths that are never wrong are the bound"
    assert "of the way from" in (out / "specdecpp.md").read_text()


def test_target_first_prints_acceptance_beside_quality(script, capsys) -> None:
    code, out = script("target_first", "--quick", "--max-new-tokens", "24")
    told = capsys.readouterr()
    assert code == 0 and "accuracy against plain" in told.err
    found = json.loads((out / "target_first.json").read_text())
    dynamic = found["rows"]["mcsd-dynamic[k=4,depth=5,soft]"]
    assert 0 < dynamic["layers_per_forward"] <= 4 and not dynamic["exact"]
    assert found["rows"]["plain"]["tokens_per_forward"] == 1.0
    assert len(found["gates"]) == 2 and "over_plain" in dynamic


def questions(path: Path, categories: int = 2, each: int = 3) -> str:
    """A file in the format of Spec-Bench, sorted by category as that is."""
    lines = [
        {"question_id": n, "category": f"c{c}", "turns": [f"question {n}", "and then"]}
        for c in range(categories)
        for n in range(c * each, (c + 1) * each)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_real_script_takes_turns_through_the_categories(script, tmp_path, capsys) -> None:
    rows = ("plain", "hf:plain", "suffix", "auto", "no-such-engine", "llama:plain[size=4]")
    given = ("--dtype", "float32", "--methods", *rows, "--tasks", questions(tmp_path / "q.jsonl"))
    code, out = script("real", "--quick", *given)
    assert code == 0 and "no-such-engine is left out" in capsys.readouterr().err
    found = json.loads((out / "real-float32.json").read_text())
    assert set(found["rows"]) == set(rows[:4]) and found["families"] == ["c0", "c1"]
    limit = found["memory_limit"]
    assert limit["forward_ms"] == pytest.approx(1000 / limit["tokens_per_second"])
    claims = {gate["claim"]: gate["measured"] for gate in found["gates"]}
    plain = found["rows"]["plain"]
    assert claims["a plain step over the memory limit"] == plain["over_limit"]["forward"]
    assert plain["over_limit"]["speed"] == pytest.approx(
        plain["tokens_per_second"]["value"] / limit["tokens_per_second"]
    )
    assert "plain over hf:compiled" not in claims, "a row that is not here misses no bound"
    assert any(claim.startswith("auto over the best row") for claim in claims)
    text = (out / "real-float32.md").read_text()
    assert "memory limit: " in text and "| c1 |" in text and "repetitions apart" in text


def test_texts_at_once_are_timed_beside_texts_one_by_one(script, tmp_path) -> None:
    given = ("--dtype", "float32", "--tasks", questions(tmp_path / "q.jsonl"))
    code, out = script("batching", "--quick", *given)
    found = json.loads((out / "batching-float32.json").read_text())
    assert code == 0 and len(found["settings"]) == 4
    for name, setting in found["settings"].items():
        assert all(run["tokens"] == 2 * 12 for run in setting["runs"]), name
        for clock in ("seconds", "rounds"):
            speeds = setting[clock]
            assert speeds["over_one"]["value"] > 0.0
            assert setting["row"] != "plain" or speeds["over_plain"]["value"] == 1.0
    assert all(gate["measured"] is None for gate in found["gates"]), "of no eight texts"
    assert "| default, 2 at once |" in (out / "batching-float32.md").read_text()


def test_no_setting_copies_what_another_one_wrote(script, tmp_path, monkeypatch) -> None:
    batching = importlib.import_module("batching")
    monkeypatch.setattr(batching, "ROWS", {"plain": "plain", "default": "suffix[controller=fixed]"})
    given = ("--dtype", "float32", "--tasks", questions(tmp_path / "q.jsonl"), "--prompts", "3")
    steps = []
    for sizes in (("1",), ("2", "1")):
        code, out = script("batching", "--rounds", "1", "--max-new-tokens", "24", *given,
                           "--per-category", "2", "--batches", *sizes)  # fmt: skip
        found = json.loads((out / "batching-float32.json").read_text())
        [run] = found["settings"]["default, 1 at once"]["runs"]
        steps.append((run["tokens"], run["steps"]))
    assert code == 0 and steps[0] == steps[1]


def test_the_real_script_cuts_tasks_evenly(script, tmp_path) -> None:
    real = importlib.import_module("real")
    path = Path(questions(tmp_path / "q.jsonl", categories=3, each=5))
    found = real.tasks(path, per_category=2, turns=1)
    assert [task.family for task in found] == ["c0", "c1", "c2", "c0", "c1", "c2"]
    assert [task.id for task in found] == ["0", "5", "10", "2", "7", "12"]
    assert {len(task.turns) for task in found} == {1}
    assert len(real.tasks(path, per_category=9, turns=2)) == 15


def test_bars_of_the_real_script_hold_where_they_should(script) -> None:
    real = importlib.import_module("real")

    def row(speed: float, lossless: bool | None = True) -> dict:
        one = {"total": speed / 40.0}
        return {
            "total_tokens_per_second": speed, "tokens_per_second": {"value": speed},
            "failed": None, "lossless": lossless, "method": "x",
            "families": {"c0": {"speedup": one}}, "over_limit": {"forward": 1.25},
        }  # fmt: skip

    rows = {
        "plain": row(40.0), "suffix": row(60.0), "auto": row(59.0),
        "hf:compiled": row(36.0, None), "llama:plain": row(50.0, None),
        "vllm:plain": row(20.0, None),
    }  # fmt: skip
    results = {
        "rows": rows, "families": ["c0"], "scoring": {"nodes": [1, 16], "ratio": [1.0, 1.85]},
    }  # fmt: skip
    held = {gate.claim: gate.holds for gate in real.verdicts(results, "float32")}
    assert held == {
        "plain over hf:compiled": True,
        "scoring 16 nodes, in plain steps": True,
        "a plain step over the memory limit": True,
        "suffix over hf:compiled": True,
        "suffix over llama:plain": True,
        "auto over the best row (c0, where suffix is best)": True,
        "auto over plain, worst category": True,
    }
    held = {gate.claim: gate.holds for gate in real.verdicts(results, "bfloat16")}
    assert held["scoring 16 nodes, in plain steps"] is False
    assert held["suffix over hf:compiled"] is False and held["suffix over vllm:plain"] is True
    rows[real.TWIN] = row(62.0)
    found = {gate.claim: gate for gate in real.verdicts(results, "float32")}
    assert found["auto over the best row (c0, where suffix is best)"].measured == pytest.approx(
        59.0 / 60.0
    )
    alone = found["the same for two rows of auto itself: chance alone"]
    assert alone.measured == pytest.approx(59.0 / 62.0) and not alone.holds


@pytest.mark.slow
def test_specee_counts_answers_beside_plains(script) -> None:
    code, out = script("specee", "--quick", "--untimed")
    found = json.loads((out / "specee.json").read_text())["answers"]
    assert code == 0 and [one["tasks"] for one in found] == [12] * 6
    assert found[0]["row"] == "plain" and found[0]["as_plain"] == 1.0
    assert all("specee" in one["row"] for one in found[1:])


@pytest.mark.slow
def test_sampled_trees_are_timed_against_chains_of_their_length(script) -> None:
    code, out = script("sampled_trees", "--quick")
    found = json.loads((out / "sampled_trees.json").read_text())
    assert code == 0 and len(found["gates"]) == 8
    assert all(gate["measured"] for gate in found["gates"])
    assert found["results"]["setting"]["temperature"] == 0.7
    assert "spectr[controller=fixed,k=8,depth=8]" in (out / "sampled_trees.md").read_text()


def test_look_ups_are_counted_at_equal_nodes(script) -> None:
    code, out = script("look_ups", "--quick", "--counts-only")
    found = json.loads((out / "look_ups.json").read_text())
    assert code == 0 and set(found["counts"]) >= {"recycling", "look-up, tree", "datastore"}
    for rows in found["counts"].values():
        for nodes, counts in rows.items():
            assert all(one["drafted"] <= int(nodes) * one["steps"] for one in counts)


def test_self_speculation_holds_del_against_a_sweep(script) -> None:
    code, out = script("self_speculation", "--quick", "--exits", "1", "--lengths", "2")
    found = json.loads((out / "self_speculation.json").read_text())
    claims = {gate["claim"].split(" (")[0]: gate for gate in found["gates"]}
    assert code == 0 and claims["del over del as published"]["measured"] > 0.0


@pytest.mark.slow
def test_peaks_are_those_of_processes_of_their_own(script) -> None:
    code, out = script("row_memory", "--quick", "--methods", "chain")
    [found] = out.glob("row_memory*.json")  # named after the target
    rows = json.loads(found.read_text())["rows"]
    assert code == 0 and set(rows) == {"chain"}
    assert all(row["peak"] is None or row["peak"] > 50e6 for row in rows.values())
    assert all(row["writing"] is None or row["writing"] <= row["peak"] for row in rows.values())
    assert all(row["tokens"] == 8 for row in rows.values())


@pytest.mark.slow
def test_plans_are_held_against_peaks(script) -> None:
    code, out = script("memory_plan", "--quick")
    found = json.loads((out / "memory_plan.json").read_text())
    assert code == 0 and len(found["rows"]) == 3 and len(found["gates"]) == 6
    for row in found["rows"].values():
        assert row["held"] == row["plan"]["weights"], "kernels in place: nothing but the weights"
        assert row["tokens"] == row["setting"]["rows"] * row["setting"]["new"]
    [points] = found["frontiers"].values()
    shares = [point["share"] for point in points]
    assert shares[0] is None and (len(shares) == 1 or 0.35 in shares)
    assert "generation planned" in (out / "memory_plan.md").read_text()


def test_intervals_are_over_prompts_and_ratios_over_what_both_wrote(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    clocked = importlib.import_module("clocked")

    def cell(row, prompt, tokens, seconds):
        return Cell(
            row=row, prompt=prompt, family="f", repetition=0, prompt_tokens=1,
            tokens=[0] * tokens, seconds=seconds, forwards=tokens // 2,
        )  # fmt: skip

    clock = clocked.Clock(
        [cell("a", str(i), 10, 1.0) for i in range(4)]
        + [cell("b", str(i), 10, 2.0) for i in range(5)]
    )
    assert clock.over("a", "b")["value"] == pytest.approx(2.0)
    assert clock.over("a", "b")["interval"] == pytest.approx((2.0, 2.0))
    assert clock.over("a", "b", "steps")["value"] == pytest.approx(1.0)
    assert clock.over("a", "none") == {"value": None, "interval": None}
    assert clock.best("a") == "a" and clock.rate("b") == 5.0 and clock.length("a") == 2.0
    assert clock.best("") == "b"  # the only one that wrote all prompts
    assert "| b | 5 | 5.0 |" in clock.table({}, base="a")


def test_the_ragged_script_holds_batches_against_slots(script, tmp_path, capsys) -> None:
    lines = [
        json.dumps({"question_id": n, "category": kind, "turns": [f"{kind} {'word ' * n}end"]})
        for n, kind in enumerate(("writing", "math", "rag", "qa", "coding"), start=1)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join([*lines, lines[0].replace("end", "too long " * 40)]) + "\n")
    given = ["--tasks", str(path), "--dtype", "float32", "--batches", "2", "--longest", "90"]
    code, out = script("ragged", "--quick", "--depth", "2", *given)
    assert code == 0
    found = json.loads((out / "ragged-float32.json").read_text())
    rows = found["batches"][0]["rows"]
    assert list(rows) == ["plain", "chain", "eqspec", "exspec"]
    for name, row in rows.items():
        assert row["texts"] == {"equal": 6, "ties": 0, "wrong": 0}, name
        assert (row["grouping_rate"] is not None) == (name in ("eqspec", "exspec"))
        assert (row["realigning"] > 0.0) == (name == "eqspec") or name == "exspec"
    claims = [gate["claim"] for gate in found["gates"]]
    assert claims == ["ragged slots over eqspec, batch 2", "texts that part beyond rounding"]
    assert "| exspec |" in (out / "ragged-float32.md").read_text()
    assert "round 1 of 1" in capsys.readouterr().err


def test_evaluation_finds_the_answers_of_hf_and_says_what_they_took(script) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'foretoken[eval]'")
    code, out = script("evaluation", "--quick", "--method", "chain", "--batch-sizes", "2")
    [path] = out.glob("lm-eval*.json")
    found = json.loads(path.read_text())
    claims = {gate["claim"]: gate for gate in found["gates"]}
    assert code == 0 and len(claims) == 7
    answers = [claim for claim in claims if "over hf" not in claim]
    assert len(answers) == 3 and all(claims[claim]["holds"] for claim in answers)
    theirs, ours = found["cells"].values()
    kind = "generate_until"
    assert claims["batch 2: written, over hf"]["measured"] == pytest.approx(
        theirs["seconds"][kind] / ours["seconds"][kind]
    )
    assert "| foretoken, batch 2 |" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_soak_compares_every_answer_and_finds_nothing_left(script, monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(importlib.import_module("soak_server"), "WORK", tmp_path / "work")
    code, out = script("soak", "--quick")
    assert code == 0 and (out / "soak.svg").read_text().count("<polyline") == 2
    found = json.loads((out / "soak.json").read_text())
    traffic = found["traffic"]
    assert not traffic["lost"] and not traffic["wrong"], traffic["faults"]
    assert traffic["right"]["known"] >= 64 < traffic["visits"] and traffic["phases"]["bursts"] >= 1
    grows = [gate["claim"] for gate in found["gates"] if "growth" in gate["claim"]]
    assert len(grows) == 3 and len(found["samples"]) >= 4
    fails = [gate for gate in found["gates"] if not gate["holds"] and gate["claim"] not in grows]
    assert not fails, "seconds show no growth, but all else"
