"""How each mini is made: architecture, data, plan. A recipe is data; :func:`train` follows it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from foretoken.errors import CheckpointError, ConfigError, meant
from foretoken.heads.files import digest
from foretoken.training import attention
from foretoken.training.dataset.records import replace_text
from foretoken.training.folders import check_idle
from foretoken.training.objectives.distill import Distill
from foretoken.training.objectives.language_model import LanguageModel, LayerSkip
from foretoken.training.optimizers import check_muon
from foretoken.training.stream import PackedStream
from foretoken.training.trainer import Progress, Trainer, TrainingPlan

from . import card, vocabulary
from .corpus import Corpus, texts


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One mini from nothing. `teacher` names the mini whose laws are distilled in the second
    phase.
    """

    name: str
    shape: dict[str, Any]  # fields of LlamaConfig
    plan: TrainingPlan
    tokens: int = 4096  # per step
    row_tokens: tuple[int, ...] = (256, 256, 512)  # short rows are cheap, long ones teach distance
    vocabulary: int = 4096
    embedding_scale: float = 0.5  # standard deviation of the untrained embedding
    tokenizer_texts: int = 6000  # per family
    layer_skip: LayerSkip | None = None
    teacher: str | None = None
    teaching: TrainingPlan | None = None  # the distillation phase, after `plan`
    families: tuple[str, ...] = field(
        default_factory=lambda: Corpus.__dataclass_fields__["families"].default
    )
    seed: int = 0


