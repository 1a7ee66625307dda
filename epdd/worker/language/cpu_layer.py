"""Decoder layers whose few rows the compiled kernels compute, whole, in one call.

Replaces transformers' own layers, which stay inside: they compute more rows, and are the reference for the kernels'
results before these are used.  For layers of the Llama kind, as all served families have: two norms, rotary positions
over whole heads, grouped queries, SwiGLU, with or without biases and norms of queries and keys.  Where experts take the
place of SwiGLU, one call computes the attention, and the experts are transformers' module (`kernels.experts`).
"""

from __future__ import annotations

import ctypes
import inspect
import logging
from typing import Any

import torch
from torch import nn

from epdd.worker.kernels import experts, native
from epdd.worker.kernels.native import MULTIPLE, TYPES, Matrix
from epdd.worker.language import attention, kv_cache

log = logging.getLogger(__name__)

TRIAL_ROWS = 3          # an odd number; each row is a sequence of its own
TRIAL_TOKENS = 2        # of each of these sequences
# Of the largest value.  A wrong operation is off by more than a tenth; bfloat16 rounds ten times on transformers' way.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class LayerShape(ctypes.Structure):
    """A layer as library.h has it."""

    _fields_ = [("heads", ctypes.c_long), ("kv_heads", ctypes.c_long), ("size", ctypes.c_long),
                ("half_weights", ctypes.c_long), ("half_cache", ctypes.c_long), ("pool_tokens", ctypes.c_long),
                *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
                *((name, ctypes.c_void_p) for name in ("input_norm", "middle_norm", "q_norm", "k_norm")),
                ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p),
                ("epsilon", ctypes.c_float), ("scaling", ctypes.c_float)]


class Layer(nn.Module):  # type: ignore[misc]
    """Replaces a decoder layer."""

    def __init__(self, original: nn.Module, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys` and `values` are the layer's part of the KV pool, [kv heads, tokens, head size]."""
        super().__init__()
        self.original = original
        self._dense = _is_dense(original)
        at = original.self_attn
        norms = [original.input_layernorm, original.post_attention_layernorm,
                 getattr(at, "q_norm", None), getattr(at, "k_norm", None)]
        self._kept = keys, values       # the pointers are to their memory
        self._shape = LayerShape(
            at.q_proj.out_features // at.head_dim, keys.shape[0], at.head_dim,
            at.q_proj.weight.dtype == torch.bfloat16, keys.dtype == torch.bfloat16, keys.shape[1],
            *(Matrix.of(linear) for linear in _linears(original)), *(Matrix() for _ in range(0 if self._dense else 3)),
            *(None if norm is None else norm.weight.data_ptr() for norm in norms), keys.data_ptr(), values.data_ptr(),
            norms[0].variance_epsilon, at.scaling)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor],
                plan: attention.AttentionPlan, **more: Any) -> torch.Tensor:
        """[1, T, hidden] to the same; by the kernels where the plan has rows for them."""
        kernels = native.library()
        if plan.rows is None or kernels is None:
            return self.original(hidden_states, position_embeddings=position_embeddings, plan=plan, **more)
        hidden_states = hidden_states.contiguous()
        cosines, sines = (angles.contiguous() for angles in position_embeddings)
        out = torch.empty_like(hidden_states)
        kernels.epdd_layer(ctypes.byref(self._shape), ctypes.byref(plan.rows.pointers), cosines.data_ptr(),
                           sines.data_ptr(), hidden_states.data_ptr(), out.data_ptr())
        if self._dense:
            return out
        return out + self.original.mlp(self.original.post_attention_layernorm(out))


def install(model: Any, pool: kv_cache.KVPool) -> bool:
    """Replace a loaded language model's decoder layers and its output layer; returns whether that was possible."""
    text, head = model.get_decoder(), model.get_output_embeddings()
    if native.library() is None or not all(map(_fits, text.layers)) or not native.takes(head):
        return False
    layers = [Layer(layer, *pool.layer(i)) for i, layer in enumerate(text.layers)]
    one_of_each = {layer._dense: layer for layer in reversed(layers)}
    error = max(_error(layer, text, pool) if layer._dense else max(_error_before_experts(layer, text, pool),
                                                                   experts.error(layer.original.mlp.experts))
                for layer in one_of_each.values())
    tolerance = TOLERANCE[head.weight.dtype] if pool.layer(0)[0].dtype == head.weight.dtype else \
        TOLERANCE[torch.bfloat16]
    if not error <= tolerance:
        log.warning("decode kernels are not used: their results are off by %.1e of the largest value", error)
        return False
    text.layers = nn.ModuleList(layers)
    model.set_output_embeddings(native.FewRowsLinear(head))
    return True


def _is_dense(layer: nn.Module) -> bool:
    return not hasattr(layer.mlp, "experts")


def _linears(layer: nn.Module) -> list[nn.Linear]:
    at, mlp = layer.self_attn, layer.mlp
    dense = [mlp.gate_proj, mlp.up_proj, mlp.down_proj] if _is_dense(layer) else []
    return [at.q_proj, at.k_proj, at.v_proj, at.o_proj, *dense]


def _fits(layer: nn.Module) -> bool:
    """Whether it has the parts that the kernels know, in sizes they take."""
    try:
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for norm in (getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")) if norm]
        linears = _linears(layer)
        dtype = linears[0].weight.dtype
        return (all(type(linear) is nn.Linear and native.takes(linear) for linear in linears)
                and all(part.weight.dtype == dtype for part in (*norms, *linears)) and dtype in TYPES
                and all(isinstance(norm.variance_epsilon, float) for norm in norms)
                and layer.self_attn.head_dim % MULTIPLE == 0)
    except AttributeError:
        return False


class _Nothing(nn.Module):  # type: ignore[misc]
    """In the place of experts."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows)


def _error_before_experts(layer: Layer, text: Any, pool: kv_cache.KVPool) -> float:
    """Of the attention alone: a difference in the last digit may choose another expert."""
    mlp = layer.original.mlp
    layer.original.mlp = _Nothing()
    try:
        return float(_error(layer, text, pool))
    finally:
        layer.original.mlp = mlp


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _error(layer: Layer, text: Any, pool: kv_cache.KVPool) -> float:
    """How far the kernels' hidden states are from transformers', over two tokens of each trial sequence."""
    hidden = layer.original.input_layernorm.weight      # for its size, type and device
    named = inspect.signature(layer.original.forward).parameters
    name = "cache" if "cache" in named else "past_key_values"
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for past in range(TRIAL_TOKENS):
        states = torch.randn(1, TRIAL_ROWS, len(hidden), generator=generator).to(hidden.dtype)
        plan = attention.plan([(1, row * TRIAL_TOKENS, past) for row in range(TRIAL_ROWS)], hidden.device)
        # Another position on each axis: how families join the three is transformers' to do, before any layer.
        angles = text.rotary_emb(states, torch.arange(3 * TRIAL_ROWS).view(3, 1, TRIAL_ROWS) + past)
        found = layer(states, angles, plan)
        wanted = layer.original(states, position_embeddings=angles, attention_mask=None, plan=plan,
                                **{name: pool.at(plan.slots)})
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    return worst
