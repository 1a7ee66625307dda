"""The answers that `/openapi.json` shows.

`answers.py` and `system_routes.py` write them as dicts, many a second; tests hold them to these structs.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """Forbids other fields, so that answers are as documented."""


class ErrorDetail(_Answer):
    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(_Answer):
    error: ErrorDetail


class PromptDetails(_Answer):
    cached_tokens: int
    image_tokens: int


class CompletionDetails(_Answer):
    reasoning_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET      # of thinking models


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[ChatTokenLogprob]
    refusal: None


class Function(_Answer):
    name: str
    arguments: str


class Call(_Answer):
    id: str
    type: Literal["function"]
    function: Function


class AnswerMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(_Answer):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(_Answer):
    """A call's first delta has all fields, later ones only arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(_Answer):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(_Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET


class TextLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(_Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class TextCompletion(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(_Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextChunk(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: Usage | None | UnsetType = UNSET


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    input_modalities: list[Literal["text", "image"]]
    emulated: dict[str, Any] | UnsetType = UNSET     # of an emulated fleet


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class Health(_Answer):
    status: Literal["ok", "starting", "degraded", "draining", "failed"]
    why: list[str]
    workers: dict[str, dict[str, int]]


class Readiness(_Answer):
    ready: bool
    workers: dict[str, dict[str, int]]


class Pong(_Answer):
    status: Literal["ok"]


class PublicStatus(msgspec.Struct):
    """Its parts have the fields that `chat_page/figures.py` names."""

    state: str
    uptime_s: float
    workers: list[dict[str, Any]]
    router: dict[str, Any]
    arena: dict[str, Any]
    cache: dict[str, Any]


class Version(_Answer):
    version: str
