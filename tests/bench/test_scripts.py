"""The scripts of `benchmarks/` say how they are used, and refuse what they cannot measure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from stretto.errors import ConfigurationError

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # as dataclasses need it
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(
    "name", ["all_reduce", "before_after", "compress", "compress_gpu", "compress_loss", "compress_step", "step", "strangers"]
)
def test_help_is_printed(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(name, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0 and "--output" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["compress_step", "step"])
def test_a_cpu_is_never_measured_as_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="torch sees no GPU"):
        script_of(name, monkeypatch).main(["--device", "cuda", "--rounds", "1"])


@pytest.mark.parametrize("name", ["compress_step", "step", "strangers"])
def test_no_rounds_are_nothing_to_report(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="nothing to report"):
        script_of(name, monkeypatch).main(["--rounds", "0"])


def test_a_codec_that_has_no_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="Int9: there is no such row. Write some of Float16,"):
        script_of("compress_step", monkeypatch).main(["--codecs", "Int8,Int9"])
