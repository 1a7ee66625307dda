"""Encoder outputs: who holds which bytes of the arena and of GPU pools, what is kept of them, how readers get them."""
