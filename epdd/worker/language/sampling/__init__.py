"""The next token of an answer: sampling, the grammar's mask, banned tokens."""
