"""A worker that comes back to a job that has gone on without it: what its job is, and what is refused.

It is another life of its rank (`Job.life`): the job's coordinator says so when it joins (`launching/lasting_membership.py`).
The others have lost their connection to its former life, and collectives take all workers, so it has none to anybody: every
collective is refused with a reason. What it can do is train so that no worker is needed (`Training.goes_on_without`): with
servers that step, where it goes on from the values that they have, at the clock of the slowest worker (`Job.first_step`); or
where workers reach each other one to one (`aggregate/peers/`), from the values and at the step of one that lives. It finds them
by the notes that the job's coordinator keeps.
"""

from __future__ import annotations

from stretto.aggregate.hierarchy.hosts import groups_of
from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.aggregate.shared_memory.training import Hogwild
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.strategy import Strategy


def check_return(job: Job, strategy: Strategy, num_optimizers: int) -> None:
    """Whether a worker that has come back can train so."""
    here = f"rank {job.rank} has come back to a job that went on without it"
    plans = strategy.schedule.needs_profile and strategy.training.plans_with_times
    if not strategy.training.goes_on_without or plans:
        raise ConfigurationError(
            f"{here}, and {strategy} needs collectives, which take all workers from the beginning on.\n"
            f"Train with servers that step, or by gossip, and a schedule that plans nothing by measured times, for instance "
            f"Strategy(aggregate=ParameterServer(), sync=StaleSynchronous(3)); or leave --min-workers out: then all "
            f"begin anew when one dies."
        )
    if issubclass(strategy.training, Hogwild):
        raise ConfigurationError(
            f"{here}, with aggregate={strategy.aggregate!r}: the workers of a host make the memory that they share when they "
            f"begin, all together, and nobody is let into it later.\n"
            f"Write aggregate=ParameterServer(), sync=Asynchronous(); or leave --max-restarts out: then the others go on alone."
        )
    if isinstance(strategy.aggregate, Hierarchy):
        group = next(each for each in groups_of(job.peers, strategy.aggregate.group_size) if job.rank in each)
        if len(group) > 1:
            raise ConfigurationError(
                f"{here}, with aggregate={strategy.aggregate!r}: ranks {', '.join(map(str, group))} are a group, which a worker "
                f"that dies takes with it, and one worker cannot bring it back.\n"
                f"Write group_size=1, or leave --max-restarts out: then the other groups go on alone."
            )
    if num_optimizers > 1:
        raise ConfigurationError(
            f"{here}, with {num_optimizers} optimizers: it enters at one number of steps, and theirs may differ.\n"
            f"Give distribute() one optimizer with several groups."
        )
