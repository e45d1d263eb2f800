"""The servers that `stretto run --servers` starts on one node: their names, their commands, and what becomes of them.

They are children of the supervisor, as workers are, so nothing is left behind; but the job is the workers'. A server ends by
itself when the last worker of all nodes has left, so a launcher whose own workers have ended waits for its servers. It tells them
to end, which those do that have not met the workers and now never will. One that fails does not end the job: whoever misses it
says so, unless there are copies of what it had. A node that has servers only ends with them, with the code of the first that
failed.

Where workers and servers still meet, or are to meet, those who wait for a server that has ended are told (`membership.Ended`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from stretto.errors import ConfigurationError, SecretError
from stretto.launching import coordinator_process, hosts, launch_plan, secret
from stretto.launching.ended import EndedWorkers
from stretto.launching.launch_plan import LOOPBACK, RunPlan
from stretto.launching.launch_report import how_it_ended
from stretto.launching.processes import ProcessReport
from stretto.launching.server_meeting import JoiningServer

RESTARTS = 3  # of each server


class NodeServers:
    def __init__(self, plan: RunPlan, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._environ = environ
        self.meet_at = servers_meet_at(plan)
        self._servers = {f"server {number}": self._server(number) for number in plan.my_servers}
        self.names = list(self._servers)
        self.alive: set[str] = set()
        self.exit_code = 0
        self._ended = EndedWorkers()

    def _server(self, number: int) -> JoiningServer:
        plan = self._plan
        assert self.meet_at is not None
        return JoiningServer(
            number=number, num_servers=plan.num_servers, num_workers=plan.world_size, rendezvous=self.meet_at, secret=plan.secret,
            encrypt=launch_plan.encrypted(plan, self._environ), trace=None if plan.trace is None else str(plan.trace),
        )  # fmt: skip

    def commands(self) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """Name, words and environment of each; they are taken for alive from now on."""
        for name, server in self._servers.items():
            self.alive.add(name)
            yield name, [*server.command(), "--restarts", str(RESTARTS)], server_environment(self._plan, self._environ)

    def note_end(self, report: ProcessReport, code: int, *, early: bool) -> str | None:
        """What a person should know about it. `early`: while somebody may need it."""
        self.alive.discard(report.name)
        if code == 0 or not early:
            return None
        self.exit_code = self.exit_code or (code if code > 0 else 128 - code)
        server, how = self._servers[report.name], how_it_ended(code)
        self._ended.note(server.ended(report.pid, how), soon=False)
        self._ended.tell(server.launch, again=True)
        return f"stretto: {report.name} (pid {report.pid}) {how}; workers that know it go on if there are copies of what it had"

    @property
    def status(self) -> str:
        return f", {len(self.alive)} of {len(self.names)} servers" if self.names else ""

    def close(self) -> None:
        self._ended.wait()


def servers_meet_at(plan: RunPlan) -> str | None:
    """Where the workers and the servers of this job meet: on rank 0's host, which is node 0. None: it has no servers."""
    if not plan.num_servers:
        return None
    if plan.rendezvous is None:
        return hosts.join_address(LOOPBACK, launch_plan.free_port())
    host, port = plan.rendezvous
    return hosts.join_address(LOOPBACK if plan.nodes == 1 else host, port + 2 if port < 65534 else port - 2)


def server_environment(plan: RunPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one server, which reads the rest on its command line (`server_meeting.JoiningServer`)."""
    own = {"STRETTO_SECRET": plan.secret.hex(), "PYTHONSAFEPATH": "1"}
    if plan.timeout_s is not None:
        own["STRETTO_TIMEOUT"] = f"{plan.timeout_s:g}"
    if plan.meet_s is not None:
        own["STRETTO_MEET_TIMEOUT"] = f"{plan.meet_s:g}"
    return {"OMP_NUM_THREADS": "1", **coordinator_process.importing_stretto(environ), **own}


def check_environment(plan: RunPlan, environ: Mapping[str, str], secret_file: Path | None) -> None:
    """Servers are ours, or somebody else's, who has to know the secret."""
    if environ.get("STRETTO_SERVERS") and secret_file is None:
        raise SecretError(
            f"STRETTO_SERVERS={environ['STRETTO_SERVERS']!r} without --secret-file: servers that were started with "
            f"`stretto serve` have the job's secret from a file, and a job without one makes up its own.\n"
            f"Give both the same: --secret-file job.secret; or unset STRETTO_SERVERS, if this job has none of these servers. "
            f"{secret.HOW_TO_MAKE_ONE}"
        )
    if plan.num_servers and environ.get("STRETTO_SERVERS"):
        raise ConfigurationError(
            f"--servers with STRETTO_SERVERS={environ['STRETTO_SERVERS']!r}: a job has the servers that `stretto run` starts, or "
            f"those that were started with `stretto serve`.\nLeave --servers out, or unset STRETTO_SERVERS."
        )
