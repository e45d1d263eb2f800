"""The random generators a training loop draws from, as plain values: torch (CPU and the model's GPUs), `random`, numpy.

Captured and restored per worker, so that dropout and augmentation go on with the very numbers they would have drawn.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn


def capture(model: nn.Module) -> dict[str, Any]:
    """Bytes and numbers only, so that it can travel as msgpack."""
    version, words, gauss = random.getstate()
    return {
        "torch": _as_bytes(torch.get_rng_state()),
        "cuda": [_as_bytes(torch.cuda.get_rng_state(device)) for device in _gpus(model)],
        "python": [version, list(words), gauss],
        "numpy": _capture_numpy(),
    }


def restore(state: dict[str, Any], model: nn.Module) -> list[str]:
    """Make the generators go on from `state`; returns what could not be restored."""
    lost = []
    torch.set_rng_state(_as_tensor(state["torch"]))
    gpus = _gpus(model)
    if len(gpus) == len(state["cuda"]):
        for device, saved in zip(gpus, state["cuda"], strict=True):
            torch.cuda.set_rng_state(_as_tensor(saved), device)
    else:
        lost.append(f"random numbers on the GPU (then {len(state['cuda'])} GPUs per worker, now {len(gpus)})")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if state["numpy"] is None:
        lost.append("random numbers of numpy (its global generator had been exchanged for another kind)")
    else:
        words, position, has_gauss, gauss = state["numpy"]
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, gauss))
    return lost


def _capture_numpy() -> list[Any] | None:
    state = np.random.get_state(legacy=False)
    if not isinstance(state, dict) or state["bit_generator"] != "MT19937":
        return None
    inner = state["state"]
    return [inner["key"].tolist(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])]


def _gpus(model: nn.Module) -> list[torch.device]:
    """The GPUs that hold the model, in order of first use."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters() if parameter.is_cuda))


def _as_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
