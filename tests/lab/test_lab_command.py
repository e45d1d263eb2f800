"""`stretto lab` as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.processes, pytest.mark.timeout(300)]

LIMIT_S = 120

STRETTO = [sys.executable, "-m", "stretto", "lab"]


def stretto_lab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STRETTO, *words], capture_output=True, text=True, timeout=LIMIT_S)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """A failing test leaves no process behind."""
    try:
        yield
    finally:
        process.kill()


def test_output_has_the_host_in_front_and_the_exit_code_is_the_first_failing_hosts(tmp_path: Path) -> None:
    # A failure ends the others, so host 1 fails only once host 0 has spoken.
    spoken = tmp_path / "spoken"
    wait = f"while ! test -e {spoken}; do sleep 0.05; done"
    fail = "echo PeerLost: rank 0 is lost: a test >&2; exit 7"
    script = f"echo from $RANK; if test $RANK = 0; then touch {spoken}; else {wait}; {fail}; fi"
    done = stretto_lab("--hosts", "2", "--rate", "100mbit", "--", "sh", "-c", script)
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == [
        "[host 0] from 0",
        "[host 1] PeerLost: rank 0 is lost: a test",
        "[host 1] from 1",
    ]
    assert "2 hosts, links 100mbit" in done.stderr
    assert "not encrypted" in done.stderr
    assert "bytes through" in done.stderr
    assert "host 1 failed first (exit code 7), having lost rank 0; the others were ended" in done.stderr


def test_a_command_without_dashes_before_it_runs_too_and_keeps_its_options() -> None:
    done = stretto_lab("--hosts", "1", "sh", "-c", "echo --rate $0", "x")
    assert (done.returncode, done.stdout) == (0, "[host 0] --rate x\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "fast", "--", "true"], "1gbit"),
        (["--slow", "9=4x", "--", "true"], "hosts 0 to 1"),
        (["--slow", "quick", "--", "true"], "--slow 1=4x"),
        (["cut", "0", "--name", "no-such-lab"], "running"),
    ],
)
def test_bad_input_gets_a_message_and_no_traceback(words: list[str], says: str) -> None:
    done = stretto_lab(*words)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_everything() -> None:
    script = "trap 'echo $RANK bye; exit 0' INT; echo $RANK started; while :; do sleep 0.1; done"
    running = subprocess.Popen(
        [*STRETTO, "--hosts", "2", "--", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    with running, ended(running):
        assert "started" in running.stdout.readline()
        assert "started" in running.stdout.readline()
        supervisor = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 130
    assert "0 bye" in stdout and "1 bye" in stdout
    assert "Traceback" not in stderr
    assert supervisor and not any(Path(f"/proc/{pid}").exists() for pid in supervisor)


# Hosts that send to each other all the time. Each says what it hears once the test has said (by a file) that it should: a host
# that is merely slow to send is silent too, so silence is asked for only while the link is cut.
PING = """
import os, socket, sys
folder = sys.argv[1]
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 7000)); s.settimeout(0.2)
other = ('10.81.0.%d' % (2 - int(os.environ['RANK'])), 7000)
for number, wanted in enumerate((True, False, True)):
    heard = None
    while heard != wanted or not os.path.exists(f"{folder}/{number}"):
        s.sendto(b'x', other)
        try: heard = bool(s.recv(1))
        except TimeoutError: heard = False
    print(heard, flush=True)
while not os.path.exists(f"{folder}/end"):  # the other may not have heard us yet
    s.sendto(b'x', other)
