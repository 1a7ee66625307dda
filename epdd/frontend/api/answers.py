"""Turns the pipeline's events into answers, and answers into the API's JSON.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from epdd.dispatch.request import Request
from epdd.errors import WorkerFailed
from epdd.families.vocabulary import Vocabulary
from epdd.frontend.context import AnswerEvent
from epdd.frontend.requests.completion_requests import Options
from epdd.frontend.structured.tool_call_parser import CallDelta, CallParser, Parsed
from epdd.frontend.text.detokenizer import TextStream
from epdd.frontend.text.reasoning_parser import ReasoningParser, Thinking, with_marks
from epdd.wire import Done, Prefilled, TokenLogprob, Tokens

_LOGPROB_MIN = -9999.0      # JSON has no minus infinity

_Json = dict[str, Any]


@dataclass(frozen=True)
class Delta:
    """An event's addition to one choice."""

    index: int
    text: str
    logprobs: list[_Json]
    finish_reason: str | None = None
    calls: list[CallDelta] = field(default_factory=list)
    reasoning: str = ""


class Answers:
    """The choices of one request, built from its events."""

    def __init__(self, options: Options, request: Request, vocabulary: Vocabulary,
                 thinking: Thinking | None = None) -> None:
        """`thinking`: the tags of reasoning; None: all text is content."""
        self._record = request.record
        self._vocabulary = vocabulary
        self._options = options
        self._thinking = thinking
        self._choices = request.n
        self.begin()

    def begin(self) -> None:
        """Drop all text: the answer starts again."""
        options, choices = self._options, range(self._choices)
        thinking = self._thinking
        stops, marks = (with_marks(options.stop), thinking.tokens.marks) if thinking else (options.stop, {})
        self._streams: list[TextStream[_Json]] = [
            TextStream(self._vocabulary, stops, options.skip_special_tokens, options.sampling.min_tokens, marks,
                       options.include_stop)
            for _ in choices]
        self._reasoners = [ReasoningParser(thinking.begun) for _ in choices] if thinking else []
        self._parsers = [CallParser() for _ in choices] if options.structure.calls else []
        self._running = set(choices)        # choices whose text has not ended
        self._working = set(choices)        # choices that are still computed
        self._stop_tokens = 0       # tokens that ended an answer: generated, but not among its streams' tokens
        self._cached: int | None = None

    @property
    def cut_short(self) -> bool:
        """Every choice has ended, some by a stop string, which the worker does not see."""
        return not self._running and bool(self._working)

    @property
    def ended(self) -> bool:
        return not self._running

    @property
    def generated(self) -> int:
        """Tokens of all choices."""
        return sum(stream.tokens for stream in self._streams) + self._stop_tokens

    def push(self, event: AnswerEvent) -> Delta | None:
        """None if the event adds nothing: it is about the prompt, or its choice has already ended."""
        index, message = event
        if isinstance(message, Prefilled):
            # Choices share one prompt: the first one computed it.
            if self._cached is None:
                self._cached = message.cached_tokens
            return None
        if isinstance(message, Done):
            self._working.discard(index)
        if index not in self._running:
            return None
        stream, options = self._streams[index], self._options
        if isinstance(message, Tokens):
            marks = [self._entry(*pair) for pair in zip(message.ids, message.logprobs)] \
                if options.logprobs else []
            if self._thinking:
                self._reasoners[index].count(message.ids, self._thinking.tokens.end)
            piece = stream.push(message.ids, marks)
            reason = "stop" if stream.stopped else None
        else:
            piece = stream.end(message.stop_token if options.include_stop else None)
            reason = "stop" if stream.stopped else message.reason
            self._stop_tokens += message.stop_token is not None
        reasoning, text = self._divided(index, piece.text, reason)
        parsed, reason = self._parsed(index, text, reason)
        if reason:
            self._running.remove(index)
        return Delta(index, parsed.text, piece.marks, reason, parsed.calls, reasoning)

    def _divided(self, index: int, text: str, reason: str | None) -> tuple[str, str]:
        """(reasoning, the rest) of an answer's text."""
        if not self._reasoners:
            return "", text
        reasoning, text = self._reasoners[index].push(text)
        return reasoning, text + self._reasoners[index].end() if reason else text

    def _parsed(self, index: int, text: str, reason: str | None) -> tuple[Parsed, str | None]:
        """The text, the calls in it, and the finish reason: `tool_calls` if the answer ends with complete calls."""
        if not self._parsers:
            return Parsed(text), reason
        parser = self._parsers[index]
        parsed = parser.push(text)
        if reason:
            reason = "tool_calls" if reason == "stop" and parser.calls and not parser.inside else reason
            rest = parser.end()
            parsed = Parsed(parsed.text + rest.text, parsed.calls + rest.calls)
        return parsed, reason

    def usage(self) -> _Json:
        details: _Json = {}
        if self._reasoners:
            # Tokens after a stop string do not count.
            counts = (min(parser.tokens, stream.tokens) for parser, stream in zip(self._reasoners, self._streams))
            details["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}
        return {
            "prompt_tokens": self._record.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": self._record.prompt_tokens + self.generated,
            "prompt_tokens_details": {
                "cached_tokens": self._cached or 0,
                "image_tokens": sum(image.rows for image in self._record.images),
            },
            **details,
        }

    def _entry(self, token: int, found: TokenLogprob) -> _Json:
        return {**self._named(token, found.logprob),
                "top_logprobs": [self._named(other, value) for other, value in found.top]}

    def _named(self, token: int, value: float) -> _Json:
        if value != value:
            raise WorkerFailed("The model's output is not a number", code="broken_logits")
        data = self._vocabulary.bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": max(value, _LOGPROB_MIN), "bytes": list(data)}


def total_usage(parts: Sequence[_Json]) -> _Json:
    """A request's usage: the sum over its prompts."""
    if len(parts) == 1:
        return parts[0]
    details = [part["prompt_tokens_details"] for part in parts]
    return {**{name: sum(part[name] for part in parts) for name in parts[0] if name != "prompt_tokens_details"},
            "prompt_tokens_details": {name: sum(detail[name] for detail in details) for name in details[0]}}


class Whole:
    """A `chat.completion` object, from deltas."""

    kind = "chat.completion"

    def __init__(self, options: Options, choices: int) -> None:
        self._wants_logprobs = options.logprobs
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._reasonings: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[Any]] = [[] for _ in range(choices)]     # results of `_kept`
        self._reasons: list[str | None] = [None] * choices
        self._calls: list[list[_Json]] = [[] for _ in range(choices)]

    def add(self, delta: Delta) -> None:
        self._texts[delta.index].append(delta.text)
        self._reasonings[delta.index].append(delta.reasoning)
        self._logprobs[delta.index] += self._kept(delta)
        self._reasons[delta.index] = delta.finish_reason
        calls = self._calls[delta.index]
        for call in delta.calls:
            if call.index == len(calls):
                calls.append(_call(call))
            else:
                calls[call.index]["function"]["arguments"] += call.arguments

    def _kept(self, delta: Delta) -> list[Any]:
        """Its log probabilities, already as JSON: for a long answer, encoding all at its end would block the loop."""
        return [orjson.Fragment(orjson.dumps(entry)) for entry in delta.logprobs]

    def body(self, head: _Json, usage: _Json) -> _Json:
        choices = [{"index": index, **self._said("".join(text), logprobs, calls, "".join(reasoning)),
                    "finish_reason": reason}
                   for index, (text, logprobs, calls, reasoning, reason) in enumerate(
                       zip(self._texts, self._logprobs, self._calls, self._reasonings, self._reasons))]
        return {**head, "object": self.kind, "choices": choices, "usage": usage}

    def _said(self, text: str, logprobs: list[Any], calls: list[_Json], reasoning: str) -> _Json:
        return {"message": _message(text, calls, reasoning),
                "logprobs": {"content": logprobs, "refusal": None} if self._wants_logprobs else None}


