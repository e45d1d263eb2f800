"""Writes docs/api.md, the reference of every public name, from signatures and docstrings.

    PYTHONPATH=src python docs/write_api.py

A new public name needs nothing here: it appears with the others of its module, or under "More" if its module is in none of the
groups. A test fails when the page is out of date.

Signatures are those written in this repository: what a class inherits from torch is left out, for it differs between versions.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from torch.optim import Optimizer

import stretto

PAGE = Path(__file__).resolve().parent / "api.md"
BEGINNING = """\
# API

Every public name, as `stretto.NAME`. How the pieces are used together is said on the pages that each section begins with.
(`docs/write_api.py` writes this page from signatures and docstrings: edit those.)
"""
FEW_CHOICES = 6  # up to which the values of an argument are listed


class Group(NamedTuple):
    title: str
    more: str  # where these names are explained
    modules: tuple[str, ...] = ()  # beginnings of the names of the modules they live in, in the order of the page
    names: tuple[str, ...] = ()  # that belong here wherever they live
    brief: bool = False  # one line for each name


GROUPS = (
    Group("Start", "[Running a job](running.md), [GPUs](gpus.md).", ("stretto.api", "stretto.launching", "stretto.timeouts")),
    Group(
        "Train",
        "[Training](training.md), [other libraries](libraries.md), [large batches](large_batches.md).",
        ("stretto.distributing", "stretto.sync_batch_norm", "stretto.optim"),
    ),
    Group("Pipelines", "[A model cut into stages](pipelines.md).", ("stretto.partition",)),
    Group("Models cut over workers", "[Tensor parallelism and meshes](tensor-parallelism.md).", ("stretto.mesh",)),
    Group("Collectives", "[Groups, and the algorithms](collectives.md).", ("stretto.collective_api", "stretto.collectives")),
    Group("torch.distributed", "[The backend](torch-distributed.md).", ("stretto.torch_backend",)),
    Group("Data", "[Checkpoints and data](checkpoints.md).", ("stretto.sampler",)),
    Group("Checkpoints", "[Checkpoints and data](checkpoints.md).", ("stretto.checkpoint",)),
    Group(
        "Strategies",
        "[Which strategy stands for which known system](systems.md).",
        ("stretto.strategy", "stretto.aggregate", "stretto.sync.", "stretto.schedule", "stretto.shard", "stretto.parsing"),
        names=("recipes",),
        brief=True,
    ),
    Group("Codecs", "[Compression](compression.md).", ("stretto.compress",), brief=True),
    Group("Errors", "[What is promised about failures](guarantees.md#failure).", ("stretto.errors",), brief=True),
    Group("More", ""),
)


def group_of(name: str, module: str) -> Group:
    """The group that lists the name, or else its module; the last one takes what no other does."""
    listed = [group for group in GROUPS if name in group.names]
    return next(iter(listed + [group for group in GROUPS if module.startswith(group.modules)]), GROUPS[-1])


def page() -> str:
    public = {name: getattr(stretto, name) for name in stretto.__all__}
    parts = [BEGINNING]
    for group in GROUPS:
        members = [name for name, value in public.items() if group_of(name, getattr(value, "__module__", "")) is group]
        members.sort(key=lambda name: place(group, public[name]))
        if members:
            parts += [f"## {group.title}\n", *([f"{group.more}\n"] if group.more else [])]
            entries = [(line if group.brief else section)(name, public[name]) for name in members]
            parts += ["".join(entries)] if group.brief else entries
    return "\n".join(parts)


def place(group: Group, value: Any) -> tuple[int, str, int]:
    """In the order of the group's modules, and as they stand in the source."""
    if inspect.ismodule(value):
        return len(group.modules), value.__name__, 0
    module = value.__module__
    before = next((index for index, beginning in enumerate(group.modules) if module.startswith(beginning)), len(group.modules))
    return before, module, inspect.getsourcelines(value)[1]


# -- one name ---------------------------------------------------------------------------------------------------------


def line(name: str, value: Any) -> str:
    """An entry of a brief group. A module is followed by its functions."""
    if inspect.ismodule(value):
        functions = [(f"{name}.{each}", function) for each, function in vars(value).items() if _is_own_function(function, value)]
        return f"- `{name}`: {first_paragraph(value)}\n" + "".join(f"  {line(*function)}" for function in functions)
    return f"- `{call(name, value)}`: {about(value)}\n"


