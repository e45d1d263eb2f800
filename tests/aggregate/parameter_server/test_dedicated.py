"""Servers that were started apart from the workers: `stretto run --servers`, `stretto serve`, and what of both is refused."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preloaded import Preloaded
from stretto.aggregate.parameter_server import ParameterServer, dedicated
from stretto.aggregate.parameter_server.keeper import NOT_JOINED
from stretto.errors import ConfigurationError, JobError, SecretError
from stretto.launching import introduce, launch_plan, node_servers, secret, spawn
from stretto.launching.detect import DedicatedServers, Launch, detect
from stretto.launching.introduce import report_ended
from stretto.launching.introduction_messages import Ended
from stretto.launching.launch_plan import RunPlan, make_plan
from stretto.launching.processes import ProcessReport
from stretto.launching.server_meeting import JoiningServer, check_restarts, joining_server, launch_of_worker, open_rendezvous
from stretto.observe.trace import TraceFile
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

SECRET = "5a" * 32
WORKER = {"STRETTO_RANK": "1", "STRETTO_WORLD_SIZE": "4", "STRETTO_LOCAL_RANK": "1", "STRETTO_LOCAL_WORLD_SIZE": "2"} | {
    "STRETTO_RENDEZVOUS": "node0:29400",
    "STRETTO_SECRET": SECRET,
}

TRAIN = """
import os, sys, time, torch, stretto
from pathlib import Path
from stretto import ParameterServer, Strategy
from stretto.launching.supervisor import descendants

job = stretto.init()

