"""Workers that reach each other one to one: who is here, who has finished, died, or come back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aggregate.peers.returning_peers import come_back, kill, newcomer
from preloaded import Preloaded
from stretto.aggregate.peers.network import PeerNetwork, peer_network_of
from stretto.aggregate.peers.until_quit import PeerSays, QuitPeers, UntilQuit
from stretto.errors import ConfigurationError, StrettoError
from stretto.job import Job
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage
from stretto.testing import run_jobs
from stretto.testing.virtual_network import VirtualNetwork

PATIENCE_S = 20.0


class Said(msgspec.Struct, frozen=True):
    """Not tagged: any struct will do."""

    text: str


class Talk(Machine):
    """Says something to all, and answers when it has heard from all that are here."""

    header_type = Said

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.here = set(range(size)) - {rank}
        self.heard: dict[int, list[str]] = {}
        self.views: list[tuple[str, int, int]] = []
        self.asked: list[int] = []

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        if request == "heard":  # by everybody that is here
            self.asked.append(ticket)
            return self._answer()
        if request == "views":
            return [Reply(ticket, list(self.views))]
        return [*(SendMessage(to, Said(str(request))) for to in sorted(self.here)), Reply(ticket)]

    def on_message(self, now: float, source: int, header: Said, payload: memoryview) -> Actions:
        self.heard.setdefault(source, []).append(header.text)
        return self._answer()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self.here = (self.here | set(joined)) - set(left)
        self.views += [("joined", rank, generation) for rank in joined] + [("left", rank, 0) for rank in left]
        return self._answer()

    def _answer(self) -> Actions:
        if self.here - self.heard.keys():
            return []
        asked, self.asked = self.asked, []
        return [Reply(ticket, {rank: list(texts) for rank, texts in sorted(self.heard.items())}) for ticket in asked]


class Owner:
    """Of a machine: a model."""


def talk(network: PeerNetwork, job: Job, owner: object, about: str = "talk") -> Any:
    return network.begin(Talk(job.rank, job.world_size), owner, about=about)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_workers_hear_each_other_on_a_channel_for_each_model(size: int) -> None:
    def program(job: Job) -> Any:
        network, heard = peer_network_of(job), []
        assert peer_network_of(job) is network and network.living == [rank for rank in range(size) if rank != job.rank]
        for model in ("first", "second"):  # one after the other
            owner = Owner()
            running = talk(network, job, owner, model)
            network.wait_for(running.request(f"{model} of {job.rank}"), "to hear")
            heard.append(network.wait_for(running.request("heard"), "to say something", PATIENCE_S))
        return heard

    for rank, (first, second) in enumerate(run_jobs(size, program)):
        others = [other for other in range(size) if other != rank]
        assert first == {other: [f"first of {other}"] for other in others}
        assert second == {other: [f"second of {other}"] for other in others}


def test_one_that_has_finished_is_not_waited_for_and_what_it_has_said_comes_first() -> None:
    def program(job: Job) -> Any:
        network, owner = peer_network_of(job), Owner()
        running = talk(network, job, owner)
        if job.rank == 2:
            running.request("my last word").result(PATIENCE_S)
            network.end(running)
            with pytest.raises(StrettoError, match="Talk has quit, and was asked for str"):
                running.request("more").result(PATIENCE_S)
        else:
            running.request("hello").result(PATIENCE_S)
            job.barrier()
            heard = running.request("heard").result(PATIENCE_S)
            while not (views := running.request("views").result(PATIENCE_S)):
                pass
            return heard, views[:1]
        job.barrier()
        return None

    for rank, (heard, views) in enumerate(run_jobs(3, program)[:2]):
        assert heard == {1 - rank: ["hello"], 2: ["my last word"]} and views == [("left", 2, 0)]


def test_one_that_has_left_the_job_before_it_began_the_model_is_not_waited_for() -> None:
    def program(job: Job) -> Any:
        network, owner = peer_network_of(job), Owner()
        if job.rank == 0:
            return None
        running = talk(network, job, owner)
        running.request("hello").result(PATIENCE_S)
        return running.request("heard").result(PATIENCE_S)

    assert run_jobs(3, program)[1:] == [{2: ["hello"]}, {1: ["hello"]}]


def test_one_that_is_killed_is_not_waited_for_and_the_others_talk_on() -> None:
    together = threading.Barrier(3)  # not the job's: somebody may still wait there for whoever dies

    def program(job: Job) -> Any:
        network, owner = peer_network_of(job), Owner()
        running = talk(network, job, owner)
        together.wait(PATIENCE_S)
        if job.rank == 1:
            kill(job)
            return None
        while 1 in network.living:
            pass
        running.request("hello").result(PATIENCE_S)
        return running.request("heard").result(PATIENCE_S), running.request("views").result(PATIENCE_S)[:1]

    assert run_jobs(3, program)[::2] == [({2: ["hello"]}, [("left", 1, 0)]), ({0: ["hello"]}, [("left", 1, 0)])]


def test_what_is_waited_for_has_a_deadline_that_says_what_it_was() -> None:
    def program(job: Job) -> None:
        network, owner = peer_network_of(job), Owner()
        running = talk(network, job, owner)
        if job.rank == 0:
            with pytest.raises(StrettoError, match=r"asked the other workers to speak, .* within 0.05 s. .* reach are \[1\]"):
                network.wait_for(running.request("heard"), "to speak", 0.05)
        job.barrier()

    run_jobs(2, program)


def test_one_that_comes_back_finds_the_model_that_still_runs_and_is_told_who_has_finished() -> None:
    jobs: dict[int, Job] = {}
    back, done = threading.Event(), threading.Event()

    def second_life(job: Job) -> Any:
        network, owner = peer_network_of(job), Owner()
        assert job.life == network.life == 1
        with pytest.raises(ConfigurationError, match="the other workers run no chess. They run: talk; whist."):
            talk(network, job, owner, "chess")
        running = talk(network, job, owner, "whist")
        running.request("I am back").result(PATIENCE_S)
        heard = running.request("heard").result(PATIENCE_S), running.request("views").result(PATIENCE_S)[:1]
        done.set()
        return heard

    together = threading.Barrier(3)  # not the job's: somebody may still wait there for whoever dies

    def program(job: Job) -> Any:
        jobs[job.rank] = job
        network, owners = peer_network_of(job), (Owner(), Owner(), Owner())
        over = talk(network, job, owners[0], "whist")  # the same as the third, and over when the newcomer comes
        first = talk(network, job, owners[1], "talk")
        second = talk(network, job, owners[2], "whist")
        assert first.error is None
        job.barrier()
        network.end(over)
        if job.rank == 0:
            network.end(second)
        together.wait(PATIENCE_S)
        if job.rank == 2:
            kill(job)
            back.wait(PATIENCE_S)
            return come_back(job, jobs[0], second_life)
        while 2 in network.living:
            pass
        network.admit([newcomer(jobs[2])])
        if job.rank == 1:
            back.set()
            while ("joined", 2, 1) not in second.request("views").result(PATIENCE_S):
                pass
            second.request("welcome").result(PATIENCE_S)
            first_words = second.request("heard").result(PATIENCE_S)
            assert done.wait(PATIENCE_S)  # else the newcomer may hear that this worker has finished before it hears of rank 0
            return first_words
        assert done.wait(PATIENCE_S)
        return None

    nothing, heard, newcomer_heard = run_jobs(3, program)
    assert nothing is None and heard == {2: ["I am back"]}
    assert newcomer_heard == ({1: ["welcome"]}, [("left", 0, 0)])


def test_a_shell_that_has_quit_tells_whoever_joins_later_and_takes_no_message() -> None:
    network = VirtualNetwork(seed=1, reliable=True)
    shells = {rank: UntilQuit(Talk(rank, 3), rank, 3) for rank in range(3)}
    for rank in (0, 1):
        network.add(rank, shells[rank])
    waiting = network.request(1, "heard")
    network.run(0.1)
    network.request(0, QuitPeers())
    network.request(1, "to whom it may concern")
    network.run(1.0)
    assert not waiting.done()  # for rank 2, which is not there yet
    network.add(2, shells[2])
    network.run(2.0)
    inside = shells[2].machine
    assert isinstance(inside, Talk) and inside.views == [("left", 0, 0)]
    network.request(2, "here")
    network.run(3.0)
    assert waiting.result(0) == {2: ["here"]}


def test_a_message_that_is_no_message_is_ignored() -> None:
    network = VirtualNetwork(seed=1, reliable=True)
    machine = Talk(0, 2)
    network.add(0, UntilQuit(machine, 0, 2))
    network.add(1, UntilQuit(Talk(1, 2), 1, 2))
    network.run(0.1)
    network.send(1, 0, {"text": "no list"})
    network.send(1, 0, PeerSays(3))
    network.send(1, 0, PeerSays(Said("this")))
    network.run(1.0)
    assert machine.heard == {1: ["this"]}


KILLED = """
import os, signal, time
import stretto
from stretto.aggregate.peers.network import peer_network_of
from aggregate.peers.test_network import Owner, Talk

