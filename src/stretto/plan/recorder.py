"""Recording a few real steps of a model: hooks that take marks, and take themselves off when recording ends.

    with StepRecorder(model, [optimizer]) as recorder:
        ...                                       # train as usual; `recorder.steps_seen` counts
    profile = recorder.profile(cost=transfer_cost(group, "a profile"), world_size=4)

A *step* is what lies between the first forward after a backward and the end of the next backward; it may call modules, or the
model itself, several times. Only forwards that lead to a backward count: not those under `no_grad`, nor the recomputation of a
checkpointed one, nor what is compiled, traced or captured. A forward or backward that raises leaves no step. The first step is
thrown away (it warms up), and so is the first update; of the others the last `KEPT` are kept.

Times are those of the training thread, or of the GPU's stream, with what this worker does there for communication. So record
while nobody waits for transfers in a forward. How times become a profile is told in `recorded_step.py`.

Cost: a forward hook for each module that has parameters below it, a hook for each parameter, and a mark in each: about 3
microseconds a layer, more than half of it torch's own for calling a hook. A step of a byte GPT takes 0.1 % longer; one of 100
times Linear(64, 64) with batches of 32, which compute next to nothing, 9.5 % (`benchmarks/profile_overhead.py`). Nothing is left
when it is closed. A compiled graph does not call the hooks; its parameters count as read by the model as a whole.

Invariant: what hangs on tensors, where Python's garbage collector does not see it, holds marks and numbers, never the model.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.errors import ConfigurationError
from stretto.plain_state import ForwardHook
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.profile_file import digest_of
from stretto.plan.recorded_step import ModelParts, RecordedStep, order_of, readers, summary
from stretto.plan.step_clock import StepClock, clock_for
from stretto.tensors_in import tensors_in

KEPT: Final = 16
MOST_CALLS: Final = 1 << 16  # of modules, in what could still become a step: forwards that no backward ever follows end there


class StepRecorder:
    """Records the steps of `model` from now until it is closed. `called` is what the training loop calls instead of the model, if
    that is something else: what `torch.compile(model)` has returned, say."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        called: nn.Module | None = None,
        clock: StepClock | None = None,
    ) -> None:
        _refuse_lazy(model)
        self._parts = ModelParts.of(model)
        self._model = type(model).__name__
        self._digest = digest_of(model)
        self._clock = clock or clock_for(p.device for p in model.parameters())
        self._notes = notes = _StepNotes(self._clock, len(optimizers))
        roots = dict.fromkeys([model, model if called is None else called])  # a compiled model may refuse to be a bool
        self._handles: list[RemovableHandle] = []
        for root in roots:
            self._handles.append(root.register_forward_pre_hook(_ModelBegins(notes)))
            self._handles.append(root.register_forward_hook(_ModelEnds(notes), prepend=True, always_call=True))
        for number, module in enumerate(model.modules()):
            if module is not model and next(module.parameters(), None) is not None:
                self._handles.append(module.register_forward_pre_hook(_ModuleBegins(notes, number)))
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            self._handles.append(parameter.register_post_accumulate_grad_hook(notes.ready_hook(number)))  # type: ignore[no-untyped-call]
        for number, optimizer in enumerate(optimizers):
            self._handles.append(optimizer.register_step_pre_hook(notes.update_begins_hook(number)))
            self._handles.append(optimizer.register_step_post_hook(notes.update_ends_hook(number)))

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off. What was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._notes.forget_step()

    @property
    def steps_seen(self) -> int:
        """Whole steps so far, with the first one, which is thrown away."""
        return self._notes.steps_seen

    @property
    def read_by(self) -> dict[str, str | None]:
        """For each trainable parameter the name of the module whose forward is the first to read it ("" is the model itself);
        None if neither a module that has it nor one around that was seen to run."""
        numbers = readers(self._parts, order_of(self._notes.steps))
        names = self._parts.modules
        return {
            name: None if number is None else names[number]
            for (name, _), number in zip(self._parts.parameters, numbers, strict=True)
        }

    def profile(self, *, cost: TransferCost, world_size: int) -> StepProfile:
        """What was recorded, in medians, together with what transfers cost in this job."""
        notes, clock = self._notes, self._clock
        if not notes.steps:
            raise ConfigurationError(
                f"a profile of {self._model} from {notes.steps_seen} recorded steps: the first one only warms up, so there is "
                f"nothing to take the median of.\nTrain for at least two steps, with backward, while the recorder is open."
            )
        clock.settle()
        modules, parameters = summary(self._parts, notes.steps, clock)
        return StepProfile(
            model=self._model,
            digest=self._digest,
            world_size=world_size,
            steps=len(notes.steps),
            forward_s=median(step.forward_s(clock) for step in notes.steps),
            backward_s=median(step.backward_s(clock) for step in notes.steps),
            update_s=sum(median(clock.seconds(*marks) for marks in some) for some in notes.updates if some),
            modules=modules,
            parameters=parameters,
            cost=cost,
        )


