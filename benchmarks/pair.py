"""The models of these scripts: the shipped pair, its widened form, or a pair of your own."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from foretoken import minis
from foretoken.bench.tasks import Task, from_examples, spread
from foretoken.cli.minis import size
from foretoken.errors import ForetokenError
from foretoken.lm.load import quiet
from foretoken.minis.tasks import FAMILIES, examples
from foretoken.minis.widen import widen_directory

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "benchmarks"  # what an interrupted run goes on from
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Pair:
    """Where target and draft lie."""

    target: Path | str
    draft: Path | str


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every script has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--target", help="model directory (default: the shipped mini)")
    options.add_argument("--draft", help="its draft (default: the shipped one)")
    options.add_argument("--quick", action="store_true", help="few prompts and short texts")
    options.add_argument("--threads", type=int, help="threads of torch")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return options


@contextmanager
def pair(
    target: str | None,
    draft: str | None,
    params: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Pair]:
    """The pair asked for. Without `target` the shipped one, widened to `params` where given; the
    widened weights are gone afterwards."""
    small = draft or minis.path("text-draft")
    if target is not None or params is None:
        yield Pair(target or minis.path("text-target"), small)
        return
    with TemporaryDirectory(prefix="foretoken-") as folder:
        wide = Path(folder) / f"text-target-{params}"
        with console.status(f"widening the shipped target to {params}"):
            widen_directory(
                minis.path("text-target"), wide, size(params), dtype=dtype, verify=False
            )
        yield Pair(wide, small)


def draft_noise(options: argparse.ArgumentParser) -> None:
    """The option of scripts that can look at a weaker draft as well."""
    options.add_argument(
        "--noise", type=float, default=0.0,
        help="weaken the draft: noise on its weights, in their standard deviations",
    )  # fmt: skip


@contextmanager
def weaker(models: Pair, noise: float) -> Iterator[Pair]:
    """The pair with noise on the weights of its draft, as much as asked for; gone afterwards.

    The shipped draft agrees with its target more than the drafts of most papers do. What is said
    of those is looked at with one that knows less.
    """
    if not noise:
        yield models
        return
    with TemporaryDirectory(prefix="foretoken-") as folder:
        out = Path(folder) / Path(models.draft).name
        shutil.copytree(models.draft, out)
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(models.draft, dtype=torch.float32)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        scale = noise * weight.std()
                        weight += scale * torch.randn(weight.shape, generator=generator)
            model.save_pretrained(out)
        yield Pair(models.target, out)


def names(asked: argparse.Namespace) -> str:
    """Target and draft in the words of a result."""
    found = f"{Path(asked.target or 'text-target').name}, {Path(asked.draft or 'text-draft').name}"
    noise = vars(asked).get("noise", 0.0)  # few scripts have the option
    weaker = f" with noise of {noise:g} standard deviations on its weights" if noise else ""
    return f"Target and draft: {found}{weaker}"


def weak_name(name: str, noise: float) -> str:
    """The name of a result, which tells a weakened draft."""
    return f"{name}-weak" if noise else name


def prompts(per_family: int, seed: int = 0, limit: int | None = None) -> list[Task]:
    """Held-out prompts of the six families, families alternating."""
    found = [from_examples(examples(family, "test", per_family, seed=seed)) for family in FAMILIES]
    return spread([task for turn in zip(*found, strict=True) for task in turn], limit)


def main(run, description: str | None) -> None:
    """Run a script's `run(arguments)`; a user's mistake is a message, not a traceback."""
    try:
        sys.exit(run(description) or 0)
    except ForetokenError as problem:
        console.print(str(problem), style="red", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)
