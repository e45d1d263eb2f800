"""One function in up to three implementations: which of them runs where, and that each kernel that is named exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import stretto
from stretto.compress import backend
from stretto.compress.backend import Backend, accelerated
from stretto.compress.kernels import compiling

FOLDER = Path(stretto.__file__).parent / "compress"


def twice(x: torch.Tensor) -> str:
    return "reference"


@pytest.mark.parametrize(
    ("device", "numba", "triton", "chosen"),
    [
        ("cpu", True, True, "some_cpu.twice"),
        ("cpu", False, True, "reference"),
        ("cuda", True, True, "some_cuda.twice"),
        ("cuda", True, False, "reference"),
        ("meta", True, True, "reference"),
    ],
)
def test_a_device_gets_its_kernel_where_that_can_be_compiled_and_else_the_reference(
    device: str, numba: bool, triton: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "has_numba", lambda: numba)
    monkeypatch.setattr(compiling, "has_triton", lambda: triton)
    monkeypatch.setattr(backend, "_kernel", lambda name: lambda x: name)
    x = SimpleNamespace(device=torch.device(device))

    assert accelerated(cpu="some_cpu.twice", cuda="some_cuda.twice")(twice)(x) == chosen  # type: ignore[arg-type]
    assert Backend(twice)(x) == "reference"  # type: ignore[arg-type]


def named_kernels() -> Iterator[tuple[str, int]]:
    """Every "module.function" that the sources of compress/ name, and how many parameters it takes."""
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in functions.values():
            for call in (one for one in node.decorator_list if isinstance(one, ast.Call) and name_of(one) == "accelerated"):
                yield from ((str(word.value.value), len(node.args.args)) for word in call.keywords)  # type: ignore[attr-defined]
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if name_of(call) == "with_kernels":
                modules = [str(word.value) for word in call.args]  # type: ignore[attr-defined]
                yield from ((f"{module}.{what}", 5) for module in modules for what in ("encode", "decode"))
            elif name_of(call) == "Backend" and isinstance(call.args[0], ast.Name) and call.args[0].id in functions:
                count = len(functions[call.args[0].id].args.args)
                yield from ((str(word.value.value), count) for word in call.keywords)  # type: ignore[attr-defined]


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


@pytest.mark.parametrize(("kernel", "num_parameters"), sorted(set(named_kernels())))
def test_every_kernel_that_is_named_is_there_and_takes_what_its_reference_takes(kernel: str, num_parameters: int) -> None:
    """Read, not imported: Triton's need not be installed."""
    module, _, function = kernel.partition(".")
    tree = ast.parse((FOLDER / "kernels" / f"{module}.py").read_text())
    found = {node.name: len(node.args.args) for node in tree.body if isinstance(node, ast.FunctionDef)}

    assert found.get(function) == num_parameters


def test_kernels_are_named_by_codecs_of_both_devices_and_by_single_functions() -> None:
    kernels = dict(named_kernels())

    assert {"signs_cpu.encode", "sign_cuda.decode", "top_k_cuda.encode", "low_rank_cpu.multiply", "int8_cpu.decode_units"} <= set(
        kernels
    )
    assert len(kernels) > 30
