"""What the report says of servers, from traces made by hand; and that a real job leaves such traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from preloaded import Preloaded
from report.traces import job, span, trace, with_servers, write
from stretto.errors import ConfigurationError
from stretto.observe.merge import read, read_servers
from stretto.report.bottleneck import find_bottleneck
from stretto.report.command import write_report
from stretto.report.figures import job_figures
from stretto.report.page import make_page
from stretto.report.servers import POINTS, servers_figures
from stretto.report.timeline import make_timeline


def test_servers_and_their_workers_in_figures() -> None:
    found = servers_figures(*with_servers(held_s=0.08, busy=0.3))
    assert found is not None
    first, second = found.servers
    assert (second.server, second.num_pushes, second.longest_queue) == (1, 41, 4) and second.bytes_copied == 500
    assert second.busy == pytest.approx(0.3, rel=0.05) and second.optimizer == pytest.approx(0.12, rel=0.05)
    assert first.busy == pytest.approx(0.15, rel=0.05) and second.push_s == pytest.approx(0.003)
    assert 2.5 < second.mean_queue < 3.5 and second.queue[0][0] == 0.0 and len(second.queue) == 41
    assert found.staleness == {0: 3 + 1 + 1, 1: 3, 2: 3}
    zero, _, two = found.workers
    assert (zero.held_by, two.held_by) == (2, None) and zero.held_s == pytest.approx(0.088 / 3)
    assert two.mean_staleness == pytest.approx(6 / 4) and two.most_staleness == 2
    assert zero.bytes_pushed == zero.bytes_pulled == 8_000_000


def test_a_job_without_servers_has_no_such_figures() -> None:
    assert job_figures(job({"compute": 60.0})).servers is None


def test_links_to_and_from_servers_are_counted_once() -> None:
    links = {(link.source, link.target): link.num_bytes for link in job_figures(*with_servers()).links}
    assert links[0, 3] == links[3, 0] == links[2, 4] == links[4, 2] == 4_000_000
    assert links[4, 3] == 500 and (0, 1) not in links


def test_a_worker_that_holds_the_others_back_is_named_with_what_to_write() -> None:
    result = find_bottleneck(job_figures(*with_servers(held_s=0.12)))
    assert result.kind == "held"
    assert result.sentence.startswith("Waiting for rank 2: until it has pushed, servers hold the other workers back for 38.5 ms")
    assert "`SoftSync`" in result.sentence
    assert find_bottleneck(job_figures(*with_servers(held_s=0.02))).kind != "held"


def test_a_busy_server_is_named_with_what_to_write() -> None:
    result = find_bottleneck(job_figures(*with_servers(busy=0.95)))
    assert result.kind == "servers"
    assert "server 1 works on pushes 95 % of the time (its optimizer 38 %)" in result.sentence and "`shards=`" in result.sentence
    assert find_bottleneck(job_figures(*with_servers(busy=0.5))).kind != "servers"


def test_the_page_has_servers_workers_staleness_and_queues() -> None:
    workers, servers = with_servers(held_s=0.12)
    figures = job_figures(workers, servers)
    page = make_page("t", figures, find_bottleneck(figures), make_timeline([*workers, *servers])).decode()
    assert "are of the whole run; what was pushed and pulled is of the spans that the trace has" in page
    assert 'aria-label="steps by staleness: 0: 5, 1: 3, 2: 3"' in page and "<title>1: 3 steps</title>" in page
    assert 'aria-label="queue of server 1, at most 4"' in page and "<polyline points=" in page
    assert "from server 0" in page and "to server 1" in page and "<td>rank 2</td>" in page
    assert "&lt;i&gt;far" in page and "<i>far" not in page
    only_workers = job_figures(workers)
    page = make_page("t", only_workers, find_bottleneck(only_workers), make_timeline(workers)).decode()
    assert "No server left a trace" in page and "steps by staleness" in page


def test_a_long_queue_is_drawn_with_its_longest_moments() -> None:
    workers, servers = with_servers()
    event = next(each for each in servers[0].traceEvents if each.ph == "C")
    servers[0].traceEvents += [
        msgspec.structs.replace(event, ts=400 * n, args={"parked": 99 if n == 777 else 1}) for n in range(1000)
    ]
    found = servers_figures(workers, servers)
    assert found is not None and len(found.servers[0].queue) <= POINTS and max(n for _, n in found.servers[0].queue) == 99


def test_files_of_servers_are_read_with_those_of_their_run(tmp_path: Path) -> None:
    workers, servers = with_servers()
    servers[1].otherData = msgspec.structs.replace(servers[1].otherData, run="another")
    write(tmp_path, [*workers, *servers])
    assert [file.otherData.server for file in read_servers(tmp_path, read(tmp_path))] == [0]
    write_report(tmp_path, None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("trace-server0.json", {"rank": 1}),
        ("trace-server0.json", {"server": 7}),
        ("trace-server0.json", {"world_size": 0}),
        ("trace-rank0.json", {"held_s": {"2": -1.0}}),
        ("trace-rank0.json", {"held_s": {"2": 1e300}}),
        ("trace-rank0.json", {"staleness": {"-1": 1}}),
        ("trace-rank0.json", {"server": 0}),
    ],
)
def test_what_cannot_be_is_refused(name: str, change: dict[str, object], tmp_path: Path) -> None:
    workers, servers = with_servers()
    write(tmp_path, [*workers, *servers])
    content = json.loads((tmp_path / name).read_text())
    content["otherData"] |= change
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=f"{name} is not a trace that stretto wrote"):
        read_servers(tmp_path, read(tmp_path))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("queue", {"parked": -1}),
        ("queue", {"parked": 0.5}),
        ("queue", {"parked": "many"}),
        ("queue", {str(n): 1 for n in range(9)}),
        ("consensus distance", {"distance": -0.5}),
        ("consensus distance", {"distance": None}),
    ],
)
def test_a_sample_that_cannot_be_is_refused(name: str, args: dict[str, object], tmp_path: Path) -> None:
    workers, _ = with_servers()
    workers[0].traceEvents.append(msgspec.structs.replace(span("wait", name, 0, 1), ph="C", dur=None, args=args))
    write(tmp_path, workers)
    with pytest.raises(ConfigurationError, match="event .* has a time, a peer or a number of bytes that cannot be"):
        read(tmp_path)


def test_a_sample_of_something_else_than_a_length_may_be_a_fraction(tmp_path: Path) -> None:
    workers, _ = with_servers()
    sample = msgspec.structs.replace(span("wait", "consensus distance", 0, 1), ph="C", dur=None, args={"distance": 0.5})
    workers[0].traceEvents.append(sample)
    write(tmp_path, workers)
    assert sample in read(tmp_path)[0].traceEvents


def test_a_trace_of_one_server_alone_is_drawn_without_steps() -> None:
    _, servers = with_servers()
    assert make_timeline([trace(0, []), *servers]).num_spans > 0


PROGRAM = """
import torch, stretto
from stretto import ParameterServer, StaleSynchronous, Strategy

