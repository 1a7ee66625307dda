"""Encoder outputs: the cache over the host's arena and those of GPUs, and the transport to prefill-decode workers."""
