"""Structured output: response formats and tools as one grammar; banned words; tool calls out of text."""