stretto.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
stretto.distribute(model, optimizer, Strategy(aggregate=ParameterServer(2, 1), sync=StaleSynchronous(1)))
for step in range(20):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
stretto.shutdown()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_traced_job_leaves_a_file_for_each_server_and_a_report_with_them(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = preloaded.shell("stretto run -n 2 --trace out train.py && stretto report out && stretto trace out", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"trace-server0.json", "trace-server1.json", "trace-rank0.json", "trace-rank1.json"} <= names
    assert re.search(r"staleness +\d\.\d\d on average", done.stdout)
    workers = read(tmp_path / "out")
    found = servers_figures(workers, read_servers(tmp_path / "out", workers))
    assert found is not None and sum(found.staleness.values()) == 40
    assert sum(each.num_pushes for each in found.servers) >= 40
    assert all(each.bytes_copied for each in found.servers if each.num_pushes)
    assert all(each.bytes_pushed == 20 * 4 * (64 * 64 + 64) for each in found.workers)
    merged = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    titles = {event["args"]["name"] for event in merged if event["name"] == "process_name"}
    assert {title.partition(" (")[0] for title in titles} == {"rank 0", "rank 1", "server 0", "server 1"}
    assert any(event["ph"] == "C" and event["name"] == "queue" for event in merged)
    ends = [max(e["ts"] for e in merged if e["pid"] == pid and e["ph"] == "X") for pid in range(4)]
    assert max(ends) - min(ends) < 5e6  # on one time line
