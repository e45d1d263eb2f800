"""What one training step of a model takes on this job: the facts that schedules plan with and the simulator computes with.

    forward    modules run in the order of `modules`; each takes `forward_s` of its own (its children's time is theirs)
    backward   the gradient of a parameter is there `ready_s` after backward has begun
    network    a transfer of n bytes that has the network to itself takes `start_s + n * per_byte_s`

A profile is of one model and one number of workers, and says so by a digest: another's is refused (`profile_file.check`).
`recorder.py` makes profiles, `recorded_step.py` says how times are counted, and `transfer_cost.py` measures the network.
"""

from __future__ import annotations

import msgspec


class ParameterProfile(msgspec.Struct, frozen=True, kw_only=True):
    """`ready_s`: from the beginning of backward until its gradient was there; `used_by`: the number of the module, in
    `StepProfile.modules`, whose forward is the first to read it; None if no module with a forward of its own was seen to."""

    name: str
    num_bytes: int
    ready_s: float
    used_by: int | None = None


class ModuleProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A module that has parameters of its own, or reads those of modules inside it, and how long its forward and its backward
    took, without those of its children in this profile. Activations and the loss are counted to the module before them."""

    name: str
    forward_s: float
    backward_s: float


class TransferCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a transfer that has the network to itself: `start_s + num_bytes * per_byte_s`. Fitted to a few real ones.

    `hops`: how many messages of a transfer follow each other; None: those of a ring of all workers."""

    start_s: float
    per_byte_s: float
    hops: int | None = None

    def seconds(self, num_bytes: float) -> float:
        return self.start_s + num_bytes * self.per_byte_s


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over a few real steps. `modules` are in the order in which forward first calls them, `parameters` in the order in
    which their gradients are ready: those that never have one are the last, and ready when backward ends. `forward_s` lasts until
    backward begins, so the loss is in it; `update_s` is the whole optimizer step."""

    model: str
    digest: str
    world_size: int
    steps: int
    forward_s: float
    backward_s: float
    update_s: float
    modules: tuple[ModuleProfile, ...]
    parameters: tuple[ParameterProfile, ...]
    cost: TransferCost
    version: int = 1
