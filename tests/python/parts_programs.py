"""Programs that look at what they compute with, each trained by plain PyTorch in one process and by an engine whose
ranks have parts of sequences, slices of layers, or both; every rank does both."""

import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
import trireme
from trireme._native import core
from zoo import parts
from zoo.parts import Attention, Lm, Mlp, OF_LM, column, row, rules

BATCH, LENGTH, VOCABULARY, HIDDEN, HEADS = 3, 12, 50, parts.HIDDEN, parts.HEADS
STEPS = 2
PROGRAMS = {}
OPTIMIZERS = {"SGD": ({"lr": 0.05, "momentum": 0.9}, torch.optim.SGD), "AdamW": ({"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}, torch.optim.AdamW)}


def program(kind=None, **options):
    """Adds a class of models, whose forward() of token ids and labels gives the loss, or a loss of an engine's."""
    def add(kind):
        PROGRAMS[kind.__name__] = (kind, options)
        return kind
    return add(kind) if kind else add


def batch(number):
    generator = torch.Generator().manual_seed(100 + number)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, 8:] = -100
    return ids, labels


class Model(Lm):
    """A language model with a loss. `seen` are numbers that the program shows."""

    attention, mlp, count = Attention, Mlp, 2

    def __init__(self):
        super().__init__(type(self).attention, type(self).mlp, self.count)
        self.seen = []
        self.own()

    def own(self):
        pass

    def see(self, *values):
        self.seen += [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]

    def change(self, x, ids):
        return x

    def loss(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def begin(self, x, ids):
        return x

    def forward(self, input_ids, labels=None):
        x = self.begin(self.embed_tokens(input_ids), input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.lm_head(self.norm(self.change(x, input_ids))), labels)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


@program
class Reversed(Model):
    """A domain's classifier behind a gradient that is turned round."""

    def own(self):
        self.domain = nn.Linear(HIDDEN, 2)

    def change(self, x, ids):
        self.of_domain = F.cross_entropy(self.domain(_Reversed.apply(x, 0.3)).flatten(0, 1), (ids % 2).flatten())
        return x

    def loss(self, logits, labels):
        return super().loss(logits, labels) + self.of_domain


class _Planted(torch.autograd.Function):
    """A backward that is wrong where a tensor is a part."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 1e-3 * (core.EngineBase.tells_wholes(gradient)))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        ctx.save_for_backward(x)
        return torch.round(x * levels) / levels

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient * (x.abs() < 1.5), None


class _RoundedMlp(Mlp):
    def act(self, x):
        return _Rounded.apply(torch.tanh(x) * 2, 64)


@program
class StraightThrough(Model):
    mlp = _RoundedMlp


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_weight = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None
        return gradient @ weight if needs[0] else None, of_weight, gradient.sum((0, 1)) if needs[2] else None


@program
class LinearOfWholes(Model):
    """A function of a part and of parameters that every rank has."""

    def own(self):
        self.extra = nn.Linear(HIDDEN, HIDDEN)

    def change(self, x, ids):
        return x + _Linear.apply(x, self.extra.weight, self.extra.bias)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, epsilon):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, gain, scale)
        return x * scale * gain

    @staticmethod
    def backward(ctx, gradient):
        x, gain, scale = ctx.saved_tensors
        scaled = gradient * gain
        of_x = scale * (scaled - x * scale * scale * (scaled * x).sum(-1, keepdim=True) / x.shape[-1])
        return of_x, (gradient * x * scale).sum((0, 1)), None


@program
class NormByFunction(Model):
    def own(self):
        self.gain = nn.Parameter(torch.rand(HIDDEN))

    def change(self, x, ids):
        return _Norm.apply(x, self.gain, 1e-6)


class _NormedMlp(Mlp):
    def own(self):
        self.gain = nn.Parameter(torch.rand(48))

    def act(self, x):
        return _Norm.apply(F.gelu(x), self.gain, 1e-6)


@program
class NormInLayer(Model):
    """It norms over features of which each rank has some."""

    mlp = _NormedMlp


class _FusedLoss(torch.autograd.Function):
    """Computes its gradients in forward()."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        logits = hidden @ weight.t()
        keep, known = labels != -100, labels.clamp(min=0)
        loss = -(torch.log_softmax(logits, -1).gather(-1, known.unsqueeze(-1)).squeeze(-1) * keep).sum() / keep.sum()
        of_logits = (torch.softmax(logits, -1) - F.one_hot(known, weight.shape[0])) * keep.unsqueeze(-1) / keep.sum()
        ctx.gradients = of_logits @ weight, torch.einsum("bsv,bsh->vh", of_logits, hidden)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradients[0] * gradient, ctx.gradients[1] * gradient, None


@program(cuts=[(2, 1)])
class FusedLoss(Model):
    def forward(self, input_ids, labels=None):
        return _FusedLoss.apply(self.hidden(input_ids), self.lm_head.weight, labels)


class _SinCos(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        count = (x > 0).sum(-1)
        ctx.mark_non_differentiable(count)
        return torch.sin(x), torch.cos(x), count

    @staticmethod
    def backward(ctx, of_sin, of_cos, _):
        x, = ctx.saved_tensors
        gradient = None if of_sin is None else of_sin * x.cos()
        return gradient if of_cos is None else (0 if gradient is None else gradient) - of_cos * x.sin()


@program
class SeveralResults(Model):
    """One of a function's results has no gradient, and one is not used."""

    def change(self, x, ids):
        sin, _, count = _SinCos.apply(x)
        self.see(count.sum().item(), sin.shape[1])
        return sin + 0.01 * count.unsqueeze(-1)


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        y, = ctx.saved_tensors
        return gradient * (y > 0)


class _ReluMlp(Mlp):
    def act(self, x):
        return _Relu.apply(x * 1.0)


@program
class InPlaceFunction(Model):
    mlp = _ReluMlp

    def change(self, x, ids):
        return _Relu.apply(x * 1.0) + 0.1 * x


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Layers(Model):
    """A model that runs its layers by run()."""

    def run(self, layer, x):
        return layer(x)

    def forward(self, input_ids, labels=None):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.loss(self.lm_head(self.norm(x)), labels)


@program
class OwnCheckpoint(Layers):
    def run(self, layer, x):
        return _Checkpoint.apply(layer, x)


@program
class CheckpointThatReenters(Layers):
    def run(self, layer, x):
        return checkpoint(layer, x, use_reentrant=True)


@program
class CheckpointByHooks(Layers):
    def run(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, weight):
        totals = torch.logsumexp(logits, -1)
        ctx.save_for_backward(logits, totals)
        ctx.weight = weight
        return weight * (totals ** 2).mean()

    @staticmethod
    def backward(ctx, gradient):
        logits, totals = ctx.saved_tensors
        return gradient * ctx.weight * 2 * totals.unsqueeze(-1) * torch.softmax(logits, -1) / totals.numel(), None


@program
class TotalOfFunction(Model):
    def loss(self, logits, labels):
        return super().loss(logits, labels) + _Total.apply(logits, 0.01)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        of_one = torch.sigmoid(gate)
        return gradient * up * of_one * (1 + gate * (1 - of_one)), gradient * F.silu(gate)


class _SwiGluMlp(Mlp):
    def own(self):
        self.gate_proj = nn.Linear(HIDDEN, 48)

    def forward(self, x):
        return self.down_proj(_SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))


@program(partition_config=rules(column("up_proj", "gate_proj"), row("down_proj"), *parts.OF_ATTENTION))
class SwiGluByFunction(Model):
    mlp = _SwiGluMlp


class _NormedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1 + gradient.pow(2).sum().sqrt()) * math.sqrt(gradient.numel())


class _NormedGradientMlp(Mlp):
    def act(self, x):
        return _NormedGradient.apply(F.gelu(x))


@program
class GradientNormInLayer(Model):
    mlp = _NormedGradientMlp


@program
class HookOfActivation(Model):
    """A hook that is taken away again, one that changes a gradient and one that looks at it."""

    def change(self, x, ids):
        x = x * 1.0
        x.register_hook(lambda gradient: gradient * 3).remove()
        x.register_hook(lambda gradient: gradient * (1 - 1 / gradient.shape[1]))
        x.register_hook(lambda gradient: self.see(list(gradient.shape), gradient.pow(2).sum(), gradient.abs().mean().item()))
        return x


class _HookedMlp(Mlp):
    def act(self, x):
        x = F.gelu(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / (1 + gradient.pow(2).sum().sqrt()) + 0.01 * gradient.shape[-1] * gradient)
        return x


@program
class HookInLayer(Model):
    mlp = _HookedMlp


@program
class SavedTensorsPacked(Model):
    def forward(self, input_ids, labels=None):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (one.shape, one), lambda kept: kept[1].view(kept[0])):
            return super().forward(input_ids, labels)


def _with_gradients(call, model, ids, labels):
    loss = call(input_ids=ids, labels=labels)
    for gradient in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True):
        model.see(gradient)
    return loss