def trained(*texts, steps=4, kill=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))  # ranges for all servers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stretto.distribute(model, optimizer, Strategy(aggregate=ParameterServer(**dict(texts))))
    data = torch.Generator().manual_seed(job.rank)
    for step in range(steps):
        if step == 2 and kill is not None:
            kill()
        model(torch.randn(8, 128, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stretto.release(model)
    return [p.detach().clone() for p in model.parameters()]
"""

TWO_KINDS = (
    TRAIN
    + """
apart = trained()
beside = trained(("shards", 1), ("placement", "beside"))
assert sorted(job.server_networks) == [0, 1] and job.server_networks[0].servers == [2, 3]
assert all(torch.equal(a, b) for a, b in zip(apart, beside))
try:
    trained(("shards", 3))
except stretto.ConfigurationError as error:
    print(error)
stretto.declare("seen", torch.zeros(3))
for _ in range(job.rank + 1):
    stretto.push("seen", torch.ones(3))
stretto.barrier()
assert stretto.pull("seen").tolist() == [3, 3, 3] and sorted(job.server_networks) == [0, 1]
print("pids", *descendants(os.getppid()))
"""
)


def trace_file(folder: Path, name: str) -> TraceFile:
    return msgspec.json.decode((folder / name).read_bytes(), type=TraceFile)


def pids_in(said: str) -> list[int]:
    return [int(word) for line in said.splitlines() if "pids" in line for word in line.split("pids")[1].split()]


@pytest.mark.processes
def test_a_job_with_servers_uses_them_beside_others_if_asked_to_and_leaves_no_process(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    (tmp_path / "train.py").write_text(TWO_KINDS)
    done = preloaded.shell("stretto run -n 2 --servers 2 --trace traces train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    servers = [trace_file(tmp_path / "traces", f"trace-server{number}.json") for number in range(2)]
    assert {each.otherData.run for each in servers} == {trace_file(tmp_path / "traces", "trace-rank0.json").otherData.run}
    for number, each in enumerate(servers):
        assert each.otherData.server == number and each.otherData.rank == 2 + number
        assert any(event.cat == "reduce" for event in each.traceEvents) and abs(each.otherData.clock_offset_ns) < 10**9
    assert "shards=3): this job was started with 2 servers" in done.stdout
    pids = pids_in(done.stdout)
    assert len(pids) >= 5 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


KILLS = (
    TRAIN
    + """
def kill():
    if job.rank == 0:
        os.kill(pid, 9)

pid = int(Path("server-1").read_text())
trained(("replicas", 1), kill=kill)
print("went on", "pids", pid)
"""
)


@pytest.mark.processes
def test_training_goes_on_when_a_dedicated_server_is_killed(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "train.py").write_text(KILLS)
    meeting = with_secret(tmp_path)
    serve = f"stretto serve --secret-file job.secret --rendezvous {meeting} --workers 2 --servers 2 --number"
    run = f"STRETTO_SERVERS=2@{meeting} stretto run -n 2 --secret-file job.secret --no-prefix train.py"
    command = f"{serve} 0 & first=$!; {serve} 1 & second=$!; echo $second > server-1; {run} || exit 1; wait $first || exit 2"
    done = preloaded.shell(command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on") == 2
    assert "has lost server 1" in done.stderr
    assert "server 0 of 2 has ended: all workers have left" in done.stderr


def with_secret(folder: Path) -> str:
    (folder / "job.secret").write_text(SECRET)
    (folder / "job.secret").chmod(0o600)
    return f"127.0.0.1:{launch_plan.free_port()}"


@pytest.mark.processes
def test_a_node_may_have_servers_only_and_ends_when_the_last_worker_has_left(tmp_path: Path, preloaded: Preloaded) -> None:
    """Two nodes are more than one host, so this is encrypted as well."""
    (tmp_path / "train.py").write_text(TRAIN + "trained()\nprint(stretto.world_size(), job.launch.servers)")
    meeting = with_secret(tmp_path)
    nodes = f"stretto run --nodes 2 -n 2,0 --servers 0,2 --rendezvous {meeting} --secret-file job.secret --node"
    done = preloaded.shell(f"{nodes} 1 no_such_file.py & {nodes} 0 train.py || exit 1; wait $! || exit 2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    host, port = meeting.split(":")
    assert f"2 DedicatedServers(number=2, rendezvous='{host}:{int(port) + 2}', encrypt=True)" in done.stdout


BACK = (
    TRAIN
    + """
def server_process(number):
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().decode().split("\\0")
        except OSError:
            continue
        if "--number" in words and words[words.index("--number") + 1] == str(number) and not any("keeper" in w for w in words):
            if job.launch.servers.rendezvous in words:
                return int(cmdline.parent.name)

def kill_and_await(number):
    network = job.server_networks[0]
    if job.rank == 0:
        os.kill(server_process(number), 9)
    deadline = time.monotonic() + 60
    while not (network.lives[number] and network.every_part_has_copies(1)) and time.monotonic() < deadline:
        time.sleep(0.01)
    stretto.barrier()

stretto.declare("seen", torch.zeros(3), servers=ParameterServer(replicas=1))
for number in range(2):
    stretto.push("seen", torch.ones(3))
    stretto.barrier()
    kill_and_await(number)
assert stretto.pull("seen").tolist() == [4, 4, 4]
print("lives", *job.server_networks[0].lives)
"""
)


@pytest.mark.slow
@pytest.mark.processes
def test_servers_that_are_killed_one_after_the_other_come_back_and_lose_nothing(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "train.py").write_text(BACK)
    done = preloaded.shell("stretto run -n 2 --servers 2 --no-prefix train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["lives 1 2"] * 2
    assert "server 0 has been started again, and has joined" in done.stderr


@pytest.mark.parametrize(("restarts", "forever"), [(-1, False), (1, True)])
def test_restarts_that_cannot_be_are_refused(restarts: int, forever: bool) -> None:
    with pytest.raises(ConfigurationError, match=f"--restarts {restarts}"):
        check_restarts(restarts, forever)
    with pytest.raises(ConfigurationError, match="--add with --forever"):
        check_restarts(0, forever=True, added=True)


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_that_serves_for_ever_serves_a_job_of_torchrun_and_then_another_one(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "trained()\nprint('trained with', job.server_networks[0].servers)")
    meeting = with_secret(tmp_path)
    serve = f"stretto serve --rendezvous {meeting} --workers 2 --secret-file job.secret --forever"
    jobs = "torchrun --standalone --nproc-per-node 2 train.py; stretto run -n 2 --secret-file job.secret --no-prefix train.py"
    variables = f"export STRETTO_SERVERS=1@{meeting} STRETTO_SECRET_FILE=job.secret"
    done = preloaded.shell(f"{serve} & server=$!; {variables}; {jobs}; kill $server; wait $server; echo $?", folder=tmp_path)
    assert done.stdout.count("trained with [2]") == 4, done.stderr
    assert done.stderr.count("server 0 of 1 has ended: all workers have left") == 2
    assert done.stdout.endswith("143\n"), "SIGTERM ends a server that waits"


@pytest.mark.processes
def test_a_server_that_does_not_come_is_named_by_the_workers_and_by_the_other_servers(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    (tmp_path / "train.py").write_text("import stretto\nstretto.init()")
    meeting = with_secret(tmp_path)
    serve = f"stretto serve --rendezvous {meeting} --workers 2 --servers 2 --number 0 --secret-file job.secret"
    run = f"STRETTO_SERVERS=2@{meeting} stretto run -n 2 --secret-file job.secret --meet-timeout 3 train.py"
    done = preloaded.shell(f"{serve} & {run}; wait $!; echo served: $?", folder=tmp_path)
    assert "rank 0 did not meet the job's servers (there: ranks 2, 3) at" in done.stderr
    assert "Rank 3 of 4 did not join within" in done.stderr
    assert "server 0, which is rank 2 of the job's 2 workers and 2 servers: Rank 3 of 4 did not join" in done.stderr
    assert done.stdout.endswith("served: 2\n")


def test_workers_that_come_later_are_told_of_a_server_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It died while they imported torch: nobody listened yet where they meet."""
    told: queue.Queue[bool] = queue.Queue()

    def report(launch: Launch, ended: Sequence[Ended]) -> bool:
        told.put(was_told := report_ended(launch, ended))
        return was_told

    monkeypatch.setattr(introduce, "report_ended", report)
    asked = plan(servers=1)
    servers = node_servers.NodeServers(asked, {})
    assert [name for name, _, _ in servers.commands()] == ["server 0"]
    servers.note_end(ProcessReport("server 0", 4711, -9), -9, early=True)
    try:
        assert told.get(timeout=10) is False
        worker = launch_of_worker(
            detect(WORKER | {"STRETTO_RANK": "0", "STRETTO_LOCAL_RANK": "0", "STRETTO_WORLD_SIZE": "2"}
                   | {"STRETTO_SERVERS": f"1@{servers.meet_at}", "STRETTO_SECRET": asked.secret.hex()})
        )  # fmt: skip
        timeouts = Timeouts.of(30)
        open_rendezvous(worker, timeouts)
        with socket.create_server(("127.0.0.1", 0)) as listens:
            address = f"127.0.0.1:{listens.getsockname()[1]}"
            with pytest.raises(JobError, match=r"Rank 2 of 3 \(pid 4711 .*was killed by SIGKILL"):
                introduce.introduce(worker, address, timeouts)
        while not told.get(timeout=10):  # what was under way when the place to meet opened had come too early, too
            pass
    finally:
        servers.close()


def test_a_server_that_waits_for_ever_outlives_a_job_with_other_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = ConfigurationError("told the job has 4 workers, but this rendezvous was opened for 3")
    jobs: Iterator[BaseException] = iter([other, KeyboardInterrupt(), other])

    def meet(*_: object) -> Wire:
        raise next(jobs)

    monkeypatch.setattr(dedicated, "_meet", meet)
    monkeypatch.setattr(dedicated, "_await_job", lambda _: None)
    monkeypatch.setattr(dedicated, "LOOK_S", 0.0)
    server = JoiningServer(
        number=0, num_servers=1, num_workers=3, rendezvous="127.0.0.1:1", secret=bytes.fromhex(SECRET), encrypt=False
    )
    with pytest.raises(KeyboardInterrupt):
        dedicated.run(server, Timeouts(), forever=True, quiet=True)
    assert "could not join a job, and waits for the next one: told the job has 4 workers" in caplog.text
    with pytest.raises(ConfigurationError, match="4 workers"):
        dedicated.run(server, Timeouts(), forever=False, quiet=True)


def test_a_server_that_is_started_again_when_the_job_is_over_finds_out_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dedicated, "GONE_S", 0.2)
    monkeypatch.setattr(dedicated, "LOOK_EVERY_S", 0.05)
    server = JoiningServer(
        number=0, num_servers=1, num_workers=2, rendezvous=f"127.0.0.1:{launch_plan.free_port()}", secret=bytes.fromhex(SECRET),
        encrypt=False, life=1,
    )  # fmt: skip
    began = time.monotonic()
    assert dedicated.run(server, Timeouts(connect_s=60.0), forever=False, quiet=True) == NOT_JOINED
    assert time.monotonic() - began < 30.0  # which is no measure of speed: it does not wait as long as for those who live
    assert "nobody lets servers in any more (connection refused)" in caplog.text


def test_servers_are_read_from_the_environment() -> None:
    found = detect(WORKER | {"STRETTO_SERVERS": "2@node0:29500"})
    assert found.servers == DedicatedServers(2, "node0:29500", encrypt=True) and found.encrypt
    there = launch_of_worker(found)
    assert (there.rank, there.world_size, there.rendezvous, there.one_host) == (1, 6, "node0:29500", False)
    assert there.secret not in (None, found.secret)


def test_traffic_to_servers_elsewhere_is_encrypted_though_the_workers_share_a_host() -> None:
    one_host = WORKER | {"STRETTO_LOCAL_WORLD_SIZE": "4"}
    found = detect(one_host | {"STRETTO_SERVERS": "2@node0:29500"})
    assert found.servers is not None and found.servers.encrypt and not found.encrypt
    here = detect(one_host | {"STRETTO_SERVERS": "2@127.0.0.1:29500"})
    assert here.servers is not None and not here.servers.encrypt and launch_of_worker(here).one_host
    off = detect(one_host | {"STRETTO_SERVERS": "2@node0:29500", "STRETTO_ENCRYPT": "off"})
    assert off.servers is not None and not off.servers.encrypt


def test_a_server_and_the_workers_derive_the_same_place() -> None:
    server = JoiningServer(
        number=1, num_servers=2, num_workers=4, rendezvous="node0:29500", secret=bytes.fromhex(SECRET), encrypt=True
    )
    worker = launch_of_worker(detect(WORKER | {"STRETTO_SERVERS": "2@node0:29500"}))
    assert (server.rank, server.launch.secret, server.launch.world_size) == (5, worker.secret, worker.world_size)
    assert SECRET not in repr(server) and SECRET not in " ".join(server.command())
    added = JoiningServer(
        number=2, num_servers=2, num_workers=4, rendezvous="node0:29500", secret=bytes.fromhex(SECRET), encrypt=True, added=True
    )
    assert (added.rank, added.launch.secret, added.launch.world_size) == (6, worker.secret, 6) and "--add" in added.command()


@pytest.mark.parametrize("text", ["2", "node0:29500", "0@node0:29500", "x@node0:29500", "2@node0", "2@node0:0"])
def test_what_is_no_number_and_place_of_servers_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"STRETTO_SERVERS=.*2@node0:29500|port 0"):
        detect(WORKER | {"STRETTO_SERVERS": text})


