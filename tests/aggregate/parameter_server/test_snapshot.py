"""Snapshots: what was written is read; a file that is cut, altered or hostile is an error; an old one survives a failed write."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregate.parameter_server.optimizers import gradient, start
from stretto.aggregate.parameter_server import snapshot
from stretto.aggregate.parameter_server.range_state import RangeState
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.snapshot import (
    DIGEST_BYTES,
    MAGIC,
    RECORD,
    START,
    VERSION,
    read_snapshot,
    write_snapshot,
)
from stretto.errors import CheckpointError, ConfigurationError

RANGES = [("layer.weight[0:10]", b"abc" * 50), ("layer.bias", b""), ("häßlich", bytes(300))]
HEADER = b"clocks"


def read(path: Path) -> tuple[bytes, list[tuple[str, bytes]]]:
    with read_snapshot(path) as found:
        return found.header, list(found.ranges)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_snapshot(tmp_path / "server.snapshot", HEADER, RANGES)
    return tmp_path / "server.snapshot"


def sealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def record(name: bytes, data: bytes) -> bytes:
    return RECORD.pack(len(name), len(data)) + name + data


BEGIN = START.pack(MAGIC, VERSION)


# -- what was written is read ---------------------------------------------------------------------------------------------


def test_what_was_written_is_read(path: Path) -> None:
    assert read(path) == (HEADER, RANGES)
    assert os.listdir(path.parent) == [path.name]


def test_a_server_goes_on_from_its_snapshot_with_the_same_bits(tmp_path: Path) -> None:
    adam = OptimizerSpec("Adam", {"lr": 0.1})
    states = {f"range {number}": RangeState(start(), adam) for number in range(3)}
    for step, state in enumerate(states.values()):
        state.apply(gradient(step), {})
    write_snapshot(tmp_path / "file", b"", ((name, state.export()) for name, state in states.items()))
    resumed = {name: RangeState(torch.zeros(1000), adam) for name in states}
    with read_snapshot(tmp_path / "file") as found:
        for name, data in found.ranges:
            resumed[name].install(memoryview(data))
    for name, state in states.items():
        state.apply(gradient(7), {})
        resumed[name].apply(gradient(7), {})
        assert resumed[name].export() == state.export()


def test_a_snapshot_without_ranges_has_its_header(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "file", memoryview(HEADER), [])
    assert read(tmp_path / "file") == (HEADER, [])


def test_a_new_snapshot_takes_the_place_of_the_old_one_also_while_that_is_read(path: Path) -> None:
    with read_snapshot(path) as found:
        write_snapshot(path, b"new", [])
        assert list(found.ranges) == RANGES
    assert read(path) == (b"new", [])


# -- a write that fails leaves the old one -----------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_snapshot(path: Path) -> None:
    def failing() -> Iterator[tuple[str, bytes]]:
        yield RANGES[0]
        raise RuntimeError("the server was stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_snapshot(path, b"new", failing())
    assert read(path) == (HEADER, RANGES) and os.listdir(path.parent) == [path.name]


def test_two_ranges_of_one_name_cannot_be_written(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'twice'"):
        write_snapshot(path, b"new", [("twice", b""), ("twice", b"")])
    assert read(path) == (HEADER, RANGES)


def test_what_could_not_be_read_again_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_HEADER_BYTES", 10)
    monkeypatch.setattr(snapshot, "MAX_RANGE_BYTES", 10)
    for header, name, data in ((b"", "x" * 70_000, b""), (bytes(11), "x", b""), (b"", "x", bytes(11))):
        with pytest.raises(ConfigurationError, match="can be read again"):
            write_snapshot(path, header, [(name, data)])
    monkeypatch.undo()
    assert read(path) == (HEADER, RANGES)


def test_a_folder_that_is_not_there_is_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere.*cannot be written"):
        write_snapshot(tmp_path / "nowhere" / "file", b"", [])
    with pytest.raises(CheckpointError, match="nowhere.*cannot be read"):
        read(tmp_path / "nowhere" / "file")


# -- files that no server has written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin as one"),
        (MAGIC, "does not begin as one"),
        (BEGIN, "does not begin as one"),
        (sealed(b"PK" + BEGIN[2:] + record(b"", b"")), "does not begin as one"),
        (sealed(START.pack(MAGIC, 2) + record(b"", b"")), "version 2"),
        (BEGIN + record(b"", b"") + bytes(DIGEST_BYTES), "checksum"),
        (sealed(BEGIN), "a record has 0 bytes"),
        (sealed(BEGIN + b"123"), "a record has 3 bytes"),
        (sealed(BEGIN + RECORD.pack(0, 1 << 63)), "are left"),
        (sealed(BEGIN + RECORD.pack(9, 0)), "are left"),
        (sealed(BEGIN + record(b"range", b"")), "a header is expected"),
        (sealed(BEGIN + record(b"", b"") + RECORD.pack(1, 1) + b"x"), "are left"),
        (sealed(BEGIN + record(b"", b"") + record(b"\xff", b"")), "no text"),
        (sealed(BEGIN + record(b"", b"") + 2 * record(b"twice", b"")), "two ranges"),
    ],
)
def test_a_file_that_no_server_has_written_is_an_error(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path / "file")
    assert "Resume from an older snapshot" in str(caught.value)


def test_a_record_longer_than_allowed_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_RANGE_BYTES", 299)
    with pytest.raises(CheckpointError, match="300 bytes is announced"):
        read(path)
    monkeypatch.setattr(snapshot, "MAX_HEADER_BYTES", 5)
    with pytest.raises(CheckpointError, match="6 bytes is announced"):
        read(path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_an_error_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file")
    with pytest.raises(CheckpointError, match="no regular file"):
        read(tmp_path / "file")


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_snapshot(path, HEADER, [("range", bytes(1 << 20))])
    with read_snapshot(path) as found:
        os.truncate(path, 1 << 19)
        with pytest.raises(CheckpointError, match="shorter"):
            list(found.ranges)


def test_an_error_of_the_program_that_reads_stays_its_own(path: Path) -> None:
    with pytest.raises(FileNotFoundError), read_snapshot(path):
        open("/nowhere").close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_a_file_with_any_byte_altered_is_an_error(path: Path, place: int, change: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= change
    altered = path.with_name("altered")
    altered.write_bytes(content)
    with pytest.raises(CheckpointError):
        read(altered)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, 10_000))
def test_a_file_that_was_cut_anywhere_is_an_error(path: Path, length: int) -> None:
    content = path.read_bytes()
    cut = path.with_name("cut")
    cut.write_bytes(content[: length % len(content)])
    with pytest.raises(CheckpointError):
        read(cut)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=100))
def test_any_bytes_with_a_right_checksum_are_read_or_an_error(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "file").write_bytes(sealed(BEGIN + body))
    try:
        header, ranges = read(tmp_path / "file")
    except CheckpointError:
        return
    assert record(b"", header) + b"".join(record(name.encode(), data) for name, data in ranges) == body
