"""`foretoken eval`: the evaluation harness lm-eval, with a session as one of its models."""

from __future__ import annotations

import typer

from foretoken.cli.app import app


@app.command(
    "eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: `foretoken eval --model foretoken --model_args "
    "target=./model,draft=./draft,method=chain,dtype=float32 --tasks gsm8k --batch_size 8`",
)
def evaluate(context: typer.Context) -> None:
    """Run lm-eval: everything behind `eval` is its own command line (`lm-eval run --help`).

    With `--model foretoken`, `--model_args` are a target and the options of a load: method, draft,
    dtype, depth and so on. Results are those of `--model hf`, and a lossy method is said to be one.
    """
    from foretoken.evaluation.harness import main

    main(context.args)
