"""Trains a small model on chats of very different lengths; a script, for one process or several."""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.training.dataset.records import Chat, Laws, write_shard
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.objectives.sparse_laws import SparseLaws
from foretoken.training.trainer import Trainer, TrainingPlan

VOCAB = 50


def texts(folder: Path) -> None:
    """Chats whose answers have 1 to 40 tokens, so that batches differ in what they count."""
    rng, parts = random.Random(0), {"train": [], "valid": []}
    torch.manual_seed(0)
    for i in range(60):
        ids = [rng.randrange(VOCAB) for _ in range(4 + rng.choice([1, 2, 40]))]
        laws = Laws.likeliest(3.0 * torch.randn(len(ids) - 4, VOCAB), 6)
        parts["train" if i % 6 else "valid"].append((Chat("given", 0.0, ids[:4], ids[4:]), laws))
    write_shard(folder, 0, parts)


class Doubled:
    """A stream whose batches are two of another one's."""

    def __init__(self, stream):
        self.stream = stream

    def batch(self, index):
        pair = [self.stream.batch(2 * index + i) for i in range(2)]
        width = max(one["input_ids"].shape[1] for one in pair)
        found = {}
        for name in pair[0]:
            parts = [one[name] for one in pair]
            if name in ("input_ids", "weights"):
                parts = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in parts]
            found[name] = torch.cat(parts)
        return found


def run(folder: Path, doubled: bool, **changes):
    """Progress of a run on the texts in `folder`, in as many processes as were started."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=None, eos_token_id=None, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    options = {"tokens": 96, "row_tokens": 48, "pad": 0, "seed": 1}
    train, valid = (ChatStream(folder / "texts", split, **options) for split in ("train", "valid"))
    plan = TrainingPlan(
        **{"steps": 12, "warmup": 2, "evaluate_every": 6, "save_every": 6} | changes
    )
    objective = SparseLaws.over(torch.arange(0, VOCAB, 2), VOCAB, 0.1)
    name = "doubled" if doubled else f"{len(changes)}"
    trainer = Trainer(
        model, objective, Doubled(train) if doubled else train, plan, folder / name, held_out=valid
    )
    return trainer.run(show=False), trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    progress, trainer = run(Path(sys.argv[1]), doubled=False)
    if trainer.accelerator.is_main_process:
        told = {"train": progress.train, "held_out": progress.held_out}
        told["processes"] = trainer.accelerator.num_processes
        Path(sys.argv[1], "told.json").write_text(json.dumps(told))
    trainer.accelerator.end_training()
