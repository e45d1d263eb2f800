"""Synchronous training with sharded state: reduce-scatter, step of a slice, all-gather, in place of all-reduce and a whole step.

    backward    a bucket that is full leaves as a reduce-scatter; each worker keeps its slice of the mean     m (P-1)/P bytes sent
    step        each worker steps its slices, and all-gathers them (`stepping.py`)                            m (P-1)/P bytes sent

Together these are the two halves of a ring or direct all-reduce, so the bytes are the same; the optimizer's work and state are a
P-th. The last bucket, whose notes say what everybody's gradients are worth, has no gradients and is all-reduced as ever.

Everything else (rounds, notes, late and unused and sparse gradients, failures, schedules) is that of synchronous all-reduce.
Gradients that are sparse travel as ever, and their parameters are stepped whole by every worker.

Stage 2 borrows memory for buckets under way (`bucket.py`), of which there are two. Backward waits for the older one where a third
is full: the network is what it waits for then, and at its end at most two are left. Buckets leave in one order there
(`turns.py`), so nobody waits for a bucket that another worker has not sent because it waits too.

Result: the same as `Replicated`, in bits too where the order of additions is the same (two workers; `AllReduce("direct")`).
Memory: see `shard/zero.py`; in addition the buckets under way, and 8 bytes per parameter tensor of notes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.aggregate.all_reduce.bucket import ReducedBucket, make_buckets
from stretto.aggregate.all_reduce.exchange import DirectExchange, ExchangeDriver, MeanOfMine, Steps
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.zero import admission
from stretto.aggregate.zero.bucket import Room, SlicedBucket
from stretto.aggregate.zero.compressed import EncodedWeights, bounds_for, scattered
from stretto.aggregate.zero.joining import Announcement, Announcements, Coming
from stretto.aggregate.zero.large_apart import large_ones_apart
from stretto.aggregate.zero.norms import SliceNorms
from stretto.aggregate.zero.slice_optimizer import SliceOptimizer, parts_by_saved_index
from stretto.aggregate.zero.slices import Apart, Piece, SliceBounds
from stretto.aggregate.zero.stepping import SlicedSteps, parts_of, uneven_parts_of
from stretto.aggregate.zero.turns import Turns
from stretto.aggregate.zero.whole_state import brought_together, make_gradients_whole, states_by_bucket, whole_state
from stretto.compress.codec import Codec
from stretto.engine.arena import MemoryKind, laid_out, shrink_heap
from stretto.engine.state import Exact
from stretto.engine.training import Named, Participation, RoundEnd, RoundResult, Setting, TrainingState
from stretto.errors import ConfigurationError, RankMismatch
from stretto.job import Job
from stretto.shard.zero import Zero

if TYPE_CHECKING:
    from stretto.strategy import Strategy

UNROUNDED: Final = "unrounded"  # in a saved state: the owner's weights, where the model has them rounded


class ShardedAllReduce(SynchronousAllReduce):
    """`AllReduce` + `Synchronous` + `Zero`."""

    _kind_of_steps = SlicedSteps

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        assert isinstance(strategy.shard, Zero)
        self._shard = strategy.shard
        super().__init__(strategy, job, setting)
        self.sliced: list[SlicedBucket] = []
        self._optimizers = [SliceOptimizer(optimizer, self._add_up) for optimizer in setting.loop.optimizers]
        self._on_wire: deque[SlicedBucket] = deque()  # that have borrowed memory, in the order in which they have left
        self._turns = Turns(partial(self._broadcast, " of the order in which buckets leave"))
        self._handles: list[RemovableHandle] = []
        self._loading: dict[Optimizer, tuple[dict[Tensor, Any], bool]] = {}  # what is in slices, and whether dtypes stay
        self._shown: dict[str, Tensor] = {}  # unrounded weights, while a checkpoint is written
        self._num_rounds = 0  # that were good, since training began: a codec of weights that draws lots draws others in each
        self._is_whole = False  # the optimizers have all of their state, on this worker
        self._leaves_room = False  # slices were cut anew since the last round began: much of the heap is free
        self.is_in_slices = self.engaged
        if not self.engaged:
            return
        self._room = Room()
        self._announced = Announcements(job, setting.channel, lambda: setting.loop.joining)
        self._is_announced = False  # this round
        self._is_following = False  # the last round had nothing of this worker: what is done with gradients is announced
        self._norms = SliceNorms(job, setting.name, self._announced)
        self._gather_channel, self._num_gathers = job.new_channel(), 0
        self._channels.add(self._gather_channel)
        self._gatherer = ExchangeDriver(job, self._group, self._gather_channel, self._algorithm)
        self._steps = self._kind_of_steps(
            self._wait_for_one,
            self._finish_crossing,
            self._drop,
            self._sliced_of,
            self._gather,
            self._regroup,
            self._room,
            job.tracer,
        )
        self._crossing = self._steps
        if self._is_lossy or self._shard.weights is not None:
            weights = "" if self._shard.weights is None else f", weights={self._shard.weights!r}"
            self.state_text, self.placement = f"{strategy.compress!r}{weights} in slices", "in slices"

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_strategy(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        admission.check(model, optimizers, strategy)

    @property
    def _works_alone(self) -> bool:
        return self._shard.offload is not None or self._shard.weights is not None

    @property
    def _all_have_the_same(self) -> bool:
        return False

    @property
    def _is_crossing(self) -> bool:
        return self.waits_before_use and super()._is_crossing

    # -- parameters ---------------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[ReducedBucket]:
        """Cut anew, slices belong to others than before. State goes there a bucket at a time, through host memory; gradients that
        are still to be stepped, and unrounded weights, become whole for a moment."""
        unrounded: dict[str, Tensor] = {}
        is_cut_anew = bool(self.sliced)
        if is_cut_anew:
            self._steps.settle_all()
            make_gradients_whole(self._job, self.sliced)
            unrounded = self._unrounded()
        for optimizer in self._setting.loop.optimizers if not self._handles else ():
            self._hook(optimizer)
        buckets = super().arrange(dense, sparse)
        self.sliced = [bucket for bucket in buckets if isinstance(bucket, SlicedBucket)]
        self._take_memory()
        self._turns.arrange(self.sliced)
        self._steps.arrange(self.sliced)
        self._norms.buckets = self.sliced
        self._norms.forget()
        for each in self._optimizers:
            each.move(self.sliced, states_by_bucket(self._job, each) if is_cut_anew else ())
        self._set_unrounded(unrounded)
        self._on_wire.clear()
        self._leaves_room = is_cut_anew
        return buckets

    def _make_buckets(self, dense: Sequence[Named]) -> list[ReducedBucket]:
        plan = self.plan = large_ones_apart(self._plan(dense, self._owner_of), dense)
        buckets = make_buckets(dense, plan, self._strategy.compress, apart=True, kind=SlicedBucket)
        room = self._room if self._shard.stage >= 2 else None
        for bucket in buckets:
            if isinstance(bucket, SlicedBucket):
                bucket.cut(self._cut(bucket), self._norms, room, self._apart(bucket.flat.device))
        return buckets

    def _take_memory(self) -> None:
        """Slices of gradients are as long in every step, and so is what buckets need while they are under way."""
        buckets = [bucket for bucket in self.sliced if bucket.room is not None]
        homes = laid_out((MemoryKind(bucket.flat.dtype, bucket.flat.device), bucket.slice_length) for bucket in buckets)
        for bucket, home in zip(buckets, homes, strict=True):
            bucket.keep_slice_in(home)
        for bucket in self.sliced:
            if not bucket.is_alone:
                self._room.expect(bucket.flat.dtype, bucket.flat.device, bucket.num_gradient_elements)

    def _cut(self, bucket: SlicedBucket) -> SliceBounds:
        return bounds_for(bucket.compression, bucket.layout, self._group.rank, self._group.size)

    def _apart(self, device: torch.device) -> Apart | None:
        """Where the weights on a device are stepped, if not in the model."""
        rounded = self._shard.weights is not None
        if self._shard.offload == "cpu" and device.type != "cpu":
            return Apart(torch.device("cpu"), torch.float32 if rounded else None)
        return Apart(device, torch.float32) if rounded else None

    def _owner_of(self, name: str) -> int | None:
        """Parameters of different optimizers travel apart: they are stepped at different times."""
        parameter = self._setting.model.get_parameter(name)
        for number, optimizer in enumerate(self._setting.loop.optimizers):
            if any(parameter is each for group in optimizer.param_groups for each in group["params"]):
                return number
        return None

    def adopt(self, new: Sequence[Tensor], found: Sequence[Named]) -> None:
        super().adopt(new, found)
        placed = {p: (bucket, slot) for bucket in self.sliced for slot, p in enumerate(bucket.parameters)}
        for _, parameter in found:
            if parameter in placed:
                bucket, slot = placed[parameter]
                bucket.put(slot)

    # -- a round ------------------------------------------------------------------------------------------------------

    def round_begins(self) -> None:
        super().round_begins()
        if self._leaves_room:  # only now nobody has anything of the buckets of before
            self._leaves_room = False
            shrink_heap()
        self._on_wire.clear()
        self._turns.begin()

    def bucket_ready(self, bucket: ReducedBucket) -> None:
        assert isinstance(bucket, SlicedBucket)
        if bucket.room is None:
            super().bucket_ready(bucket)
            return
        for following in self._turns.after(bucket):
            super().bucket_ready(following)

    def _send_rest(self, end: RoundEnd) -> None:
        for bucket in self._turns.order:
            if bucket.exchange is None:
                self._send(bucket, end.participation, late=bool(end.late))
        super()._send_rest(end)

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        if end.participation is Participation.ABSENT:
            self._take_part()
        try:
            result = super().backward_ended(end)
        finally:
            self._is_announced = False
        self._num_rounds += result.combined
        if self._shard.stage >= 2 and result.combined:
            self._turns.round_ended()
        return result

    def _take_part(self) -> None:
        """This worker has run out of data: do its part of what the others do, until they come to the next round."""
        for bucket in self.sliced if self._is_following else ():
            bucket.show(bucket.shown)  # which were dropped for the round to come
        self._is_following = True
        self._follow()
        for bucket in self.sliced:
            bucket.let_go()

    def _follow(self) -> None:
        while (coming := self._announced.hear()) is not None:
            if coming.what is Coming.ROUND and coming.model == self._setting.channel:
                return
            engines = (each for each in self._job.engines if isinstance(each.training, ShardedAllReduce))
            other = next((each.training for each in engines if each.training.answers_to(coming.model)), None)
            if other is None or coming.what is Coming.ROUND:
                raise RankMismatch(
                    "within join a worker that works has come to another model than those that have run out of data expect.\n"
                    "Name the models in join(...) in the order in which each batch runs their backwards, every model once."
                )
            other.do(coming)

    def answers_to(self, model: int) -> bool:
        return self._setting.channel == model

    def do(self, coming: Announcement) -> None:
        """What the others do with this model, on a worker without data."""
        first, second, third = coming.arguments
        if coming.what is Coming.NORMS:
            self._norms.find(first)
        elif coming.what is Coming.SCALE:
            self.sliced[int(first)].scale(int(second), third, divide=False)
        elif coming.what is Coming.UNSCALE:
            self._norms.unscale_bucket(self.sliced[int(first)], second)
        elif coming.what is Coming.INFINITIES:
            self._norms.agree_on_infinity()
        else:
            optimizer = self._optimizers[int(first)].user
            self._steps.note_step(optimizer)
            self._steps.step_taken()

    @contextmanager
    def catching_up(self) -> Iterator[None]:
        """Workers without data have stepped what they own: their slices are up to date."""
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    def _announce_round(self) -> None:
        if self._is_announced or not self._setting.loop.joining:
            return
        if any(bucket.has_before for bucket in self.sliced):
            raise ConfigurationError(
                f"within join a second backward before optimizer.step(), with shard={self._shard!r}: workers that have run out "
                f"of data cannot know that gradients add up.\nPut all but the last into `with stretto.no_sync(model):`."
            )
        self._is_announced = True
        self._announced.say(Coming.ROUND)

    def _send(self, bucket: ReducedBucket, participation: Participation, *, late: bool) -> None:
        if participation is not Participation.ABSENT:
            self._is_following = False
            self._announce_round()
        if isinstance(bucket, SlicedBucket):
            self._find_room(bucket)
            bucket.fill()
            self._on_wire.append(bucket)
        super()._send(bucket, participation, late=late)

    def _find_room(self, bucket: SlicedBucket) -> None:
        """Take out what has arrived; wait for it if there is no memory left."""
        kind = bucket.flat.dtype, bucket.flat.device
        while self._on_wire and bucket.room is not None:
            oldest = self._on_wire[0]
            if bucket.room.has(*kind) and not (oldest.exchange is not None and oldest.exchange.arrived):
                return
            self._wait([oldest])
            oldest.land()
            self._on_wire.popleft()

    def _steps_of(self, bucket: ReducedBucket, values: Tensor) -> Steps:
        if not isinstance(bucket, SlicedBucket):
            return super()._steps_of(bucket, values)
        if bucket.turn is None:
            return _part_of_mean(values)
        return scattered(bucket.compression, values, bucket.turn, bucket.shares)

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._on_wire.clear()

    def _end_all(self, *, good: bool) -> None:
        super()._end_all(good=good)
        for bucket in self.sliced:
            bucket.drop()
        self._on_wire.clear()

    # -- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        admission.check_known(optimizer, self._setting)
        return super().before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        number = next(number for number, each in enumerate(self._optimizers) if each.user is optimizer)
        self._announced.say(Coming.STEP, number)
        super().after_step(optimizer)

    def _regroup(self, sliced: SliceOptimizer, buckets: list[SlicedBucket]) -> None:
        """What it has of parameters that it does not step any more waits in the user's optimizer, as torch has it."""
        sliced.move(buckets, states_by_bucket(self._job, sliced))

    def _sliced_of(self, optimizer: Optimizer) -> SliceOptimizer:
        return next(each for each in self._optimizers if each.user is optimizer)

    def _add_up(self, values: Tensor) -> None:
        self._job.all_reduce(values, op="sum", algorithm="ring", label=f" of norms of layers{self._label}")

    def _weight_of(self, piece: Piece) -> Tensor:
        """What its owner has of it, unrounded."""
        owner = next((each for each in self._optimizers if piece.parameter in each.group_of), None)
        return piece.in_parameter if owner is None else owner.weight_of(piece)

    def _gather(self, bucket: SlicedBucket, flat: Tensor) -> DirectExchange:
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        self._job.whereabouts.claim(self._gather_channel)
        if isinstance(self._shard.weights, Codec):
            mine = flat[bucket.shares.start : bucket.shares.stop].float()
            for piece in bucket.pieces:
                mine[piece.start : piece.stop] = self._weight_of(piece)
            encoded = bucket.kept.setdefault(EncodedWeights, EncodedWeights(self._shard.weights, bucket.layout, bucket.shares))
            steps = encoded.steps(mine, flat, self._num_rounds & 0xFFFFFFFF)
        elif bucket.shares.is_even:
            steps = parts_of(flat)
        else:
            steps = uneven_parts_of(flat, bucket.shares)
        label = f" of stepped slices{self._label}"
        return DirectExchange(self._gatherer.drive(steps, number, label, bucket.sending))

    # -- state --------------------------------------------------------------------------------------------------------

    def _hook(self, optimizer: Optimizer) -> None:
        self._handles += [
            optimizer.register_state_dict_pre_hook(self._fetch_state),
            optimizer.register_state_dict_post_hook(self._drop_state),
            optimizer.register_load_state_dict_pre_hook(self._look_at_saved),
            optimizer.register_load_state_dict_post_hook(self._take_saved),
        ]

    def _fetch_state(self, optimizer: Optimizer) -> None:
        """Before `state_dict`, which all workers call."""
        if not self._is_whole:
            self._steps.settle_all()
            mine = self._sliced_of(optimizer)
            mine.show_whole(whole_state(self._job, mine))

    def _drop_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if not self._is_whole:
            self._sliced_of(optimizer).drop_whole()

    def _look_at_saved(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
        """Before `load_state_dict`, which would copy all of it: keep what is in slices aside."""
        if self._is_whole:
            return None
        mine = self._sliced_of(optimizer)
        given = {p: state for p, state in parts_by_saved_index(optimizer, saved).items() if mine.has(p)}
        self._loading[optimizer] = given, isinstance(saved["state"], Exact)
        apart = {id(state) for state in given.values()}
        rest = {number: state for number, state in saved["state"].items() if id(state) not in apart}
        return {**saved, "state": deepcopy(rest)}  # an optimizer takes the very tensors that it is given

    def _take_saved(self, optimizer: Optimizer) -> None:
        given, exactly = self._loading.pop(optimizer, (None, False))
        if given is not None:
            mine = self._sliced_of(optimizer)
            mine.forget()
            mine.take_in(given, cast=not exactly)

    def before_release(self) -> None:
        """The optimizers have all of their state again, on all workers, where they expect it."""
        if self.sliced and not self._is_whole:
            self._steps.settle_all()
            for each in self._optimizers:
                each.show_whole(each.beside_parameters(whole_state(self._job, each)))
                each.forget()
            make_gradients_whole(self._job, self.sliced)
            self._is_whole = True

    @contextmanager
    def result_shown(self) -> Iterator[None]:
        """Rank 0 has all of the optimizers' state."""
        if not self.sliced:
            yield
            return
        for each in self._optimizers:
            each.show_whole(whole_state(self._job, each, only_rank_0=True))
        self._shown = self._unrounded(only_rank_0=True)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole, self._shown = False, {}
            for each in self._optimizers:
                each.drop_whole()

    # -- weights that are not rounded ---------------------------------------------------------------------------------

    def _unrounded(self, *, only_rank_0: bool = False) -> dict[str, Tensor]:
        """What the owners step, by parameter, where the model has it rounded. All workers call it."""
        if self._shard.weights is None:
            return {}
        found = {}
        for bucket in self.sliced:
            flat = brought_together(self._job, bucket, self._weight_of, torch.float32, only_rank_0=only_rank_0)
            if flat is not None:
                found.update({each.name: each.as_tensor(flat[each.start : each.stop]).clone() for each in bucket.layout.places})
        return found

    def _set_unrounded(self, values: Mapping[str, Tensor]) -> None:
        for bucket in self.sliced if values else ():
            for piece in bucket.pieces:
                if piece.name in values:
                    piece.weight.data.copy_(piece.of(values[piece.name]))
                    piece.seen = piece.parameter._version

    def state(self) -> TrainingState:
        state = super().state()
        for name, value in self._shown.items():
            state.shared.setdefault(name, {})[UNROUNDED] = value
        return state if self._shard.weights is None else state._replace(rounds=self._num_rounds)

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        for bucket in self.sliced:
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                value = saved.get(name, {}).get(UNROUNDED)
                if value is not None and (not isinstance(value, Tensor) or value.shape != parameter.shape):
                    return f"{UNROUNDED} of {name} is not of its shape, {tuple(parameter.shape)}"
        return super().check_state(saved)

    def load_state(self, state: TrainingState) -> None:
        apart = {name: kinds[UNROUNDED] for name, kinds in state.shared.items() if UNROUNDED in kinds}
        shared = {n: {k: v for k, v in kinds.items() if k != UNROUNDED} for n, kinds in state.shared.items()}
        super().load_state(TrainingState(state.rounds, state.own, {name: kinds for name, kinds in shared.items() if kinds}))
        self._num_rounds = state.rounds
        self._set_unrounded(apart)

    def before_save(self) -> None:
        if self.engaged:
            self._steps.settle_all()

    def begin_anew(self) -> None:
        if self.engaged:
            self._steps.settle_or_forget()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().close()


def _part_of_mean(values: Tensor) -> Steps:
    yield MeanOfMine(values)
