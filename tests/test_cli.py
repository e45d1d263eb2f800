"""The `stretto` command itself: what it offers, what it prints, how fast it is there."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from preloaded import Preloaded
from stretto import cli


def stretto(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stretto", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_every_command() -> None:
    done = stretto("--help")

    assert done.returncode == 0
    for name in ("run", "trace", "report", "doctor", "secret", "version", "lab", "bench"):
        assert re.search(rf"\b{name}\b", done.stdout), name
    assert "wait" not in done.stdout  # no strategy of this version lets workers go on without waiting for one another


def test_a_secret_is_64_hexadecimal_characters_and_never_the_same() -> None:
    first, second = stretto("secret").stdout, stretto("secret").stdout

    assert re.fullmatch(r"[0-9a-f]{64}\n", first) and first != second


def test_a_secret_written_to_a_file_is_readable_to_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "job.secret"
    with path.open("w") as file:
        subprocess.run([sys.executable, "-m", "stretto", "secret"], stdout=file, timeout=60, check=True)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 65


def test_version_is_printed() -> None:
    asked, by_option = stretto("version"), stretto("--version")

    assert re.fullmatch(r"stretto \d+\.\d+\S*\n", asked.stdout) and by_option.stdout == asked.stdout
    assert asked.returncode == by_option.returncode == 0


def test_doctor_speaks_json_too(tmp_path: Path, preloaded: Preloaded) -> None:
    done = preloaded.shell("stretto doctor --json", folder=tmp_path)

    assert done.returncode == 0 and "python" in json.loads(done.stdout)["versions"]


def test_ctrl_c_while_the_command_is_being_imported_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal, sys\nsys.stdout.write('interrupted\\n')\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "stretto", "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ, cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


def test_the_launcher_does_not_import_torch() -> None:
    code = "import stretto.cli, stretto.launching.launch, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments", [["--hosts", "4", "--", "python", "x.py", "--", "-n"], ["--", "true"], ["cut", "1"], ["--help"], []]
)
def test_delegated_commands_get_their_command_line_untouched(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(cli, "delegate", lambda name, given: seen.append((name, given)))
    cli.app(args=["lab", *arguments], standalone_mode=False)

    assert seen == [("lab", arguments)]


def test_our_errors_are_messages_and_not_tracebacks() -> None:
    done = stretto("run", "no-such-file.py")

    assert done.returncode == 2 and done.stderr.startswith("stretto: ") and "Traceback" not in done.stderr