def _refuse_lazy(model: nn.Module) -> None:
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"recording the steps of {type(model).__name__}, whose parameter {lazy!r} has no shape yet: its gradient cannot be "
            f"planned for.\nRun one forward first, which gives lazy modules their shapes."
        )


class _StepNotes:
    """The marks of the step under way, and the steps before it."""

    def __init__(self, clock: StepClock, num_optimizers: int) -> None:
        self.clock = clock
        self.mark = clock.mark
        self.steps: deque[RecordedStep] = deque(maxlen=KEPT)
        self.steps_seen = 0
        self.updates: list[deque[tuple[Any, Any]]] = [deque(maxlen=KEPT) for _ in range(num_optimizers)]
        self.depth = 0  # of the model's own forwards: it may call itself
        self.begins: list[tuple[int, Any]] = []
        self._ready: dict[int, Any] = {}
        self._backward_begins: Any = None
        self._raised: int | None = None  # the exception that was being handled when the model's forward began
        self._updating: dict[int, Any] = {}
        self._updated = [False] * num_optimizers

    def forget_step(self) -> None:
        self.depth = 0
        self.begins, self._ready, self._backward_begins = [], {}, None

    # -- forward ------------------------------------------------------------------------------------------------------

    def counts(self) -> bool:
        """Whether a forward that begins outside of all others belongs to a step."""
        if not _leads_to_backward() or not self.clock.runs():
            return False
        if self._backward_begins is not None or len(self.begins) > MOST_CALLS:
            self.forget_step()  # its backward ended in an exception, or there never was one
        self._updating.clear()  # an update within which a forward runs, given as a closure, is more than an update
        return True

    def model_begins(self) -> None:
        if self.depth == 0:
            if not self.counts():
                return
            self._raised = id(sys.exception())
        self.depth += 1
        self.begins.append((0, self.mark()))

    def model_ends(self, output: Any) -> None:
        if self.depth == 0:
            return
        self.depth -= 1
        if self.depth > 0:
            return
        if id(sys.exception()) != self._raised:
            self.forget_step()
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_backward)  # type: ignore[no-untyped-call]

    # -- backward -----------------------------------------------------------------------------------------------------

    def _on_backward(self, gradient: Tensor | None = None) -> None:
        if self._backward_begins is None and self.begins:
            self._backward_begins = self.mark()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def ready_hook(self, number: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if self.begins:
                if self._backward_begins is None:  # it does not come through the model's outputs: this is the first we know of it
                    self._on_backward()
                self._ready[number] = self.mark()

        return ready

    def _on_backward_end(self) -> None:
        if not self._ready:  # torch.autograd.grad within the step: a gradient penalty, say
            self._backward_begins = None
            return
        self.steps_seen += 1
        if self.steps_seen > 1:
            self.steps.append(RecordedStep(self.begins, self._ready, self._backward_begins, self.mark()))
        self.forget_step()

    # -- update -------------------------------------------------------------------------------------------------------

    def update_begins_hook(self, number: int) -> Callable[..., None]:
        def update_begins(*_: Any) -> None:
            self._updating[number] = self.mark()

        return update_begins

    def update_ends_hook(self, number: int) -> Callable[..., None]:
        def update_ends(*_: Any) -> None:
            begin = self._updating.pop(number, None)
            if begin is None:
                return
            if self._updated[number]:
                self.updates[number].append((begin, self.mark()))
            self._updated[number] = True

        return update_ends


class _ModelBegins(ForwardHook):
    def __init__(self, notes: _StepNotes) -> None:
        self._notes = notes

    def __call__(self, *_: Any) -> None:
        if not is_compiling():
            self._notes.model_begins()


class _ModelEnds(ForwardHook):
    def __init__(self, notes: _StepNotes) -> None:
        self._notes = notes

    def __call__(self, *arguments: Any) -> None:
        if not is_compiling():
            self._notes.model_ends(arguments[-1])


class _ModuleBegins(ForwardHook):
    def __init__(self, notes: _StepNotes, number: int) -> None:
        self._notes = notes
        self._number = number

    def __call__(self, *_: Any) -> None:
        if is_compiling():
            return
        notes = self._notes
        if notes.depth or notes.counts():
            notes.begins.append((self._number, notes.mark()))


def _leads_to_backward() -> bool:
    """Not where no graph is made, within a backward (which computes a checkpointed forward again), or where a transform or tracer
    only looks at what would be computed."""
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )
