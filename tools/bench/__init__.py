"""Measurements; each program says what it compares with what."""
