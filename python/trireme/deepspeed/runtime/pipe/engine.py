"""PipelineEngine: trains a PipelineModule, of which each rank has one stage."""
import json

import torch
from torch.utils import _pytree

from .... import config as configs
from ...._native import core
from ....activations import eager
from ....errors import ConfigError, PipelineError, StateError, UnsupportedError
from ....watch import ended
from ... import autotp, checkpointing
from ...engine import DeepSpeedEngine
from ...missing import names_of
from ...profiling.flops_profiler import step_profile
from ...utils.programs import RepeatingLoader
from .module import PipelineModule, sum_over
from .schedule import PipeSchedule

__getattr__ = names_of(__name__)


def _refused(name):
    def refuse(self, *args, **kwargs):
        raise PipelineError(f"{name}(): Only train_batch() is accessible in pipeline mode.")

    refuse.__name__, refuse.__doc__ = name, "Raises PipelineError: the schedule does that, in train_batch()."
    return refuse


class PipelineEngine(DeepSpeedEngine):
    """Trains the stage that a PipelineModule has on this rank. train_batch() is a step of all stages, at any ZeRO
    stage.

    A batch is (inputs, labels) of a micro-batch, of which further elements are not read, or what set_batch_fn()'s
    function makes so. Only the first and the last stage ask for batches, and they must get the same. Between stages go
    tensors, None, numbers, texts, and tuples, lists and dicts of these.
    """

    # pylint: disable=abstract-method

    _attach_profile = step_profile.attach_to_pipeline

    def __init__(self, model, config, **options):
        self._losses = []  # by micro-batch, of an evaluation
        self._additional = {}  # sums over micro-batches of a step, by name, where the last layers are
        self._mean_additional = None
        self._batches = self._batch_fn = None
        super().__init__(model, config, **options)
        section = self._given.get("pipeline") or {}
        if section.get("activation_checkpoint_interval"):
            model.set_checkpoint_interval(section["activation_checkpoint_interval"])
            if section.get("use_reentrant") is False:
                model.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint

    grid = property(lambda self: self.module.mpu(), doc="The PipelineParallelGrid.")
    num_stages = property(lambda self: self.grid.pipe_parallel_size)
    _stages = num_stages
    _program_slices = property(lambda self: 1 if autotp.has_rules(self._given) else self.grid.model_parallel_size)
    _topology = property(lambda self: self.grid.topology())
    stage_id = property(lambda self: self.grid.stage_id)
    _sequence_degree = property(lambda self: self._resolved.get("sequence_parallel_size", 1))
    dp_world_size = property(lambda self: self.grid.data_parallel_size // self._sequence_degree)
    _dp_rank = property(lambda self: self.grid.data_parallel_id // self._sequence_degree)
    _drops_last = property(lambda self: not self.module.dynamic_shape or bool(self._given.get("dataloader_drop_last")))
    is_pipe_parallel = property(lambda self: self.num_stages > 1)
    is_data_parallel = property(lambda self: self.dp_world_size > 1)
    micro_batches = property(lambda self: self.gradient_accumulation_steps(), doc="Of a step, on each data-parallel rank.")
    micro_batch_size = property(lambda self: self.train_micro_batch_size_per_gpu())

    def _check_models(self, read):
        """The library compares the data-parallel ranks of each stage."""

    def _make_core(self, read, groups, make_client, output):
        tied = {}
        for of_stage in self.over_stages(self.module.tied_parameters()):
            tied.update(of_stage)
        return core.StageEngine(self.world, self._ranks(), self.module, read, groups, make_client, output,
                                _loss_function(self.module, self._losses, self._additional), tied, self.module.tied_copies(), self.module.parameters_of_parts(),
                                self.module.schedule, self.module.chunks, self.module.dynamic_shape, self._slices())

    def _ranks(self):
        """The module's topology under the library's names: where rules cut layers, DeepSpeed's "model" is "tensor";
        where sequences are cut, neighbours on "data" share samples. Raises ConfigError."""
        topology, slices, parts = self.grid.topology(), configs.tensor_degree(self._resolved), self._sequence_degree
        axes = list(zip(topology.axes, topology.dims))
        if parts > 1:
            of_data = topology.ranks.size_of("data")
            if of_data % parts:
                raise ConfigError(f"sequence_parallel_size={parts} does not divide the {of_data} ranks of the PipelineModule on the axis \"data\", of which "
                                  "neighbours share samples; make one of the two fit the other")
            eager.check(self.module, ["sequence_parallel_size"])
            at = topology.axes.index("data")
            axes[at:at + 1] = [("data", of_data // parts), ("sequence", parts)]
        if slices == 1:
            return core.Topology(axes)
        of_model = topology.ranks.size_of("model")
        if of_model != slices:
            raise ConfigError(f"tensor_parallel.autotp_size={slices}, and the ranks of the PipelineModule have {of_model} on the axis \"model\"; give it "
                              f"topology=PipeModelDataParallelTopology(num_pp={self.num_stages}, num_mp={slices}, "
                              f"num_dp={self.world.size // self.num_stages // slices or 1})")
        eager.check(self.module, ["tensor_parallel.autotp_size"])
        return core.Topology([("tensor" if axis == "model" else axis, size) for axis, size in axes])

    def get_model_parallel_rank(self):
        """Place of this rank among those that share layers."""
        return self.grid.get_slice_parallel_rank()

    get_tensor_parallel_rank = get_model_parallel_rank

    def over_stages(self, value):
        """JSON's values: `value` of each stage of this rank's pipeline. Collective."""
        texts = self.world.gather(json.dumps(value))
        return [json.loads(texts[rank]) for rank in self.grid.pp_group]

    # --- batches ---

    def take_training_data(self, dataset, collate_fn):
        in_order = torch.utils.data.DistributedSampler(dataset, self.dp_world_size, self._dp_rank, shuffle=False)
        self.set_dataloader(RepeatingLoader(self.deepspeed_io(dataset, data_sampler=in_order, collate_fn=collate_fn)))

    def set_dataloader(self, loader):
        """train_batch() takes its micro-batches from `loader`, from its beginning."""
        self.training_dataloader = loader
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator):
        """train_batch() takes its micro-batches from `iterator`. Raises ConfigError: it is none."""
        if iterator is not None and not hasattr(iterator, "__next__"):
            raise ConfigError(f"set_dataiterator: {type(iterator).__name__} is no iterator; pass iter() of it")
        self._batches = iterator

    def set_batch_fn(self, fn):
        """`fn` makes (inputs, labels) of each batch; None: batches are that."""
        self._batch_fn = fn

    def _next_batch(self):
        """(inputs, labels) of the next micro-batch on this rank's device; None: the data ended."""
        if self._batches is None:
            raise ConfigError("train_batch: there are no batches; pass data_iter, or training_data= to initialize(), or call set_dataloader()")
        try:
            batch = next(self._batches)
        except StopIteration:
            return None
        if self._batch_fn is not None:
            batch = self._batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            size = f" of {len(batch)} elements" if isinstance(batch, (tuple, list)) else ""
            raise ConfigError(f"train_batch: a batch is a {type(batch).__name__}{size}; expected (inputs, labels), which set_batch_fn() can make "
                              "of it")
        move = lambda value: value.to(self.device) if isinstance(value, torch.Tensor) else value
        inputs, labels = _pytree.tree_map(move, tuple(batch[:2]))  # as in DeepSpeed: the rest is not read
        return inputs if self.module.has_first_part() else None, labels if self.module.has_last_part() else None

    # --- steps ---

    def train_batch(self, data_iter=None):
        """One step over gradient_accumulation_steps() micro-batches, from `data_iter` or the iterator that was set
        before. Collective.

        Returns the mean loss over micro-batches and data-parallel ranks, [] in fp32, the same on every rank.
        Raises  DataError: the data ended. ShapeError: activations of another shape, without dynamic_shape. All that
                backward() and
        step() of a DeepSpeedEngine raise.
        """
        if not torch.is_grad_enabled():
            raise StateError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self._additional.clear()
        changes = self._changes()
        self.tput_timer.start()
        with self._stepping(), ended.telling(self), self._cutting():
            loss, applied = self.core.train_batch(self._next_batch, changes)
        self._follow_step(applied)
        self._gather_additional_losses()
        return loss.to(self.device)

    def _gather_additional_losses(self):
        """Collective where the module's class has get_additional_losses() of its own, else nothing."""
        if type(self.module).get_additional_losses is PipelineModule.get_additional_losses:
            return
        told = [sums for sums in map(json.loads, self.world.gather(json.dumps(self._additional))) if sums]
        count = len(told) * self.micro_batches
        self._mean_additional = {name: torch.tensor(sum(sums[name] for sums in told) / count) for name in told[0]} if told else None

    def get_additional_losses(self):
        """{name: [] fp32} of the module's get_additional_losses(), their means over the micro-batches of the last step
        and the data-parallel ranks, on every rank; None: there are none."""
        return self._mean_additional

    def eval_batch(self, data_iter, return_logits=False, compute_loss=True, reduce_output="avg", bcast_loss=True, num_micro_batches=None):
        """Forward passes of `num_micro_batches` from `data_iter`, by default as many as a step has. Collective.

        Returns the mean loss over micro-batches and data-parallel ranks; with reduce_output=None a list by micro-batch.
        Without compute_loss the last layer's outputs take the losses' place. The last stage has the result, and with
        bcast_loss all have a mean loss; else it is None. With return_logits (result, outputs of the last micro-batch,
        on the last stage).
        Raises  UnsupportedError: another reduce_output. As train_batch().
        """
        if reduce_output not in (None, "avg"):
            raise UnsupportedError(f"eval_batch: reduce_output={reduce_output!r} is not there; use \"avg\" or None")
        before, was_training = self._batches, self.module.training
        self.set_dataiterator(data_iter)
        self.module.eval()
        self._losses.clear()
        try:
            with ended.telling(self), self._cutting():
                mean, outputs = self.core.eval_batch(self._next_batch, num_micro_batches, compute_loss, return_logits or not compute_loss)
        finally:
            self._batches = before
            self.module.train(was_training)
        result = None
        if compute_loss and reduce_output == "avg":
            result = mean.to(self.device) if bcast_loss or self.module.has_last_part() else None
        elif self.module.has_last_part():
            result = list(self._losses) if compute_loss else outputs
            result = result if reduce_output is None else self._mean_of(result)
        return (result, outputs[-1] if outputs else None) if return_logits else result

    def _mean_of(self, outputs):
        """The mean of tensors in the same nesting, over a list of micro-batches and the data-parallel ranks."""
        def mean(*tensors):
            total = torch.stack(tensors).mean(0)
            if self.grid.data_parallel_size > 1:  # ranks that share samples have the same
                sum_over(total, self.grid.dp_group)
            return total / self.grid.data_parallel_size

        return _pytree.tree_map(mean, outputs[0], *outputs[1:])

    forward, backward, step, scale = (_refused(name) for name in ("forward", "backward", "step", "scale"))
    no_sync, coalesce_grad_reduction = _refused("no_sync"), _refused("coalesce_grad_reduction")
    set_gradient_accumulation_boundary = _refused("set_gradient_accumulation_boundary")

    def reset_activation_shape(self):
        """The next batches may have activations of other shapes."""
        self.core.reset_activation_shape()

    def set_schedule(self, schedule):
        """The schedule that train_batch() executes: a name of trireme.pipe.schedule_names(), a class derived from
        PipeSchedule, or a callable that makes a trireme.pipe.Schedule of (stages, micro_batches). Every rank alike.
        Collective.

        Raises  ConfigError: one that cannot be executed or trains nothing, is for other chunks or another placement
                than the module was cut
        for, or another one than some rank has.
        """
        if isinstance(schedule, str):
            make = lambda stages, micro_batches: core.make_schedule(schedule, stages, micro_batches, self.module.chunks)
        elif isinstance(schedule, type) and issubclass(schedule, PipeSchedule):
            make = lambda stages, micro_batches: schedule.of_all_stages(micro_batches, stages)
        elif callable(schedule):
            make = schedule
        else:
            raise ConfigError(f"set_schedule: {schedule!r:.60} is no schedule; use a name, a class derived from PipeSchedule, or a callable")
        self.core.set_schedule(make)

    def is_first_stage(self):
        """Whether this rank has the first layers."""
        return self.grid.is_first_stage

    def is_last_stage(self):
        """Whether this rank has the last layers."""
        return self.grid.is_last_stage

    # --- files ---

    def load_module_state_dict(self, *args, **kwargs):
        """As DeepSpeedEngine's, of this stage's layers."""
        super().load_module_state_dict(*args, **kwargs)
        self.core.follow_owners()

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        raise UnsupportedError("_zero3_consolidated_16bit_state_dict: no rank has all stages; save_16bit_model() writes the whole model")

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


def _loss_function(module, losses, additional):
    """(outputs, labels) -> loss: the module's loss_fn; without one its last layer returns the loss. Those of
    evaluations go to `losses`, sums of a step's additional ones to `additional`."""
    def compute(outputs, labels):
        loss = outputs if module.loss_fn is None else module.loss_fn(outputs, labels)
        if not torch.is_grad_enabled():
            losses.append(loss)
            return loss
        for name, value in (module.get_additional_losses() or {}).items():
            additional[name] = additional.get(name, 0.0) + float(value)
        return loss

    return compute
