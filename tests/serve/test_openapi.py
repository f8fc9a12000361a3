"""Whatever the description allows or forbids is answered as it says, by the shipped models."""

import subprocess
import sys

import jsonschema
import pytest
from live_server import wait_for

import foretoken
from foretoken import minis

KEY = "one-of-the-tests"
SECONDS = 30.0  # within which everything is answered
PHASES = "examples,coverage,fuzzing,stateful"


@pytest.fixture(scope="module")
def guarded(running):
    """A server of the shipped pair that wants a key, with a limit as before strangers."""
    target, draft = minis.path("text-target"), minis.path("text-draft")
    with (
        foretoken.load(target, "auto-draft", draft, dtype="float32") as session,
        running(session, max_tokens_limit=32, api_keys=(KEY,)) as server,
    ):
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_bodies_made_from_the_description_are_answered_as_it_says(guarded, tmp_path, mode) -> None:
    """Hundreds of requests to each endpoint, keys left out and forged among them.

    All checks are on, but for `positive_data_acceptance`: a body whose types are all right may be
    refused, for a grammar that cannot be read, say, or a token beyond the vocabulary, which no
    schema can tell.
    """
    schemathesis = pytest.importorskip(
        "schemathesis", reason="the extra `schema` is not installed: pip install foretoken[schema]"
    )
    command = [sys.executable, "-m", schemathesis.__name__ + ".cli", "run"]
    command += [f"{guarded.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"]
    command += ["--mode", mode, "--phases", PHASES, "--max-examples", "100", "--seed", "2"]
    command += ["--max-response-time", f"{SECONDS:g}", "--continue-on-failure", "--no-color"]
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for path in ("/v1/completions", "/v1/chat/completions"):  # or nothing was held to its schema
        answered = guarded.metric("requests_total", path=path, status="200")
        assert mode == "negative" or answered >= 10
    wait_for(lambda: guarded.session.engine.idle and guarded.service.places == 0)
    assert guarded.metric("engine_errors_total") == guarded.metric("drafter_errors_total") == 0
    assert guarded.session.target.rows_held == 0 and not guarded.service.answers


def test_every_example_of_the_description_is_answered_and_looks_as_described(served) -> None:
    schema = served.get("/openapi.json").json()
    for path, calls in schema["paths"].items():
        if "post" not in calls:
            continue
        body = calls["post"]["requestBody"]["content"]["application/json"]
        answer = calls["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        looks = jsonschema.Draft202012Validator({**answer, "components": schema["components"]})
        takes = jsonschema.Draft202012Validator(
            {**body["schema"], "components": schema["components"]}
        )
        assert len(body["examples"]) > 12
        for name, example in body["examples"].items():
            takes.validate(example["value"])
            told = served.post(path, json=example["value"])
            assert told.status_code == 200, (name, told.text)
            if example["value"].get("stream"):
                assert told.text.endswith("data: [DONE]\n\n")
            else:
                looks.validate(told.json())
