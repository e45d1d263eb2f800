"""A race: what is computed from its runs, and its step rates in virtual time."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A report of three contenders, of which one has failed and one has been killed in part: `made(race)`."""
    report, worker = module("race_report", monkeypatch), module("race_worker", monkeypatch)

    def run(name: str, per_s: float, *, seconds: int = 40, killed: bool = False, halved_from: int = 99) -> Any:
        """So many steps a second (half of that from some second on), and a loss of 5 - 0.02 for each of them."""
        marks = [(float(s), int(per_s * (min(s, halved_from) + max(0, s - halved_from) / 2))) for s in range(seconds + 1)]
        ranks = [worker.RankRun(steps=marks[-1][1], seconds=float(seconds), marks=marks, num_bytes=1000 * marks[-1][1])] * 4
        curve = [(at_s, steps, 5 - 0.02 * steps) for at_s, steps in marks]
        own = [loss + 0.5 for _, _, loss in curve]
        if killed:
            ranks = [*ranks[:2], None, ranks[3]]
        return report.RaceRun(contender=name, seed=0, killed=killed, ranks=ranks, curve=curve, own=own)

    def race(*runs: Any, killed: int | None = None) -> Any:
        from stretto.bench.machine import describe

        contenders = {each.contender: worker.Contender() for each in runs}
        settings = report.RaceSettings(
            name="rho10", contenders=contenders, seeds=[0], run_s=40.0, compute_s=0.1, rate="1mbit", killed=killed,
            kill_at_s=20.0, rho=10.0,
        )  # fmt: skip
        return report.RaceReport(settings=settings, machine=describe(), date="2026-11-18", num_parameters=10, runs=list(runs))

    race.run = run  # type: ignore[attr-defined]
    race.failed = lambda name: report.RaceRun(contender=name, seed=0, failed="a\nImportError: no such wheel")  # type: ignore[attr-defined]
    return race


