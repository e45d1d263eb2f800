"""A job on hosts of its own: it works, counts its bytes truly, and a cut link is noticed on both ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.processes, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(300)]

Eventually = Callable[[Callable[[], bool]], None]
SILENCE_S = 4.0  # a host that a busy machine leaves waiting for a second or two is not silent
CUT = 1

WORKER = """
import json, os, sys, time
import torch, stretto
from stretto import Timeouts

folder, rank = sys.argv[1], int(os.environ["STRETTO_RANK"])

def mark(name, value):
    with open(f"{folder}/{name}.new", "w") as file: json.dump(value, file)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")

def all_reduce(numel):
    tensor = torch.full((numel,), float(rank))
    stretto.all_reduce(tensor, "sum", algorithm="ring")
    assert tensor[0] == 3 and tensor[-1] == 3

job = stretto.init(timeouts=Timeouts(silence_s=float(sys.argv[2])))
for _ in range(10): all_reduce(2_000_000)
mark(f"sent{rank}", {"bytes": job.wire.bytes_sent, "wire": type(job.wire).__name__})
end = time.monotonic() + 200
try:
    while time.monotonic() < end:
        all_reduce(1000)
        if not os.path.exists(f"{folder}/counted"): time.sleep(0.1)
        elif not os.path.exists(f"{folder}/ready{rank}"): mark(f"ready{rank}", None)
        else: time.sleep(0.01)
except stretto.StrettoError as error:
    blamed = {"kind": type(error).__name__, "rank": getattr(error, "rank", None), "text": str(error)}
    mark(f"caught{rank}", blamed)
"""


@pytest.mark.parametrize(
    ("encrypt", "wire"),
    [
        pytest.param(False, "TcpWire", id="plain", marks=pytest.mark.slow),
        pytest.param(True, "ZeroMQWire", id="encrypted", marks=pytest.mark.slow),
    ],
)
def test_hosts_reduce_and_count_their_bytes_and_a_cut_link_is_noticed_on_both_ends(
    encrypt: bool, wire: str, tmp_path: Path, eventually: Eventually
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def marks(name: str) -> list[Path]:
        return [tmp_path / f"{name}{rank}" for rank in range(3)]

    with Lab(hosts=3, encrypt=encrypt) as lab:
        job = lab.start([sys.executable, str(script), str(tmp_path), str(SILENCE_S)])

        def have(name: str) -> bool:
            if any(process.finished for process in job.processes) and not all(mark.exists() for mark in marks(name)):
                pytest.fail("\n".join(process.output for process in job.processes))
            return all(mark.exists() for mark in marks(name))

        eventually(lambda: have("sent"))
        sent = [json.loads(mark.read_text()) for mark in marks("sent")]
        check_ledger(sent, [traffic.sent for traffic in lab.counters()], wire)

        (tmp_path / "counted").touch()
        eventually(lambda: have("ready"))
        lab.cut(CUT)
        eventually(lambda: all(mark.exists() for mark in marks("caught")))
        check_cut([json.loads(mark.read_text()) for mark in marks("caught")])
        results = job.wait(60, keep_going=True)
    assert [result.returncode for result in results] == [0, 0, 0], results


def check_ledger(sent: list[dict[str, Any]], counted: list[int], wire: str) -> None:
    """What the wires say they sent and what the interfaces saw: the same to 5 per cent."""
    assert [each["wire"] for each in sent] == [wire] * 3
    by_hand = 10 * 4 * 2_000_000 * 4 // 3  # of a ring of three: 2 (P-1)/P of the tensor, ten times
    for each, interface in zip(sent, counted, strict=True):
        assert each["bytes"] == pytest.approx(by_hand, rel=0.01)
        assert interface == pytest.approx(each["bytes"], rel=0.05)


def check_cut(caught: list[dict[str, Any]]) -> None:
    """Lost, for it is silent, and nobody waits for `arrive_s`, ten minutes. (How soon exactly: see `test_faults.py`.)"""
    for rank, error in enumerate(caught):
        assert error["kind"] == "PeerLost" and "silent for" in error["text"], caught
        # Those who are left name the host that was cut off; that host itself lost both others, and names one.
        assert error["rank"] == CUT if rank != CUT else error["rank"] in (0, 2), caught
