"""The ranks of random_features_test.py: each trains the programs that the arguments name (a seed, then numbers) beside
plain PyTorch, and says of each in a line of JSON what came out.

    trireme launch --num_gpus 2 python tests/python/random_feature_ranks.py SEED NUMBER ...    repeats some

{"program", "rank", "verdict": "right", "wrong", "refused", "raw", "lost", "text"}. After what is neither right nor
wrong the ranks end, since they may be at different places.
"""
import contextlib
import copy
import dataclasses
import faulthandler
import json
import os
import pathlib
import shutil
import sys
import tempfile
import traceback

import random_programs
import torch
import torch.distributed as dist
import trireme
from random_features import STEPS, draw_program
from trireme import errors, fsdp
from trireme.pipe import PipelineModule
from trireme.runtime.pipe.topology import PipeDataParallelTopology
from zoo import features as models, optimizers

# Tolerances of losses and gradients: of the largest element of the tensor in fp32, of its norm otherwise, where an
# element has 8 or 11 bits; of weights to the way that they went.
EXACT = 1e-5
ROUNDED = {"bf16": 6e-2, "autocast": 6e-2, "low": 8e-2, "fp16": 2e-2}
WAY = {"bf16": 0.2, "autocast": 0.2, "low": 0.35, "fp16": 0.1}
# Gradients that are zero by mathematics, as those of the biases of keys, are all rounding: a tensor counts as no
# smaller than this share of the largest.
SMALLEST = 1e-2
# Where a program is off, so many runs of plain PyTorch with other last bits in its gradients say how far these alone
# lead, and so many times that is allowed: Lion's step is a sign.
SENSITIVITY, DRAWS = 4, 4
LAST_BITS = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8, "autocast": 2.0**-8, "low": 2.0**-8}
SCALE_POWER, PATIENCE_S = 8, 100
WEIGHT_DTYPES = {"bf16": torch.bfloat16, "low": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class Outcome:
    """Losses of this rank, gradients of each step by name before clipping, weights at the end; what events read."""
    losses: list = dataclasses.field(default_factory=list)
    gradients: list = dataclasses.field(default_factory=list)
    weights: dict = dataclasses.field(default_factory=dict)
    begin: dict = dataclasses.field(default_factory=dict)
    told: set = dataclasses.field(default_factory=set)  # the parameters whose gradients this rank tells
    read: dict = dataclasses.field(default_factory=dict)
    moments: dict = dataclasses.field(default_factory=dict)  # of the optimizer, where they tell of gradients


def _trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _plain_optimizer(program, named):
    """Parameters by name."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in program.options.items()}
    if program.optimizer == "Muon":
        return optimizers.Muon(list(named.items()), **options)
    kind = getattr(optimizers, program.optimizer, None) or getattr(torch.optim, program.optimizer)
    return kind(list(named.values()), **options)


class Plain:
    """Plain PyTorch in one process, over the samples of all ranks. `draw` > 0 changes last bits of gradients."""

    def __init__(self, program, data_rank, draw=0):
        self.program, self.data_rank, self.draw = program, data_rank, draw
        self.generator = torch.Generator().manual_seed(draw)
        self.model = models.build(program.model)
        self.dtype = WEIGHT_DTYPES.get(program.precision, torch.float32)
        # FSDP's mixed precision keeps what the program made; DeepSpeed's masters are the weights after the cast.
        keeps = program.names == "FSDP" and program.precision == "bf16"
        self.kept = {name: p.detach().clone() for name, p in self.model.named_parameters()} if keeps else {}
        self.model.to(self.dtype)
        self.named, self.outcome = _trained(self.model), Outcome()
        self.masters = {name: p if self.is_stepped_itself else self.kept.get(name, p.detach().float().clone()) for name, p in self.named.items()}
        self.optimizer = _plain_optimizer(program, self.masters)
        self.schedule = random_programs.make_schedule(program, self.optimizer)
        self.outcome.begin = self.weights()

    @property
    def is_stepped_itself(self):
        return self.program.precision in ("fp32", "low", "autocast")

    def weights(self):
        own = {name: p.detach().float().clone() for name, p in self.model.named_parameters()}
        return {**own, **{name: p.detach().float().clone() for name, p in {**self.kept, **self.masters}.items()}}

    def loss(self, number):
        return models.loss_of(self.program.model, self.model, models.batch(self.program.model, number), self.dtype)

    def step(self, step):
        program = self.program
        count, scale = program.micro_batches * program.data_ranks, 2**SCALE_POWER if program.precision == "fp16" else 1
        sums, sizes, losses, whole = {}, {}, [], self._shake()
        for number in range(count):
            with torch.autocast("cpu", torch.bfloat16, enabled=program.precision == "autocast"):
                loss = self.loss(step * count + number)
            (loss.float() * scale / (count if self.draw else 1)).backward()
            # A pipeline tells the mean of all ranks.
            losses += [loss.item()] if program.axis == "pipeline" or number % program.data_ranks == self.data_rank else []
            for name, p in self.named.items():
                if p.grad is not None:
                    gradient = p.grad.float() / scale / (1 if self.draw else count)
                    sums[name], sizes[name] = sums.get(name, 0) + gradient, sizes.get(name, 0) + gradient.abs()
                    p.grad = None
        if self.draw:
            self._set(whole)
            largest = max(size.max() for size in sizes.values())
            for name, size in sizes.items():
                sums[name] = sums[name] + LAST_BITS[program.precision] * self._signs(size) * (size + SMALLEST * largest)
        self.outcome.losses += [sum(losses) / len(losses)] if program.axis == "pipeline" else losses
        self.outcome.gradients.append(sums)
        for name, gradient in sums.items():
            self.masters[name].grad = gradient.to(self.masters[name].dtype, copy=True)  # which clipping writes
        if program.clip:
            torch.nn.utils.clip_grad_norm_(list(self.masters.values()), program.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        self.publish()

    def _signs(self, like):
        return torch.randint(0, 2, like.shape, generator=self.generator) * 2 - 1

    def _set(self, values):
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), values, strict=True):
                p.copy_(value)

    def _shake(self):
        """Where operators round to 16 bits, another order of sums changes last bits of activations as other last bits
        of weights do. Returns the weights as they were."""
        whole = [p.detach().clone() for p in self.model.parameters()]
        if self.draw and self.program.precision != "fp32":
            self._set([(p.float() * (1 + 1.5 * LAST_BITS[self.program.precision] * self._signs(p))).to(p.dtype) for p in whole])
        return whole

    def publish(self):
        if not self.is_stepped_itself:
            with torch.no_grad():
                for name, p in self.named.items():
                    p.copy_(self.masters[name])

    def happen(self):
        """The event before the second step."""
        if self.program.event == "gathered read":
            self.outcome.read = {name: p.detach().float().clone() for name, p in self.model.named_parameters()}
        elif self.program.event == "evaluate":
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.program.precision == "autocast"):
                self.outcome.losses.append(self.loss(9000).item())
        elif self.program.event == "lr":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        elif self.program.event == "gathered write":
            with torch.no_grad():
                first = next(iter(self.masters.values()))
                first.copy_((first.to(self.dtype) * 0.5))
                self.publish()

    def run(self):
        for step in range(STEPS):
            if step == 1:
                self.happen()
            self.step(step)
        self.outcome.weights = self.weights()
        return self.outcome


class WithEngine:
    """The same by trireme.initialize()."""

    def __init__(self, program, folder):
        self.program, self.folder, self.outcome = program, folder, Outcome()
        self.dtype = WEIGHT_DTYPES.get(program.precision, torch.float32)
        self.make(program.stage)

    def config(self, stage):
        program, trireme_section, zero = self.program, {}, {"stage": stage}
        if program.gather != "auto" and stage == 3:
            trireme_section["gather"] = program.gather
        if program.axis == "ring":
            trireme_section["sequence_attention"] = "ring"
        if program.recompute in ("full", "selective"):
            trireme_section["recompute"] = program.recompute
        if program.tiles:
            trireme_section["tiled"] = {program.tiles: 5}
        if program.axis == "MiCS" and stage:
            zero["mics_shard_size"] = 2
        if program.axis == "hpZ" and stage == 3:
            zero["zero_hpz_partition_size"] = 2
        if program.home:
            zero["offload_optimizer" if program.home == "states" or stage < 3 else "offload_param"] = {"device": "nvme", "nvme_path": f"{self.folder}/disk"}
        config = {"train_micro_batch_size_per_gpu": models.SAMPLES, "gradient_accumulation_steps": program.micro_batches,
                  "gradient_clipping": program.clip, "zero_optimization": zero, "trireme": trireme_section}
        precisions = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": SCALE_POWER}},
                      "low": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
                      "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}}
        config.update(precisions.get(program.precision, {}))
        if program.axis in ("ulysses", "ring"):
            config["sequence_parallel_size"] = program.parts
        if program.axis.startswith("tensor"):
            config["tensor_parallel"] = {"autotp_size": program.parts, "sequence_parallel": program.axis == "tensor tokens"}
        if not program.is_client:
            params = {**program.options, **({"adam_w_mode": False} if program.optimizer == "Adam" else {})}
            config["optimizer"] = {"type": program.optimizer, "params": params}
        section = random_programs.scheduler_section(program)
        if section is not None:
            config["scheduler"] = section
        return config

    def make(self, stage):
        program, config = self.program, self.config(stage)
        with trireme.zero.Init(config_dict_or_path=config) if program.under_init else contextlib.nullcontext():
            model = self.build()
        given = {"optimizer": _plain_optimizer(program, _trained(model))} if program.is_client else {}
        if program.schedule == "LambdaLR":
            given["lr_scheduler"] = lambda optimizer: random_programs.make_schedule(program, optimizer)
        self.engine, self.optimizer, *_ = trireme.initialize(model=model, config=config, **given)
        self.model = model

    def build(self):
        return models.build(self.program.model, self.program.recompute == "checkpoint")

    def plain_name(self, name):
        """A parameter's counterpart in Plain's model."""
        return name

    def trained(self):
        return {self.plain_name(name): p for name, p in _trained(self.model).items()}

    def loss(self, number, cuts=True):
        values = models.batch(self.program.model, number)
        if self.program.axis in ("ulysses", "ring") and self.program.model in models.OWN and cuts:
            values = self.engine.cut(**values)
        return models.loss_of(self.program.model, self.engine, values, self.dtype)

    def step(self, step):
        program = self.program
        for micro in range(program.micro_batches):
            number = (step * program.micro_batches + micro) * program.data_ranks + self.data_rank
            loss = self.loss(number)
            self.engine.backward(loss)
            self.outcome.losses.append(loss.item())
            if micro == program.micro_batches - 1:
                found = {name: trireme.utils.safe_get_full_grad(p) for name, p in self.trained().items()}
                self.outcome.gradients.append({name: g.detach().float().clone() for name, g in found.items() if g is not None})
            self.engine.step()

    @property
    def data_rank(self):
        return dist.get_rank() // self.program.parts

    def happen(self):
        event, engine = self.program.event, self.engine
        if event == "evaluate":
            self.evaluate()
        elif event == "lr":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        elif event == "gathered read":
            with trireme.zero.GatheredParameters(list(self.model.parameters())):
                whole = engine.gather if self.program.axis.startswith("tensor") else lambda p: p
                self.outcome.read = {self.plain_name(name): whole(p.detach()).float().clone() for name, p in self.model.named_parameters()}
        elif event == "gathered write":
            first = next(iter(_trained(self.model).values()))
            with trireme.zero.GatheredParameters([first], modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    first.mul_(0.5)
        elif event.startswith("rewind"):
            engine.save_checkpoint(f"{self.folder}/saved", exclude_frozen_parameters=event.endswith("frozen"))
            kept = copy.deepcopy(self.outcome)
            self.step(7)
            self.outcome = kept
            assert engine.load_checkpoint(f"{self.folder}/saved")[0] is not None
        elif event.startswith("resume"):
            engine.save_checkpoint(f"{self.folder}/saved")
            engine.destroy()
            stage = self.program.stage
            self.make((stage + 1) % 4 if event.endswith("stage") and not self.program.home and self.program.axis not in ("hpZ", "MiCS") else stage)
            self.scramble()
            assert self.engine.load_checkpoint(f"{self.folder}/saved")[0] is not None

    def scramble(self):
        """Values that a load must replace."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(0.9)

    def evaluate(self):
        self.engine.eval()
        with torch.no_grad():
            self.outcome.losses.append(self.loss(9000).item())
        self.engine.train()

    def run(self):
        for step in range(STEPS):
            if step == 1:
                self.happen()
            self.step(step)
        self.outcome.told = set(self.trained())
        weights = {name: trireme.utils.safe_get_full_fp32_param(p).detach().float().clone() for name, p in self.trained().items()}
        self.engine.destroy()
        after = {self.plain_name(name): p.detach().float().clone() for name, p in self.model.named_parameters()}
        self.outcome.weights = {**after, **weights}
        return self.outcome


class WithStages(WithEngine):
    """The same in the stages of a pipeline. What it tells of gradients are the optimizer's moments."""

    def build(self):
        layers, self.parts = models.layers_of(self.program.model)
        return PipelineModule(layers, loss_fn=models.criterion(self.program.model), partition_method="uniform",
                              topology=PipeDataParallelTopology(self.program.parts, self.program.data_ranks),
                              activation_checkpoint_interval=int(self.program.recompute == "checkpoint"))

    def plain_name(self, name):
        if name.startswith("tied_modules."):
            return f"first.{name.split('.', 2)[2]}"
        index, _, inner = name.partition(".")
        return f"{self.parts[int(index)]}.{inner}"

    @property
    def data_rank(self):
        return self.model.mpu().data_parallel_id

    def _batches(self, step):
        program, name = self.program, self.program.model
        for micro in range(program.micro_batches):
            values = models.batch(name, (step * program.micro_batches + micro) * program.data_ranks + self.data_rank)
            inputs = values["input_ids"]
            yield (inputs.to(self.dtype) if inputs.is_floating_point() else inputs), values["labels"]

    def trained(self):
        """Without copies of a tied parameter, whose owner alone tells of it."""
        return {self.plain_name(name): p for name, p in _trained(self.model).items() if not getattr(p, "ds_pipe_replicated", False)}

    def step(self, step):
        self.outcome.losses.append(self.engine.train_batch(self._batches(step)).item())
        norm, before, is_sgd = self.engine.get_global_grad_norm(), self.outcome.moments, self.program.optimizer == "SGD"
        key = "momentum_buffer" if is_sgd else "exp_avg"
        told = {name: trireme.utils.safe_get_full_optimizer_state(p, key).detach().float().clone() for name, p in self.trained().items()}
        factor = max(1.0, (norm + 1e-6) / self.program.clip) if self.program.clip else 1.0
        last = lambda name: self.program.options["momentum"] * before[name] if is_sgd and before else 0
        self.outcome.gradients.append({name: (moment - last(name)) * factor for name, moment in told.items()})
        self.outcome.moments = told

    def evaluate(self):
        inputs = models.batch(self.program.model, 9000)
        whole = inputs["input_ids"].to(self.dtype) if inputs["input_ids"].is_floating_point() else inputs["input_ids"]
        count = self.program.micro_batches
        self.outcome.losses.append(self.engine.eval_batch(iter([(whole, inputs["labels"])] * count)).item())


class WithFsdp(WithEngine):
    """The same by the names of FSDP."""

    def make(self, stage):
        program, low = self.program, self.program.precision == "low"
        self.model = models.build(program.model, program.recompute == "checkpoint")
        if low:
            self.model.bfloat16()
        options = {"reshard_after_forward": stage == 3}
        if program.axis == "MiCS":
            options["mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if program.precision == "bf16":
            options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (module for parent in self.model.modules() if isinstance(parent, torch.nn.ModuleList) for module in parent):
            if not isinstance(layer, fsdp.FSDPModule):
                fsdp.fully_shard(layer, **options)
        fsdp.fully_shard(self.model, **options)
        self.engine = self.model
        self.optimizer = _plain_optimizer(program, _trained(self.model))
        self.schedule = random_programs.make_schedule(program, self.optimizer)

    def step(self, step):
        program = self.program
        for micro in range(program.micro_batches):
            loss = self.loss((step * program.micro_batches + micro) * program.data_ranks + self.data_rank)
            (loss / program.micro_batches).backward()
            self.outcome.losses.append(loss.item())
        self.outcome.gradients.append({name: p.grad.full_tensor().detach().float().clone() for name, p in self.trained().items() if p.grad is not None})
        if program.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), program.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()

    def happen(self):
        event = self.program.event
        if event == "rewind" and not self.schedule:
            fsdp.save_checkpoint(self.model, self.optimizer, f"{self.folder}/saved")
            kept = copy.deepcopy(self.outcome)
            self.step(7)
            self.outcome = kept
            assert fsdp.load_checkpoint(self.model, self.optimizer, f"{self.folder}/saved")
        elif event == "resume":
            fsdp.save_checkpoint(self.model, self.optimizer, f"{self.folder}/saved")
            rates = self.schedule and self.schedule.state_dict()
            self.make(self.program.stage)
            self.scramble()
            assert fsdp.load_checkpoint(self.model, self.optimizer, f"{self.folder}/saved")
            if rates:
                self.schedule.load_state_dict(rates)
        elif event in ("evaluate", "lr"):
            super().happen()

    def run(self):
        for step in range(STEPS):
            if step == 1:
                self.happen()
            self.step(step)
        self.outcome.weights = {name: value.full_tensor().float().clone() if hasattr(value, "full_tensor") else value.float().clone()
                                for name, value in self.model.state_dict().items()}
        return self.outcome


def _way(name, expected):
    return (expected.weights[name] - expected.begin[name]).norm().item()


def _flaws(program, found, expected, shaken):
    """[(how many times as far as allowed, in words)] of what is farther than is allowed."""
    exact, flaws = program.precision == "fp32", []

    def compare(what, one, other, others, allowed):
        if one is None or one.shape != other.shape:
            flaws.append((float("inf"), f"{what} is {None if one is None else list(one.shape)} in place of {list(other.shape)}"))
            return
        size = (lambda t: t.abs().max().item()) if exact else (lambda t: t.norm().item())
        far = size(one - other)
        allowed = max([allowed, *((SENSITIVITY if exact else 1.5) * size(moved - other) for moved in others)])
        if not far <= allowed:
            flaws.append((far / max(allowed, 1e-30), f"{what} is another by {far:.3g}, allowed {allowed:.3g}, of {size(other):.3g}"))

    def allowed_of(name, weights):
        if exact:
            return EXACT * weights[name].abs().max().item()
        return max(WAY[program.precision] * _way(name, expected), 2e-3 * weights[name].norm().item())

    if len(found.losses) != len(expected.losses):
        flaws.append((float("inf"), f"{len(found.losses)} losses in place of {len(expected.losses)}"))
    number = lambda value: torch.tensor([value], dtype=torch.float64)
    for index, (one, other) in enumerate(zip(found.losses, expected.losses)):
        allowed = (EXACT if exact else ROUNDED[program.precision]) * max(abs(other), 0.1)
        compare(f"loss {index}", number(one), number(other), [number(run.losses[index]) for run in shaken], allowed)
    is_told = lambda name, where: program.axis != "pipeline" or name in where  # a stage tells of its own
    for name, one in found.read.items():
        compare(f"{name} as it is read", one, expected.read[name], [run.read[name] for run in shaken], allowed_of(name, expected.read))
    for step, (ones, others) in enumerate(zip(found.gradients, expected.gradients)):
        size = (lambda t: t.abs().max().item()) if exact else (lambda t: t.norm().item())
        largest = max((size(gradient) for gradient in others.values()), default=0)
        for name, other in others.items():
            if is_told(name, found.told):
                allowed = (EXACT if exact else ROUNDED[program.precision]) * max(size(other), SMALLEST * largest)
                compare(f"step {step}: the gradient of {name}", ones.get(name), other, [run.gradients[step][name] for run in shaken], allowed)
        if more := [name for name, one in ones.items() if name not in others and one.any()]:
            flaws.append((float("inf"), f"step {step}: gradients of {more} beside"))
    for name, other in expected.weights.items():
        if is_told(name, found.weights):
            compare(f"the trained {name}", found.weights.get(name), other, [run.weights[name] for run in shaken], allowed_of(name, expected.weights))
    return sorted(flaws, reverse=True)


def train(program):
    """"" or what is wrong with it, in words."""
    folder = [tempfile.mkdtemp(dir=pathlib.Path.cwd()) if dist.get_rank() == 0 else None]
    if folder[0]:  # before others see it: rank 0 may be refused, and remove it, while they are on their way
        (pathlib.Path(folder[0]) / "disk").mkdir()
    dist.broadcast_object_list(folder)
    try:
        kind = WithFsdp if program.names == "FSDP" else WithStages if program.axis == "pipeline" else WithEngine
        run = kind(program, folder[0])
        data_rank, found = run.data_rank, run.run()
        plain = lambda draw=0: Plain(program, data_rank, draw).run()
        expected = plain()
        flaws = _flaws(program, found, expected, ())
        if flaws:
            flaws = _flaws(program, found, expected, [plain(draw) for draw in range(1, DRAWS + 1)])
        dist.barrier()
        return "; ".join(text for _, text in flaws[:3]) + (f"; {len(flaws)} in all" if flaws else "")
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)


_NAMED = (errors.ConfigError, errors.StateError, errors.ShapeError)


def verdict_of(program):
    """(verdict, text)."""
    try:
        wrong = train(program)
        return ("wrong", wrong) if wrong else ("right", "")
    except errors.CommTimeoutError as error:
        return "hang", str(error)
    except errors.CommError as error:
        return "lost", f"{type(error).__name__}: {error}"
    except _NAMED as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception:  # pylint: disable=broad-except
        return "raw", traceback.format_exc()[-2500:]


def main():
    trireme.init_distributed()
    for index in map(int, sys.argv[2:]):
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        program = draw_program(int(sys.argv[1]), index)
        verdict, text = verdict_of(program)
        line = json.dumps({"program": index, "rank": dist.get_rank(), "verdict": verdict, "text": text})
        os.write(1, f"\n{line}\n".encode())
        if verdict not in ("right", "wrong"):
            os._exit(0)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
