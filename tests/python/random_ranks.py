"""The program of each rank of random_training.py: its segments of the cases, each against plain PyTorch on the whole
batch."""
import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import os
import pathlib
import sys
import time
import traceback

import random_cases
import random_compare
import random_programs
import torch
import trireme as deepspeed
from zoo import models as zoo_models

cases = random_programs if "--programs" in sys.argv else random_cases
END = 1 << 40  # a turn that never comes


def _turn(folder):
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((folder / "turn").read_text(encoding="ascii"))
    return 0


def _give_turn(folder, turn):
    (folder / "turn.new").write_text(str(turn), encoding="ascii")
    os.replace(folder / "turn.new", folder / "turn")


def _wait_for_turn(folder, turn):
    """Whether the run goes on. Segments take turns in one order, so a launch that waits takes no core from the one that
    works."""
    while (now := _turn(folder)) < turn:
        time.sleep(0.01)
    return now < END


class Plain:
    """Plain PyTorch over the whole batch: parameters in fp32, or in bf16 with masters in fp32.

    `noise` is added to gradients, with a random sign (another with each `draw`), times the sum of the absolute values
    that an element was summed of.
    """

    def __init__(self, training, noise=0.0, draw=0):
        self.training, self.noise = training, noise
        self.generator = torch.Generator().manual_seed(training.index + 1_000_003 * draw)
        self.model = cases.build(training)
        if training.bf16:
            self.model.bfloat16()
        self.parameters = zoo_models.trained(self.model)
        self.begin = [p.detach().float().clone() for p in self.parameters]
        self.masters = {p: p.detach().float().clone() if training.bf16 else p for p in self.parameters}
        groups = cases.parameter_groups(training, self.model)
        if training.two_groups:
            groups = [{**group, "params": [self.masters.get(p, p) for p in group["params"]]} for group in groups]
        else:
            groups = [self.masters[p] for p in groups]
        self.optimizer = cases.make_optimizer(training, groups)
        self.schedule = cases.make_schedule(training, self.optimizer)

    def step(self, step, segment):
        """Losses of its micro-batches."""
        losses, sums, sizes, count = [], {}, {}, segment.ranks * segment.accumulation
        drop = [event[1] for event in self.training.events.get(step, []) if event[0] == "zero_grad"]
        for micro in range(count):
            loss = cases.loss_of(self.training, self.model, step, micro)
            loss.backward()
            losses.append(loss.item())
            for p in self.parameters:
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad.float() if p in sums else p.grad.float()
                    sizes[p] = sizes.get(p, 0) + p.grad.float().abs()
                    p.grad = None
            if drop and micro == (drop[0] + 1) * segment.ranks - 1:
                sums.clear()
                sizes.clear()
        for p, master in self.masters.items():
            master.grad = sums[p] / count if p in sums else None
            if self.noise and p in sums:
                signs = torch.randint(0, 2, p.shape, generator=self.generator) * 2 - 1
                master.grad += self.noise * signs * sizes[p] / count
        if self.training.clip:
            torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        self._round()
        return losses

    def _round(self):
        if self.training.bf16:
            with torch.no_grad():
                for p, master in self.masters.items():
                    p.copy_(master)

    def scale_parameter(self, number, factor):
        """Multiplies a weight, and its master where the value changed, as training does with a program's write."""
        p = _parameter(self.model, number)
        before = p.detach().clone()
        with torch.no_grad():
            p.mul_(factor)
            if self.training.bf16 and p in self.masters:
                self.masters[p].copy_(torch.where(p == before, self.masters[p], p.float()))

    def events(self, step):
        """Those of before the step; losses of evaluations."""
        losses = []
        for name, *values in self.training.events.get(step, []):
            if name in ("gathered edit", "write"):
                self.scale_parameter(values[0], 0.9)
            elif name == "lr":
                for group in self.optimizer.param_groups:
                    group["lr"] *= values[0]
            elif name == "option":
                _set_option(self.optimizer, *values)
            elif name in ("freeze", "thaw"):
                _freeze(self.parameters, *values)
            elif name == "evaluate":
                with torch.no_grad():
                    losses.append(cases.loss_of(self.training, self.model, 5000 + step, 0).item())
        return losses

    def run(self):
        """(losses of each segment, final weights of each segment)."""
        losses, weights, step = [], [], 0
        for segment in self.training.segments:
            losses.append([])
            _freeze(self.parameters)  # a segment begins with a model of its own
            for step in range(step, step + segment.steps):
                losses[-1] += self.events(step) + self.step(step, segment)
            step += 1
            weights.append([p.detach().float().clone() for p in self.parameters])
        return losses, weights


