"""A worker that comes back to a job that has gone on without it: what its job is, and what is refused.

It is another life of its rank (`Job.life`): the job's coordinator says so when it joins (`launching/lasting_membership.py`).
The others have lost their connection to its former life, and collectives take all workers, so it has none to anybody: every
collective is refused with a reason. What it can do is train with servers that step (`Training.goes_on_without`), which need no
worker but it. It finds them by the notes that the job's coordinator keeps, and goes on from the values that they have, at the
clock of the slowest worker (`Job.first_step`).
"""

from __future__ import annotations

from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.strategy import Strategy


def check_return(job: Job, strategy: Strategy, num_optimizers: int) -> None:
    """Whether a worker that has come back can train so."""
    here = f"rank {job.rank} has come back to a job that went on without it"
    if not strategy.training.goes_on_without or strategy.schedule.needs_profile:
        raise ConfigurationError(
            f"{here}, and {strategy} needs collectives, which take all workers from the beginning on.\n"
            f"Train with servers that step and a schedule that plans nothing by measured times, for instance "
            f"Strategy(aggregate=ParameterServer(), sync=StaleSynchronous(3)); or leave --min-workers out: then all "
            f"begin anew when one dies."
        )
    if num_optimizers > 1:
        raise ConfigurationError(
            f"{here}, with {num_optimizers} optimizers: it enters at one number of steps, and theirs may differ.\n"
            f"Give distribute() one optimizer with several groups."
        )
