"""What can be said about a lab without starting one: rates, slow hosts, the environment, messages, names."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import msgspec
import pytest

from stretto.errors import ConfigurationError, JobError
from stretto.lab import Lab, control, messages
from stretto.lab.connection import LabConnection
from stretto.lab.environment import SharedByHosts, host_environment
from stretto.lab.ledger import Traffic, excess, warning
from stretto.lab.rates import FRAME_BYTES, describe_rate, parse_rate, shape
from stretto.lab.slow import PERIOD_S, DutyCycle, parse_slow
from stretto.launching.launch_plan import threads_each
from stretto.launching.ledger_file import WireCount, of_server, read_ledger, write_ledger


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("1gbit", 125_000_000),
        ("100mbit", 12_500_000),
        ("10Gbit", 1_250_000_000),
        ("500kbit", 62_500),
        ("2.5 gbit", 312_500_000),
    ],
)
def test_a_rate_is_read_as_bits_per_second(text: str, bytes_per_s: int) -> None:
    assert parse_rate(text) == bytes_per_s
    assert parse_rate(describe_rate(bytes_per_s)) == bytes_per_s


def test_no_rate_stays_no_rate() -> None:
    assert parse_rate(None) is None
    assert describe_rate(None) == "unshaped"


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "gbit", "-1gbit", "1gbit/s", "0mbit", "100gbit", 1000])
def test_a_bad_rate_is_an_error_that_gives_the_form(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Write"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["500kbit", "10mbit", "100mbit", "1gbit", "10gbit", "32gbit"])
def test_a_bucket_holds_a_millisecond_and_its_queue_ten(text: str) -> None:
    rate = parse_rate(text)
    assert rate is not None
    bucket = shape(rate)
    assert bucket.burst_bytes == max(rate // 1000, 4 * FRAME_BYTES)
    assert bucket.limit_bytes == bucket.burst_bytes + rate // 100
    packets = -(-bucket.packet_bytes // (FRAME_BYTES - 66))
    assert bucket.packet_bytes + 66 * packets <= bucket.burst_bytes or bucket.packet_bytes == 65536  # the charge fits


@pytest.mark.parametrize("text", ["1", "1=", "=4x", "a=4x", "1=fast", "1=0.5x", "1=41x", "1=nanx"])
def test_a_bad_slow_is_an_error_that_says_what_to_write(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Write|Use"):
        parse_slow(text)


@pytest.mark.parametrize("factor", [1.5, 4.0, 10.0, 40.0])
def test_a_duty_cycle_keeps_its_ratio_although_every_turn_is_late(factor: float) -> None:
    late = random.Random(0)
    now, ran_s = 0.0, 0.0
    cycle = DutyCycle(factor, now)
    for _ in range(5000):
        turned = cycle.due + late.uniform(0.0, 0.003)
        if cycle.running:
            ran_s += turned - now
        now = turned
        cycle.turn(now)
    assert now / ran_s == pytest.approx(factor, rel=0.02)


def test_a_duty_cycle_has_the_documented_period() -> None:
    cycle = DutyCycle(4.0, 0.0)
    assert cycle.due == pytest.approx(PERIOD_S / 4)
    assert cycle.turn(cycle.due) is False
    assert cycle.due == pytest.approx(PERIOD_S)


def run_of(world_size: int, rendezvous: str | None = "10.81.0.1:4000", workers: int = 1) -> SharedByHosts:
    return SharedByHosts(
        world_size=world_size, workers=workers, rendezvous=rendezvous, secret="ab" * 32, encrypt=False, master_port=29501
    )


def test_each_host_is_one_rank_to_stretto_and_to_torch() -> None:
    environment = host_environment({"PATH": "/bin", "RANK": "9", "TORCHELASTIC_RUN_ID": "x"}, run_of(3), 2, "/l")
    for prefix in ("", "STRETTO_"):
        assert [environment[f"{prefix}{name}"] for name in ("RANK", "WORLD_SIZE")] == ["2", "3"]
        assert [environment[f"{prefix}{name}"] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["0", "1"]
    assert environment["STRETTO_RENDEZVOUS"] != f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment["STRETTO_ENCRYPT"] == "off"
    assert environment["PATH"] == "/bin"
    assert "TORCHELASTIC_RUN_ID" not in environment


def test_several_workers_of_a_host_are_counted_host_by_host() -> None:
    places = [host_environment({}, run_of(6, workers=3), rank, "/l") for rank in range(6)]
    assert [place["STRETTO_LOCAL_RANK"] for place in places] == ["0", "1", "2", "0", "1", "2"]
    assert {place["LOCAL_WORLD_SIZE"] for place in places} == {"3"}


def test_threads_are_limited_only_for_several_hosts_and_only_when_the_user_has_not_said() -> None:
    assert host_environment({}, run_of(2), 0, "/l")["OMP_NUM_THREADS"] == str(threads_each(2))
    assert host_environment({"OMP_NUM_THREADS": "5"}, run_of(2), 0, "/l")["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in host_environment({}, run_of(1), 0, "/l")


def test_a_rendezvous_of_another_job_does_not_leak_in() -> None:
    assert "STRETTO_RENDEZVOUS" not in host_environment({"STRETTO_RENDEZVOUS": "x:1"}, run_of(1, None), 0, "/l")


def test_a_ledger_comes_back_as_written_and_garbage_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    assert read_ledger(path) is None
    write_ledger(str(path), 1000)
    assert read_ledger(path) == WireCount(1000)
    for life in range(2):
        write_ledger(of_server(str(path), 4, life), 10 + life)
    assert read_ledger(path) == WireCount(1021)  # servers that this worker has started, in all their lives
    path.write_bytes(b"\xff" * 10_000)
    assert read_ledger(path) is None


def test_excess_is_the_share_the_interface_sent_more() -> None:
    assert excess(Traffic(1040, 0), WireCount(1000)) == pytest.approx(0.04)
    assert excess(Traffic(1040, 0), WireCount(0)) == float("inf")


@pytest.mark.parametrize(
    ("sent", "received", "counted", "warns"),
    [
        (2_099_000, 2_099_000, 2_000_000, False),
        (2_101_000, 2_101_000, 2_000_000, True),
        (1_899_000, 2_000_000, 2_000_000, True),
        (1_901_000, 2_000_000, 2_000_000, False),
        (900_000, 0, 100, False),  # too little to judge
        (5_000_000, 0, 0, True),
        (1_200_000, 12_000_000, 1_000_000, False),  # acknowledges ten times what it sends
        (1_500_000, 12_000_000, 1_000_000, True),
    ],
)
def test_counts_more_than_five_per_cent_apart_are_a_warning(sent: int, received: int, counted: int, warns: bool) -> None:
    traffic, ledger = Traffic(sent, received), WireCount(counted)
    said = warning(3, traffic, ledger)
    assert (said is not None) == warns
    if said is not None:
        assert "host 3" in said and f"{excess(traffic, ledger):+.1%}" in said


def test_garbage_and_oversized_messages_are_refused_and_their_descriptors_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        opened = len(os.listdir("/proc/self/fd"))
        for data in (
            b"\xff\x00",
            b"{}",
            b'{"id":1,"request":{"type":"Cut","host":"x"}}',
            b" " * (messages.MAX_BYTES + 1),
        ):
            socket.send_fds(ours, [data], [0, 1])
            with pytest.raises(msgspec.DecodeError):
                messages.receive(theirs, messages.LINK_ENVELOPE)
        assert len(os.listdir("/proc/self/fd")) == opened


def test_a_request_that_meets_a_line_just_closed_says_that_the_supervisor_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = LabConnection(ours)

    def die_first(*_: object) -> None:
        theirs.close()
        raise BrokenPipeError

    monkeypatch.setattr(messages, "send", die_first)
    with pytest.raises(JobError, match="supervisor process has died"):
        connection.request(messages.Count())
    connection.close()


def test_a_stranger_may_ask_for_links_and_for_nothing_else() -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.LINK_ENVELOPE.decode(msgspec.json.encode(messages.NumberedRequest(1, messages.Spawn(0, False))))


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 41, "a b"])
def test_a_name_that_is_no_directory_name_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "runtime_directory", lambda: tmp_path)
    with pytest.raises(ConfigurationError, match="--name"):
        control.LabFolder(name)


def test_the_directory_for_sockets_must_be_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    if Path(f"/run/user/{os.getuid()}").is_dir():
        pytest.skip("this system has a directory for that")
    path = control.runtime_directory()
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o755)
    with pytest.raises(JobError, match="Remove it"):
        control.runtime_directory()


def test_left_overs_of_killed_labs_are_cleared_and_with_no_lab_the_message_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "runtime_directory", lambda: tmp_path)
    (tmp_path / "killed" / "ledger").mkdir(parents=True)
    with pytest.raises(JobError, match="stretto lab --hosts"):
        control.ask(None, messages.CutHost(0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hosts", [0, -1, 251])
def test_a_lab_of_an_impossible_size_is_refused(hosts: int) -> None:
    with pytest.raises(ConfigurationError, match="from 1 to 250"):
        Lab(hosts=hosts)


def test_a_slow_host_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="hosts 0 to 1"):
        Lab(hosts=2, slow={2: 4.0})


def test_without_pyroute2_the_error_gives_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.lab.lab.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install pyroute2"):
        Lab(hosts=1)