def _freeze(parameters, *numbers):
    """All but the parameters of these numbers require gradients."""
    frozen = [parameters[number % len(parameters)] for number in numbers]
    for parameter in parameters:
        parameter.requires_grad_(not any(parameter is one for one in frozen))


def _set_option(optimizer, key, value):
    for group in optimizer.param_groups:
        if key in group:
            group[key] = value


def _parameter(model, number):
    parameters = list(model.parameters())
    return parameters[number % len(parameters)]


class Sharded:
    """One segment of a case on this launch's ranks."""

    def __init__(self, training, number, folder):
        self.training, self.segment = training, training.segments[number]
        self.first = sum(segment.steps for segment in training.segments[:number])
        self.folder = folder / f"case{training.index}"
        # A model of other values than the first segment's: they come from the checkpoint.
        self.model = cases.build(training, 7 if number == 0 else 100 + number)
        self.optimizer, self.trained = None, zoo_models.trained(self.model)
        self.engine, self.handle, _, self.schedule = self._initialize()
        if number > 0:
            path, client_state = self.engine.load_checkpoint(self.folder)
            assert path is not None and client_state == {"segment": number - 1, "rows": [1, 2.5, "x"]}, (path, client_state)
            assert self.engine.global_steps == self.first, (self.engine.global_steps, self.first)

    def _initialize(self):
        training, segment = self.training, self.segment
        config = {"train_micro_batch_size_per_gpu": zoo_models.BATCH // training.part,
                  "gradient_accumulation_steps": segment.accumulation, "gradient_clipping": training.clip,
                  "zero_optimization": {"stage": segment.stage}, "bf16": {"enabled": training.bf16}, **segment.more}
        groups, given = cases.parameter_groups(training, self.model), {}
        if training.from_config:
            params = {"weight_decay": 0.0, **training.options}
            if training.optimizer == "Adam":
                params["adam_w_mode"] = False
            config["optimizer"] = {"type": training.optimizer, "params": params}
            given["model_parameters"] = groups
        else:
            given["optimizer"] = self.optimizer = cases.make_optimizer(training, groups)
        section = cases.scheduler_section(training)
        if section is not None:
            config["scheduler"] = section
        elif training.schedule and (training.schedule == "by a callable" or training.from_config):
            given["lr_scheduler"] = lambda optimizer: cases.make_schedule(training, optimizer)
        elif training.schedule:
            given["lr_scheduler"] = cases.make_schedule(training, self.optimizer)
        return deepspeed.initialize(model=self.model, config=config, **given)

    def loss(self, step, micro):
        """The loss of a micro-batch of this rank's."""
        called = self.engine if self.segment.calls == "engine" else self.model
        return cases.loss_of(self.training, called, step, micro)

    def _backward(self, loss):
        if self.segment.backward == "engine":
            self.engine.backward(loss)
        elif self.segment.backward == "scale":
            self.engine.scale(loss).backward()
        else:
            loss.backward()

    def _scope(self, last):
        if self.segment.scope == "no_sync" and not last:
            return self.engine.no_sync()
        return contextlib.nullcontext()

    def step(self, step):
        """Losses of this rank's micro-batches."""
        losses, accumulation = [], self.segment.accumulation
        drop = [event[1] for event in self.training.events.get(step, []) if event[0] == "zero_grad"]
        if self.segment.scope == "coalesce":
            with self.engine.coalesce_grad_reduction():
                for turn in range(accumulation):
                    losses.append(self._micro_batch(step, turn))
            for _ in range(accumulation):
                self.engine.step()
            return losses
        for turn in range(accumulation):
            with self._scope(turn == accumulation - 1):
                losses.append(self._micro_batch(step, turn))
            self.engine.step()
            if turn in drop:
                self.engine.zero_grad()
        assert self.engine.global_steps == step + 1, (self.engine.global_steps, step)
        return losses

    def _micro_batch(self, step, turn):
        loss = self.loss(step, turn * self.segment.ranks + self.engine.global_rank)
        self._backward(loss)
        return loss.item()

    def events(self, step):
        """Those of before the step; losses of evaluations."""
        losses = []
        for name, *values in self.training.events.get(step, []):
            if name == "gathered edit":
                parameter = _parameter(self.model, values[0])
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=values[1]), torch.no_grad():
                    if self.engine.global_rank == values[1]:
                        parameter.mul_(0.9)
            elif name == "write":
                with torch.no_grad():
                    _parameter(self.model, values[0]).mul_(0.9)
            elif name == "lr":
                for group in self.handle.param_groups:
                    group["lr"] *= values[0]
            elif name == "option":
                _set_option(self.handle, *values)
            elif name in ("freeze", "thaw"):
                _freeze(self.trained, *values)
            elif name == "evaluate":
                with torch.no_grad():
                    losses.append(self.loss(5000 + step, 0).item())
        return losses

    def run(self, last):
        """(losses in the order of plain PyTorch's, final weights)."""
        losses, size = [], self.engine.world_size
        for step in range(self.first, self.first + self.segment.steps):
            losses += self.events(step)
            mine = torch.tensor(self.step(step), dtype=torch.float64)
            everybody = [torch.empty_like(mine) for _ in range(size)]
            deepspeed.comm.all_gather(everybody, mine)
            losses += torch.stack(everybody, 1).flatten().tolist()
        if not last:
            number = self.training.segments.index(self.segment)
            self.engine.save_checkpoint(self.folder, client_state={"segment": number, "rows": [1, 2.5, "x"]})
        weights = []
        for parameter in self.trained:
            with deepspeed.zero.GatheredParameters(parameter):
                weights.append(parameter.detach().float().clone())
        if not last:
            self.engine.wait_for_checkpoint()
        if self.segment.destroys:
            self.engine.destroy()
            for parameter, weight in zip(self.trained, weights):
                assert torch.equal(parameter.float(), weight), "destroy() changed a weight"
        return losses, weights