job = stretto.init(timeouts=stretto.Timeouts(arrive_s=60.0))
network, owner = peer_network_of(job), Owner()
running = network.begin(Talk(job.rank, job.world_size), owner, about="talk")
running.request(f"{job.rank} in life {job.life}").result(60)
if job.rank == 0 and not job.life:
    running.request("heard").result(60)
    os.kill(os.getpid(), signal.SIGKILL)
end = time.monotonic() + 60
while not job.life and "0 in life 1" not in running.request("heard").result(60).get(0, []):
    assert time.monotonic() < end
    time.sleep(0.01)
running.request("welcome").result(60)
print("rank", job.rank, "heard", running.request("heard").result(60), flush=True)
stretto.shutdown()
"""


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_rank_0_is_killed_and_comes_back_to_the_others(tmp_path: Path, preloaded: Preloaded) -> None:
    here = Path(__file__).parent
    (tmp_path / "talk.py").write_text(f"import sys; sys.path[:0] = [{str(here.parents[1])!r}]\n{KILLED}")
    done = preloaded.shell("stretto run -n 3 --min-workers 2 --max-restarts 1 talk.py", folder=tmp_path, timeout_s=170)

    assert done.returncode == 0, done.stderr
    heard = dict(line.split("] rank ", 1)[1].split(" heard ") for line in done.stdout.splitlines() if " heard " in line)
    assert "'0 in life 1'" in heard["1"] and "'0 in life 1'" in heard["2"]
    assert "welcome" in heard["0"]
