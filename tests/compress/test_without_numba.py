"""Numba is part of the installation; where it cannot be imported all the same, codecs work, and say once what that costs."""

from __future__ import annotations

import logging
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import torch

from compress.together import Workers
from stretto.bench import machine
from stretto.compress.codec import Compression
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.int8 import Int8
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.none import NoCompression
from stretto.compress.sign import Sign

ROOT = Path(__file__).parents[2]


def test_installing_stretto_alone_brings_numba() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert any(requirement.startswith("numba") for requirement in project["dependencies"])
    assert {"lab", "kernels", "plot", "dev"} <= project["optional-dependencies"].keys()  # what commands may name


@contextmanager
def no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import numba` raises ImportError, as if it were not installed."""
    has_numba.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        yield
    has_numba.cache_clear()


def combined(compression: Compression) -> torch.Tensor:
    gradients = [torch.randn(700, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    return Workers(compression, [("weight", (700,))], 3).round(gradients)[0]


def test_codecs_warn_once_with_a_figure_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codecs = Int8(), ErrorFeedback(Sign()), Int8()
    expected = [combined(codec) for codec in codecs]
    assert caplog.messages == [] and machine.describe().versions["numba"] == metadata.version("numba")

    with no_numba(monkeypatch), caplog.at_level(logging.WARNING, "stretto"):
        combined(NoCompression())
        assert caplog.messages == []
        for codec, value in zip(codecs, expected, strict=True):
            assert torch.equal(combined(codec), value)
        assert machine.describe().versions["numba"] == machine.WITHOUT_NUMBA
    [said] = caplog.messages
    assert "ModuleNotFoundError" in said and "5 to 50 times slower" in said and "pip install numba" in said
