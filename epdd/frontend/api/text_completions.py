"""`POST /v1/completions`: prompts of text or token ids, continued without a chat template, and their answers' JSON."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Any

import orjson
from aiohttp import web

from epdd.dispatch.request import Request
from epdd.dispatch.request_record import RequestRecord
from epdd.frontend.api.answers import Answers, Chunks, Delta, Whole
from epdd.frontend.api.completions import Completions, PreparedRequest, PromptRun
from epdd.frontend.requests import completion_requests
from epdd.frontend.requests.schema import CompletionBody
from epdd.frontend.structured import structured_output
from epdd.frontend.text.prompt import Prompt

_Json = dict[str, Any]


class TextWhole(Whole):
    """A `text_completion` object, from deltas."""

    kind = "text_completion"

    def _kept(self, delta: Delta) -> list[Any]:
        return [(entry["token"], entry["logprob"], orjson.Fragment(orjson.dumps(_top(entry))))
                for entry in delta.logprobs]

    def _said(self, text: str, logprobs: list[Any], calls: list[_Json], reasoning: str) -> _Json:
        return {"text": text, "logprobs": _lists(logprobs, 0) if self._wants_logprobs else None}


class TextChunks(Chunks):
    """`text_completion` objects of a stream, from deltas."""

    kind = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._chars: dict[int, int] = defaultdict(int)      # sent so far, for each choice

    def of(self, delta: Delta) -> list[_Json]:
        marks = _marks(delta.logprobs, self._chars[delta.index]) if delta.logprobs else None
        self._chars[delta.index] += len(delta.text)
        return [self._with_choice({"index": delta.index, "text": delta.text, "logprobs": marks,
                                   "finish_reason": delta.finish_reason})]


def _marks(entries: list[_Json], offset: int) -> _Json:
    return _lists([(entry["token"], entry["logprob"], _top(entry)) for entry in entries], offset)


def _top(entry: _Json) -> _Json:
    return {top["token"]: top["logprob"] for top in entry["top_logprobs"]}


def _lists(entries: list[tuple[str, float, Any]], offset: int) -> _Json:
    """The endpoint's parallel lists from (token, log probability, top log probabilities).  `offset`: characters of
    text before them."""
    offsets = []
    for token, _, _ in entries:
        offsets.append(offset)
        offset += len(token)
    return {"tokens": [token for token, _, _ in entries], "token_logprobs": [value for _, value, _ in entries],
            "top_logprobs": [top for _, _, top in entries], "text_offset": offsets}


class TextCompletions(Completions):
    """The endpoint's handler."""

    kind = "cmpl"
    whole = TextWhole
    chunks = TextChunks

    async def _prepare(self, http: web.Request, record: RequestRecord, deadline: float, stack: AsyncExitStack
                       ) -> PreparedRequest:
        context = self._context
        async with AsyncExitStack() as reading:
            body = await self._body(http, reading, stack)
            options, texts = await self._parsed(CompletionBody, completion_requests.text, body)
            del body
            await structured_output.check(options.structure, self._checker)
            salt = context.keys.salt(http, options.cache_salt)
            parts, chars = [], sum(len(text) for text in texts if isinstance(text, str))
            for index, text in enumerate(texts):
                prompt, sampling = await self._ready(
                    await self._prompts.plain(text, context.max_model_len(), chars) if isinstance(text, str)
                    else Prompt(text, param="prompt"), options)
                # A single prompt has the answer's id.
                own = record if len(texts) == 1 else RequestRecord(f"{record.id}-{index}", record.client_id,
                                                                   record.clock, record.arrived)
                request = Request(own, prompt.tokens, sampling, n=options.n, deadline=deadline, salt=salt,
                                  tenant=context.keys.tenant(http), whole=not options.stream)
                context.admission.check(request)
                parts.append(PromptRun(request, Answers(options, request, self._vocabulary)))
            record.prompt_tokens = sum(len(part.request.tokens) for part in parts)
            context.stats.prompt(record, len(options.ignored))
            return PreparedRequest(http, options, parts, record, deadline)
