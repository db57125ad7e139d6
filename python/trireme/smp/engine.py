"""StepEngine: the Engine of the stage that a rank has of a model."""
import contextlib
import functools
import itertools
import json

import torch

from .._native import core
from ..activations import wholes
from ..engine import Engine
from ..errors import StateError, UnsupportedError
from ..watch import ended
from . import casts, program, ranks, settings, weights
from .config import state
from .nn import cuts
from .static_calls import StaticCalls
from .trace import homed_tensors

# smp's names of the core's orders of passes, by those of trireme.pipe.make_schedule().
_ORDERS = {"1f1b": "interleaved", "gpipe": "simple", "sequential": "sequential"}


class StepEngine(Engine):
    """Trains the tensors of `module` whose home is this rank's stage, by step functions over the whole of it.

    homes           {name: stage} of every parameter and persistent buffer, under its first name
    sums            whether gradients are summed over micro-batches, rather than averaged
    calls_per_step  step functions that run between two steps of the optimizer
    own_buffers     whether buffers stay each data-parallel rank's own, after they were rank 0's once
    agreed          names of tensors that are rank 0's already, and without memory where another stage has them
    beside          the core of another model's StepEngine, which step functions use, too; None: there is none
    """

    _knows_micro_batch = False
    layout_call, remake, anew = "the first optimizer.step()", "make the model and its optimizer anew", "start the program again"
    clips_otherwise = "gradients of an smp.DistributedModel are not in .grad; call optimizer.clip_master_grads(max_norm), which takes the norm of the whole model"
    steps_otherwise = "gradients of an smp.DistributedModel are not in .grad, so it would change nothing; give it to smp.DistributedOptimizer()"

    def __init__(self, module, homes, *, sums=False, calls_per_step=1, own_buffers=False, agreed=(), beside=None):
        self.homes = _under_all_names(module, homes)
        self._pending = 0  # step functions with a backward pass since gradients were dropped or taken
        self._counted = 0  # gradients that these have given
        self._has_backward = False  # the step function that runs has called backward()
        self._agreed = frozenset(agreed)
        self._sums = sums
        self.comm_hook = None  # of the program, with which it joins gradients
        self._has_standing = False  # the program has not dropped the gradients of the last optimizer.step()
        self._is_mixed = False  # a step function has added others to those
        self._beside = beside
        micro_batches = state.cfg.microbatches
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches * calls_per_step, "gradient_clipping": 0.0,
                  **settings.sections()}
        if ranks.tp_size() > 1:
            config["tensor_parallel"] = {**cuts.section_of(module, ranks.tp_size()), "sequence_parallel": state.cfg.optimize == "memory"}
        super().__init__(module, config, origin="smp.init",
                         unmanaged=[parameter for name, parameter in module.named_parameters() if self.homes[name] != ranks.pp_rank()])
        if state.cfg.half is not None:
            casts.cast_unhomed(module, self.homes)
        self._static_calls = StaticCalls(module, self) if state.cfg.static_mode and not self.over_one_stage else None
        self.divisor = 1 if sums else micro_batches
        if sums or calls_per_step > 1:
            self.core.divide_gradients_by(self.divisor)
        if own_buffers:
            self.core.keep_buffers_apart()

    _stages = property(lambda self: ranks.pp_size())
    stage = property(lambda self: self.core.stage, doc="This rank's.")
    over_one_stage = property(lambda self: self.core.stages == 1)
    has_gradients = property(lambda self: self._pending > 0, doc="Whether there are some that a step would take.")

    def over_stages(self, value):
        texts = self.world.gather(json.dumps(value))
        return [json.loads(texts[rank]) for rank in ranks.get_pp_group()]

    def _check_models(self, read):
        """Also lets every rank have rank 0's values: buffers that are no state are on every stage."""
        super()._check_models(read)
        tensors = {name: tensor for named in (self.module.named_parameters(), self.module.named_buffers()) for name, tensor in named if name not in self._agreed}
        digests = [json.loads(text) for text in self.world.gather(json.dumps([core.digest(tensor.detach().contiguous()) for tensor in tensors.values()]))]
        for tensor, of_ranks in zip(tensors.values(), zip(*digests)):
            if len(set(of_ranks)) > 1:
                values = tensor.detach().contiguous()
                self.world.broadcast(values)
                if values.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(values)

    def _unmanaged_names(self):
        return set()  # all are compared; those of other stages are not the core's

    def _make_core(self, read, groups, make_client, output):
        return core.StepEngine(self.world, state.topology, self.module, self.homes, read, groups, make_client, output, _ORDERS[state.cfg.schedule],
                               state.cfg.active_microbatches, self._slices(), self._beside)

    # --- steps -------------------------------------------------------------------------------------------------------

    def run(self, micro_batches, function, name, model, others=()):
        """The step function `name`: `function` on each micro-batch. What it returned of each, detached, with its
        numbers on every stage. `model` is this engine's, `others` are those of other models. Collective."""
        engines = self, *others
        for engine in engines:
            engine._refuse_outside("smp.step")
            engine._has_backward = False
        if state.cfg.fp16 and self.client_optimizer is None and torch.is_grad_enabled() and (optimizer := program.optimizer_of(model)) is not None:
            self.use(optimizer)  # whose loss scale the first backward pass needs
        with contextlib.ExitStack() as telling:
            for engine in engines:
                telling.enter_context(ended.telling(engine))
            if self._static_calls is not None:
                telling.enter_context(self._static_calls)
            outputs = self.core.step(micro_batches, functools.partial(self._whole_of, function) if ranks.tp_size() > 1 else function, name)
        reached = [self._has_backward]
        if others:
            told = torch.tensor([engine.core.gradient_count != engine._counted for engine in engines], dtype=torch.int64)
            state.world.all_reduce(told, "max")
            reached = told.tolist()
        for engine, is_reached in zip(engines, reached):
            engine._counted = engine.core.gradient_count
            if is_reached:
                engine._pending += 1
                engine._is_mixed = engine._is_mixed or engine._has_standing
                if engine.comm_hook is not None:
                    engine.comm_hook.refuse_late()
        if not others:  # else the function may train another model
            self.refuse_mixed("smp.step")
        return outputs

    def _whole_of(self, function, micro_batch):
        """The results of `function`, each whole on every rank that shares layers; with several stages the core does
        that."""
        with self._cutting():
            tensors = function(micro_batch)
            return [self.core.gather(tensor) if self.over_one_stage and self.core.is_part(tensor) else tensor for tensor in tensors]

    def backward(self, loss, gradient=None):  # pylint: disable=arguments-differ, arguments-renamed
        """Inside of a step function: a backward pass begins with `loss`."""
        self._has_backward = True
        self.core.backward(loss, weights.weighted(loss, gradient, has_shares=not self._sums))

    def step_by(self, optimizer):
        """optimizer.step(). Collective."""
        if not self._pending:
            raise StateError("optimizer.step(): no step function has called backward() since gradients were dropped or taken, so there are none to step by; call the "
                             "@smp.step function first")
        self._refuse_outside("optimizer.step()")
        self.refuse_mixed("optimizer.step()")
        if state.cfg.fp16 and self.client_optimizer is None:
            raise StateError("optimizer.step(): the step function has called backward() without a loss scale, since there was no optimizer; make smp.DistributedOptimizer() "
                             "before the first step function of training")
        self.use(optimizer)
        self.step()

    def use(self, optimizer):
        """`optimizer` steps the model from here on. Collective when first called."""
        if self.client_optimizer is None:
            if state.cfg.fp16:
                self._given = {**self._given, "fp16": {**self._given["fp16"], **settings.loss_scale_of(optimizer)}}
            self.set_optimizer(optimizer)
        if self.client_optimizer is not optimizer:
            raise UnsupportedError("optimizer.step(): this model is stepped by another optimizer already; put all parameters into the groups of one")

    def step(self, lr_kwargs=None):
        changes = self._changes()
        if self.comm_hook is not None:
            self.comm_hook.reduce(self)
            self.comm_hook.begin()
        with self._stepping(), ended.telling(self):
            applied = self.core.update(changes)
        self._follow_step(applied, lr_kwargs)
        self._pending, self._counted, self._has_standing = 0, self.core.gradient_count, True

    def zero_grad(self, set_to_none=True):
        self._has_standing = self._is_mixed = False
        if self.comm_hook is not None:
            self.comm_hook.begin()
        if self._pending:
            self.core.zero_grad()
        self._pending, self._counted = 0, self.core.gradient_count

    def _refuse_outside(self, call):
        if self.core.gradient_count != self._counted:
            raise StateError(f"{call}: a backward pass outside of step functions has added to gradients, which would be divided as those of a micro-batch; "
                             "call model.backward(loss) inside of a @smp.step function")

    def refuse_mixed(self, call):
        """Raises StateError: a step function has added to gradients that the last optimizer.step() has taken."""
        if self._is_mixed:
            raise StateError(f"{call}: gradients of the optimizer.step() before were not dropped; call optimizer.zero_grad() between optimizer.step() and the next "
                             "backward pass: those gradients have gone, so they cannot be added to")


def _under_all_names(module, homes):
    """{name: stage} of all names. What shares memory is where the first of it is."""
    stages = {}
    for name, tensor in homed_tensors(module).items():
        stages.setdefault(memory_of(tensor), homes[name])
    named = itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: stages[memory_of(tensor)] for name, tensor in named if memory_of(tensor) in stages}


def memory_of(tensor):
    """A key of the memory of a tensor, alike for all that share it."""
    return wholes.storage_of(tensor)._cdata  # pylint: disable=protected-access
