"""`stretto doctor`: everything about this machine that explains why a job does or does not run here.

The findings are sections of (name, value) pairs of text, printed for people or as JSON. Nothing that is secret is
shown. Facts are tried rather than believed: an address is bound and connected to, a network namespace is made in a
throw-away process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata

from stretto import __version__
from stretto.errors import StrettoError
from stretto.launching import hosts

Section = dict[str, str]
Findings = dict[str, Section]

CONNECT_S = 2.0
NAMESPACE_S = 5.0
PACKAGES = ("torch", "numpy", "pyzmq", "msgspec", "typer", "rich", "pyroute2", "numba", "triton")
JOB_VARIABLES = re.compile(
    r"STRETTO_|MASTER_(ADDR|PORT)$|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|GLOO_|NCCL_|TORCH|CUDA_VISIBLE|OMP_|MKL_|KMP_"
    r"|OMPI_COMM_WORLD_|PMI_|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NNODES|JOB_ID|STEP_ID|STEP_NUM_TASKS)$"
)
SECRET = re.compile(r"SECRET(?!_FILE)|TOKEN|PASSWORD|PASSWD|KEY|CREDENTIAL")

_UNSHARE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(0 if libc.unshare(int(sys.argv[1])) == 0 else ctypes.get_errno() or 1)
"""
_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER


def examine(environ: Mapping[str, str]) -> Findings:
    """All findings. A check that fails unexpectedly says so in its section and stops no other."""
    checks: dict[str, Callable[[], Section]] = {
        "versions": versions,
        "machine": machine,
        "devices": devices,
        "network": lambda: network(environ),
        "reachable": reachability,
        "limits": limits,
        "lab": lab,
        "environment": lambda: environment(environ),
    }
    return {name: _checked(check) for name, check in checks.items()}


def _checked(check: Callable[[], Section]) -> Section:
    try:
        return check()
    except Exception as problem:  # a doctor that crashes on the machine it should explain is of no use
        return {"check failed": f"{type(problem).__name__}: {problem}"}


def versions() -> Section:
    found = {"stretto": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    import zmq

    curve = "with CURVE" if zmq.has("curve") else "WITHOUT CURVE: jobs on several machines cannot be encrypted"
    found["libzmq"] = f"{zmq.zmq_version()} {curve}"
    return found


def machine() -> Section:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "host name": socket.gethostname(),
        "processors": f"{hosts.usable_processors()} usable of {os.cpu_count()}",
        "memory": _memory(),
    }


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with open("/proc/meminfo") as lines:
        available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    if available is None:  # some sandboxes have a short one
        return _size(total)
    return f"{_size(total)}, {_size(available)} available"


def devices() -> Section:
    try:
        import torch
    except ImportError as problem:
        return {"torch": f"cannot be imported: {problem}"}
    found = {"torch threads": str(torch.get_num_threads()), "CUDA": torch.version.cuda or "not in this build of torch"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{properties.name}, {_size(properties.total_memory)}"
    if torch.distributed.is_available():
        backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
        found["backends"] = ", ".join(name for name, there in backends.items() if there) or "none"
    return found


def network(environ: Mapping[str, str]) -> Section:
    found: Section = {}
    for name, address in hosts.interfaces():
        found[name] = f"{found[name]}, {address}" if name in found else address
    found["published on one host"] = "127.0.0.1"
    found["published to other hosts"] = _published(environ)
    return found


def _published(environ: Mapping[str, str]) -> str:
    chosen = environ.get("STRETTO_INTERFACE")
    meeting = environ.get("STRETTO_RENDEZVOUS")
    try:
        if chosen:
            return f"{hosts.address_of(chosen)} (STRETTO_INTERFACE={chosen})"
        if meeting:
            address = hosts.address_for_others(*hosts.split_address(meeting))
            return f"{address} ({hosts.interface_of(address)}, for the rendezvous {meeting})"
    except (StrettoError, ValueError) as problem:
        return f"none: {problem}"
    outward = [
        f"{address} ({hosts.interface_of(address)}, the route to the outside world)" for address in hosts.outward_addresses()
    ]
    return outward[0] if outward else "none: no route leads to the outside world"


def reachability() -> Section:
    """For each own address: can it be listened on, and does a connection to it arrive?"""
    return {address: _reach(address) for _, address in hosts.interfaces()}


def _reach(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname()[:2], timeout=CONNECT_S):
                return "listens and answers"
    except OSError as problem:
        return f"NOT REACHABLE from this machine itself: {problem}"


def limits() -> Section:
    found = {
        "open files (ulimit -n)": _limit(resource.RLIMIT_NOFILE),
        "locked memory (ulimit -l)": _limit(resource.RLIMIT_MEMLOCK),
    }
    for name, path in (("shared memory (for data loaders)", "/dev/shm"), ("temporary files", os.environ.get("TMPDIR", "/tmp"))):
        if os.path.isdir(path):
            usage = shutil.disk_usage(path)
            found[f"{name} ({path})"] = f"{_size(usage.total)}, {_size(usage.free)} free"
        else:
            found[f"{name} ({path})"] = "none"
    return found


def _limit(which: int) -> str:
    soft, hard = ("unlimited" if value == resource.RLIM_INFINITY else str(value) for value in resource.getrlimit(which))
    return f"{soft} (at most {hard})"


def lab() -> Section:
    if importlib.util.find_spec("pyroute2") is None:
        return {"can run": "no: pyroute2 is not installed (pip install pyroute2)"}
    if _can_unshare(_NEW_NETWORK):
        return {"can run": "yes, with this user's privileges"}
    if _can_unshare(_NEW_NETWORK | _NEW_USER):
        return {"can run": "yes, in a user namespace"}
    return {"can run": "no: this user may make neither network nor user namespaces; run it as root"}


def _can_unshare(flags: int) -> bool:
    command = [sys.executable, "-I", "-S", "-c", _UNSHARE, str(flags)]
    return subprocess.run(command, capture_output=True, timeout=NAMESPACE_S, check=False).returncode == 0


def environment(environ: Mapping[str, str]) -> Section:
    """The variables that decide about jobs. Of what looks like a secret only its length is told."""
    return {
        name: f"(set, {len(value)} characters, not shown)" if SECRET.search(name) else value
        for name, value in sorted(environ.items())
        if JOB_VARIABLES.match(name)
    }


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def as_text(findings: Findings) -> str:
    lines = []
    for section, values in findings.items():
        lines.append(section)
        width = max((len(name) for name in values), default=0)
        lines += [f"  {name.ljust(width)}  {value}" for name, value in values.items()] or ["  (none)"]
    return "\n".join(lines) + "\n"


def as_json(findings: Findings) -> str:
    return json.dumps(findings, indent=2) + "\n"
