"""Lines from pieces: whatever the pieces are, each line comes out once, whole and with its prefix."""

from __future__ import annotations

import errno
import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stretto.launching.output import HOLD_S, LONGEST, STDERR, STDOUT, Lines, Screen, prefix_of, wants_colour


def feed_all(pieces: list[bytes]) -> bytes:
    lines = Lines(b"[0] ")
    return b"".join(lines.feed(piece, now=0.0) for piece in pieces) + lines.close()


def test_a_line_in_pieces_comes_out_when_its_end_has_come() -> None:
    lines = Lines(b"[0] ")

    assert lines.feed(b"one", 0.0) == b""
    assert lines.feed(b" line\nand", 0.1) == b"[0] one line\n"
    assert lines.feed(b" another\n\n", 0.2) == b"[0] and another\n[0] \n"
    assert lines.close() == b""


@given(
    some.lists(some.text(some.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)),
    some.data(),
)
def test_where_the_pieces_are_cut_makes_no_difference(texts: list[str], data: some.DataObject) -> None:
    whole = "".join(f"{text}\n" for text in texts).encode()
    cuts = sorted(data.draw(some.lists(some.integers(0, len(whole)), max_size=6)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    assert feed_all(pieces) == b"".join(f"[0] {text}\n".encode() for text in texts)


def test_text_without_a_newline_is_shown_after_a_while_and_only_once() -> None:
    lines = Lines(b"[0] ")
    assert lines.feed(b"name? ", 10.0) == b""

    assert lines.overdue(10.0 + HOLD_S / 2) == b""
    assert lines.overdue(10.0 + HOLD_S) == b"[0] name? \n"
    assert lines.overdue(20.0) == lines.close() == b""


def test_of_a_progress_bar_only_the_latest_state_is_shown() -> None:
    lines = Lines(b"[0] ")
    shown = b"".join(lines.feed(b"\r%d%%" % percent, 0.01 * percent) for percent in range(51))
    assert shown == b""

    assert lines.overdue(HOLD_S) == b"[0] 50%\n"
    assert lines.feed(b"\r99%\r100%\n", 1.1) == b"[0] 100%\n"


def test_windows_line_ends_are_line_ends_even_when_cut_in_two() -> None:
    assert feed_all([b"one\r\ntwo\r", b"\nthree"]) == b"[0] one\n[0] two\n[0] three\n"


def test_a_very_long_line_is_cut_between_characters() -> None:
    text = "ä" * LONGEST  # two bytes each
    out = feed_all([b"x" + text.encode()])

    pieces = out.decode().splitlines()  # decodes: no character was cut
    assert all(piece.startswith("[0] ") and len(piece.encode()) <= LONGEST + 4 for piece in pieces)
    assert "".join(piece[4:] for piece in pieces) == "x" + text


def test_bytes_that_are_not_text_become_replacement_characters() -> None:
    assert feed_all([b"a\xffb\n", b"\xc3"]).decode() == "[0] a\ufffdb\n[0] \ufffd\n"


@pytest.mark.parametrize(("rank", "width", "colour", "prefix"), [("3", 2, None, "[ 3] "), ("3", 1, 3, "\x1b[35m[3]\x1b[0m ")])
def test_prefixes_line_up_and_are_coloured_by_rank(rank: str, width: int, colour: int | None, prefix: str) -> None:
    assert prefix_of(rank, width, colour) == prefix.encode()


def test_no_color_is_respected() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert wants_colour(Terminal(), {"TERM": "xterm"})
    assert not wants_colour(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert not wants_colour(io.StringIO(), {"TERM": "xterm"})


REALLY_WRITE = os.write


class Descriptors:
    """What was written to 1 and 2, each of whose next writes may fail or be cut short."""

    def __init__(self) -> None:
        self.written = {STDOUT: b"", STDERR: b""}
        self.planned: dict[int, list[int]] = {STDOUT: [], STDERR: []}  # > 0: so many bytes; < 0: that error

    def write(self, target: int, data: bytes) -> int:
        if target not in self.written:
            return REALLY_WRITE(target, data)
        outcome = self.planned[target].pop(0) if self.planned[target] else len(data)
        if outcome < 0:
            raise OSError(-outcome, os.strerror(-outcome))
        self.written[target] += bytes(data[:outcome])
        return outcome


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT])
@pytest.mark.parametrize("target", [STDOUT, STDERR])
def test_output_that_cannot_be_written_is_said_to_be_lost_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, number: int, target: int
) -> None:
    descriptors, other = Descriptors(), STDOUT + STDERR - target
    monkeypatch.setattr(os, "write", descriptors.write)
    descriptors.planned[target] = [6, 3, -number, -number, -number]  # one block, half a line, then nothing
    screen = Screen()
    screen.start()
    for block in (b"[0] 1\n", b"[0] 22\n", b"[0] 333\n", b"[0] 4444\n", b"[0] 5\n"):
        screen.write(target, block)
    screen.close(give_up=lambda: False)

    assert descriptors.planned[target] == []  # all of the faults happened
    assert not screen.broken and screen.lost == {}
    assert descriptors.written[target] == (
        b"[0] 1\n[0]\nstretto: some output (24 bytes) could not be written and is missing here\n[0] 5\n"
    )
    said = descriptors.written[other].decode()
    assert said.count("cannot be written") == 1 and os.strerror(number) in said and "the job goes on" in said


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ECONNRESET])
def test_a_reader_that_has_gone_ends_the_output(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    descriptors = Descriptors()
    monkeypatch.setattr(os, "write", descriptors.write)
    descriptors.planned[STDOUT] = [-number]
    screen = Screen()
    screen.start()
    screen.write(STDOUT, b"one\n")
    screen.write(STDOUT, b"two\n")
    screen.close(give_up=lambda: False)

    assert screen.broken and descriptors.written == {STDOUT: b"", STDERR: b""}
