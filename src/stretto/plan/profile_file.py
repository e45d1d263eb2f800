"""A profile as a file: JSON, written whole or not at all, and refused unless every number in it makes sense.

A profile says by a digest which model it was recorded from, so that a plan is never made for a model from another's times.

A file may come from anywhere. It is read up to `MAX_BYTES`, decoded into plain structs, and checked as a whole before anybody
sees it; what is wrong with it is a `ConfigurationError`.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from torch import nn

from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile

VERSION: Final = 1
MAX_BYTES: Final = 16 << 20  # about 150,000 parameters
MOST: Final = 1 << 62  # bytes of a parameter, workers, steps: what is above is no count of anything


class _AnyVersion(msgspec.Struct):
    version: int


def save(profile: StepProfile, path: str | Path) -> None:
    """Make `path` hold the profile. If that cannot be done, what was there before is still there."""
    if wrong := next(_faults(profile), None):
        raise ConfigurationError(
            f"saving a profile of {profile.model}: {wrong}, so it describes no step that was ever measured.\n"
            f"Save what StepRecorder.profile() has returned."
        )
    path = Path(path)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")  # several workers may write the same file
    try:
        try:
            with open(part, "xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(profile)))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as problem:
        raise ConfigurationError(
            f"saving a profile to {path}: it cannot be written ({problem.strerror}). "
            f"Name a file in a folder that exists and that you may write to."
        ) from problem


def load(path: str | Path) -> StepProfile:
    """The profile in this file, checked."""
    content = _content(Path(path))
    try:
        version = msgspec.json.decode(content, type=_AnyVersion).version
        if version != VERSION:
            raise ConfigurationError(
                f"{path} is a profile of version {version}, and this stretto reads version {VERSION}: its numbers may mean "
                f"something else.\nRecord the profile again with this stretto."
            )
        profile = msgspec.json.decode(content, type=StepProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise _no_profile(path, str(problem)) from problem
    if wrong := next(_faults(profile), None):
        raise _no_profile(path, wrong)
    return profile


def _content(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not keep us
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise _no_profile(path, "it is no regular file")
            content = file.read(MAX_BYTES + 1)
    except OSError as problem:
        raise ConfigurationError(
            f"loading a profile from {path}: it cannot be read ({problem.strerror}). Name a file that was saved as a profile."
        ) from problem
    if len(content) > MAX_BYTES:
        raise _no_profile(path, f"it is longer than {MAX_BYTES:,} bytes, more than a profile of any model has")
    return content


def _no_profile(path: str | Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is not a profile that stretto has saved ({why[:300]}). It is damaged, cut short, or something else.\n"
        f"Record the profile again, or name another file."
    )


def _faults(profile: StepProfile) -> Iterator[str]:
    """What no recorded profile has, in words."""
    for what, seconds in _times(profile):
        if not (math.isfinite(seconds) and seconds >= 0):
            yield f"{what} is {seconds}"
    if profile.cost.per_byte_s == 0:
        yield "cost.per_byte_s is 0"
    for what, count in (("world_size", profile.world_size), ("steps", profile.steps)):
        if not 1 <= count <= MOST:
            yield f"{what} is {count}"
    for parameter in profile.parameters:
        if not 0 <= parameter.num_bytes <= MOST:
            yield f"num_bytes of {parameter.name[:100]!r} is {parameter.num_bytes}"
        if parameter.used_by is not None and not 0 <= parameter.used_by < len(profile.modules):
            yield f"used_by of {parameter.name[:100]!r} is {parameter.used_by}, of {len(profile.modules)} modules"
    for kind in (profile.modules, profile.parameters):
        twice = [name for name, count in Counter(each.name for each in kind).items() if count > 1]
        if twice:
            yield f"{twice[0][:100]!r} is there twice"


def _times(profile: StepProfile) -> Iterator[tuple[str, float]]:
    for name in ("forward_s", "backward_s", "update_s"):
        yield name, getattr(profile, name)
    yield "cost.start_s", profile.cost.start_s
    yield "cost.per_byte_s", profile.cost.per_byte_s
    for module in profile.modules:
        yield f"forward_s of {module.name[:100]!r}", module.forward_s
        yield f"backward_s of {module.name[:100]!r}", module.backward_s
    for parameter in profile.parameters:
        yield f"ready_s of {parameter.name[:100]!r}", parameter.ready_s


# -- whose profile it is ------------------------------------------------------------------------------------------------


def digest_of(model: nn.Module) -> str:
    """16 hexadecimal digits that two models share if their parameters have the same names, shapes and dtypes, in the same order,
    and the same ones are trained."""
    text = "".join(f"{name!r} {tuple(p.shape)} {p.dtype} {p.requires_grad}\n" for name, p in model.named_parameters())
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def check(profile: StepProfile, model: nn.Module, world_size: int) -> None:
    """Refuse a profile of another model or of another number of workers."""
    digest = digest_of(model)
    if profile.digest != digest:
        raise ConfigurationError(
            f"a profile of {profile.model[:100]} (digest {profile.digest[:100]}) for {type(model).__name__} (digest {digest}): "
            f"{_first_difference(profile, model)}. Times of another model say nothing about this one.\n"
            f"Record a profile of this model."
        )
    if profile.world_size != world_size:
        raise ConfigurationError(
            f"a profile of {profile.model[:100]} on {profile.world_size} workers for a job of {world_size}: what a transfer "
            f"costs depends on their number.\nRecord a profile in a job of {world_size}."
        )


def _first_difference(profile: StepProfile, model: nn.Module) -> str:
    """Between the parameters that are trained, as far as a profile knows them."""
    theirs = {parameter.name: parameter.num_bytes for parameter in profile.parameters}
    ours = {name: p.numel() * p.element_size() for name, p in model.named_parameters() if p.requires_grad}
    for name in [*ours, *theirs]:
        there, here = theirs.get(name), ours.get(name)
        if there is None or here is None:
            return f"{name[:100]!r} is a trained parameter only in the {'model' if there is None else 'profile'}"
        if there != here:
            return f"{name[:100]!r} has {there:,} bytes in the profile and {here:,} in the model"
    return "their parameters differ in shape, dtype, order or in which are frozen"
