"""The scripts of `benchmarks/` say how they are used."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["all_reduce", "compress", "compress_gpu", "compress_loss", "compress_step", "step"])
def test_help_is_printed(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # as dataclasses need it
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0 and "--output" in capsys.readouterr().out
