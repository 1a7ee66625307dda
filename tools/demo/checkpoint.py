"""The demo model: tokenizer, shape, initial weights, and writing to a folder.

The architecture is transformers' own Qwen3VLForConditionalGeneration; only `see` is ours, the
tower's forward over a batch of equal grids, because transformers' own walks image by image.
"""

import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (GenerationConfig, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil,
                          Qwen3VLConfig, Qwen3VLForConditionalGeneration)
from transformers.vision_utils import (get_vision_interpolation_indices_and_weights,
                                       get_vision_position_ids)

from tools.demo import dialogue as talk, world as world

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
VOCABULARY = 768
CONTEXT = 8192
# Qwen's own split of text into words: a digit is always a token of its own.
WORD = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content or [] %}
            {%- if part.type in ('image', 'image_url') %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.text is defined %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def chat_text(messages: list[talk.Message]) -> list[tuple[str, bool]]:
    """The chat template's text of messages, in pieces: (text, whether the model writes it)."""
    pieces = []
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(
            IMAGE_TEXT if part["type"] == "image" else part["text"] for part in content)
        answer = message["role"] == "assistant"
        pieces += [(f"<|im_start|>{message['role']}\n", False), (text + "<|im_end|>", answer),
                   ("\n", False)]
    return pieces


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the demo's talks: any text can be written, known words are short."""
    texts = ["system\n", "user\n", "assistant\n", "tool\n"] * 500
    for index in range(6000):
        rng = world.train_rng("tokenizer", index)
        scenes = [_blank_scene(rng) for _ in range(rng.randint(0, talk.IMAGES_MAX))]
        kind = rng.choice(talk.askable(scenes)) if scenes else "talk"
        for message in talk.single_turn(rng, kind, scenes).messages:
            content = message["content"]
            texts += [content] if isinstance(content, str) else [
                part["text"] for part in content if part["type"] == "text"]
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    model.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    model.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:], clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _blank_scene(rng: random.Random) -> world.Scene:
    """A scene without a picture, for the tokenizer."""
    things = [world.Thing(rng.choice(list(world.COLOURS)), shape, (0, 0, 1, 1))
              for shape in rng.sample(world.SHAPES, rng.choice([1, 1, 2, 3, 4]))]
    return world.Scene(Image.new("RGB", (1, 1)), things)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384,
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=CONTEXT, rms_norm_eps=1e-6, hidden_act="silu",
            rope_parameters=dict(rope_type="default", rope_theta=10000.0,
                                 mrope_section=[6, 5, 5], mrope_interleaved=True),
            bos_token_id=None, eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"]),
        vision_config=dict(
            depth=4, hidden_size=96, intermediate_size=384, num_heads=3,
            patch_size=world.PATCH, spatial_merge_size=world.MERGE, temporal_patch_size=2,
            out_hidden_size=128, num_position_embeddings=256, deepstack_visual_indexes=[1, 2],
            hidden_act="gelu_pytorch_tanh"),
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False)
    model = Qwen3VLForConditionalGeneration(config).float()
    _initialise(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _initialise(model: Qwen3VLForConditionalGeneration, generator: torch.Generator) -> None:
    """Fan-in scale, as the usual 0.02 is far too small for matrices this narrow; and positions
    as a table of sines, so that the tower can distinguish positions from the first step."""
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        scale = weight[0].numel() ** -0.5
        if name.endswith(("attn.proj.weight", "linear_fc2.weight", "o_proj.weight",
                          "down_proj.weight")):
            scale *= 0.5  # a layer's addition to the residual stream starts small
        scale = {"embed_tokens": 0.5, "lm_head": 0.02}.get(name.split(".")[-2], scale)
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    positions = model.model.visual.pos_embed.weight
    side, waves = math.isqrt(len(positions)), positions.shape[1] // 4
    steps = torch.exp(torch.linspace(math.log(math.pi / side / 2), math.log(math.pi / 1.5), waves))
    angle = torch.arange(side)[:, None] * steps
    line = torch.cat([angle.sin(), angle.cos()], -1)
    table = torch.cat([line[:, None].expand(side, side, -1), line[None].expand(side, side, -1)], -1)
    positions.copy_(table.reshape(side * side, -1) * 0.5)


def patches(image: Image.Image) -> tuple[Tensor, int, int]:
    """The processor's patches of one frame, [rows * columns, 192], and the grid's rows, columns."""
    size = world.processed_size(*image.size)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    side, merge = world.PATCH, world.MERGE
    rows, columns = size[1] // side, size[0] // side
    levels = np.asarray(image, dtype=np.float32) / 127.5 - 1
    levels = levels.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
    levels = levels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1)
    return torch.from_numpy(np.ascontiguousarray(levels)), rows, columns


