"""Benchmarks of servers: requests, start, memory, beside other servers."""
