"""`/tokenize` and `/detokenize`: the tokens of a prompt or a conversation.  No worker is involved."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec
from aiohttp import web

from epdd.errors import BadRequest
from epdd.frontend.api.completions import INLINE_BYTES, deadline_of, limits_of, off_loop, until
from epdd.frontend.context import Context
from epdd.frontend.http.body import Bodies
from epdd.frontend.images.media import Media
from epdd.frontend.requests import completion_requests, request_validation
from epdd.frontend.requests.messages import conversation
from epdd.frontend.requests.schema import DetokenizeBody, Detokenized, TokenizeBody, Tokenized
from epdd.frontend.structured import structured_output
from epdd.frontend.text.prompt import Prompt, PromptMaker

T = TypeVar("T", TokenizeBody, DetokenizeBody)

_INLINE_TOKENS = 4096       # a few milliseconds of decoding: longer lists go to a thread


class TokenRoutes:
    """Both endpoints' handlers."""

    def __init__(self, context: Context, bodies: Bodies, media: Media, prompts: PromptMaker,
                 executor: Executor) -> None:
        self._context = context
        self._bodies = bodies
        self._media = media
        self._prompts = prompts
        self._executor = executor
        self._limits = limits_of(context)

    async def tokenize(self, http: web.Request) -> web.Response:
        """As the completion endpoints tokenise; of images only the size is read."""
        async with until(deadline_of(self._context)), AsyncExitStack() as stack:
            asked = await self._read(http, TokenizeBody, stack)
            if (asked.prompt is None) == (asked.messages is None):
                raise BadRequest("Either prompt or messages must be given", param="prompt")
            prompt = await self._prompt(asked, stack)
            texts = await off_loop(self._executor, len(prompt.tokens), self._texts, prompt.tokens) \
                if asked.return_token_strs else None
            return _json(Tokenized(count=len(prompt.tokens), max_model_len=self._context.max_model_len(),
                                   tokens=prompt.tokens, token_strs=texts))

    async def detokenize(self, http: web.Request) -> web.Response:
        """The tokens' text, control tokens included."""
        async with until(deadline_of(self._context)), AsyncExitStack() as stack:
            tokens = (await self._read(http, DetokenizeBody, stack)).tokens
            vocab = self._context.family.vocab
            if max(tokens, default=0) >= vocab:
                raise BadRequest(f"tokens names a token id outside 0 to {vocab - 1}", param="tokens")
            if len(tokens) <= _INLINE_TOKENS:
                return _json(Detokenized(self._text(tokens)))
            loop = asyncio.get_running_loop()
            return _json(Detokenized(await loop.run_in_executor(self._executor, self._text, tokens)))

    async def _prompt(self, asked: TokenizeBody, stack: AsyncExitStack) -> Prompt:
        max_model_len = self._context.max_model_len()
        if asked.prompt is not None:
            return await self._prompts.plain(asked.prompt, max_model_len)
        structure = await off_loop(self._executor, INLINE_BYTES + 1 if asked.tools else 0, structured_output.parse,
                                   msgspec.structs.asdict(asked))
        said = conversation(asked, structure.tools)
        low, high = completion_requests.pixels(asked.mm_processor_kwargs, self._context.family)
        held = await stack.enter_async_context(self._media.images(said.images, low, high))
        return await self._prompts.make(said, held.images, max_model_len)

    def _texts(self, tokens: list[int]) -> list[str]:
        return [self._prompts.tokenizer.id_to_token(token) or "" for token in tokens]

    def _text(self, tokens: list[int]) -> str:
        # The batch call releases the GIL; `decode` would hold it for 0.1 s.
        return self._prompts.tokenizer.decode_batch([tokens], skip_special_tokens=False)[0]

    async def _read(self, http: web.Request, kind: type[T], stack: AsyncExitStack) -> T:
        body = await self._bodies.read(http, stack)
        asked: T
        asked, ignored = await off_loop(self._executor, len(body), request_validation.parse, body, kind,
                                        self._context.config.server.strict, self._limits)
        completion_requests.check_model(asked.model, self._context.model_names)
        self._context.stats.ignored_fields += len(ignored)
        return asked


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