def _memory():
    """kB resident after garbage has gone, of that anonymous and shared; threads; open files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    numbers = [int(status[key].split()[0]) for key in ("VmRSS", "RssAnon", "RssShmem", "Threads")]
    return [*numbers, len(os.listdir("/proc/self/fd"))]


def _train_segment(training, number, folder):
    """The report of one segment."""
    began = time.monotonic()
    report = {"case": training.index, "segment": number, "model": training.model}
    try:
        sharded = Sharded(training, number, folder)
    except deepspeed.errors.ConfigError as error:
        if not training.may_refuse or not str(error).startswith("optimizer: "):
            raise
        return {**report, "refused": str(error), "wrong": "", "memory": _memory()}
    found = sharded.run(number == len(training.segments) - 1)
    rank = sharded.engine.global_rank
    del sharded
    if rank == 0:
        plain = Plain(training)
        losses, weights = plain.run()
        wrong, distance = random_compare.differences(training, found, (losses[number], weights[number]), plain.begin)
        if wrong:
            others = [Plain(training, random_compare.LAST_BITS, draw).run() for draw in range(random_compare.DRAWS)]
            wrong, distance = random_compare.differences(training, found, (losses[number], weights[number]), plain.begin,
                                                         [(losses[number], weights[number]) for losses, weights in others])
        report.update(wrong=wrong and f"{wrong}; {training.describe()}", distance=distance,
                      finite=all(abs(x) < 1e30 for x in losses[number]))
    report.update(memory=_memory(), seconds=round(time.monotonic() - began, 3))
    return report


def _attempt(training, number, folder):
    """_train_segment(), or what it threw, as all ranks then do: the run goes on, unless they have lost each other."""
    try:
        return _train_segment(training, number, folder)
    except deepspeed.errors.CommError:
        raise
    except Exception:  # pylint: disable=broad-except
        return {"case": training.index, "segment": number, "model": training.model, "memory": _memory(),
                "wrong": f"{traceback.format_exc()[-3000:]}\n{training.describe()}"}


def work(options):
    """A rank: takes part in the segments of as many ranks as there are."""
    deepspeed.init_distributed(timeout=datetime.timedelta(minutes=5))
    folder, size, rank = pathlib.Path(options.folder), deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
    turn, index = 0, options.first
    with open(folder / f"report.{size}.{rank}", "w", encoding="utf-8", buffering=1) as report:
        while True:
            training = cases.draw_training(options.seed, index, range(1, options.max_ranks + 1))
            for number, segment in enumerate(training.segments):
                if segment.ranks == size:
                    if not _wait_for_turn(folder, turn):
                        return
                    if rank == 0:
                        (folder / "current").write_text(f"case {index}, segment {number}: {training.describe()}", encoding="utf-8")
                    report.write(json.dumps(_attempt(training, number, folder)) + "\n")
                    deepspeed.comm.barrier()
                    ends = number == len(training.segments) - 1 and index + 1 >= options.last and time.time() >= options.until
                    if rank == 0:
                        _give_turn(folder, END if ends else turn + 1)
                turn += 1
            index += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, kind in (("folder", str), ("seed", int), ("first", int), ("last", int), ("until", float), ("max-ranks", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--programs", action="store_true")
    work(parser.parse_args())
