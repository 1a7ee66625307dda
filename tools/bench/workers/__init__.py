"""Benchmarks of one worker: encoding, decoding, loading, handover."""
