"""Prefill and decode: the engine, its scheduler, KV memory, attention over packed batches."""