@program(loss_of=_with_gradients, cuts=[(1, 2)])
class GradientsOfParameters(Model):
    """Gradients of parameters that are cut and of others."""


@program(backward=lambda engine, model, loss: loss.backward(inputs=list(model.layers[1].parameters())), cuts=[(1, 2)])
class BackwardOfSomeParameters(Model):
    """The others have none."""


@program
class TokensMaskedOut(Model):
    def change(self, x, ids):
        x = x * 1.0
        x[ids > 30] = 0.25
        mask = ids % 3 == 0
        x[mask] = x[mask] * 2 + 1
        return x


@program
class TokenWritten(Model):
    def own(self):
        self.first = nn.Parameter(torch.randn(HIDDEN))

    def begin(self, x, ids):
        x = x.clone()
        x[:, 0] = self.first
        x[:, -1] += 1
        x[..., :3] *= 2
        return x


@program
class TokensShifted(Model):
    def change(self, x, ids):
        y = x.clone()
        y[:, 1:] = x[:, :-1].clone()
        return (x + y).index_copy(1, torch.tensor([1, 5, 11]), x[:, :3] * 2).index_fill(1, torch.tensor([0, 7]), 0.5)


@program
class SoftmaxOverTokensByHand(Model):
    def change(self, x, ids):
        y = (x - x.amax(1, keepdim=True)).exp()
        return x + y / y.sum(1, keepdim=True)


