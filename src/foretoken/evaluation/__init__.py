"""foretoken as a model of the evaluation harness lm-eval: its `hf` model's results, sooner.

    pip install "foretoken[eval]"
    foretoken eval --model foretoken \\
        --model_args target=./model,draft=./draft,method=chain,dtype=float32 --tasks gsm8k

`foretoken eval` is lm-eval's own command line with one more model in it. In Python:

    import foretoken.evaluation.harness  # from here on lm-eval knows the model
    lm_eval.simple_evaluate("foretoken", model_args={"target": "./model"}, tasks=["gsm8k"])
"""