def test_servers_of_a_job_without_a_secret_or_of_one_worker_are_refused() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29400", "STRETTO_SERVERS": "2@node0:29500"}
    with pytest.raises(SecretError, match="Servers are told from strangers by it"):
        detect(torchrun)
    with pytest.raises(ConfigurationError, match="a job of one worker"):
        detect({"STRETTO_SERVERS": "2@node0:29500"})


def plan(**asked: object) -> RunPlan:
    usual = {"module": True, "workers": 2, "nodes": 1, "node": None, "rendezvous": None, "secret_file": None}
    return make_plan("x", [], **{**usual, "timeout_s": None, "prefix": True, **asked})  # type: ignore[arg-type]


def test_workers_and_servers_are_counted_node_by_node(tmp_path: Path) -> None:
    meeting = with_secret(tmp_path)
    nodes = {"nodes": 4, "rendezvous": meeting, "secret_file": tmp_path / "job.secret"}
    plans = [plan(**nodes, node=node, workers="2,3,0,1", servers="1,0,2,0") for node in range(4)]
    assert [[each.rank(local) for local in range(each.workers)] for each in plans] == [[0, 1], [2, 3, 4], [], [5]]
    assert [list(each.my_servers) for each in plans] == [[0], [], [1, 2], []]
    assert {(each.world_size, each.num_servers) for each in plans} == {(6, 3)}
    assert [plans[0].node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 1, 3]
    assert len({node_servers.servers_meet_at(each) for each in plans}) == 1
    assert list(plan(**nodes, node=2, servers=2).my_servers) == [4, 5]
    alone = plan(servers=1, rendezvous="node0:29400", secret_file=tmp_path / "job.secret")
    assert node_servers.servers_meet_at(alone) == "127.0.0.1:29402", "where another one can be added"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"workers": 0}, "-n 0: a job needs at least one worker"),
        ({"workers": "2,2"}, "-n 2,2 with --nodes 1: 2 numbers for 1 node"),
        ({"workers": "two"}, "-n two: this is neither a number"),
        ({"servers": -1}, "--servers -1"),
        ({"workers": 1, "servers": 2}, "--servers 2 with one worker"),
        ({"nodes": 2, "node": 0, "workers": "0,2"}, "not node 0, which has rank 0"),
        ({"nodes": 2, "node": 0, "workers": "2,0"}, "node 1 has neither workers nor servers"),
        (
            {"nodes": 2, "node": 0, "workers": "2,0", "servers": "0,1", "max_restarts": 1},
            "a node that has servers only cannot tell",
        ),
    ],
)
def test_counts_that_cannot_be_are_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan(**asked)