_TARGET = Recipe(
    name="text-target",
    shape={
        "hidden_size": 320,
        "intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    plan=TrainingPlan(
        steps=2250,
        precision="bf16",
        seconds=5700,  # with the draft's quarter of an hour, under two hours
        save_every=100,
        evaluate_every=100,
        held_out_batches=2,
    ),
    layer_skip=LayerSkip(),
)
_DRAFT = Recipe(
    name="text-draft",
    shape={
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    plan=TrainingPlan(steps=1000, precision="bf16", evaluate_every=100, held_out_batches=2),
    teacher="text-target",
    teaching=TrainingPlan(
        steps=400,
        warmup=10,
        precision="bf16",
        matrix_rate=0.01,
        vector_rate=2e-3,
        embedding_rate=8e-3,
        evaluate_every=100,
        held_out_batches=2,
    ),
)
_TINY = Recipe(
    name="tiny",
    shape={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    plan=TrainingPlan(steps=6, warmup=2, save_every=2, evaluate_every=2, held_out_batches=1),
    tokens=256,
    row_tokens=(128,),
    vocabulary=512,
    tokenizer_texts=20,
    layer_skip=LayerSkip(exits=(1,)),
)
_TINY_DRAFT = replace(
    _TINY,
    name="tiny-draft",
    shape=_TINY.shape
    | {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    },
    layer_skip=None,
    teacher="tiny",
    teaching=TrainingPlan(steps=4, warmup=1, evaluate_every=4, held_out_batches=1),
)
RECIPES = {recipe.name: recipe for recipe in (_TARGET, _DRAFT, _TINY, _TINY_DRAFT)}


def recipe(name: str) -> Recipe:
    """The recipe called `name`."""
    if name not in RECIPES:
        raise ConfigError(
            asked=f"the mini {name!r}",
            possible=", ".join(RECIPES),
            do=meant(name, RECIPES),
        )
    return RECIPES[name]


def train(
    name: str,
    out: str | Path,
    *,
    resume: bool = True,
    scale: float = 1.0,
    progress: bool = True,
    teacher: str | Path | None = None,
) -> Progress:
    """Make the mini `name` in the folder `out`; `scale` shortens the run. Killed runs continue
    where they were.

    A draft needs its target: `teacher`, or else the one that ships; a run goes on with the one it
    was begun with. Checkpoints live in ``out/training`` until the finished model is written.
    """
    found, out = recipe(name), Path(out)
    if scale <= 0:
        raise ConfigError(
            asked=f"scale={scale}", possible="a positive number", do="use 1 for the full recipe"
        )
    check_muon(found.plan.matrix_rate, do="install torch 2.9 or later")
    source = _teacher_path(found, teacher)
    _check_out(name, out)
    work = out / "training"
    _make_folder(work)
    processes = PartialState()
    with processes.main_process_first():
        if source is not None:
            _check_teacher(found, source, work, resume)
        _check_scale(found, scale, work, resume)
        tokenizer = _tokenizer(found, source, work / "tokenizer")
    model = build(found, tokenizer)
    how = (resume, scale, progress)
    phases = {"data": _phase(found, model, tokenizer, found.plan, work / "data", None, how)}
    if source is not None and found.teaching is not None:
        master = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        master.to(processes.device).eval().requires_grad_(False)
        phases["distill"] = _phase(
            found, model, tokenizer, found.teaching, work / "distill", master, how
        )
    if processes.is_main_process:
        write(model, tokenizer, out)
        card.write(out, card.describe_run(name, asdict(found), model.num_parameters(), phases))
    return list(phases.values())[-1]


def build(found: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, every block the identity.

    Large random embeddings tell rare tokens apart from the first step, so that copying a name out
    of the context is learned for all names at once; with the usual 0.02 the 2-million-token mark
    passed without it. The last norm starts small in return, which keeps the first logits small.
    """
    torch.manual_seed(found.seed)
    config = LlamaConfig(
        vocab_size=found.vocabulary,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **found.shape,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=found.embedding_scale)
    torch.nn.init.constant_(model.model.norm.weight, 0.025 / found.embedding_scale)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def write(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Weights as bf16 safetensors, config and tokenizer, for ``from_pretrained``."""
    model.eval().to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _phase(
    found: Recipe,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    plan: TrainingPlan,
    folder: Path,
    master: torch.nn.Module | None,
    how: tuple[bool, float, bool],
) -> Progress:
    """One run of the trainer on the recipe's data: plain, LayerSkip, or taught by `master`."""
    resume, scale, show = how
    seconds = plan.seconds * scale if plan.seconds else None
    plan = replace(plan, steps=_steps(plan, scale), seconds=seconds)
    objective = Distill(teacher=master) if master else found.layer_skip or LanguageModel()

    def stream(split: str, seed: int) -> PackedStream:
        documents = Corpus(tokenizer, split, found.families)
        return PackedStream(
            documents=documents,
            tokens=found.tokens,
            row_tokens=found.row_tokens,
            pad=tokenizer.pad_token_id,
            seed=seed,
        )

    if plan.precision == "bf16":
        attention.hurry(model, *([master] if master else []))
    trainer = Trainer(
        model,
        objective,
        stream("train", found.seed + (1000 if master else 0)),
        plan,
        folder,
        held_out=stream("valid", found.seed),
        held_out_objective=LanguageModel(),
        name=folder.name + " " + found.name,
    )
    state = trainer.run(resume=resume, show=show)
    model.set_attn_implementation("sdpa")
    return state


def _tokenizer(found: Recipe, source: Path | None, folder: Path) -> PreTrainedTokenizerFast:
    """The teacher's tokenizer, else the one of an earlier attempt, else a new one."""
    if source is None and not folder.is_dir():
        learned = vocabulary.learn(texts(found.seed, found.tokenizer_texts), found.vocabulary)
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        learned.save_pretrained(partial)
        os.replace(partial, folder)
    return PreTrainedTokenizerFast.from_pretrained(source or folder)


def _teacher_path(found: Recipe, teacher: str | Path | None) -> Path | None:
    if found.teacher is None:
        if teacher is not None:
            raise ConfigError(
                asked=f"training {found.name}, taught by {teacher}",
                possible=f"{found.name} learns from texts alone; drafts have a teacher",
                do="leave the teacher out",
            )
        return None
    path = Path(teacher) if teacher else Path(__file__).parent / "weights" / found.teacher
    if not (path / "config.json").is_file():
        raise CheckpointError(
            asked=f"training {found.name}, taught by {path}",
            possible="there is no model in that folder",
            do=f"train {found.teacher} first, or name the folder of a finished one",
        )
    width = json.loads((path / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    if width != found.vocabulary:
        raise ConfigError(
            asked=f"training {found.name}, taught by {path}",
            possible=f"{found.name} has {found.vocabulary} tokens and that teacher {width}: laws "
            "over different tokens cannot be compared",
            do=f"name the folder of a {found.teacher}, or of another model with its tokens",
        )
    return path


def _check_teacher(found: Recipe, source: Path, work: Path, resume: bool) -> None:
    """Refuse to go on with what another teacher has taught; else note who teaches."""
    weights = sorted([*source.glob("*.safetensors"), *source.glob("*.bin")])
    told = json.dumps({path.name: digest(path) for path in weights}, indent=2) + "\n"
    _check_note(work / "teacher.json", told, resume, ConfigError(
        asked=f"training {found.name} in {work.parent}, taught by {source}",
        possible="it was begun there with another teacher, whose laws its checkpoints have "
        "learned",
        do="pass --fresh to begin anew, name the teacher it was begun with, or another folder",
    ))  # fmt: skip


def _check_scale(found: Recipe, scale: float, work: Path, resume: bool) -> None:
    """Refuse to go on with a run of another length, whose rates fall at other steps."""
    plans = [plan for plan in (found.plan, found.teaching) if plan is not None]
    steps = [_steps(plan, scale) for plan in plans]
    told = json.dumps({"scale": scale, "steps": steps}) + "\n"
    note = work / "scale.json"
    if resume and not note.is_file() and any(work.glob("*/step-*.pt")):
        return  # begun before scales were noted: nobody knows which
    before = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
    _check_note(note, told, resume, ConfigError(
        asked=f"training {found.name} in {work.parent} for {steps} steps (scale={scale:g})",
        possible=f"it was begun there with another scale, or the recipe had other steps: {before}",
        do="pass --fresh to begin anew, pass the scale it was begun with, or another folder",
    ))  # fmt: skip


def _check_note(note: Path, told: str, resume: bool, other: ConfigError) -> None:
    """Raise `other` where a run that was begun otherwise is to go on; else note what is told."""
    before = note.read_text(encoding="utf-8") if note.is_file() else None
    if before == told:
        return
    if before is not None and resume:
        raise other
    if before is not None:  # a run that is killed before it saves would go on from these
        check_idle(note.parent)
        for phase in ("data", "distill"):
            shutil.rmtree(note.parent / phase, ignore_errors=True)
    replace_text(note, told)


def _steps(plan: TrainingPlan, scale: float) -> int:
    """Optimizer steps of a run that is so much shorter."""
    return max(1, round(plan.steps * scale))


def _check_out(name: str, out: Path) -> None:
    """Refuse to write over a model other than this mini, made or begun here."""
    carded = (out / "card.json").exists()
    ours = card.is_of(out, name) if carded else (out / "training" / "data").is_dir()
    if (out / "config.json").exists() and not ours:
        raise ConfigError(
            asked=f"writing the mini {name} to {out}",
            possible=f"a new folder, or one where {name} was made or begun; it holds another model",
            do="choose another folder",
        )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            asked=f"writing a mini to {path.parent}",
            possible=f"the folder cannot be made ({error})",
            do="choose another",
        ) from error
