"""Emulated roles: their answers go out when the profile's time model says, not when the work is done.

`paced.py` holds answers back; `encoder.py` and `engine.py` are the two roles and pace what really answers, their
core: `rows.py`, light and without a model, or the demo model's real role.
"""
