"""Every compression that a strategy can name, in the order in which they are shown: its class, and its module in this folder.

This is the one list that a new codec is added to. What `compress=` takes, what the text of a strategy may name and the public
names of `stretto` follow from it, and a test says where else the new one is missing (`tests/compress/test_catalogue.py`).
Modules are imported when their classes are asked for: `import stretto` must not bring in torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

COMPRESSIONS: Final = {
    "NoCompression": "none",
    "Float16": "float16",
    "BFloat16": "bfloat16",
    "Int8": "int8",
    "Dynamic8": "dynamic8",
    "E3M0": "e3m0",
    "QSGD": "qsgd",
    "TernGrad": "tern_grad",
    "OneBit": "one_bit",
    "Sign": "sign",
    "TopK": "top_k",
    "RandomK": "random_k",
    "Threshold": "threshold",
    "DGC": "dgc",
    "PowerSGD": "power_sgd",
    "DeMo": "demo",
    "OneBitAdam": "one_bit_adam",
    "ErrorFeedback": "error_feedback",
    "EF21": "ef21",
    "ByParameter": "by_parameter",
    "WarmUp": "warm_up",
}


def classes() -> tuple[type, ...]:
    return tuple(getattr(import_module(f"stretto.compress.{module}"), name) for name, module in COMPRESSIONS.items())