class Chunks:
    """`chat.completion.chunk` objects, from deltas."""

    kind = "chat.completion.chunk"

    def __init__(self, options: Options, head: _Json, usage: Callable[[], _Json]) -> None:
        self._options = options
        self._head = {**head, "object": self.kind}
        self._usage = usage
        self._begun: set[int] = set()

    def of(self, delta: Delta) -> list[_Json]:
        """The role before a choice's first token; reasoning, text and calls, each if there is any; the finish reason
        in its own chunk."""
        chunks = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        content = bool(delta.text or delta.logprobs and not delta.reasoning)
        if delta.reasoning:     # logprobs go with the last of both chunks
            chunks.append(self._chunk(delta.index, {"reasoning_content": delta.reasoning},
                                      [] if content else delta.logprobs))
        if content:
            chunks.append(self._chunk(delta.index, {"content": delta.text}, delta.logprobs))
        if delta.calls:
            calls = [{"index": call.index, **(_call(call) if call.id else {"function": {"arguments": call.arguments}})}
                     for call in delta.calls]
            chunks.append(self._chunk(delta.index, {"tool_calls": calls}))
        if delta.finish_reason:
            chunks.append(self._chunk(delta.index, {}, reason=delta.finish_reason))
        return chunks

    def last(self) -> list[_Json]:
        """The usage chunk, only if asked for: other clients read `choices[0]` of every chunk."""
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._options.include_usage else []

    def _chunk(self, index: int, delta: _Json, logprobs: list[_Json] | None = None,
               reason: str | None = None) -> _Json:
        return self._with_choice({"index": index, "delta": delta,
                                  "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
                                  "finish_reason": reason})

    def _with_choice(self, choice: _Json) -> _Json:
        chunk = {**self._head, "choices": [choice]}
        if self._options.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk


def _message(text: str, calls: list[_Json], reasoning: str) -> _Json:
    message: _Json = {"role": "assistant", "content": text, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | {"content": text or None, "tool_calls": calls} if calls else message


def _call(begun: CallDelta) -> _Json:
    return {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": begun.arguments}}


def model_card(name: str, root: str, created: int, max_model_len: int, emulated: _Json | None) -> _Json:
    """An entry of /v1/models.  `root` is the model's own name, which benchmark clients read if `name` is an alias."""
    return {"id": name, "object": "model", "created": created, "owned_by": "epdd", "root": root, "parent": None,
            "max_model_len": max_model_len, "input_modalities": ["text", "image"],
            **({} if emulated is None else {"emulated": emulated})}
