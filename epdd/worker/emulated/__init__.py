"""Emulated roles: their answers go out when the profile's time model says, not when the work is done.

`delay.py` delays answers; `encoder.py` and `prefill_decode.py` are the two roles.  The answers come from the demo
model's real role, or from one without a model: `RowsEncoder`, and the engine with `runner.py`.
"""