def test_workers_alone_are_started_again_though_a_node_has_servers_only(tmp_path: Path) -> None:
    shared: dict[str, object] = {"nodes": 2, "rendezvous": with_secret(tmp_path), "secret_file": tmp_path / "job.secret"}
    shared |= {"workers": "2,0", "servers": "0,1"}
    assert plan(**shared, node=0, max_restarts=1, min_workers=1).goes_on and not plan(**shared, node=1).goes_on


def test_a_job_has_the_servers_of_its_launcher_or_of_somebody_else() -> None:
    with pytest.raises(ConfigurationError, match="--servers with STRETTO_SERVERS='1@a:1'"):
        node_servers.check_environment(plan(servers=2), {"STRETTO_SERVERS": "1@a:1"}, Path("job.secret"))
    with pytest.raises(SecretError, match="STRETTO_SERVERS='1@a:1' without --secret-file"):
        node_servers.check_environment(plan(), {"STRETTO_SERVERS": "1@a:1"}, None)
    node_servers.check_environment(plan(), {"STRETTO_SERVERS": "1@a:1"}, Path("job.secret"))


def test_a_job_whose_servers_are_elsewhere_is_encrypted_though_it_has_one_node() -> None:
    where = {"a:1": True, "127.0.0.1:1": False, "[::1]:1": False, "[fd00::5]:1": True, "localhost:1": False}
    for address, wanted in where.items():
        assert launch_plan.encrypted(plan(), {"STRETTO_SERVERS": f"1@{address}"}) is wanted
    assert not launch_plan.encrypted(plan(), {}) and not launch_plan.encrypted(plan(servers=2), {})
    assert not launch_plan.encrypted(plan(encrypt=False), {"STRETTO_SERVERS": "1@a:1"})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"number": 2}, "--number 2 with --servers 2.*or --add"),
        ({"number": 1, "added": True}, r"--add with --number 1 and --servers 2(.|\n)*a --number from 2 to 65"),
        ({"number": 66, "added": True}, "--add with --number 66"),
        ({"number": 0, "num_servers": 0, "added": True}, "--add with --number 0 and --servers 0"),
        ({"num_workers": 1}, "--workers 1"),
        ({"rendezvous": "node0"}, "--rendezvous node0: it is not of the form HOST:PORT"),
        ({"rendezvous": "node0:0"}, "--rendezvous node0:0: the workers could not know"),
    ],
)
def test_a_server_with_no_place_is_refused(asked: dict[str, object], said: str) -> None:
    usual: dict[str, Any] = {"number": 0, "num_servers": 2, "num_workers": 4, "rendezvous": "a:1"}
    usual |= {"secret_file": None, "encrypt": None}
    with pytest.raises(ConfigurationError, match=said):
        joining_server({"STRETTO_SECRET": SECRET}, **(usual | asked))
    with pytest.raises(SecretError, match="stretto serve without --secret-file"):
        joining_server({}, **usual)
    assert joining_server({"STRETTO_SECRET": SECRET}, **usual).secret == secret.parse(SECRET, "")