class _LargestMlp(Mlp):
    def act(self, x):
        return x - x.amax(-1, keepdim=True)


@program
class LargestFeature(Model):
    mlp = _LargestMlp


class _OneKeyHead(Attention):
    groups = 1


@program(cuts=[(2, 1), (1, 2)])
class OneKeyHead(Model):
    """Queries of several heads attend to one key head."""

    attention = _OneKeyHead


@program
class LossInPieces(Model):
    """The last piece has fewer tokens than a rank would need."""

    def loss(self, logits, labels):
        pieces = zip(logits.split(5, 1), labels.split(5, 1))
        return sum(F.cross_entropy(of_piece.flatten(0, 1), own.flatten(), reduction="sum") for of_piece, own in pieces) / labels.ne(-100).sum()


@program
class PackedDocuments(Model):
    """Several documents in a sample: positions begin anew in each, and a token attends to its own document alone."""

    def own(self):
        self.positions, self.outer = nn.Embedding(LENGTH, HIDDEN), Attention()

    def change(self, x, ids):
        ends = (ids % 5 == 0).long()
        document, place = ends.cumsum(1) - ends, torch.arange(ids.size(1))
        begin = torch.where(F.pad(ends, (1, 0))[:, :-1].bool(), place, 0).cummax(1).values
        x = x + self.positions(place - begin)
        q, k, v = self.outer.project(x)
        mask = (document[:, :, None] == document[:, None]) & (place[:, None] >= place)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return x + self.outer.o_proj(attended.transpose(1, 2).flatten(2))


@program
class LinearChain(Model):
    """A conditional random field over the tokens: every sum over paths, token by token."""

    def own(self):
        self.transitions = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY) * 0.1)

    def loss(self, logits, labels):
        labels = labels.clamp(min=0)
        paths = logits[:, 0]
        for token in range(1, logits.size(1)):
            paths = torch.logsumexp(paths[:, :, None] + self.transitions[None], 1) + logits[:, token]
        taken = logits.gather(2, labels[..., None]).sum((1, 2)) + self.transitions[labels[:, :-1], labels[:, 1:]].sum(1)
        return (paths.logsumexp(-1) - taken).mean() / logits.size(1)


class Planted(Model):
    """Wrong by 1e-3 where a gradient is a part's."""

    def change(self, x, ids):
        return _Planted.apply(x)


