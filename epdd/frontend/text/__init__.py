"""Conversations to tokens, and tokens to text."""
