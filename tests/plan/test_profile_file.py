"""Profiles as files: what was saved is what is loaded, and everything else is refused with a reason."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from stretto.errors import ConfigurationError
from stretto.plan import profile_file
from stretto.plan.profile import ModuleProfile, ParameterProfile, StepProfile, TransferCost
from stretto.plan.profile_file import MAX_BYTES, check, digest_of, load, save

MODEL = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
PROFILE = StepProfile(
    model="Sequential",
    digest=digest_of(MODEL),
    world_size=4,
    steps=3,
    forward_s=0.003,
    backward_s=0.006,
    update_s=0.001,
    modules=(
        ModuleProfile(name="0", forward_s=0.001, backward_s=0.002),
        ModuleProfile(name="1", forward_s=0.002, backward_s=0.004),
    ),
    parameters=(
        ParameterProfile(name="1.weight", num_bytes=12, ready_s=0.004, used_by=1),
        ParameterProfile(name="0.bias", num_bytes=12, ready_s=0.005, used_by=0),
        ParameterProfile(name="0.weight", num_bytes=24, ready_s=0.006),
    ),
    cost=TransferCost(start_s=1e-4, per_byte_s=8e-9),
)


def written(folder: Path, **changes: Any) -> Path:
    """A file that differs from a good one in these entries, which may lie deeper (`parameters__0__ready_s`)."""
    content = json.loads(msgspec.json.encode(PROFILE))
    for place, value in changes.items():
        *steps, last = (int(step) if step.isdigit() else step for step in place.split("__"))
        inner = content
        for step in steps:
            inner = inner[step]
        inner[last] = value
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return path


def test_what_was_saved_is_loaded_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("what was there before")
    save(PROFILE, path)
    assert load(path) == load(str(path)) == PROFILE
    assert os.listdir(tmp_path) == ["profile.json"]
    assert load(written(tmp_path)) == PROFILE


def test_a_profile_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    save(PROFILE, path)
    with pytest.raises(ConfigurationError, match="cannot be written.*folder that exists"):
        save(PROFILE, tmp_path / "nowhere" / "profile.json")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        save(msgspec.structs.replace(PROFILE, steps=9), path)
    assert load(path) == PROFILE and os.listdir(tmp_path) == ["profile.json"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"forward_s": -1.0}, "forward_s is -1.0"),
        ({"forward_s": "long"}, "Expected `float`"),
        ({"cost__per_byte_s": 0}, "per_byte_s is 0"),
        ({"cost__start_s": -1e-9}, "cost.start_s is -1e-09"),
        ({"parameters__0__ready_s": -0.5}, "ready_s of '1.weight' is -0.5"),
        ({"parameters__0__num_bytes": -1}, "num_bytes of '1.weight' is -1"),
        ({"parameters__0__num_bytes": 1 << 70}, "num_bytes"),
        ({"parameters__0__used_by": 2}, "used_by of '1.weight' is 2, of 2 modules"),
        ({"parameters__0__used_by": -1}, "used_by of '1.weight' is -1"),
        ({"parameters__0__name": "0.bias"}, "'0.bias' is there twice"),
        ({"modules__0__name": "1"}, "'1' is there twice"),
        ({"modules__1__backward_s": None}, "Expected `float`"),
        ({"world_size": 0}, "world_size is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1.5}, "Expected `int`"),
        ({"parameters": {}}, "Expected `array`"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(written(tmp_path, **changes))
    assert why in str(refused.value) and "Record the profile again" in str(refused.value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_neither_saved_nor_loaded(number: float, tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(PROFILE, backward_s=number)
    with pytest.raises(ConfigurationError, match="backward_s is"):
        save(wrong, tmp_path / "profile.json")
    assert os.listdir(tmp_path) == []
    for text in ("NaN", "Infinity", "1e999", "-1e999", "null"):
        path = written(tmp_path, forward_s="HERE")
        path.write_text(path.read_text().replace('"HERE"', text))
        with pytest.raises(ConfigurationError, match="not a profile"):
            load(path)


def test_another_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"profile of version 2, and this stretto reads version 1.*\n.*again"):
        load(written(tmp_path, version=2))
    with pytest.raises(ConfigurationError, match="version 7"):  # whatever else a later one may have
        load(written(tmp_path, version=7, parameters="elsewhere"))


def test_a_file_that_is_cut_short_damaged_or_foreign_is_an_error_and_nothing_worse(tmp_path: Path) -> None:
    good = written(tmp_path).read_bytes()
    path = tmp_path / "other.json"
    generator = random.Random(5)
    contents = [good[:length] for length in range(0, len(good), 7)]
    contents += [b"[" * 100_000, b'{"version": 1, "x": ' + b"[" * 100_000, b"\xff\xfe", rb'{"version": 1, "model": "\ud800"}']
    contents += [b"{}", b"[]", b'{"version": 1}', b"1"]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"not a profile that stretto has saved.*\n.*again"):
            load(path)
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            found = load(path)
        except ConfigurationError:
            continue
        assert next(profile_file._faults(found), None) is None  # a digit may have become another one


def test_files_without_end_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    long = tmp_path / "long.json"
    with open(long, "wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ConfigurationError, match=f"longer than {MAX_BYTES:,} bytes"):
        load(long)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="no regular file"):
        load(tmp_path / "pipe")  # nobody ever writes to it
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigurationError, match=r"cannot be read|no regular file"):
            load(missing)


# -- whose profile it is ------------------------------------------------------------------------------------------------


def other_models() -> list[tuple[nn.Module, str]]:
    frozen = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    frozen[0].weight.requires_grad_(False)
    last = nn.Linear(3, 1, bias=False)
    return [
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "'1.bias' is a trained parameter only in the model"),
        (nn.Sequential(nn.Linear(2, 3, bias=False), last), "'0.bias' is a trained parameter only in the profile"),
        (nn.Sequential(nn.Linear(4, 3), last), "'0.weight' has 24 bytes in the profile and 48 in the model"),
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(1, 3, bias=False)), "shape, dtype"),
        (frozen, "'0.weight' is a trained parameter only in the profile"),
    ]


def test_a_profile_is_good_for_its_own_model_and_number_of_workers_alone() -> None:
    check(PROFILE, MODEL, 4)
    check(PROFILE, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)), 4)
    digests = {digest_of(MODEL)}
    for model, difference in other_models():
        with pytest.raises(ConfigurationError) as refused:
            check(PROFILE, model, 4)
        text = str(refused.value)
        assert digest_of(MODEL) in text and digest_of(model) in text and difference in text and "Record a profile" in text
        digests.add(digest_of(model))
    assert len(digests) == 6 and digest_of(MODEL) == digest_of(nn.Sequential(*MODEL))
    assert digest_of(MODEL) != digest_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)).to(torch.float64))
    with pytest.raises(ConfigurationError, match=r"on 4 workers for a job of 2.*\n.*job of 2"):
        check(PROFILE, MODEL, 2)
