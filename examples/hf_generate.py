"""The same inside `model.generate`: processors, stopping criteria and a streamer keep working.

    python examples/hf_generate.py [TARGET DRAFT]

The streamer and stop texts are given to `custom_generate`: `generate` drops them on the way.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import foretoken
from foretoken import minis

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("folders", nargs="*", metavar="TARGET DRAFT", help="default: the shipped two")
folders = options.parse_args().folders or [minis.path("text-target"), minis.path("text-draft")]
if len(folders) != 2:
    options.error("name a target and a draft, or neither")
tokenizer = AutoTokenizer.from_pretrained(folders[0])
model, draft = (
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders
)

inputs = tokenizer(
    "### Task: question answering\nWhat is the capital of Jorvik?\n### Answer:\n",
    return_tensors="pt",
)
inputs.pop("token_type_ids", None)
faster = foretoken.custom_generate(
    method="chain", draft=draft, streamer=TextStreamer(tokenizer, skip_prompt=True)
)
ids = model.generate(**inputs, custom_generate=faster, max_new_tokens=48, repetition_penalty=1.1)

again = model.generate(**inputs, max_new_tokens=48, repetition_penalty=1.1)
print("the same ids as generate alone:", bool(torch.equal(ids, again)))