"""


def test_a_link_is_cut_and_mended_from_another_terminal(tmp_path: Path) -> None:
    name = f"cut-{os.getpid()}"
    command = [*STRETTO, "--hosts", "2", "--name", name, "--", sys.executable, "-c", PING, str(tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    with running, ended(running):
        for number, (heard, next_order) in enumerate((("True", "cut"), ("False", "restore"), ("True", None))):
            (tmp_path / str(number)).touch()
            lines = [running.stdout.readline() for _ in range(2)]
            assert sorted(lines) == [f"[host 0] {heard}\n", f"[host 1] {heard}\n"]
            if next_order is not None:
                assert stretto_lab(next_order, "1", "--name", name).returncode == 0
        (tmp_path / "end").touch()
        assert running.wait(LIMIT_S) == 0


def test_the_table_sets_the_count_of_each_hosts_workers_beside_the_interfaces() -> None:
    worker = (
        "import os, socket; from stretto.launching.ledger_file import write_ledger; rank = int(os.environ['RANK'])\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for _ in range(50): s.sendto(bytes(1000), (f'10.81.0.{2 - rank // 2}', 7000))\n"
        "write_ledger(os.environ['STRETTO_LEDGER'], 50_000); print('local rank', os.environ['LOCAL_RANK'])\n"
    )
    done = stretto_lab("--hosts", "2", "-n", "2", "--", sys.executable, "-c", worker)
    said = [f"[host {rank // 2}, rank {rank}] local rank {rank % 2}" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == said
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:6] for line in done.stderr.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["0", "1"]
    for row in rows:
        sent, count, over = (row[column].strip().replace(",", "") for column in (1, 3, 4))
        assert int(count) == 100_000
        assert 100_000 < int(sent) < 115_000  # 42 bytes of headers each, and what the closed port answers
        assert over.startswith("+")
    assert "warning" not in done.stderr  # too little was sent to judge


def test_a_count_that_is_far_off_gets_a_warning() -> None:
    worker = (
        "import os, socket; from stretto.launching.ledger_file import write_ledger; rank = int(os.environ['RANK'])\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for _ in range(2000): s.sendto(bytes(1000), (f'10.81.0.{2 - rank}', 7000))\n"
        "write_ledger(os.environ['STRETTO_LEDGER'], 2_040_000 if rank else 1_500_000)\n"
    )
    done = stretto_lab("--hosts", "2", "--", sys.executable, "-c", worker)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "stretto lab: warning: host 0 sent 2," in said and "counted 1,500,000 (+" in said
    assert "warning: host 1" not in said


def test_a_user_who_asks_for_encryption_in_the_environment_or_for_a_trace_gets_it(tmp_path: Path) -> None:
    (tmp_path / "trace-rank7.json").touch()
    words = [*STRETTO, "--hosts", "1", "--", "sh", "-c", "echo $STRETTO_ENCRYPT $STRETTO_TRACE"]
    for more, expected in ((["--trace", str(tmp_path)], f"on {tmp_path}"), (["--no-encrypt"], "off")):
        command = [*STRETTO, *more, *words[len(STRETTO) :]]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "STRETTO_ENCRYPT": "on"}, check=False
        )
        assert (done.returncode, done.stdout) == (0, f"[host 0] {expected}\n"), done.stderr
    assert list(tmp_path.iterdir()) == []  # what an earlier run left is gone


DDP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert x.eq(3).all()
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.randn(3, 4)).sum().backward()
weights = [torch.empty_like(model.module.weight) for _ in range(2)]
dist.all_gather(weights, model.module.weight.grad)
assert torch.equal(*weights)
print("trained", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_plain_torch_script_with_ddp_runs_unchanged() -> None:
    for _ in range(3):
        done = stretto_lab("--hosts", "2", "--rate", "1gbit", "--", sys.executable, "-c", DDP)
        if "terminate called without an active exception" not in done.stdout + done.stderr:  # torch's own end, on a busy machine
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[host 0] trained", "[host 1] trained"]  # and no warning of torch's


@pytest.mark.slow
def test_hosts_for_servers_come_after_the_others_and_their_bytes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, stretto\n"
        "job = stretto.init()\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "strategy = stretto.Strategy(aggregate=stretto.ParameterServer(placement='dedicated'))\n"
        "stretto.distribute(model, optimizer, strategy)\n"
        "for _ in range(4):\n"
        "    model(torch.randn(8, 256)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "print('servers', job.server_networks[0].servers)\n"
    )
    words = ["--hosts", "2", "--servers", "2", "--rate", "1gbit", "--", sys.executable, str(tmp_path / "train.py")]
    done = stretto_lab(*words)
    assert done.returncode == 0, done.stderr
    assert "2 hosts and 2 with a server each" in done.stderr
    assert sum("servers [2, 3]" in line for line in done.stdout.splitlines()) == 2
    rows = [line.replace(",", "").split("\u2502")[1:-1] for line in done.stderr.splitlines() if line.startswith("\u2502")]
    model = 4 * 8 * (256 * 256 + 256)
    for _, sent, _, counted, _ in rows:
        assert int(sent) > int(counted) >= 4 * model, (
            "each worker sends the model in a step, and each of two servers half of it to both"
        )
    assert len(rows) == 4 and "warning" not in done.stderr