def test_a_contender_that_steps_five_times_as_often_is_five_times_as_soon(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = module("race_report", monkeypatch)
    found = made(made.run("DDP", 1.0), made.run("fast", 5.0), made.run("no communication", 11.0))

    assert report.against(found, "fast", "DDP") == pytest.approx([5.0])
    assert report.rho(found) == pytest.approx([10.0])
    assert report.sooner(found, "DDP") == [1.0]
    assert report.sooner(found, "fast")[0] == pytest.approx(5.0, rel=0.2)  # the mean of three seconds is late by one
    assert report.sooner(made(made.run("DDP", 5.0), made.run("slow", 1.0)), "slow") == [None]
    assert report.slopes(found)[0] == pytest.approx(0.16 / 4.54, rel=0.02)


def test_without_communication_workers_are_judged_by_weights_of_their_own(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report, text = module("race_report", monkeypatch), module("race_text", monkeypatch)
    found = made(made.run("DDP", 1.0), made.run("local", 2.0), made.run("no communication", 2.0))

    (ours,), (alone,) = report.sooner(found, "local"), report.sooner(found, "no communication")
    assert ours == pytest.approx(2.0, rel=0.1) and alone < 1.1  # 25 steps more for the half that their own loss lies higher
    assert report.sooner(found, "no communication", by_mean=True) == [ours]
    page = "\n".join(text.as_markdown(found, "python benchmarks/race.py"))
    assert f"sooner: {ours:.2f} (each seed)" in page
    assert f"| 3.440 | 3.940 | {alone:.2f} |" in page


def test_the_loss_of_workers_that_differ_is_found_for_each_and_for_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, worker = module("race_report", monkeypatch), module("race_worker", monkeypatch)
    monkeypatch.setattr(report, "validate", lambda model, weights, text: float(weights.square().sum()))
    weights = torch.tensor([[1.0, 2.0], [1.0, 4.0]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]])  # alike at first
    for rank, each in enumerate(weights):
        torch.save(each, tmp_path / f"{rank}.pt")
    rank_run = worker.RankRun(steps=1, seconds=1.0, marks=[(0.0, 0), (1.0, 1)], num_bytes=0)
    run = report.with_losses(report.RaceRun(contender="sgp()", seed=0, ranks=[rank_run, rank_run]), tmp_path)

    assert run.curve == [(0.0, 0.0, 5.0), (1.0, 1.0, 5.0)] and run.own == [5.0, (17.0 + 1.0) / 2]


def test_workers_have_parts_of_the_text_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = module("race_worker", monkeypatch)
    text = torch.arange(4 * worker.PART_BYTES + 7)
    parts = [worker.part_of(text, rank, 4) for rank in range(4)]

    assert [len(part) for part in parts] == [worker.PART_BYTES] * 4
    assert len(set(torch.cat(parts).tolist())) == 4 * worker.PART_BYTES


def test_the_weights_of_a_moment_are_those_that_all_workers_had_then(monkeypatch: pytest.MonkeyPatch) -> None:
    report = module("race_report", monkeypatch)
    fast = [(0.5 * number, number) for number in range(9)]
    slow = [(1.6 * number, number) for number in range(3)]  # its last mark is at 3.2 s

    found = report.moments([fast, slow, fast])
    assert [fast[first][0] for first, _, _ in found] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert [slow[second][0] for _, second, _ in found] == [0.0, 0.0, 1.6, 1.6, 1.6, 3.2, 3.2]
    assert all(first == third for first, _, third in found)


def test_survivors_are_compared_with_themselves_undisturbed(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = module("race_report", monkeypatch)
    found = made(made.run("sgp()", 4.0), made.run("sgp()", 4.0, killed=True, halved_from=20), killed=2)

    assert report.after_kill(found, "sgp()") == pytest.approx([0.5])
    assert report.loss_after_kill(found, "sgp()")[0] == pytest.approx((5 - 0.02 * 118) / (5 - 0.02 * 156), rel=0.01)


def test_one_that_did_not_run_misses_its_claims_and_the_reason_is_said(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = module("race_text", monkeypatch)
    runs = [made.run("DDP", 1.0), made.run("sgp()", 2.0), made.run("no communication", 11.0)]
    found = made(*runs, made.failed("diloco(every=20)"))
    page = "\n".join(text.as_markdown(found, "python benchmarks/race.py"))

    assert "| diloco(every=20): reaches DDP's loss sooner, x | 4 | none | **missed** |" in page
    assert "| sgp(): steps per second, x DDP | 1.3 | 2.00 | met |" in page
    assert "- diloco(every=20): `ImportError: no such wheel`" in page
    assert "DDP communicates 10.0 times as long as it computes" in page


def test_the_picture_of_a_race_names_every_contender(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plots = module("race_plots", monkeypatch)
    found = made(made.run("DDP", 1.0), made.run("a < b", 1.4), made.run("no communication", 11.0))
    root = ElementTree.fromstring(plots.picture(found))
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]

    assert "DDP" in words and "a < b" in words and "no communication, own weights" in words


def test_in_virtual_time_a_step_takes_what_its_messages_take(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = module("race_simulate", monkeypatch)
    monkeypatch.setattr(simulated, "STEPS", 8)
    monkeypatch.setattr(simulated, "num_parameters", lambda: 30_000)
    size, num_bytes = 4, 120_000
    link = simulated.model_of(size).default
    carry_s = num_bytes * link.seconds_for(1)

    def seconds(program: Any) -> float:
        return float(1 / simulated.steps_per_second(size, program))

    assert seconds(simulated.alone) == pytest.approx(0.085)
    assert 1.5 * carry_s == pytest.approx(10 * 0.085)  # what DDP's bytes take
    late = simulated.partial(simulated.gossip, graph=simulated.OnePeerExponential(), num_bytes=num_bytes)
    assert seconds(late) == pytest.approx(0.085 + 0.05 + carry_s, rel=1e-3)
    ring = seconds(simulated.ddp)  # 6 hops of a quarter and a latency each; its only bucket leaves when all gradients are there
    assert ring == pytest.approx(0.085 + 6 * (carry_s / 4 + 0.05), rel=1e-2)
    local = simulated.partial(simulated.local, algorithm="ring")
    monkeypatch.setattr(simulated, "EVERY", 4)
    assert seconds(local) == pytest.approx(0.085 + (6 * (carry_s / 4 + 0.05)) / 4, rel=1e-2)
    monkeypatch.setattr(simulated, "PERIOD", 8)
    assert seconds(simulated.partial(simulated.streaming, algorithm="direct", overlap=2)) == pytest.approx(0.085)
    assert seconds(simulated.partial(simulated.streaming, algorithm="ring", overlap=1)) > 0.085 + 0.05
