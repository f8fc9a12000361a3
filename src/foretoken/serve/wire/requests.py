"""What clients may ask for: the fields of OpenAI's requests that mean something here, and ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_TEXTS = 128  # texts per prompt
MOST_STOPS = 16

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TOKEN_IDS: dict[str, Any] = {
    "propertyNames": {"pattern": "^[0-9]{1,12}$"}
}  # as a JSON object can hold it


class Part(BaseModel):
    """One part of a message: text only."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: str
    text: str | None = None


class Message(BaseModel):
    """What somebody said."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | list[Part] | None = None


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


class Prediction(BaseModel):
    """What the client expects the text to be."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["content"] = "content"
    content: str | list[Part]


class Speculation(BaseModel):
    """How much is guessed for one text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    max_tokens: int = Field(ge=0, lt=2**31)


class Asked(BaseModel):
    """Fields that both kinds of request share; null is as good as left out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    n: int | None = Field(default=None, ge=1, le=MOST_TEXTS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    seed: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, json_schema_extra=TOKEN_IDS)
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
    guided_choice: list[str] | None = None
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

    prompt: str | list[str] | list[Whole] | list[list[Whole]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)


class ChatRequest(Asked):
    """A conversation to be answered."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
