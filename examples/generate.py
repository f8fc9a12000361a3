"""Load a target and a draft, then write, stream and batch.

    python examples/generate.py [TARGET [DRAFT]]

Without arguments it uses the two small models that ship with the package.
"""

from __future__ import annotations

import sys

import foretoken
from foretoken import minis

target = sys.argv[1] if len(sys.argv) > 1 else minis.path("text-target")
draft = sys.argv[2] if len(sys.argv) > 2 else minis.path("text-draft")
if len(sys.argv) == 2:  # a target of your own without a draft: guess from the prompt
    spec = foretoken.load(target, method="prompt-lookup")
else:
    spec = foretoken.load(target, method="chain", draft=draft)

prompt = "### Task: question answering\nWhat is the capital of Jorvik?\n### Answer:\n"

out = spec.generate(prompt, max_new_tokens=48)
print(out.text)
print(out.finish_reason, out.stats.to_dict())

for piece in spec.stream(prompt, max_new_tokens=48, temperature=0.8, top_p=0.95, seed=1):
    print(piece.text, end="", flush=True)
print()

for result in spec.generate([prompt, "### Task: "], max_new_tokens=24, stop=["."]):
    print(repr(result.text), result.finish_reason)
