"""lm-eval's own `hf` model beside ours, over the same folders; tasks whose data lie beside them."""

import importlib.util
import json

import pytest
import torch

from foretoken.minis.tasks import FAMILIES, examples

MISSING = importlib.util.find_spec("lm_eval") is None


def pytest_collection_modifyitems(items) -> None:
    """Without lm-eval, what asks for it is skipped, and says how to get it."""
    for item in items:
        if MISSING and "lm_eval" in getattr(item, "fixturenames", ()):
            reason = "lm-eval is not installed: pip install 'foretoken[eval]'"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def lm_eval():
    """The harness, with our model in it; importing it takes seconds."""
    import lm_eval

    import foretoken.evaluation.harness  # noqa: F401

    return lm_eval


@pytest.fixture(scope="session")
def make_model(lm_eval):
    """Makes a model of lm-eval by its name: `make_model("hf", pretrained=folder)`."""
    from lm_eval.api.registry import get_model

    def make(name: str, **arguments):
        given = {"dtype": "float32", "device": "cpu", **arguments}
        return get_model(name)(**given)

    return make


@pytest.fixture(scope="session")
def requests(lm_eval):
    """Instances of one kind of request: `requests("generate_until", [arguments, ...])`."""
    from lm_eval.api.instance import Instance

    def make(kind: str, arguments: list[tuple]) -> list[Instance]:
        return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]

    return make


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
WRITTEN = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""
CHOSEN = """
output_type: multiple_choice
doc_to_target: 0
doc_to_choice: choices
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory):
    """The tasks `local_written` and `local_chosen`, over held-out examples of the six families."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "examples.jsonl"
    found = [one for family in FAMILIES for one in examples(family, "test", 1)]
    answers = [one.answer for one in found]
    documents = [
        {
            "question": one.prompt,
            "answer": one.answer,
            "choices": [f" {a}" for a in answers[i:][:3]],
        }
        for i, one in enumerate(found)
    ]
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    for name, kind in (("local_written", WRITTEN), ("local_chosen", CHOSEN)):
        head = TASK.format(name=name, data=data, cache=folder / "cache")
        (folder / f"{name}.yaml").write_text(head + kind)
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