def section(name: str, value: Any) -> str:
    """An entry with a heading of its own; a class with its methods."""
    described = "\n\n".join(as_markdown(paragraph) for paragraph in paragraphs(value))
    listed = "".join(f"- `{call(f'.{each}', method)}`: {first_paragraph(method)}\n" for each, method in methods(value))
    return f"### {name}\n\n```\n{call(name, value)}\n```\n\n{described}\n" + (f"\n{listed}" if listed else "")


def about(value: Any) -> str:
    """A class in a file of its own: the file says what the idea is, the class what can be chosen."""
    same_file = [
        each for each in map(stretto.__getattr__, stretto.__all__) if getattr(each, "__module__", "") == value.__module__
    ]
    idea = f"{first_paragraph(sys.modules[value.__module__])} " if inspect.isclass(value) and len(same_file) == 1 else ""
    return idea + first_paragraph(value)


def methods(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of ours defines and describes itself; of a class with `__public__`, those in
    it. Nobody calls those of an optimizer."""
    if not inspect.isclass(value) or issubclass(value, Optimizer):
        return
    for name, member in vars(value).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        shown = name in getattr(value, "__public__", (name,)) and not name.startswith("_")
        if shown and inspect.isfunction(function) and function.__doc__:
            yield name, member if isinstance(member, property) else function


def _is_own_function(value: Any, module: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not value.__name__.startswith("_")


# -- signatures -------------------------------------------------------------------------------------------------------


def call(name: str, value: Any) -> str:
    """How it is written: the name, with its parameters if they are ours to say."""
    if isinstance(value, property) or (inspect.isclass(value) and not _is_ours(value.__init__)):
        return name
    if hasattr(value, "__public__"):  # users do not make it themselves
        return name
    signature = inspect.signature(value)
    shown, before = [], None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            shown.append("*")
        shown.append(argument(parameter, value))
        before = parameter.kind
    if inspect.isgeneratorfunction(inspect.unwrap(value)) and hasattr(value, "__wrapped__"):  # a context manager
        return f"with {name}({', '.join(shown)})"
    returns = "" if inspect.isclass(value) or signature.return_annotation == "None" else f" -> {signature.return_annotation}"
    return f"{name}({', '.join(shown)}){returns}"


def argument(parameter: inspect.Parameter, owner: Any) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    written = f"{stars}{parameter.name}: {annotation(parameter, owner)}"
    if parameter.default is parameter.empty:
        return written
    factory = _factories(owner).get(parameter.name)
    return f"{written} = {literal(parameter.default if factory is None else factory())}"


def annotation(parameter: inspect.Parameter, owner: Any) -> str:
    """As it stands in the source; the name of a few choices is replaced by them."""
    meant = getattr(sys.modules[owner.__module__], str(parameter.annotation), None)
    if get_origin(meant) is Literal and len(get_args(meant)) <= FEW_CHOICES:
        return " | ".join(map(literal, get_args(meant)))
    return str(parameter.annotation)


def literal(value: Any) -> str:
    """`repr`, with double quotes as in the source."""
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


def _is_ours(function: Any) -> bool:
    """Written in this repository, or made by `dataclass` from fields that are."""
    return inspect.isfunction(function) and function.__module__.startswith("stretto")


def _factories(value: Any) -> dict[str, Any]:
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {field.name: field.default_factory for field in fields if field.default_factory is not dataclasses.MISSING}


# -- docstrings -------------------------------------------------------------------------------------------------------


def paragraphs(value: Any) -> list[str]:
    text = inspect.getdoc(value) or ""
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]


def first_paragraph(value: Any) -> str:
    return next((as_markdown(paragraph) for paragraph in paragraphs(value)), "")


def as_markdown(paragraph: str) -> str:
    """Prose on one line; examples and tables as they are."""
    lines = paragraph.splitlines()
    if any(each.startswith((" ", ">>> ", "===")) for each in lines):
        return f"```\n{textwrap.dedent(paragraph)}\n```"  # not marked as Python: then it would have to be formatted as such
    return " ".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
