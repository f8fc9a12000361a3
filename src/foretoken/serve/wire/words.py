"""Answers as OpenAI clients read them: one JSON document, or chunks of a stream.

Chunks are put together from texts, as a stream has one per step and text: what does not change is
written once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from foretoken.serve.answer import Answer
from foretoken.serve.logprobs import Chosen
from foretoken.serve.service import Service
from foretoken.serve.wire.requests import ChatRequest, CompletionRequest
from foretoken.serve.writing import Drafted, Piece, Writing

DONE = "data: [DONE]\n\n"


def event(document: Mapping[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n"


class Words:
    """How one request is answered; subclasses are the two kinds there are."""

    prefix: str  # of ids
    kind: str
    chunk_kind: str

    def __init__(self, service: Service, answer: Answer) -> None:
        self.service, self.answer, self.asked = service, answer, answer.asked
        self.head = {
            "id": f"{self.prefix}-{answer.account.id}",
            "object": self.kind,
            "created": int(time.time()),
            "model": service.settings.model_name,
            "system_fingerprint": service.fingerprint,
        }
        chunk = json.dumps({**self.head, "object": self.chunk_kind}, separators=(",", ":"))
        self.opening = f'data: {chunk[:-1]},"choices":[{{"index":'
        ends = {"usage": None} if self.asked.usage_told else {}
        lossy = {} if service.lossy is None else {"foretoken": {"lossy": service.lossy}}
        tail = json.dumps({**ends, **lossy}, separators=(",", ":"))
        self.tail = f"]{',' if ends or lossy else ''}{tail[1:]}\n\n"
        self.strings: dict[int, str] = {}  # of tokens, for trees

    # a stream

    def opened(self) -> str:
        """What a stream begins with."""
        return ""

    def told(self, piece: Piece) -> str:
        """The chunk of a piece; nothing where nothing became readable."""
        details = self.asked.include_speculation
        found = ""
        if piece.text or piece.chosen or (details and (piece.segments or piece.drafted)):
            logs = self.logprobs(piece.chosen) if piece.chosen else "null"
            extra = self.speculation(piece) if details else None
            words = self.delta(json.dumps(piece.text))
            found = self.chunk(piece.writing.index, words, logs, "null", extra)
        if piece.over and self.answer.refusal is None:
            found += self.ending(piece.writing)
        return found

    def ending(self, writing: Writing) -> str:
        """The chunk that says why a text ended."""
        extra = self.summary(writing) if self.asked.include_speculation else None
        reason = f'"{writing.finish_reason}"'
        return self.chunk(writing.index, self.empty(), "null", reason, extra)

    def chunk(
        self, index: int, words: str, logs: str, reason: str, extra: dict[str, Any] | None
    ) -> str:
        """An event with one choice."""
        choice = f'{index},{words},"logprobs":{logs},"finish_reason":{reason}}}'
        if extra is None:
            return f"{self.opening}{choice}{self.tail}"
        if self.service.lossy is not None:
            extra = {"lossy": self.service.lossy, **extra}
        usage = '"usage":null,' if self.asked.usage_told else ""
        return f'{self.opening}{choice}],{usage}"foretoken":{json.dumps(extra)}}}\n\n'

    def closed(self) -> str:
        """What a stream ends with that was not broken off."""
        found = ""
        if self.asked.usage_told:
            document = {
                **self.head,
                "object": self.chunk_kind,
                "choices": [],
                "usage": self.usage(),
            }
            found = event(document)
        return found + DONE

    def delta(self, words: str) -> str:
        """A new part of a text, given as JSON, inside a chunk."""
        raise NotImplementedError

    def empty(self) -> str:
        """Nothing new, inside a chunk."""
        raise NotImplementedError

    def logprobs(self, chosen: list[tuple[Chosen, int]]) -> str:
        """Tokens with their logarithms and places, as JSON."""
        raise NotImplementedError

    # one document

    def choice(self, writing: Writing) -> str:
        """A whole text, inside a choice."""
        raise NotImplementedError

    def document(self) -> str:
        """The answer of a request that is no stream, as JSON.

        Put together from texts: what encodes it in one go lets nobody else run for as long.
        """
        writings = self.answer.writings
        choices = ",".join([self.whole(writing) for writing in writings])
        rest: dict[str, Any] = {"usage": self.usage()}
        own: dict[str, Any] = {}
        if self.service.lossy is not None:
            own["lossy"] = self.service.lossy
        if self.asked.include_speculation:
            texts = [self.summary(writing) for writing in writings]
            own |= texts[0] if len(texts) == 1 else {"texts": texts}
        if own:
            rest["foretoken"] = own
        return f'{json.dumps(self.head)[:-1]},"choices":[{choices}],{json.dumps(rest)[1:]}'

    def whole(self, writing: Writing) -> str:
        """The choice of a text that is over."""
        logs = "null"
        if self.answer.wants.logprobs is not None:
            logs = self.logprobs(writing.whole_chosen())
        reason = f'"finish_reason":"{writing.finish_reason}"'
        told = f'"index": {writing.index}, {self.choice(writing)},"logprobs":{logs},{reason}'
        return f"{{{told}}}"

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and texts, and what became of the client's prediction."""
        answer = self.answer
        written = sum(len(writing.row.new_tokens) for writing in answer.writings)
        accepted = sum(writing.stats.accepted_prediction for writing in answer.writings)
        rejected = sum(writing.stats.rejected_prediction for writing in answer.writings)
        return {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": answer.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    # what was guessed

    def speculation(self, piece: Piece) -> dict[str, Any]:
        """A step's guesses, and where each part of the text came from."""
        kinds = piece.writing.kinds
        tokens = [
            {"text": part.text, "kind": kinds[part.at]}
            for part in piece.segments
            if part.at < len(kinds)  # a step that failed behind its tokens was never told
        ]
        found: dict[str, Any] = {"tokens": tokens}
        return found if piece.drafted is None else {**found, **self.step(piece.drafted)}

    def step(self, drafted: Drafted) -> dict[str, Any]:
        """Counts of a step, and its tree; node 0 is the last token of the text before."""
        trace, tree = drafted.trace, drafted.tree
        return {
            "accepted": trace.accepted,
            "drafted": trace.drafted,
            "depth": trace.depth,
            "corrected": trace.corrected,
            "tree": {
                "tokens": [self.string(token) for token in tree.tokens],
                "parents": list(tree.parents),
                "accepted": list(drafted.path[: trace.accepted]),
            },
        }

    def string(self, token: int) -> str:
        """A token as a reader sees it."""
        if token not in self.strings:
            self.strings[token] = self.service.names.shown(token)
        return self.strings[token]

    def summary(self, writing: Writing) -> dict[str, Any]:
        """What a whole text took, and what its guesses saved."""
        return {"stats": writing.stats.to_dict(), "estimate": writing.estimate.to_dict()}


class ChatWords(Words):
    """An answer of a chat."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opened(self) -> str:
        delta = '"delta":{"role":"assistant","content":""}'
        return "".join(
            self.chunk(index, delta, "null", "null", None) for index in range(self.answer.count)
        )

    def delta(self, words: str) -> str:
        return f'"delta":{{"content":{words}}}'

    def empty(self) -> str:
        return '"delta":{}'

    def logprobs(self, chosen: list[tuple[Chosen, int]]) -> str:
        names = self.service.names
        told = ",".join([names.in_chat(one) for one, _ in chosen])
        return f'{{"content":[{told}],"refusal":null}}'

    def choice(self, writing: Writing) -> str:
        told = {"role": "assistant", "content": writing.text, "refusal": None}
        return f'"message": {json.dumps(told)}'


class CompletionWords(Words):
    """A continuation."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, answer: Answer) -> None:
        super().__init__(service, answer)
        assert isinstance(self.asked, CompletionRequest)
        self.echo = bool(self.asked.echo)
        self.prompts: dict[int, str] = {}  # by number, as JSON

    def opened(self) -> str:
        """With `echo` the prompts."""
        if not self.echo:
            return ""
        return "".join(
            self.chunk(index, self.delta(self.prompt(index)), "null", "null", None)
            for index in range(self.answer.count)
        )

    def prompt(self, index: int) -> str:
        """The prompt of a text, as JSON; read and written once for all its texts."""
        number = index // self.asked.texts
        if number not in self.prompts:
            prompt = self.answer.prompts[number]
            if not isinstance(prompt, str):
                prompt = str(self.service.session.tokenizer.decode(list(prompt)))
            self.prompts[number] = json.dumps(prompt)
        return self.prompts[number]

    def delta(self, words: str) -> str:
        return f'"text":{words}'

    def empty(self) -> str:
        return '"text":""'

    def logprobs(self, chosen: list[tuple[Chosen, int]]) -> str:
        return self.service.names.in_completion(
            [one for one, _ in chosen], [at for _, at in chosen]
        )

    def choice(self, writing: Writing) -> str:
        text = json.dumps(writing.text)
        if self.echo:  # two strings as one: a quote less of each
            text = self.prompt(writing.index)[:-1] + text[1:]
        return f'"text": {text}'


def words_for(service: Service, answer: Answer) -> Words:
    """How a request is answered."""
    kind = ChatWords if isinstance(answer.asked, ChatRequest) else CompletionWords
    return kind(service, answer)
