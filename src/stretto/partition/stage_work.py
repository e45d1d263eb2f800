"""What a stage does in one step: its plan's actions, one after the other.

An action waits for what it needs (`Mailbox.take`), computes, and sends what it has made at once, without waiting. Nothing is held
but what the plan says: the inputs and the graph of a micro-batch from its forward to the end of its backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.errors import ConfigurationError
from stretto.observe.trace import Tracer
from stretto.partition.actions import Order, StageAction, Work, piece_of, place_of
from stretto.partition.letters import LetterSubject, Name
from stretto.partition.mailbox import ArrivedLetter, Mailbox
from stretto.partition.split_backward import SplitBackward
from stretto.partition.stage_model import RETURNED, StageModel, as_given, plain
from stretto.partition.trees import changed, take_apart
from stretto.partition.walk import StageSpan

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class StageSeat:
    """Where this worker sits: its stage, and the ranks in the job of the stages of its own replica of the pipeline."""

    stage: int
    chunks: int
    ranks: tuple[int, ...]
    mailbox: Mailbox | None  # None: there is but one worker
    tracer: Tracer | None = None

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def last_piece(self) -> int:
        return self.stages * self.chunks - 1

    def piece(self, chunk: int) -> int:
        return piece_of(self.stage, chunk, self.stages)

    def rank_of(self, piece: int) -> int:
        return self.ranks[place_of(piece, self.stages)[0]]


class Held(NamedTuple):
    """What is kept of a micro-batch from its forward to its backward."""

    leaves: list[Tensor]  # that came in, and whose gradients go back
    outputs: list[Tensor]  # of which gradients come; or the loss


@dataclass(slots=True)
class StageWork:
    """One call of the pipeline on one stage. `share`: how much each micro-batch counts in the loss."""

    seat: StageSeat
    model: StageModel
    device: torch.device
    call: int  # of the pipeline: how many there were
    inputs: Sequence[Any] = ()  # of micro-batches, on the first stage
    targets: Sequence[Any] = ()  # on the last, if there is a loss
    loss_fn: LossFunction | None = None
    share: Sequence[float] = ()
    began_ns: int = field(default_factory=time.perf_counter_ns)
    losses: list[Tensor] = field(default_factory=list)
    returned: dict[int, Any] = field(default_factory=dict)  # by micro-batch, by the last piece, where there is no loss
    spans: list[StageSpan] = field(default_factory=list)
    peak: int = 0
    doing: str = ""
    _held: dict[tuple[int, int], Held] = field(default_factory=dict)
    _own: dict[Name, ArrivedLetter] = field(default_factory=dict)  # letters to this worker itself
    _split: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)
    _whole: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)

    def carry_out(self, order: Order, around: Callable[[StageAction], Any]) -> None:
        """Do it all. `around(action)` is a context that its computation runs in."""
        steps = {
            Work.FORWARD: self._forward,
            Work.BACKWARD: self._backward,
            Work.INPUTS: self._inputs,
            Work.WEIGHTS: self._weights,
        }
        for action in order:
            self.doing = f"the {action.work.name.lower()} of micro-batch {action.microbatch}"
            if self.seat.chunks > 1:
                self.doing += f", part {action.chunk}"
            steps[action.work](action, around)
            self.peak = max(self.peak, len(self._held) + len(self._split) + len(self._whole))

    @property
    def total(self) -> Tensor:
        """The loss over the whole batch, on the last stage."""
        return torch.stack(self.losses).sum()

    def _note(self, action: StageAction, began_ns: int) -> None:
        begin_s, end_s = ((at - self.began_ns) / 1e9 for at in (began_ns, time.perf_counter_ns()))
        self.spans.append(StageSpan(self.seat.stage, action, begin_s, end_s))

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, action: StageAction, around: Callable[[StageAction], Any]) -> None:
        piece = self.seat.piece(action.chunk)
        value, leaves = self._value_for(piece, action.microbatch)
        began = time.perf_counter_ns()
        with around(action):
            output = self.model(value, action.chunk)
            if piece == self.seat.last_piece and self.loss_fn is not None:
                outputs = self._take_loss(self.loss_fn(output, self.targets[action.microbatch]), action.microbatch)
            else:
                _, tensors = take_apart(output, RETURNED)
                outputs = [tensor for tensor in tensors if tensor.requires_grad]
        self._note(action, began)
        if torch.is_grad_enabled():
            self._held[action.microbatch, action.chunk] = Held(leaves, outputs)
        if piece < self.seat.last_piece:
            name = Name(self.call, LetterSubject.VALUES, piece + 1, action.microbatch)
            self._send(piece + 1, name, output, [tensor.requires_grad for tensor in tensors])
        elif self.loss_fn is None:
            self.returned[action.microbatch] = plain(output)

    def _value_for(self, piece: int, microbatch: int) -> tuple[Any, list[Tensor]]:
        if piece == 0:
            return self.inputs[microbatch], []
        name = Name(self.call, LetterSubject.VALUES, piece, microbatch)
        letter = self._take(name, piece - 1, hops=piece)
        wants = letter.wants if torch.is_grad_enabled() else [False] * len(letter.wants)
        return as_given(letter.tree, wants, self.device)

    def _take_loss(self, loss: Any, microbatch: int) -> list[Tensor]:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigurationError(
                f"the loss function returned {what} for a micro-batch; a pipeline needs the loss, one floating-point number.\n"
                f'Return the mean over the samples, or with loss="sum" their sum.'
            )
        weighted = loss * self.share[microbatch]
        self.losses.append(weighted.detach())
        if len(self.losses) == len(self.share) and self.seat.mailbox is not None:
            for rank in self.seat.ranks[:-1]:
                self.seat.mailbox.send(rank, Name(self.call, LetterSubject.LOSS), self.total)
        return [weighted] if weighted.requires_grad else []

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward(self, action: StageAction, around: Callable[[StageAction], Any]) -> None:
        gradients = self._gradients_for(action)
        held = self._held.pop((action.microbatch, action.chunk))
        began = time.perf_counter_ns()
        with around(action):
            outputs, given = _paired(held.outputs, gradients)
            if outputs:
                torch.autograd.backward(outputs, given)
        self._note(action, began)
        self._send_back(action, [leaf.grad for leaf in held.leaves])

    def _inputs(self, action: StageAction, around: Callable[[StageAction], Any]) -> None:
        gradients = self._gradients_for(action)
        held = self._held.pop((action.microbatch, action.chunk))
        began = time.perf_counter_ns()
        back: list[Tensor | None] = [None] * len(held.leaves)
        with around(action):
            outputs, given = _paired(held.outputs, gradients)
            if outputs and held.leaves:
                split = SplitBackward(outputs, held.leaves, self.model.parameters_of(action.chunk))
                back = split.inputs(given)
                self._split[action.microbatch, action.chunk] = split
            elif outputs:  # nobody waits for anything: all of it is the second half
                self._whole[action.microbatch, action.chunk] = outputs, given
        self._note(action, began)
        self._send_back(action, back)

    def _weights(self, action: StageAction, around: Callable[[StageAction], Any]) -> None:
        split = self._split.pop((action.microbatch, action.chunk), None)
        whole = self._whole.pop((action.microbatch, action.chunk), None)
        began = time.perf_counter_ns()
        with around(action):
            if split is not None:
                split.weights()
            elif whole is not None:
                torch.autograd.backward(*whole)
        self._note(action, began)

    def _gradients_for(self, action: StageAction) -> list[Tensor | None]:
        piece = self.seat.piece(action.chunk)
        if piece == self.seat.last_piece:
            return [torch.ones_like(loss) for loss in self._held[action.microbatch, action.chunk].outputs]
        name = Name(self.call, LetterSubject.GRADIENTS, piece, action.microbatch)
        letter = self._take(name, piece + 1, hops=2 * self.seat.last_piece + 1 - piece)
        return [None if each is None else each.to(self.device) for each in letter.tree]

    def _send_back(self, action: StageAction, gradients: Sequence[Tensor | None]) -> None:
        piece = self.seat.piece(action.chunk)
        if piece > 0:
            name = Name(self.call, LetterSubject.GRADIENTS, piece - 1, action.microbatch)
            self._send(piece - 1, name, list(gradients))

    # -- letters ------------------------------------------------------------------------------------------------------

    def _send(self, piece: int, name: Name, tree: Any, wants: Sequence[bool] = ()) -> None:
        if self.seat.stages == 1 or self.seat.mailbox is None:
            self._own[name] = ArrivedLetter(changed(tree, _copy, RETURNED), list(wants))
        else:
            self.seat.mailbox.send(self.seat.rank_of(piece), name, tree, wants=wants)

    def _take(self, name: Name, piece: int, hops: int) -> ArrivedLetter:
        if self.seat.stages == 1 or self.seat.mailbox is None:
            return self._own.pop(name)
        source, tracer = self.seat.rank_of(piece), self.seat.tracer
        begin_ns = 0 if tracer is None else tracer.now()
        letter = self.seat.mailbox.take(name, source, hops)
        if tracer is not None:
            tracer.span("wait", f"for {name.text} from stage {place_of(piece, self.seat.stages)[0]}", begin_ns, peer=source)
        return letter


def _copy(tensor: Tensor) -> Tensor:
    """As one that has been sent: a layer may change it in place."""
    return tensor.detach().clone()


def _paired(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and the gradients that have come of them; the stage after may not have used some."""
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]
