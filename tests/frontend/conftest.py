"""A small checkpoint folder: tokenizer, template and settings as a Qwen-VL model's, no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from epdd import families

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
            "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")      # in Qwen's files these are not special
_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(images=0) %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {%- set text = message.content %}
        {%- if message.role == 'assistant' and '</think>' in text %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- text }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image_url' in part %}
                {%- set seen.images = seen.images + 1 %}
                {%- if add_vision_id %}{{- 'Picture ' ~ seen.images ~ ': ' }}{% endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CORPUS = ("the image shows a red circle left of two blue squares\n\n what does this picture show ? hello world\n"
          "system user assistant Picture colours und Größe, naïve café 龜 🫠 🥹 ABCDEFGHIJ abcdefghij\n\n\n") * 20


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE as Qwen's: same pre-tokeniser, normaliser, decoder and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


def build_checkpoint(folder: Path, max_model_len: int = 4096, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in SPECIALS}
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen2_vl", "image_token_id": ids["<|image_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": {"max_position_embeddings": max_model_len, "vocab_size": tokenizer.get_vocab_size() + 20,
                        "eos_token_id": ids["<|im_end|>"]},
        "vision_config": {"hidden_size": 64, "patch_size": 14, "temporal_patch_size": 2}}))
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 256}))
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("frontend") / "tiny-vl")


@pytest.fixture(scope="session")
def family(folder: Path) -> families.ModelInfo:
    return families.load(str(folder))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
