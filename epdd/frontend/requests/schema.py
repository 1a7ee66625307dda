"""Bodies of requests: one definition, which validates (`request_validation.py`) and which `/openapi.json` shows.

Rules that need more than one field, or the checkpoint, are in `completion_requests.py`.  null is the same as absent
everywhere.  Fields of completions that are refused or without effect are in `field_table.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

N_MAX = 8                   # answers to one prompt
PROMPTS_MAX = 32            # of one text completion
TOP_LOGPROBS_MAX = 20       # OpenAI's own
TEXT_LOGPROBS_MAX = 5       # OpenAI's own, of text completions
STOPS_MAX = 16              # OpenAI allows 4; each is searched for after every token
STOP_CHARS_MAX = 256
STOP_IDS_MAX = 128
LOGIT_BIAS_MAX = 1024
BAD_WORDS_MAX = 128
ALLOWED_IDS_MAX = 1 << 17   # 1 MB on the way to a worker
MESSAGES_MAX = 10_000       # each costs the event loop microseconds, and the context a few tokens
PARTS_MAX = 10_000          # of one message
DETOKENIZE_MAX = 1 << 19    # tokens

AtLeastOne = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Ignored = Annotated[Any, Meta(description="Accepted, without effect.")]

_Json = dict[str, Any]


class StreamOptions(msgspec.Struct):
    include_usage: Annotated[bool | None, Meta(description="End with a chunk that has usage and no choices.")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Usage so far in every chunk.")] = None
    include_obfuscation: Ignored = None


class Generation(msgspec.Struct, kw_only=True):
    """Fields of both kinds of completion."""

    model: Annotated[str | None, Meta(description="A name of /v1/models; absent: the one that is served.")] = None
    max_tokens: Annotated[AtLeastOne | None, Meta(
        description="Tokens of the answer; more than the context leaves means all that is left.")] = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)] | None, Meta(
        description="0: always the most likely token.  Absent: the checkpoint's own, as for top_p, top_k and "
                    "repetition_penalty.")] = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Meta(ge=-1)] | None, Meta(description="0 or -1: all.")] = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_IDS_MAX)] | None = None
    logit_bias: Annotated[Annotated[dict[str, Bias], Meta(max_length=LOGIT_BIAS_MAX)] | None, Meta(
        description="Added to the logits of these token ids.",
        extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}})] = None
    n: Annotated[int, Meta(ge=1, le=N_MAX)] | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with stream.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on to max_tokens.")] = None
    cache_salt: Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(
        description="Share caches only with requests that have the same salt (and the same API key).")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave control tokens out of the text.")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(
        description="Keep the stop string, or the text of the stop token, at the text's end.")] = None
    no_stop_trim: Annotated[bool | None, Meta(description="SGLang's name of include_stop_str_in_output.")] = None
    bad_words: Annotated[Annotated[list[Stop], Meta(max_length=BAD_WORDS_MAX)] | None, Meta(
        description="No run of tokens that spells one of these, with or without a space before it.")] = None
    allowed_token_ids: Annotated[Annotated[list[TokenId], Meta(min_length=1, max_length=ALLOWED_IDS_MAX)] | None, Meta(
        description="Only these tokens; the end token only if it is among them.")] = None
    truncate_prompt_tokens: Annotated[Annotated[int, Meta(ge=-1)] | None, Meta(
        description="Only the prompt's last tokens; -1: as many as leave room for the answer.")] = None

    # The format of the answer: one of these at most.
    response_format: _Json | None = None
    structured_outputs: Annotated[_Json | None, Meta(
        description="One of json, regex, choice, grammar, json_object.")] = None
    guided_json: _Json | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: Annotated[str | None, Meta(description="Lark, or EBNF with ::= and a rule root.")] = None
    json_schema: _Json | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    format: Annotated[_Json | str | None, Meta(description="json, or a JSON schema.")] = None


class ImageUrl(msgspec.Struct):
    url: Annotated[str, Meta(description="data: with base64, http(s): or file:, as the server's settings allow.")]
    detail: Annotated[str | None, Meta(
        description="Without effect: mm_processor_kwargs sets the resolution that the model sees.")] = None


class _Part(msgspec.Struct, tag_field="type"):
    """A part of a message; its type says which."""


class TextPart(_Part, tag="text"):
    text: str


class InputText(_Part, tag="input_text"):
    text: str


class OutputText(_Part, tag="output_text"):
    text: str


class RefusalPart(_Part, tag="refusal"):
    """An assistant's part that SDKs echo back."""

    refusal: str | None = None


class ImagePart(_Part, tag="image_url"):
    image_url: ImageUrl | str


class InputImage(_Part, tag="input_image"):
    image_url: ImageUrl | str
    detail: Ignored = None


Part = str | TextPart | InputText | OutputText | RefusalPart | ImagePart | InputImage


class ChatMessage(msgspec.Struct, kw_only=True):
    """Fields that SDKs echo back (refusal, annotations, audio, function_call) are accepted, without effect."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Annotated[list[Part], Meta(max_length=PARTS_MAX)] | None, Meta(
        description="null is for assistants only.")] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Booleans that Qwen templates know."""

    add_vision_id: bool | None = None
    enable_thinking: bool | None = None


class PixelLimits(msgspec.Struct, forbid_unknown_fields=True):
    """Pixels of each image after resizing, within the checkpoint's own limits."""

    min_pixels: AtLeastOne | None = None
    max_pixels: AtLeastOne | None = None


class ChatBody(Generation, kw_only=True):
    """A request for a chat completion."""

    messages: Messages
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: Annotated[bool | None, Meta(
        description="false: the prompt ends with the last message.")] = None
    continue_final_message: Annotated[bool | None, Meta(
        description="Continue the last message, which must be the assistant's.")] = None
    mm_processor_kwargs: PixelLimits | None = None
    max_completion_tokens: Annotated[AtLeastOne | None, Meta(description="Wins over max_tokens.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None, Meta(
        description="Needs logprobs.")] = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None


class CompletionBody(Generation, kw_only=True):
    """A request for a text completion."""

    prompt: Annotated[str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1)], Meta(
        description="A text, token ids, or a list of either.  Control tokens in a text are the checkpoint's own.")]
    logprobs: Annotated[int, Meta(ge=0, le=TEXT_LOGPROBS_MAX)] | None = None
    best_of: Annotated[AtLeastOne | None, Meta(description="Must equal n.")] = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A prompt as in a text completion, or messages as in a chat completion."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    chat_template_kwargs: TemplateOptions | None = None
    mm_processor_kwargs: PixelLimits | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=DETOKENIZE_MAX)]


# --- what they get: these are written from the structs, completions (answers.py) only shown by them


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: Annotated[int, Meta(description="Tokens of prompt and answer together.")]
    tokens: Annotated[list[int], Meta(description="Each image is as many placeholders as it has rows.")]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str
