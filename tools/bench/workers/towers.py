"""Vision towers of true shape with random weights and any number of layers, and pictures for them."""

import io
from dataclasses import replace

import numpy as np
import torch
import transformers
from PIL import Image

from epdd import families
from epdd.families.processor import CLIP_MEAN, CLIP_STD

transformers.logging.set_verbosity_error()

MODELS = {
    "qwen3-vl-8b": ("qwen3_vl", dict(
        depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, patch_size=16, out_hidden_size=4096,
        num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24])),
    "qwen2.5-vl-7b": ("qwen2_5_vl", dict(
        depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14, out_hidden_size=3584,
        window_size=112, fullatt_block_indexes=[7, 15, 23, 31])),
}
DEMO = families.load(str(families.DEMO))


def tower_config(model, layers):
    """A vision config with `layers` layers; deepstack and full attention as densely as in all, but full attention
    at least once."""
    kind, options = MODELS[model]
    depth = options["depth"]
    options = dict(options, depth=layers)
    for name, least in (("deepstack_visual_indexes", 0), ("fullatt_block_indexes", 1)):
        if name in options:
            count = max(least, len(options[name]) * layers // depth)
            options[name] = [(i + 1) * layers // count - 1 for i in range(count)]
    return transformers.AutoConfig.for_model(kind).vision_config.__class__(**options)


def module_class(model):
    kind = MODELS[model][0]
    name = {"qwen3_vl": "Qwen3VLVisionModel", "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel"}[kind]
    return getattr(getattr(getattr(transformers.models, kind), f"modeling_{kind}"), name)


def build(model, layers, seed=0):
    """transformers' own module, sdpa attention, random weights that keep activations near one."""
    config = tower_config(model, layers)
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    module = module_class(model)._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    return module.eval().requires_grad_(False)


def family_of(model):
    _, options = MODELS[model]
    deepstack = options.get("deepstack_visual_indexes", ())
    patch = options["patch_size"]
    mean, std = ((0.5,) * 3, (0.5,) * 3) if patch == 16 else (CLIP_MEAN, CLIP_STD)
    return replace(DEMO, patch=patch, merge=2, min_pixels=56 * 56, max_pixels=16384 * 28 * 28, mean=mean, std=std,
                   hidden=options["out_hidden_size"], planes=1 + len(deepstack))


def jpeg(width, height, seed=0):
    """A picture with about a photograph's detail: shapes under noise."""
    rng = np.random.default_rng(seed)
    shapes = Image.fromarray(rng.integers(0, 256, (9, 16, 3), np.uint8))
    pixels = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    pixels += rng.integers(-12, 13, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
