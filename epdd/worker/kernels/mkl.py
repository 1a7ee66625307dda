"""MKL's vector functions, each called once before threads share one.

torch computes cosines and the like by them.  MKL chooses a function's code at its first call, and where two threads
make that call together one of them may run code of a few digits for its part of the tensor (pytorch issue 188792):
errors of 1e-4, in a table that an encoder keeps until it ends.
"""

from __future__ import annotations

import torch

FUNCTIONS = ("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10",
             "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh")


def warm_up_vml() -> None:
    """Make those first calls, on one number each, which is too little for a second thread."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(number)
