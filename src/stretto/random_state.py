"""The random generators a training loop draws from, as plain values: torch (CPU and the model's GPUs), `random`, numpy.

Captured and restored per worker, so that dropout and augmentation go on with the very numbers they would have drawn; or
set to a known beginning for a while, so that all workers draw the same.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_ONE_AT_A_TIME = threading.Lock()  # the generators belong to the process: two threads that set them would mix their numbers


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
    _restore_numpy(state["numpy"])
    return lost


@contextmanager
def seeded(words: Sequence[int], held: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Inside, the CPU's generators (and those of `held`) begin from `words`; afterwards they go on where they were."""
    first, *others = np.random.SeedSequence(words).generate_state(1 + len(held), np.uint64).tolist()
    with _ONE_AT_A_TIME:
        before = torch.get_rng_state(), random.getstate(), _capture_numpy(), [generator.get_state() for generator in held]
        try:
            torch.default_generator.manual_seed(first)  # torch.manual_seed would begin the GPUs' anew as well
            random.seed(first)
            if before[2] is not None:
                np.random.seed(first % 2**32)
            for generator, word in zip(held, others, strict=True):
                generator.manual_seed(word)
            yield
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            _restore_numpy(before[2])
            for generator, state in zip(held, before[3], strict=True):
                generator.set_state(state)


def _capture_numpy() -> list[Any] | None:
    state = np.random.get_state(legacy=False)
    if not isinstance(state, dict) or state["bit_generator"] != "MT19937":
        return None
    inner = state["state"]
    return [inner["key"].tolist(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])]


def _restore_numpy(state: list[Any] | None) -> None:
    if state is not None:
        words, position, has_gauss, gauss = state
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, gauss))


def _gpus(model: nn.Module) -> list[torch.device]:
    """The GPUs that hold the model, in order of first use."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters() if parameter.is_cuda))


def _as_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
