"""Load a target and a draft, then write, stream and batch.

    python examples/generate.py [TARGET [DRAFT]]

Without arguments it uses the two small models that ship with the package.
"""

from __future__ import annotations

import argparse

import foretoken
from foretoken import minis

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("target", nargs="?", help="directory or hub name")
options.add_argument("draft", nargs="?", help="a smaller model of the same vocabulary")
asked = options.parse_args()
if asked.target is None:
    asked.target, asked.draft = minis.path("text-target"), minis.path("text-draft")
spec = foretoken.load(asked.target, draft=asked.draft)  # without a draft: guesses are looked up

prompt = "### Task: question answering\nWhat is the capital of Jorvik?\n### Answer:\n"

out = spec.generate(prompt, max_new_tokens=48)
print(out.text)
print(out.finish_reason, out.stats.to_dict())

for piece in spec.stream(prompt, max_new_tokens=48, temperature=0.8, top_p=0.95, seed=1):
    print(piece.text, end="", flush=True)
print()

for result in spec.generate([prompt, "### Task: "], max_new_tokens=24, stop=["."]):
    print(repr(result.text), result.finish_reason)
