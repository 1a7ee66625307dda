"""Benchmarks of routing policies, and of the cost of a decision."""