def compare(name, sequence, tensor, stage=0, optimizer="SGD", accumulation=1, steps=STEPS, **more):
    """[[kind, where, relative]] of the largest differences."""
    kind, options = (Planted, {}) if name == "Planted" else PROGRAMS[name]
    arguments, of_torch = OPTIMIZERS[optimizer]
    torch.manual_seed(3)
    plain = kind()
    torch.manual_seed(3)
    own = kind()
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0,
              "optimizer": {"type": optimizer, "params": arguments}, "zero_optimization": {"stage": stage}, **more}
    if sequence > 1:
        config["sequence_parallel_size"] = sequence
    if tensor > 1:
        partition = options.get("partition_config", OF_LM)
        if sequence > 1 and partition:  # a lookup in a vocabulary that is cut gives whole samples
            partition = {**partition, "layer_specs": [*partition["layer_specs"], parts.cut("embed_tokens", partition_type="skip")]}
        config["tensor_parallel"] = {"autotp_size": tensor, **({"partition_config": partition} if partition else {})}
    before = options.get("before")
    engine, *_ = trireme.initialize(model=own, config=config)
    of_plain = of_torch([p for p in plain.parameters() if p.requires_grad], **arguments)
    worst = {}

    def see(what, where, one, other, smallest=1e-6):
        if isinstance(other, torch.Tensor) and isinstance(one, torch.Tensor):
            if one.shape != other.shape:
                worst[what + " shape"] = [math.inf, f"{where}: {list(one.shape)} is not {list(other.shape)}"]
                return
            one, other = one.detach().double(), other.detach().double()
            apart = ((one - other).norm() / other.norm().clamp(min=smallest)).item()
        else:
            apart = 0.0 if one == other or (isinstance(one, float) and abs(one - other) <= 1e-5 * max(abs(other), 1e-6)) else math.inf
            where = where if apart == 0 else f"{where}: {one!r} is not {other!r}"
        if not apart <= worst.get(what, [-1.0])[0]:
            worst[what] = [apart, where]

    loss_of = options.get("loss_of", lambda call, model, ids, labels: call(input_ids=ids, labels=labels))
    backward = options.get("backward", lambda engine, model, loss: engine.backward(loss))
    plain_backward = options.get("backward", lambda engine, model, loss: loss.backward())
    cut = engine.cut if sequence > 1 else lambda **whole: whole
    names = dict(own.named_parameters())
    for step in range(steps):
        of_plain.zero_grad()
        for micro in range(accumulation):
            ids, labels = batch(step * accumulation + micro)
            if before:
                before(plain, step), before(own, step)
            loss = loss_of(lambda **whole: engine(**cut(**whole)), own, ids, labels)
            expected = loss_of(lambda **whole: plain(**whole), plain, ids, labels)
            see("loss", f"step {step}", loss, expected)
            backward(engine, own, loss)
            plain_backward(None, plain, expected / accumulation)
            if micro + 1 < accumulation:
                engine.step()
        if step == 0 or options.get("every_gradient"):
            whole = math.sqrt(sum(p.grad.norm().item() ** 2 for p in plain.parameters() if p.grad is not None))
            for where, parameter in plain.named_parameters():
                if parameter.requires_grad:
                    gradient = trireme.utils.safe_get_full_grad(names[where])
                    if parameter.grad is None:
                        if gradient is not None and gradient.abs().max() > 0:
                            worst["gradient of unused"] = [math.inf, where]
                    elif gradient is None:
                        worst["no gradient"] = [math.inf, where]
                    else:
                        see("gradient", where, gradient, parameter.grad, max(1e-6, 1e-3 * whole))
        engine.step()
        of_plain.step()
        after = options.get("after")
        if after:
            after(engine, own, step), after(None, plain, step)
    for where, parameter in plain.named_parameters():
        if parameter.requires_grad:
            see("weight", where, trireme.utils.safe_get_full_fp32_param(names[where]), parameter, 1e-2)
    of_own, of_other = getattr(own, "seen", []), getattr(plain, "seen", [])
    if len(of_own) != len(of_other):
        worst["seen count"] = [math.inf, f"{len(of_own)} {len(of_other)}"]
    for place, (one, other) in enumerate(zip(of_own, of_other)):
        see("seen", str(place), one, other, 1e-3)
    engine.destroy()
    return worst