def see(visual: torch.nn.Module, frames: Tensor, rows: int, columns: int) -> list[Tensor]:
    """The tower over [images, patches, 192]: main and deepstack features, [images, tokens, 128]."""
    grid = torch.tensor([[1, rows, columns]])
    at, weight = get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=visual.num_grid_per_side, mode="bilinear", align_corners=True,
        spatial_merge_size=world.MERGE)
    cos, sin = visual.rotary_pos_emb(frames, get_vision_position_ids(grid, world.MERGE))
    kernel = visual.patch_embed.proj.weight.sum(2).flatten(1)  # a still repeats its one frame
    hidden = F.linear(frames, kernel, visual.patch_embed.proj.bias)
    hidden = hidden + (visual.pos_embed(at) * weight[:, :, None]).sum(1)
    merged = []
    for index, block in enumerate(visual.blocks):
        hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if index in visual.deepstack_visual_indexes:
            place = visual.deepstack_visual_indexes.index(index)
            merged.append(visual.deepstack_merger_list[place](hidden))
    features = [visual.merger(hidden), *merged]
    return [feature.view(len(frames), -1, feature.shape[-1]) for feature in features]


def _attend(attn: torch.nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    images, length, width = hidden.shape
    parts = attn.qkv(hidden).view(images, length, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind(0)
    query, key = (part * cos + _half_turn(part) * sin for part in (query, key))
    seen = F.scaled_dot_product_attention(query, key, value)
    return attn.proj(seen.transpose(1, 2).reshape(images, length, width))


def _half_turn(part: Tensor) -> Tensor:
    left, right = part.chunk(2, -1)
    return torch.cat([-right, left], -1)


def inputs(tokenizer: PreTrainedTokenizerFast, processor: Qwen2VLImageProcessorPil,
           messages: list[talk.Message], images: list[Image.Image], ask: bool = False
           ) -> dict[str, Tensor]:
    """The inputs of transformers' model; with `ask`, up to an answer to be generated."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    given: dict[str, Tensor] = {}
    if images:
        given = dict(processor(images, return_tensors="pt"))
        first, *others = text.split("<|image_pad|>")
        counts = given["image_grid_thw"].prod(1) // world.MERGE ** 2
        text = first + "".join("<|image_pad|>" * count + other
                               for count, other in zip(counts.tolist(), others))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    seen = ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {"input_ids": ids, "mm_token_type_ids": seen.int(), **given}


def build_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=world.PATCH, merge_size=world.MERGE, temporal_patch_size=2,
        min_pixels=world.PIXELS_MIN, max_pixels=world.PIXELS_MAX,
        image_mean=[0.5] * 3, image_std=[0.5] * 3)


def save(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast,
         folder: Path) -> None:
    """Write the files that transformers needs to load the model; weights as float16."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    build_processor().save_pretrained(folder)
    shipped = Qwen3VLForConditionalGeneration(model.config)
    shipped.load_state_dict(model.state_dict())
    end, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    shipped.generation_config = GenerationConfig(
        eos_token_id=[end, pad], pad_token_id=pad, do_sample=False)
    shipped.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it readable by its owner alone
