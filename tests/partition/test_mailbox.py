"""What a mailbox makes of letters that no stage would send."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stretto.collectives.failures import Roster
from stretto.collectives.reduction import dtype_code
from stretto.errors import FrameError
from stretto.partition.letters import LetterPart, LetterSubject, Name
from stretto.partition.mailbox import Letterbox, PostOffice
from stretto.partition.trees import TENSOR

NAME = Name(1, LetterSubject.VALUES, 1, 0)


def received(sizes: list[int], payload: bytes) -> Letterbox:
    inbox = Letterbox()
    office = PostOffice(cast(Roster, SimpleNamespace(rank=0, lost={})), [0, 1], inbox)
    part = LetterPart(NAME, [TENSOR], [False], 0, dtype_code(torch.float32), sizes, 0)
    list(office.on_message(0.0, 1, part, memoryview(payload)))
    return inbox


def test_a_letter_arrives() -> None:
    inbox = received([2], torch.tensor([1.0, 2.0]).numpy().tobytes())
    assert inbox.error is None and inbox.letters[NAME].tree.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("sizes", "payload", "words"),
    [
        ([1 << 31], b"", "a tensor of 8589934592 bytes, of which 0 come first"),
        ([1 << 40], b"", "a tensor of 4398046511104 bytes"),
        ([8], bytes(16), "a tensor of 32 bytes, of which 16 come first"),
        ([0, 1 << 62, 1 << 62], b"", "a tensor of sizes"),
        ([0, 1 << 70], b"", "a tensor of sizes"),
    ],
)
def test_memory_is_for_tensors_of_which_something_has_come(sizes: list[Any], payload: bytes, words: str) -> None:
    error = received(sizes, payload).error
    assert isinstance(error, FrameError) and words in str(error)
