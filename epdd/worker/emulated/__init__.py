"""Emulated roles: their answers go out when the profile's time model says, not when the work is done.

`paced.py` holds answers back; `encoder.py` and `prefill_decode.py` are the two roles.  What they hold back comes from
the demo model's real role, or from one without a model: `RowsEncoder`, and the engine with `runner.py`.
"""
