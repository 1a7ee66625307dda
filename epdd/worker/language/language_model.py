"""A checkpoint's language model on one device: its weights and KV pool, and the parts of a step that devices share."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from epdd import families, wire
from epdd.errors import BadRequest, HardwareError
from epdd.families import ModelInfo
from epdd.families.layers import Positions
from epdd.worker.language import batch_inputs, kv_cache
from epdd.worker.language.model_runner import PromptSequence, StepOutput
from epdd.worker.language.sampling.sampler import Sampler
from epdd.worker.language.sampling.structured_output import GrammarCompiler
from epdd.worker.language.scheduler import Batch
from epdd.worker.weights import load


class LanguageModel:
    """transformers' text model, which runs unchanged on packed batches."""

    def __init__(self, spec: wire.WorkerSpec, attention: str) -> None:
        """Loads the weights and allocates the KV cache; `attention`: what transformers calls.  Raises StartupError."""
        loaded = families.load(spec.model)
        self.info: ModelInfo = replace(loaded, eos_ids=spec.eos_ids or loaded.eos_ids)
        self.device = torch.device(spec.device)
        self.model = load.load_language(spec.model, spec.dtype, spec.device, attention)
        parameters = sum(p.numel() for p in self.model.parameters())
        self.text, self.head = self.model.get_decoder(), self.model.get_output_embeddings()
        self.dtype: torch.dtype = self.head.weight.dtype
        self.embed = self.text.get_input_embeddings()
        named = inspect.signature(self.text.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"   # as of transformers 5.17
        self.grammar_compiler = GrammarCompiler(spec.model, self.head.out_features, self.info.eos_ids)
        self._prefix_cache = spec.prefix_cache
        context = min(spec.max_model_len or self.info.max_model_len, self.info.max_model_len)
        kv_dtype = kv_cache.pick_dtype(spec, self.dtype)
        kv_tokens = kv_cache.tokens(spec, self.text.config, kv_dtype, context)
        try:
            self.pool = kv_cache.KVPool(self.text.config, kv_tokens, kv_dtype, self.device)
        except RuntimeError:    # torch has no class of its own for it on CPUs
            raise HardwareError(f"no memory for a KV cache of {kv_tokens} tokens; lower pd.kv_tokens or "
                                "pd.kv_bytes") from None
        self.ready = wire.Ready(binding=wire.Binding((), (), torch.get_num_threads()),
                                dtype=load.dtype_name(self.dtype), kv_tokens=kv_tokens,
                                max_model_len=min(context, kv_tokens), parameters=parameters)

    def prepare(self, request: PromptSequence) -> None:
        """All of a request's input but its images.  Raises BadRequest."""
        message, tokens, vocab = request.message, request.tokens, self.embed.num_embeddings
        if min(tokens) < 0 or max(tokens) >= vocab:
            raise BadRequest(f"token ids must lie in 0..{vocab - 1}")
        if message.spans and self.info.positions is Positions.MROPE:
            request.positions, request.delta = self._positions(tokens, message.spans)
        if self._prefix_cache:
            request.content = batch_inputs.content(tokens, message.spans, message.salt)
            request.shared_prefill = hash(request.content)
        grammar = self.grammar_compiler.compile(message.sampling) if message.sampling.grammar else None
        request.sampler = Sampler(message.sampling, tokens, request.stop_ids, self.head.out_features, self.device,
                                  grammar)

    def _positions(self, tokens: list[int], spans: tuple[wire.Span, ...]) -> tuple[torch.Tensor, int]:
        ids = torch.tensor([tokens])
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        for span in spans:
            for start, count in span.places:
                kinds[0, start:start + count] = 1
        positions, delta = self.model.base_model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor([span.grid for span in spans]))
        return positions[:, 0], int(delta)

    def layout(self, batch: Batch[PromptSequence]) -> list[tuple[int, int, int]]:
        """(count, extent offset, tokens computed before) of each sequence; offsets stay for this step."""
        for request, _ in batch.chunks:
            self.pool.reserve(request.id, request.reserved)
        return [(count, self.pool.offset(request.id), request.computed) for request, count in batch.chunks]

    def hidden(self, embeds: torch.Tensor, positions: torch.Tensor, plan: Any, **visual: Any) -> torch.Tensor:
        """Hidden states [T, hidden] of rows with these embeddings [T, hidden] and positions [3, T]."""
        numbers = positions[:, None] if self.info.positions is Positions.MROPE else positions[:1]
        out = self.text(inputs_embeds=embeds[None], position_ids=numbers, use_cache=False, plan=plan,
                        **{self._cache_name: self.pool.at(plan.slots)}, **visual)
        return out.last_hidden_state[0]

    def best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit and its token, float32 [2, n], and all logits, float32 [n, vocab]."""
        logits = self.head(hidden).float()
        values, ids = logits.max(-1)    # a NaN anywhere in a row comes out as its maximum
        return torch.stack((values, ids.float())), logits       # float32 holds integers up to 16 million


def output(best: torch.Tensor, logits: torch.Tensor) -> StepOutput:
    """What `LanguageModel.best` found, on the host: waits for the device."""
    values, ids = best.tolist()
    return StepOutput(logits, values, [int(token) for token in ids])