def test_which_servers_are_meant() -> None:
    auto, beside, dedicated = (ParameterServer(placement=where) for where in ("auto", "beside", "dedicated"))
    assert [each.num_servers(4, dedicated=2) for each in (auto, beside, dedicated)] == [2, 4, 2]
    assert [each.num_servers(4) for each in (auto, beside)] == [4, 4]
    with pytest.raises(ConfigurationError, match="(?s)has no servers on hosts of their own.*stretto run --servers"):
        dedicated.num_servers(4)
    with pytest.raises(ConfigurationError, match='(?s)started with 2 servers.*placement="beside" for 3'):
        ParameterServer(shards=3).num_servers(4, dedicated=2)
    with pytest.raises(ConfigurationError, match="--servers 3"):
        ParameterServer(replicas=2).num_servers(4, dedicated=2)
    with pytest.raises(ConfigurationError, match="placement='here'"):
        ParameterServer(placement="here")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="stretto serve --restarts 5"):
        ParameterServer(placement="dedicated", restarts=5)


def test_a_job_that_a_worker_launches_has_none_of_the_servers_of_its_own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_SERVERS", "2@127.0.0.1:9")
    variables = spawn._variables(2, ("127.0.0.1", 1), bytes(32), False)
    assert all(detect({**os.environ, **each}).servers is None for each in variables)
