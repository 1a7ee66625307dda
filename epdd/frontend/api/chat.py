"""`POST /v1/chat/completions`: a conversation with images, made ready for the workers."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AsyncExitStack

from aiohttp import web

from epdd.dispatch.request import Request
from epdd.dispatch.request_record import RequestRecord
from epdd.families.vocabulary import Vocabulary
from epdd.frontend.api.answers import Answers
from epdd.frontend.api.completions import Completions, PreparedRequest, PromptRun
from epdd.frontend.context import Context
from epdd.frontend.http.body import Bodies
from epdd.frontend.images.media import Media
from epdd.frontend.requests import completion_requests
from epdd.frontend.requests.schema import ChatBody
from epdd.frontend.structured import structured_output
from epdd.frontend.structured.grammar_checker import GrammarChecker
from epdd.frontend.text.prompt import PromptMaker


class ChatCompletions(Completions):
    """The endpoint's handler."""

    kind = "chatcmpl"

    def __init__(self, context: Context, bodies: Bodies, media: Media, prompts: PromptMaker,
                 vocabulary: Vocabulary, checker: GrammarChecker, executor: Executor) -> None:
        super().__init__(context, bodies, prompts, vocabulary, checker, executor)
        self._media = media

    async def _prepare(self, http: web.Request, record: RequestRecord, deadline: float, stack: AsyncExitStack
                       ) -> PreparedRequest:
        """Frees body and messages; the images' bytes stay reserved until `stack` closes at the latest."""
        context = self._context
        async with AsyncExitStack() as reading:
            body = await self._body(http, reading, stack)
            chat, conversation = await self._parsed(ChatBody, completion_requests.chat, body)
            del body
            await structured_output.check(chat.structure, self._checker)
            salt = context.keys.salt(http, chat.cache_salt)
            held = await stack.enter_async_context(
                self._media.images(conversation.images, chat.min_pixels, chat.max_pixels, salt))
            prompt, sampling = await self._ready(
                await self._prompts.make(conversation, held.images, context.max_model_len()), chat)
            request = Request(record, prompt.tokens, sampling, held.images, prompt.spans, chat.n, deadline, salt=salt,
                              tenant=context.keys.tenant(http), whole=not chat.stream)
            context.admission.check(request)
            context.stats.prompt(record, len(chat.ignored))
            run = PromptRun(request, Answers(chat, request, self._vocabulary, prompt.thinking))
            return PreparedRequest(http, chat, [run], record, deadline, held)
