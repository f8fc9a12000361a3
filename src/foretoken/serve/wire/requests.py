"""What clients may ask for: the fields of OpenAI's requests that mean something here, and ours."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

MOST_TEXTS = 128  # texts per prompt
MOST_STOPS = 16
LONGEST_STOP = 1024  # characters of a stop text, which is looked for at every step

T = TypeVar("T")
# Read up to the first wrong item: of a body of megabytes, millions of errors would be put together.
Several = Annotated[list[T], Field(fail_fast=True)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, WithJsonSchema({"type": "string", "maxLength": LONGEST_STOP})]
TOKEN_IDS: dict[str, Any] = {
    "propertyNames": {"pattern": "^[0-9]{1,12}$"}
}  # as a JSON object can hold it


def numbers(value: Any) -> Any:
    """ValueError at the first value of an object that is no finite number."""
    if isinstance(value, dict):
        for name, one in value.items():
            if isinstance(one, bool) or not isinstance(one, int | float) or not is_finite(one):
                raise ValueError(f"the value of {name[:40]!r} is no finite number")
    return value


def short_stops(value: Any) -> Any:
    """ValueError at the first stop text that is too long to be looked for at every step."""
    for one in value[:MOST_STOPS] if isinstance(value, list) else [value]:
        if isinstance(one, str) and len(one) > LONGEST_STOP:
            raise ValueError(f"a stop of {len(one)} characters; it has at most {LONGEST_STOP}")
    return value


def is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


class Part(BaseModel):
    """One part of a message: text only."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: str
    text: str | None = None


class Message(BaseModel):
    """What somebody said."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | Several[Part] | None = None


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None


class Schema(BaseModel):
    """A JSON schema under a name."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """What a text has to look like."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class StructuredOutputs(BaseModel):
    """What a text has to look like, as vLLM's clients say it: one of these."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Several[str] | None = None
    json_object: bool | None = None


class Prediction(BaseModel):
    """What the client expects the text to be."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["content"] = "content"
    content: str | Several[Part]


class Speculation(BaseModel):
    """How much is guessed for one text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    max_tokens: int = Field(ge=0, lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def known(cls, value: Any) -> Any:
        """ValueError at the first field that is none; by itself each of them is an error."""
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"there is no field {name[:40]!r}")
        return value


class Asked(BaseModel):
    """Fields that both kinds of request share; null is as good as left out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    n: int | None = Field(default=None, ge=1, le=MOST_TEXTS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    stop: Annotated[
        Stop | Annotated[Several[Stop], Field(max_length=MOST_STOPS)] | None,
        BeforeValidator(short_stops),
    ] = None
    seed: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(numbers)] | None = Field(
        default=None, json_schema_extra=TOKEN_IDS
    )
    user: str | None = Field(default=None, max_length=512)
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    # beyond OpenAI's interface, by the names that other open servers use
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    priority: Whole | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Several[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    # our own
    speculation: bool | Speculation | None = None
    include_speculation: bool | None = None

    @property
    def texts(self) -> int:
        """Texts per prompt."""
        return self.n or 1

    @property
    def usage_told(self) -> bool:
        """Whether a stream ends with what it took."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Asked):
    """Texts to be continued."""

    prompt: str | Several[str] | Several[Whole] | Several[Several[Whole]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)


class ChatRequest(Asked):
    """A conversation to be answered."""

    messages: Annotated[Several[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
