"""What the documentation says is true: its snippets run, its links lead somewhere, its options exist.

A snippet is executed when an HTML comment on the line before its fence says so (CONTRIBUTING.md has the table of comments).
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from _pytest.mark import ParameterSet

from preloaded import Preloaded
from stretto import cli
from stretto.bench import command as bench_command
from stretto.lab import command as lab_command
from stretto.lab import lab_available

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LONG_PAGES = (  # each starts a dozen jobs, or servers: their snippets run in `make test-slow`
    "running.md",
    "compression.md",
    "lab.md",
    "local-sgd.md",
    "parameter-server.md",
    "scheduling.md",
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SNIPPET_S = 200
TRIES = 3
IN_THE_LAB = "run: root"
FENCE = re.compile(
    r"(?:<!-- (?P<mark>(?:run|file)[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
DETAIL = r"(?:\d+|root|fails|needs \w+)"
MARK = re.compile(rf"|run(?:: {DETAIL}(?:, {DETAIL})*)?|file: \S+")
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Snippet:
    mark: str  # "", "run", "run: 2", "run: fails", "run: root", "run: 2, needs lightning", "file: name.py"
    language: str
    text: str

    @property
    def details(self) -> list[str]:
        return self.mark.partition(": ")[2].split(", ")

    @property
    def needs(self) -> str | None:
        """The package without which it cannot run."""
        return next((detail.removeprefix("needs ") for detail in self.details if detail.startswith("needs ")), None)

    @property
    def runs_everywhere(self) -> bool:
        return self.mark.startswith("run") and self.mark != IN_THE_LAB and self.needs is None

    @property
    def is_file(self) -> bool:
        return self.mark.startswith("file: ")


def snippets(page: Path) -> list[Snippet]:
    found = FENCE.finditer(page.read_text())
    return [Snippet(each["mark"] or "", each["language"], each["text"]) for each in found]


# ---------------------------------------------------------------- running


def pages_that_run() -> list[ParameterSet]:
    return [_quick_or_slow(page) for page in PAGES if any(snippet.runs_everywhere for snippet in snippets(page))]


def pages_that_run_in_the_lab() -> list[ParameterSet]:
    return [_quick_or_slow(page) for page in PAGES if any(snippet.mark == IN_THE_LAB for snippet in snippets(page))]


def _quick_or_slow(page: Path) -> ParameterSet:
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in LONG_PAGES else [])


def pages_that_need_a_library() -> list[ParameterSet]:
    pairs = sorted({(page, snippet.needs) for page in PAGES for snippet in snippets(page) if snippet.needs is not None})
    missing = {library for _, library in pairs if importlib.util.find_spec(library) is None}
    skip = {library: [pytest.mark.skip(reason=f"not installed: {library}")] for library in missing}
    return [pytest.param(page, library, id=f"{page.name}-{library}", marks=skip.get(library, ())) for page, library in pairs]


def environment() -> dict[str, str]:
    """Where `stretto` and `python` are the ones under test, and no job is around."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STRETTO_", "COLUMNS"))}
    here = str(Path(sys.executable).parent)
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return kept | {"PATH": os.pathsep.join([here, os.environ.get("PATH", "")]), "PYTHONPATH": source}


def execute(snippet: Snippet, folder: Path, preloaded: Preloaded) -> None:
    workers = next((int(detail) for detail in snippet.details if detail.isdigit()), 0)
    if snippet.is_file:
        (folder / snippet.details[0]).write_text(patched(snippet.text) if snippet.language == "diff" else snippet.text)
    elif workers:  # as under `stretto run -n 2`, which the snippets of the console prove, and quicker
        assert snippet.language == "python", "only python runs in several workers without a command that says so"
        (folder / "snippet.py").write_text(snippet.text)
        done = preloaded.run(folder / "snippet.py", folder=folder, workers=workers, timeout_s=SNIPPET_S)
        assert done.returncode == 0, f"{snippet.text}\nin {workers} workers ended with\n{done.stdout}{done.stderr}"
    elif snippet.language == "python":
        (folder / "snippet.py").write_text(snippet.text)
        command = "python snippet.py" if snippet.mark == IN_THE_LAB else "stretto run snippet.py"
        check_printed(command, [], folder, shell_for(snippet, preloaded), fails=False)
    else:
        assert snippet.language in ("console", "bash"), f"a snippet in {snippet.language!r} cannot be run"
        for command, shown in commands(snippet):
            check_printed(command, shown, folder, shell_for(snippet, preloaded), fails="fails" in snippet.details)


