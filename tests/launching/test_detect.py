"""Every launcher is recognised from its variables, and nonsense in them is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stretto.errors import ConfigurationError, SecretError
from stretto.launching.detect import Launch, detect
from stretto.timeouts import Timeouts

SECRET = "5a" * 32
STRETTO = {
    "STRETTO_RANK": "3", "STRETTO_WORLD_SIZE": "4", "STRETTO_LOCAL_RANK": "1", "STRETTO_LOCAL_WORLD_SIZE": "2",
    "STRETTO_RENDEZVOUS": "node0:29400", "STRETTO_SECRET": SECRET, "STRETTO_ENCRYPT": "on",
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29401",
}  # fmt: skip
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
}  # fmt: skip
TWO_HOSTS = {"WORLD_SIZE": "4", "RANK": "3"}
SLURM = {
    "SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x2),1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "STRETTO_SECRET": SECRET,
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "STRETTO_RENDEZVOUS": "[fe80::1]:29500", "STRETTO_SECRET": SECRET,
}  # fmt: skip

NO_MASTER = {name: OPENMPI[name] for name in OPENMPI if "MASTER" not in name} | {"STRETTO_RENDEZVOUS": "node0:29400"}


def place(launch: Launch) -> tuple[str, int, int, int, int, str | None, bool]:
    return (
        launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, launch.rendezvous,
        launch.encrypt,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("single", 0, 1, 0, 1, None, False)),
        ({"RANK": "3"}, ("single", 0, 1, 0, 1, None, False)),  # what a notebook may have left behind
        ({"WORLD_SIZE": "4"}, ("single", 0, 1, 0, 1, None, False)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("single", 0, 1, 0, 1, None, False)),
        ({"RANK": "1", "WORLD_SIZE": ""}, ("single", 0, 1, 0, 1, None, False)),
        (STRETTO, ("stretto", 3, 4, 1, 2, "node0:29400", True)),
        (STRETTO | {"STRETTO_ENCRYPT": "off"}, ("stretto", 3, 4, 1, 2, "node0:29400", False)),
        ({"STRETTO_RANK": "0", "STRETTO_WORLD_SIZE": "1"}, ("stretto", 0, 1, 0, 1, None, False)),
        (TORCHRUN, ("torchrun", 1, 2, 1, 2, None, False)),
        (TORCHRUN | TWO_HOSTS | {"STRETTO_SECRET": SECRET}, ("torchrun", 3, 4, 1, 2, None, True)),
        (TORCHRUN | TWO_HOSTS | {"STRETTO_ENCRYPT": "off"}, ("torchrun", 3, 4, 1, 2, None, False)),
        (SLURM, ("slurm", 4, 5, 0, 1, "node0:29501", True)),
        (SLURM | {"SLURM_NODEID": "0", "SLURM_PROCID": "1"}, ("slurm", 1, 5, 0, 2, "node0:29501", True)),
        (NO_MASTER | {"RANK": "1", "WORLD_SIZE": "2"}, ("openmpi", 1, 2, 1, 2, "node0:29400", False)),
        (OPENMPI, ("openmpi", 1, 2, 1, 2, "127.0.0.1:29501", False)),
        (MPICH, ("mpich", 1, 4, 1, 2, "[fe80::1]:29500", True)),
    ],
)
def test_each_launcher_is_recognised(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    assert place(detect(environ)) == expected


def test_an_interactive_shell_in_slurm_is_a_job_of_one() -> None:
    launch = detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "17"})

    assert (launch.world_size, launch.rendezvous, launch.secret) == (1, None, None)


def test_a_restarted_torchrun_group_has_another_name_than_the_first() -> None:
    first, second = (detect(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": count}) for count in "01")

    assert first.run != second.run
    assert first.agent_store and first.master == "localhost:29500"


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (STRETTO | {"STRETTO_RANK": "three"}, "STRETTO_RANK='three'"),
        (STRETTO | {"STRETTO_RANK": "4"}, "STRETTO_RANK=4 with STRETTO_WORLD_SIZE=4"),
        (STRETTO | {"STRETTO_RANK": "-1"}, "STRETTO_RANK=-1"),
        (STRETTO | {"STRETTO_WORLD_SIZE": "0"}, "STRETTO_WORLD_SIZE=0"),
        (STRETTO | {"STRETTO_LOCAL_RANK": "2"}, "STRETTO_LOCAL_RANK=2 with STRETTO_LOCAL_WORLD_SIZE=2"),
        (STRETTO | {"STRETTO_LOCAL_WORLD_SIZE": "5"}, "STRETTO_LOCAL_WORLD_SIZE=5 with STRETTO_WORLD_SIZE=4"),
        (STRETTO | {"STRETTO_RENDEZVOUS": "node0"}, "STRETTO_RENDEZVOUS='node0'"),
        (STRETTO | {"STRETTO_RENDEZVOUS": "node0:0"}, "STRETTO_RENDEZVOUS='node0:0'"),
        (STRETTO | {"STRETTO_RENDEZVOUS": ""}, "STRETTO_RENDEZVOUS is not set"),
        (STRETTO | {"STRETTO_ENCRYPT": "yes"}, "STRETTO_ENCRYPT='yes'"),
        (STRETTO | {"STRETTO_TIMEOUT": "soon"}, "STRETTO_TIMEOUT='soon'"),
        (STRETTO | {"STRETTO_TIMEOUT": "-1"}, "STRETTO_TIMEOUT='-1'"),
        (STRETTO | {"STRETTO_TIMEOUT": "inf"}, "STRETTO_TIMEOUT='inf'"),
        (STRETTO | {"STRETTO_MEET_TIMEOUT": "0"}, "STRETTO_MEET_TIMEOUT='0'"),
        (STRETTO | {"STRETTO_RESTART_COUNT": "x"}, "STRETTO_RESTART_COUNT='x'"),
        ({"STRETTO_RANK": "0"}, "STRETTO_WORLD_SIZE is not"),
        ({"STRETTO_WORLD_SIZE": "2"}, "STRETTO_RANK is not"),
        (TORCHRUN | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0'"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "'http' is not a port number"),
        ({name: TORCHRUN[name] for name in TORCHRUN if name != "MASTER_PORT"}, "MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 but MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "7", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "7"}, "unset RANK and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "many"}, "SLURM_TASKS_PER_NODE='many'"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        (SLURM | {"MASTER_PORT": "65535"}, "MASTER_PORT=65535"),
        ({name: SLURM[name] for name in SLURM if name != "MASTER_ADDR"}, "Export MASTER_ADDR"),
        ({name: OPENMPI[name] for name in OPENMPI if name != "MASTER_PORT"}, "Export MASTER_ADDR"),
        ({name: MPICH[name] for name in MPICH if name != "MPI_LOCALRANKID"}, "MPI_LOCALRANKID is not"),
    ],
)
def test_nonsense_is_an_error_that_names_variable_and_value(environ: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect(environ)

    assert names in str(caught.value)


@pytest.mark.parametrize("environ", [STRETTO, SLURM, MPICH, TORCHRUN | TWO_HOSTS])
def test_several_hosts_without_a_secret_are_refused_with_what_to_export(environ: dict[str, str]) -> None:
    with pytest.raises(SecretError, match=r"(?s)STRETTO_SECRET_FILE.*stretto secret > job.secret"):
        detect({name: value for name, value in environ.items() if name != "STRETTO_SECRET"})


def test_the_secret_may_come_from_a_file_and_is_never_printed(tmp_path: Path) -> None:
    file = tmp_path / "job.secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    environ = {name: value for name, value in STRETTO.items() if name != "STRETTO_SECRET"}

    launch = detect(environ | {"STRETTO_SECRET_FILE": str(file)})

    assert launch.secret == bytes.fromhex(SECRET)
    assert SECRET not in repr(launch) and repr(launch.secret) not in repr(launch)


def test_what_the_user_may_set_is_read() -> None:
    launch = detect({"STRETTO_TIMEOUT": "2.5", "STRETTO_INTERFACE": "eth1", "STRETTO_STRATEGY": "ddp()"})

    assert (launch.timeout_s, launch.interface, launch.strategy) == (2.5, "eth1", "ddp()")
    assert detect({}).strategy is None
    assert detect(STRETTO | {"STRETTO_RESTART_COUNT": "2"}).restart == detect(TORCHRUN).restart == 2
    # Nodes count their restarts each for itself, and their traces belong together all the same.
    assert detect(STRETTO).run == detect(STRETTO | {"STRETTO_RESTART_COUNT": "2"}).run


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Timeouts()),
        ({"STRETTO_TIMEOUT": "900"}, Timeouts.of(900)),
        ({"STRETTO_MEET_TIMEOUT": "5"}, Timeouts(meet_s=5)),
        ({"STRETTO_TIMEOUT": "60", "STRETTO_MEET_TIMEOUT": "3600"}, dataclasses.replace(Timeouts.of(60), meet_s=3600)),
    ],
)
def test_timeouts_are_as_the_environment_says(environ: dict[str, str], expected: Timeouts) -> None:
    assert detect(environ).timeouts == expected


@pytest.mark.parametrize("seconds", [10, 60, 600, 100_000])
def test_no_deadline_for_starting_is_below_what_was_asked_for(seconds: float) -> None:
    timeouts = Timeouts.of(seconds)

    assert timeouts.meet_s == timeouts.connect_s == timeouts.arrive_s == seconds
    assert Timeouts.of(1).meet_s == Timeouts.of(1).connect_s == 10  # importing torch takes longer than a second