Shell = Callable[[str, Path], "subprocess.CompletedProcess[str]"]


def shell_for(snippet: Snippet, preloaded: Preloaded) -> Shell:
    """Commands are run by forks of a process that has torch, but for what starts interpreters on the hosts of the lab."""

    def warm(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return preloaded.shell(command, folder=folder, environ=environment(), timeout_s=SNIPPET_S)

    def real(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        whole = ["bash", "-c", command]
        return subprocess.run(
            whole, cwd=folder, env=environment(), capture_output=True, text=True, timeout=SNIPPET_S, check=False
        )

    return real if snippet.mark == IN_THE_LAB else warm


def patched(diff: str) -> str:
    """What a diff makes of the file it is about."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def check_printed(command: str, shown: list[str], folder: Path, shell: Shell, *, fails: bool) -> None:
    """What a failing job prints depends on who ends first, for the launcher waits a second for last words. A machine that stalls
    may take longer than that to take a worker apart: then the job fails again, until what the page shows is seen."""
    for _ in range(TRIES if fails else 1):
        done = shell(command, folder)
        printed = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, f"{command} ended with {done.returncode}:\n{printed}"
        missing = [line for line in shown if comparable(line) not in comparable(printed).splitlines()]
        if not missing:
            return
    raise AssertionError(f"{command}\nshould print:\n{chr(10).join(missing)}\nbut printed:\n{printed}")


def commands(snippet: Snippet) -> Iterator[tuple[str, list[str]]]:
    """Each command with the lines shown below it; bash snippets show none and need no `$`."""
    if snippet.language == "bash":
        yield snippet.text, []
        return
    for part in re.split(r"^\$ ", snippet.text, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, [line for line in shown if line.strip() and line.strip() != "..."]


def comparable(text: str) -> str:
    """Without what differs from run to run: process ids and durations."""
    return re.sub(r"\d+(\.\d+)?", "N", text)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages_that_run())
def test_the_snippets_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path, preloaded: Preloaded) -> None:
    for snippet in snippets(page):
        if snippet.is_file or snippet.runs_everywhere:
            execute(snippet, tmp_path, preloaded)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "library"), pages_that_need_a_library())
def test_the_snippets_that_need_a_library_run_where_it_is_installed(
    page: Path, library: str, tmp_path: Path, preloaded: Preloaded
) -> None:
    for snippet in snippets(page):
        if snippet.is_file or snippet.needs == library:
            execute(snippet, tmp_path, preloaded)


@pytest.mark.processes
def test_the_first_example_of_the_readme_ends_with_the_same_loss_on_one_worker_two_and_four(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    example = next(snippet for snippet in snippets(ROOT / "README.md") if snippet.mark)
    assert example.language == "diff"
    execute(example, tmp_path, preloaded)
    losses = []
    for workers in (0, 2, 4):
        done = preloaded.run(tmp_path / "train.py", folder=tmp_path, workers=workers)
        assert done.returncode == 0, done.stderr
        losses.append(float(done.stdout.removeprefix("loss ")))
    assert losses == pytest.approx([losses[0]] * 3, rel=0.05) and losses[0] < 0.05


@pytest.mark.root
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages_that_run_in_the_lab())
def test_the_snippets_that_need_the_lab_run_where_it_does(page: Path, tmp_path: Path, preloaded: Preloaded) -> None:
    problem = lab_available()
    if problem is not None:
        pytest.skip(problem)
    for snippet in snippets(page):
        if snippet.is_file or snippet.mark == IN_THE_LAB:
            execute(snippet, tmp_path, preloaded)


@pytest.mark.processes
def test_a_page_that_shows_another_output_or_does_not_run_is_found_out(tmp_path: Path, preloaded: Preloaded) -> None:
    lie = Snippet("run", "console", "$ echo 4 apples\n5 pears\n")
    fails = Snippet("run: 2", "python", "import stretto\nstretto.init()\nassert stretto.rank() == 0, 'fails on rank 1'")

    with pytest.raises(AssertionError, match="5 pears"):
        execute(lie, tmp_path, preloaded)
    with pytest.raises(AssertionError, match="AssertionError: fails on rank 1"):
        execute(fails, tmp_path, preloaded)
    execute(Snippet("run", "console", "$ echo 4 apples\n5 apples\n...\n"), tmp_path, preloaded)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_comment_before_a_snippet_is_one_of_those_that_are_listed(page: Path) -> None:
    for snippet in snippets(page):
        assert MARK.fullmatch(snippet.mark), f"{page.name}: <!-- {snippet.mark} --> means nothing; see CONTRIBUTING.md"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_python_snippet_is_python(page: Path) -> None:
    for snippet in snippets(page):
        if snippet.language == "python":
            ast.parse(snippet.text, str(page))


# ---------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if fragment:
            assert fragment in anchors(target), f"{page.name} links to {link}"


# ---------------------------------------------------------------- options


def options() -> dict[str, dict[str, bool]]:
    """For each command: its options, and whether each is followed by a value."""
    made = dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    benches = typer.main.get_command(bench_command.app).commands  # type: ignore[attr-defined]
    made |= {f"bench {name}": command for name, command in benches.items()}
    made["lab"] = typer.main.get_command(lab_command._hosts)
    known: dict[str, dict[str, bool]] = {}
    for name, command in made.items():
        known[name] = {
            option: not getattr(parameter, "is_flag", False)
            for parameter in command.params
            for option in [*parameter.opts, *parameter.secondary_opts]
            if option.startswith("-")
        } | {"--help": False}
    known["lab"]["--name"] = True
    return known


def command_lines(text: str) -> list[list[str]]:
    """What follows `stretto` where a command of it is written, in a snippet or between backticks, word by word."""
    code = [each["text"] for each in FENCE.finditer(text)] + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    lines = [line for each in code for line in each.splitlines()]
    return [line.partition("stretto ")[2].split() for line in lines if re.search(r"(^|\$ |# |: )stretto \w", line)]


def unknown_option(words: list[str], known: dict[str, dict[str, bool]]) -> str | None:
    """The first option that does not exist; what follows the script or `--` is not ours."""
    if words[:1] == ["bench"]:
        words = [" ".join(words[:2]), *words[2:]]
    if not words or words[0] not in known:
        return None
    rest = iter(words[1:])
    for word in rest:
        if word in ("--", "#", ">", "|") or not word.startswith("-"):
            return None
        option, has_value, _ = word.partition("=")
        if option not in known[words[0]]:
            return word
        if known[words[0]][option] and not has_value:
            next(rest, None)
    return None


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_command_lines_use_options_that_exist(page: Path) -> None:
    known = options()
    for words in command_lines(page.read_text()):
        assert words[0] in known, f"{page.name}: there is no `stretto {words[0]}`"
        assert unknown_option(words, known) is None, f"{page.name}: stretto {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_options_that_are_mentioned_exist(page: Path) -> None:
    everywhere = {option for each in options().values() for option in each}
    for code in re.findall(r"`(--[\w-]+)[^`\n]*`", FENCE.sub("", page.read_text())):
        assert code in everywhere, f"{page.name} mentions {code}"


def test_an_option_that_does_not_exist_is_found_out() -> None:
    known = options()

    assert unknown_option(["run", "-n", "2", "--turbo", "x.py"], known) == "--turbo"
    assert unknown_option(["run", "-n", "2", "x.py", "--turbo"], known) is None
    assert unknown_option(["bench", "allreduce", "--sizes", "4K", "--fast"], known) == "--fast"
    assert command_lines("```console\n$ stretto run --turbo x.py\n```") == [["run", "--turbo", "x.py"]]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_nobody_is_told_to_install_stretto_from_an_index_that_does_not_have_it(page: Path) -> None:
    assert not re.search(r"pip install [^`\n]*\bstretto\b", page.read_text())


def test_the_measured_rows_of_the_pages_are_those_of_the_committed_results() -> None:
    """Figures are pasted; this keeps them what was measured."""
    pages = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "choosing.md")
    measured = "\n".join(
        part.split("<!-- end of measured -->")[0] for page in pages for part in page.read_text().split("<!-- measured -->")[1:]
    )
    rows = [line for line in measured.splitlines() if line.startswith("| ") and re.search(r"\d", line)]
    committed = {line for path in (ROOT / "benchmarks" / "results").glob("*.md") for line in path.read_text().splitlines()}
    assert len(rows) > 100
    assert [row for row in rows if row not in committed] == []
