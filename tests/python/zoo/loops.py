"""More programs that users write: losses, training loops, whole models."""
import atexit
import copy
import math
import pathlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
import trireme

from tensor_compare import Differences, adamw, compare, configuration, seeded
import zoo
from zoo.parts import BATCH, HEADS, HIDDEN, LENGTH, OF_LM, OF_MLP, VOCABULARY, Attention, Block, Lm, Mlp, column, next_token, row, rules, squares, tokens, vectors

PROGRAMS = zoo.Collection("loops", tokens, next_token)


def small_lm(**more):
    return lambda: Lm(layers=1, **more)


class TiedLm(Lm):
    tied = True


# Losses of the logits.
def loss(name):
    """Declares a function of logits (tokens, vocabulary) and labels."""
    def declare(function):
        def of_model(call, _, ids):
            logits = call(ids)
            return function(logits[:, :-1].reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
        PROGRAMS.add(f"loss_{name}", small_lm(), of_model, partition_config=OF_LM)
        PROGRAMS.add(f"loss_{name}_tied", lambda: TiedLm(layers=1), of_model)
    return declare


loss("smoothed")(lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1))
loss("ignored")(lambda logits, labels: F.cross_entropy(logits, labels.masked_fill(labels % 3 == 0, -100)))
loss("ignored_other")(lambda logits, labels: nn.CrossEntropyLoss(ignore_index=7, reduction="sum")(logits, labels) / (labels != 7).sum())
loss("weighted")(lambda logits, labels: F.cross_entropy(logits, labels, weight=torch.linspace(0.5, 2, VOCABULARY)))
loss("probabilities")(lambda logits, labels: F.cross_entropy(logits, F.one_hot(labels, VOCABULARY).float() * 0.9 + 0.1 / VOCABULARY))


@loss("each")
def _(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).sum() / len(losses)


loss("with_z")(lambda logits, labels: F.cross_entropy(logits, labels) + 1e-2 * torch.logsumexp(logits, -1).pow(2).mean())
loss("by_log_softmax")(lambda logits, labels: -logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1).mean())
loss("by_nll")(lambda logits, labels: F.nll_loss(F.log_softmax(logits.float(), dim=-1), labels))
loss("by_logsumexp")(lambda logits, labels: (logits.logsumexp(-1) - logits[torch.arange(len(labels)), labels]).mean())


@loss("focal")
def _(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


@loss("focal_by_softmax")
def _(logits, labels):
    p = logits.softmax(-1).gather(1, labels.unsqueeze(1)).squeeze(1)
    return -((1 - p) ** 2 * p.log()).mean()


loss("binary")(lambda logits, labels: F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, VOCABULARY).float()))


@loss("entropy")
def _(logits, labels):
    p = logits.softmax(-1)
    return F.cross_entropy(logits, labels) - 0.1 * -(p * (p + 1e-9).log()).sum(-1).mean()


loss("margin")(lambda logits, labels: F.multi_margin_loss(logits, labels))
loss("squared")(lambda logits, labels: F.mse_loss(logits.softmax(-1), F.one_hot(labels, VOCABULARY).float()))
loss("capped")(lambda logits, labels: F.cross_entropy(30 * torch.tanh(logits / 30), labels))
loss("tempered")(lambda logits, labels: F.cross_entropy(logits.float() / 0.7, labels) + logits.float().abs().mean() + logits.sum() / logits.numel())


@loss("masked_logits")
def _(logits, labels):
    logits = logits.clone()
    logits[:, 3] = -1e4
    return F.cross_entropy(logits, labels.masked_fill(labels == 3, 4))


loss("sliced_logits")(lambda logits, labels: F.cross_entropy(logits[:, :40], labels.clamp(max=39)))


@loss("one_hot_gumbel")
def _(logits, labels):
    hard = F.one_hot(logits.argmax(-1), VOCABULARY).float()
    soft = logits.softmax(-1)
    return ((hard - soft).detach() + soft)[:, :10].sum(-1).mean() + F.cross_entropy(logits, labels)


@loss("accuracy")
def _(logits, labels):
    right = (logits.argmax(-1) == labels).float().mean()
    best = logits.topk(5, -1).indices
    among = (best == labels[:, None]).any(-1).float().mean()
    return F.cross_entropy(logits, labels) * (1 + right.item() + among.item())


@loss("reinforced")
def _(logits, labels):
    chosen = torch.distributions.Categorical(logits=logits)
    reward = (labels % 2).float() - 0.5
    return -(chosen.log_prob(labels) * reward).mean() - 0.01 * chosen.entropy().mean()


@loss("unlikely")
def _(logits, labels):
    p = logits.softmax(-1)
    return -(1 - p[:, 5]).log().mean() + F.cross_entropy(logits, labels)


@loss("ranked")
def _(logits, labels):
    largest = logits.sort(-1, descending=True).values
    return F.cross_entropy(logits, labels) + (largest[:, 0] - largest[:, 1]).relu().mean()


@loss("compared")
def _(logits, labels):
    first, last = logits.logsumexp(0), logits.mean(0)
    return F.cross_entropy(logits, labels) + 0.01 * (first - last).pow(2).mean()


def _sampled(call, _, ids):
    logits = call(ids)
    torch.manual_seed(5)
    with torch.no_grad():
        best, at = logits[:, -1].topk(10, -1)
        chosen = at.gather(1, torch.multinomial(best.softmax(-1), 1))
    return F.cross_entropy(logits[:, -1], chosen[:, 0]) + next_token(call, None, ids)


PROGRAMS.add("loss_sampled", small_lm(), _sampled)


@PROGRAMS.own
def loss_distilled(tensor, stage):
    teacher = seeded(lambda: nn.Embedding(VOCABULARY, VOCABULARY)).requires_grad_(False)

    def distilled(call, _, ids):
        logits, wanted = call(ids), teacher(ids)
        return F.kl_div((logits / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean") * 4
    return compare(tensor, stage, small_lm(), distilled)


@PROGRAMS.own
def loss_distilled_between_engines(tensor, stage):
    """A teacher in an engine of its own."""
    make = lambda: nn.ModuleDict({"student": Lm(layers=1), "teacher": Lm(layers=1)})
    whole = seeded(make)
    teacher, *_ = trireme.initialize(model=whole["teacher"], config=configuration(tensor, stage))
    plain = seeded(make)["teacher"]

    def distilled(call, _, ids):
        logits = call(ids)
        with torch.no_grad():
            wanted = (teacher if hasattr(call, "global_rank") else plain)(ids)
        return F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
    found = compare(tensor, stage, small_lm(), distilled)
    teacher.destroy()
    return found


# Other training loops.
def loop(name, make=None, loss_of=next_token, partition_config=None, **options):
    PROGRAMS.add(f"loop_{name}", make or small_lm(), loss_of, partition_config=partition_config, **options)


loop("accumulated", accumulation=3)
loop("clipped", clipping=0.1)
loop("sgd", optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}},
     optimizer_of=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01))
loop("adam", optimizer={"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-4, "adam_w_mode": False, "weight_decay": 0.01}},
     optimizer_of=lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4, weight_decay=0.01))
loop("adagrad", optimizer={"type": "Adagrad", "params": {"lr": 1e-2, "eps": 1e-4}}, optimizer_of=lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4))
loop("lamb", optimizer={"type": "Lamb", "params": {"lr": 1e-3}}, optimizer_of=lambda p: torch.optim.SGD(p, lr=1e-3))
loop("muon", optimizer={"type": "Muon", "params": {"lr": 1e-3}}, optimizer_of=lambda p: torch.optim.SGD(p, lr=1e-3))
for _name, _cls, _arguments in (("adamw", torch.optim.AdamW, {"eps": 1e-4}), ("sgd", torch.optim.SGD, {"momentum": 0.9}), ("nadam", torch.optim.NAdam, {"eps": 1e-4}),
                                ("rmsprop", torch.optim.RMSprop, {"eps": 1e-4}), ("adafactor", torch.optim.Adafactor, {}),
                                ("radam", torch.optim.RAdam, {"eps": 1e-4}), ("lbfgs", torch.optim.LBFGS, {})):
    loop(f"client_{_name}", optimizer=None, optimizer_of=lambda p, cls=_cls, arguments=_arguments: cls(p, lr=1e-3, **arguments),
         initialize=lambda own, cls=_cls, arguments=_arguments: {"optimizer": cls(own.parameters(), lr=1e-3, **arguments)})
loop("no_decay_groups", optimizer=None, optimizer_of=lambda p: adamw([{"params": [q for q in p if q.dim() > 1]},
                                                                     {"params": [q for q in p if q.dim() < 2], "weight_decay": 0.0, "lr": 1e-3}]),
     initialize=lambda own: {"optimizer": adamw([{"params": [q for q in own.parameters() if q.dim() > 1]},
                                                 {"params": [q for q in own.parameters() if q.dim() < 2], "weight_decay": 0.0, "lr": 1e-3}])})
loop("scheduled", initialize=lambda own: {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)})
loop("tied", lambda: TiedLm(layers=1))
loop("frozen_embedding", lambda: _frozen(Lm(), "embed_tokens"))
loop("frozen_layer", lambda: _frozen(Lm(), "layers.0"))
loop("frozen_head", lambda: _frozen(Lm(), "lm_head"))
loop("frozen_columns", lambda: _frozen(Lm(), "up_proj"))
loop("only_biases", lambda: _only(Lm(), "bias"))
loop("only_norms", lambda: _only(Lm(), "norm"))
loop("only_down", lambda: _only(Lm(), "down_proj.weight"))
loop("only_rows_bias", lambda: _only(Lm(), "o_proj.bias"))


def _frozen(model, part):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    return model


def _only(model, part):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    return model


for _size in (51, 3, 7, 53):
    loop(f"vocabulary_{_size}", lambda size=_size: type("Odd", (Lm,), {"vocabulary": size})(layers=1), batch=lambda n, size=_size: tokens(n, size))
    loop(f"vocabulary_{_size}_tied", lambda size=_size: type("Odd", (Lm,), {"vocabulary": size, "tied": True})(layers=1),
         batch=lambda n, size=_size: tokens(n, size))
loop("inner_45", lambda: Lm(layers=1, mlp=lambda: Mlp(45)))
loop("inner_1", lambda: Lm(layers=1, mlp=lambda: Mlp(1)))


class Checkpointed(Lm):
    reentrant = False

    def hidden(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.norm(x)


loop("checkpointed", Checkpointed)
loop("checkpointed_reentrant", type("Reentrant", (Checkpointed,), {"reentrant": True}))


class SharedMlp(Lm):
    def __init__(self):
        super().__init__()
        self.layers[1].mlp = self.layers[0].mlp


class SharedLayer(Lm):
    def hidden(self, ids):
        x = self.embed_tokens(ids)
        for _ in range(3):
            x = self.layers[0](x)
        return self.norm(x)


class SharedParameter(Lm):
    def __init__(self):
        super().__init__()
        self.layers[1].mlp.up_proj.weight = self.layers[0].mlp.up_proj.weight
        self.layers[1].attn.q_proj.weight = self.layers[0].attn.k_proj.weight


class SharedAcross(Lm):
    """A square matrix is a column in one place and a row in another."""

    def __init__(self):
        super().__init__()
        self.layers[0].attn.o_proj.weight = self.layers[0].attn.q_proj.weight


class UnusedLayer(Lm):
    def __init__(self):
        super().__init__()
        self.never = Mlp()


loop("shared_mlp", SharedMlp)
loop("shared_layer", SharedLayer)
loop("shared_parameter", SharedParameter)
loop("shared_across", SharedAcross)
loop("unused_layer", UnusedLayer)
loop("shared_mlp_ruled", SharedMlp, partition_config=OF_LM)
loop("shared_across_ruled", SharedAcross, partition_config=OF_LM)
loop("tied_by_call", lambda: TiedByCall())


class TiedByCall(Lm):
    def __init__(self):
        super().__init__()
        del self.lm_head
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        return F.linear(self.hidden(ids), self.embed_tokens.weight) * self.scale


# Programs' reads of parameters.
def penalty(name, function, partition_config=OF_LM, make=None):
    def loss_of(call, module, ids):
        return next_token(call, module, ids) + 0.01 * function(module)
    PROGRAMS.add(f"penalty_{name}", make or small_lm(), loss_of, partition_config=partition_config)


def up(module):
    return module.layers[0].mlp.up_proj


penalty("head_norm", lambda module: module.lm_head.weight.norm())
penalty("all_squares", lambda module: sum(p.pow(2).sum() for p in module.parameters()))
penalty("all_norms", lambda module: sum(p.norm(2) for p in module.parameters()))
penalty("all_absolute", lambda module: torch.cat([p.abs().view(-1) for p in module.parameters()]).mean())
penalty("orthogonal_rows", lambda module: (up(module).weight @ up(module).weight.T - torch.eye(48)).pow(2).sum())
penalty("orthogonal_columns", lambda module: (up(module).weight.T @ up(module).weight - torch.eye(HIDDEN)).norm())
penalty("orthogonal_down", lambda module: (module.layers[0].mlp.down_proj.weight @ module.layers[0].mlp.down_proj.weight.T - torch.eye(HIDDEN)).norm())
penalty("spectral", lambda module: torch.linalg.matrix_norm(up(module).weight, 2))
penalty("nuclear", lambda module: torch.linalg.svdvals(up(module).weight).sum())
penalty("rows", lambda module: up(module).weight.norm(dim=1).max() + up(module).weight.norm(dim=0).sum())
penalty("mean", lambda module: up(module).weight.mean() + up(module).bias.mean() + up(module).weight.std() + up(module).weight.var(0).sum())
penalty("one_element", lambda module: up(module).weight[40, 3] + up(module).weight[0, 0] ** 2 + module.lm_head.weight[-1].sum())
penalty("max", lambda module: up(module).weight.max() + up(module).weight.abs().amax(0).sum())
penalty("product", lambda module: (module.layers[0].mlp.down_proj.weight @ up(module).weight).pow(2).mean())
penalty("between_embeddings", lambda module: (module.lm_head.weight - module.embed_tokens.weight).pow(2).sum())
penalty("between_embeddings_default", lambda module: (module.lm_head.weight - module.embed_tokens.weight).pow(2).sum(), None)
penalty("cosine", lambda module: F.cosine_similarity(module.lm_head.weight, module.embed_tokens.weight).mean())
penalty("embedding_gram", lambda module: (module.embed_tokens.weight @ module.embed_tokens.weight.t()).softmax(-1).diagonal().sum())
penalty("vector", lambda module: nn.utils.parameters_to_vector(module.parameters()).square().sum())
penalty("group_lasso", lambda module: (up(module).weight.pow(2).sum(1) + up(module).bias ** 2).sqrt().sum())


# The same batch, other things in between.
@PROGRAMS.own
def loop_evaluated(tensor, stage):
    """An evaluation between two steps, in eval() and without gradients."""
    def between(call, module, found, who):
        call.eval()
        with torch.no_grad():
            logits = call(tokens(77)[0])
            values[who] = [F.cross_entropy(logits.flatten(0, 1), tokens(78)[0].flatten()), logits.argmax(-1).float(), logits.softmax(-1).max(), logits.detach().clone()]
        call.train()
        if who == "plain":
            for place, (one, other) in enumerate(zip(values["own"], values["plain"])):
                found.see("evaluation", str(place), one, other)
    values = {}
    return compare(tensor, stage, small_lm(), between=between)


@PROGRAMS.own
def loop_evaluated_in_inference_mode(tensor, stage):
    def between(call, module, found, who):
        with torch.inference_mode():
            values[who] = call(tokens(77)[0]).logsumexp(-1)
        if who == "plain":
            found.see("evaluation", "logits", values["own"].clone(), values["plain"].clone())
    values = {}
    return compare(tensor, stage, small_lm(), between=between)


def _edited(name, edit):
    def between(module):
        with torch.no_grad():
            edit(module)
    PROGRAMS.add(f"edit_{name}", small_lm(), partition_config=OF_LM, between=between)


_edited("decay_by_hand", lambda module: [p.mul_(0.99) for p in module.parameters()])
_edited("data_decay", lambda module: [p.data.mul_(0.99) for p in module.parameters()])
_edited("data_assigned", lambda module: [setattr(p, "data", p.data * 0.99) for p in module.parameters()])
_edited("clamped", lambda module: [p.clamp_(-0.1, 0.1) for p in module.parameters()])
_edited("row_zero", lambda module: module.embed_tokens.weight[0].zero_())
_edited("rows", lambda module: [module.lm_head.weight[3:30].fill_(0.1), up(module).weight[40].mul_(0.5), up(module).weight[:, 3].zero_()])
_edited("rows_of_head", lambda module: module.lm_head.weight[3:30].fill_(0.1))
_edited("normed", lambda module: up(module).weight.div_(up(module).weight.norm(dim=1, keepdim=True)))
_edited("normed_columns", lambda module: up(module).weight.div_(up(module).weight.norm(dim=0, keepdim=True)))
_edited("renormed", lambda module: up(module).weight.copy_(F.normalize(up(module).weight, dim=0)))
_edited("copied_whole", lambda module: up(module).weight.copy_(torch.linspace(-1, 1, 48 * HIDDEN).view(48, HIDDEN)))
_edited("data_copied_whole", lambda module: up(module).weight.data.copy_(torch.linspace(-1, 1, 48 * HIDDEN).view(48, HIDDEN)))
_edited("from_other", lambda module: module.lm_head.weight.copy_(module.embed_tokens.weight))
_edited("masked", lambda module: up(module).weight.mul_((torch.arange(48 * HIDDEN) % 3 > 0).float().view(48, HIDDEN)))
_edited("pruned", lambda module: up(module).weight.mul_(up(module).weight.abs() > up(module).weight.abs().flatten().kthvalue(300).values))
_edited("averaged", lambda module: [p.lerp_(torch.zeros_like(p), 0.1) for p in module.parameters()])
_edited("load_state_dict", lambda module: module.load_state_dict(seeded(small_lm()).state_dict()))
_edited("load_own_state_dict", lambda module: module.load_state_dict({name: value * 0.9 for name, value in module.state_dict().items()}))
_edited("init", lambda module: [torch.manual_seed(3), nn.init.ones_(up(module).weight), nn.init.zeros_(up(module).bias)])
_edited("init_norm_random", lambda module: [torch.manual_seed(3), nn.init.normal_(module.norm.weight)])


@PROGRAMS.own
def edit_ema(tensor, stage):
    """A moving average of the weights, kept by the program."""
    averages = {}

    def between(call, module, found, who):
        average = averages.setdefault(who, {})
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name not in average:
                    average[name] = parameter.detach().clone()
                average[name].mul_(0.9).add_(parameter, alpha=0.1)
        if who == "plain":
            for name, value in average.items():
                found.see("average", name, averages["own"][name] + 0, value)
                found.see("average norm", name, averages["own"][name].norm(), value.norm())
    return compare(tensor, stage, small_lm(), partition_config=OF_LM, between=between)


@PROGRAMS.own
def edit_ema_deepcopy(tensor, stage):
    """A moving average by copy.deepcopy()."""
    averages = {}

    def between(call, module, found, who):
        module = module.module if hasattr(module, "global_rank") else module
        if who not in averages:
            averages[who] = copy.deepcopy(module).requires_grad_(False)
        with torch.no_grad():
            for mine, parameter in zip(averages[who].parameters(), module.parameters()):
                mine.lerp_(parameter, 0.1)
            values[who] = averages[who](tokens(5)[0])
        if who == "plain":
            found.see("average", "logits", values["own"], values["plain"])
    values = {}
    return compare(tensor, stage, small_lm(), partition_config=OF_LM, between=between)


def read(name, function):
    """`function` of a model, after the steps."""
    def after(engine, own, plain, found):
        found.see("read", name, torch.as_tensor(function(own)), torch.as_tensor(function(plain)))
    PROGRAMS.add(f"read_{name}", small_lm(), partition_config=OF_LM, after=after, steps=1)


read("numel", lambda module: [sum(p.numel() for p in module.parameters()), up(module).weight.size(0), up(module).weight.shape[0], len(up(module).weight)])
read("bytes", lambda module: [sum(p.nelement() * p.element_size() for p in module.parameters())])
read("item", lambda module: [up(module).weight[40, 3].item(), up(module).weight.sum().item(), float(up(module).weight.norm())])
read("tolist", lambda module: up(module).weight.tolist())
read("numpy", lambda module: up(module).weight.detach().numpy())
read("clone", lambda module: up(module).weight.detach().clone())
read("cpu", lambda module: up(module).weight.detach().cpu().float())
read("state_dict", lambda module: torch.cat([value.flatten() for value in module.state_dict().values()]))
read("norms", lambda module: torch.stack([p.norm() for p in module.parameters()]))
read("total_norm", lambda module: nn.utils.get_total_norm(list(module.parameters())))
read("foreach_norm", lambda module: torch.stack(torch._foreach_norm(list(module.parameters()))))
read("vector", lambda module: nn.utils.parameters_to_vector(module.parameters()))
read("histogram", lambda module: torch.histc(up(module).weight.detach(), bins=10))
read("quantile", lambda module: torch.quantile(up(module).weight.detach(), 0.9))
read("equal", lambda module: float(torch.equal(up(module).weight, up(module).weight)) + float(torch.allclose(up(module).weight, up(module).weight)))
read("printed", lambda module: float(len(str(up(module).weight)) > 10))
read("iterated", lambda module: torch.stack([row.sum() for row in up(module).weight]))
read("deepcopy", lambda module: torch.cat([p.flatten() for p in copy.deepcopy(module).parameters()]))
read("hash", lambda module: (up(module).weight.detach().view(torch.int32).sum() * 0 + 1))


@PROGRAMS.own
def read_grad_norms(tensor, stage):
    """Norms of gradients, as programs log them."""
    found = Differences()
    own, plain = seeded(small_lm()), seeded(small_lm())
    engine, *_ = trireme.initialize(model=own, config=configuration(tensor, stage, OF_LM))
    copies, rank = engine.dp_world_size, engine.global_rank // tensor
    engine.backward(next_token(engine, own, *tokens(rank)))
    (sum(next_token(plain, plain, *tokens(other)) for other in range(copies)) / copies).backward()
    for (name, one), other in zip(own.named_parameters(), plain.parameters()):
        found.see("norm", name, trireme.utils.safe_get_full_grad(one).norm(), other.grad.norm())
    engine.step()
    found.see("norm", "all", torch.tensor(engine.get_global_grad_norm()), nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    engine.destroy()
    return found.worst


@PROGRAMS.own
def loop_gradients_changed(tensor, stage):
    """safe_set_full_grad() and safe_set_full_fp32_param()."""
    found = Differences()
    own, plain = seeded(small_lm()), seeded(small_lm())
    engine, *_ = trireme.initialize(model=own, config=configuration(tensor, stage, OF_LM))
    optimizer = adamw(plain.parameters())
    copies, rank = engine.dp_world_size, engine.global_rank // tensor
    for step in range(2):
        optimizer.zero_grad()
        engine.backward(next_token(engine, own, *tokens(2 * step + rank)))
        (sum(next_token(plain, plain, *tokens(2 * step + other)) for other in range(copies)) / copies).backward()
        for one, other in zip(own.parameters(), plain.parameters()):
            trireme.utils.safe_set_full_grad(one, trireme.utils.safe_get_full_grad(one) * 0.01)
            other.grad.mul_(0.01)
        engine.step()
        optimizer.step()
        for (name, one), other in zip(own.named_parameters(), plain.named_parameters()):
            trireme.utils.safe_set_full_fp32_param(one, trireme.utils.safe_get_full_fp32_param(one) * 0.9)
            other[1].data.mul_(0.9)
            found.see("state", name, trireme.utils.safe_get_full_optimizer_state(one, "exp_avg"), optimizer.state[other[1]]["exp_avg"], 1e-6)
    engine.destroy()
    for (name, one), other in zip(own.named_parameters(), plain.parameters()):
        found.see("weight", name, one, other)
    return found.worst


def _twice(engine, loss):
    engine.backward(loss / 2, retain_graph=True)
    engine.backward(loss / 2)


loop("two_backwards", backward=_twice)
loop("direct_backward", backward=lambda engine, loss: loss.backward())
loop("two_forwards", loss_of=lambda call, module, ids: next_token(call, module, ids) + 0.5 * next_token(call, module, ids.flip(0)))
loop("inner_gradient", loss_of=lambda call, module, ids: _with_gradient_penalty(call, module, ids))


def _with_gradient_penalty(call, module, ids):
    """The gradient by the embeddings is a part of the loss."""
    kept = []
    handle = module.embed_tokens.register_forward_hook(lambda layer, inputs, output: kept.append(output))
    first = next_token(call, module, ids)
    handle.remove()
    gradient, = torch.autograd.grad(first, kept[-1], create_graph=True)
    return first + 10 * gradient.pow(2).sum()


def _saliency(call, module, ids):
    kept = []
    handle = module.layers[0].mlp.up_proj.register_forward_hook(lambda layer, inputs, output: kept.append(output))
    first = next_token(call, module, ids)
    handle.remove()
    gradient, = torch.autograd.grad(first, kept[-1], retain_graph=True)
    return first * (1 + gradient.norm().item())


loop("saliency", loss_of=_saliency, partition_config=OF_LM)


def _hooked(call, module, ids):
    """Activations inside of layers are read and penalised."""
    kept = []
    handles = [layer.register_forward_hook(lambda layer, inputs, output: kept.append(output)) for name, layer in module.named_modules()
               if name.endswith(("up_proj", "q_proj", "embed_tokens", "down_proj"))]
    first = next_token(call, module, ids)
    for handle in handles:
        handle.remove()
    return first + 0.01 * sum(output.pow(2).mean() + output.abs().sum() / output.numel() + output.std() for output in kept)


loop("hooked", loss_of=_hooked, partition_config=OF_LM)


@PROGRAMS.own
def loop_backward_hooks(tensor, stage):
    norms = {"own": [], "plain": []}

    def loss_of(call, module, ids):
        who = "own" if hasattr(call, "global_rank") else "plain"
        if not getattr(module, "hooked", False):
            module.hooked = True
            for name, layer in module.named_modules():
                if name.endswith(("up_proj", "down_proj", "q_proj", "o_proj")):
                    layer.register_full_backward_hook(lambda layer, inputs, outputs: norms[who].append((inputs[0].norm(), outputs[0].norm(), outputs[0].shape, inputs[0].clone())))
        return next_token(call, module, ids)

    def after(engine, own, plain, found):
        for place, (one, other) in enumerate(zip(norms["own"], norms["plain"])):
            found.see("input", str(place), one[0], other[0])
            found.see("output", str(place), one[1], other[1])
            found.see("input itself", str(place), one[3] + 0, other[3])
            found.see("shape", str(place), torch.tensor(one[2]), torch.tensor(other[2]))
        assert len(norms["own"]) == len(norms["plain"])
    return compare(tensor, stage, small_lm(), loss_of, OF_LM, after=after)


@PROGRAMS.own
def loop_tensor_hooks(tensor, stage):
    """A hook of an activation scales its gradient."""
    def loss_of(call, module, ids):
        handle = up(module).register_forward_hook(lambda layer, inputs, output: output.register_hook(lambda gradient: gradient / (gradient.norm() + 1)) and None)
        first = next_token(call, module, ids)
        first = first + 0
        handle.remove()
        return first
    return compare(tensor, stage, small_lm(), loss_of, OF_LM)


@PROGRAMS.own
def loop_parameter_hooks(tensor, stage):
    def loss_of(call, module, ids):
        if not getattr(module, "hooked", False):
            module.hooked = True
            up(module).weight.register_hook(lambda gradient: gradient * 0.5)
            module.lm_head.weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        return next_token(call, module, ids)
    return compare(tensor, stage, small_lm(), loss_of, OF_LM)


class Replaced(Lm):
    """A forward hook replaces what a layer gives."""

    def __init__(self):
        super().__init__(layers=1)
        up(self).register_forward_hook(lambda layer, inputs, output: output * 0.5 + 1)
        self.layers[0].mlp.down_proj.register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 0.1,))


loop("replacing_hooks", Replaced)


loop("compiled", lambda: _compiled(Lm(layers=1)))
loop("compiled_layers", lambda: _compiled_layers(Lm(layers=1)))


def _compiled(model):
    model.compile(backend="eager")
    return model


def _compiled_layers(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


# Whole models.
class Classifier(Lm):
    def __init__(self):
        super().__init__(layers=1)
        del self.lm_head
        self.score = nn.Linear(HIDDEN, 3)

    def forward(self, ids):
        mask = (ids % 5 != 0).float()[..., None]
        return self.score((self.hidden(ids) * mask).sum(1) / mask.sum(1))


loop("classifier", Classifier, lambda call, _, ids: F.cross_entropy(call(ids), ids[:, 0] % 3))


class ClassifierOfLast(Classifier):
    def forward(self, ids):
        x = self.hidden(ids)
        return self.score(x[torch.arange(len(ids)), (ids[:, 0] % LENGTH)])


loop("classifier_of_last", ClassifierOfLast, lambda call, _, ids: F.cross_entropy(call(ids), ids[:, 0] % 3))


class Contrastive(Lm):
    def forward(self, ids):
        return F.normalize(self.hidden(ids).mean(1), dim=-1)


loop("contrastive", lambda: Contrastive(layers=1), lambda call, _, ids: F.cross_entropy(call(ids) @ call(ids.flip(1)).t() / 0.1, torch.arange(len(ids))))


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, HIDDEN, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, HIDDEN)), nn.Parameter(torch.randn(1, 17, HIDDEN) * 0.02)
        self.blocks = nn.ModuleList(Block(Attention, Mlp) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 10)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def _images(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


loop("vit", Vit, lambda call, _, x, y: F.cross_entropy(call(x), y), batch=_images)
loop("vit_ruled", Vit, lambda call, _, x, y: F.cross_entropy(call(x), y), OF_LM, batch=_images)


class Timm(nn.Module):
    """timm's names and packing."""

    class Attn(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
            self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            B, N, C = x.shape
            q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

        def forward(self, x):
            return self.fc2(F.gelu(self.fc1(x)))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(self.Attn, self.Inner) for _ in range(2))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OF_TIMM = rules(column("fc1"), row("fc2"), column("qkv", shape=[3, -1], partition_dim=0), row("proj"))
loop("timm", Timm, squares, batch=vectors)
loop("timm_ruled", Timm, squares, OF_TIMM, batch=vectors)


class Translator(nn.Module):
    """An encoder and a decoder with attention across."""

    class Cross(Attention):
        def forward(self, x, other=None):
            other = x if other is None else other
            b, s, _ = x.shape
            q = self.q_proj(x).view(b, s, HEADS, -1).transpose(1, 2)
            k, v = (layer(other).view(b, other.shape[1], HEADS, -1).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
            return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.cross_attn, self.mlp = Attention(), Translator.Cross(), Mlp()
            self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(HIDDEN) for _ in range(3))

        def forward(self, x, memory):
            x = x + self.self_attn(self.norm1(x))
            x = x + self.cross_attn(self.norm2(x), memory)
            return x + self.mlp(self.norm3(x))

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, HIDDEN)
        self.encoder = nn.ModuleList(Block(Attention, Mlp) for _ in range(2))
        self.decoder = nn.ModuleList(Translator.Decoder() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, ids):
        memory, x = self.shared(ids.flip(1)[:, :7]), self.shared(ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.lm_head(x * HIDDEN ** -0.5)


loop("translator", Translator)
loop("translator_ruled", Translator, partition_config=OF_LM)


class TorchEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 48, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.head(self.encoder(x))


OF_TORCH = rules(column("linear1"), row("linear2"))
loop("torch_encoder", TorchEncoder, squares, batch=vectors)
loop("torch_encoder_ruled", TorchEncoder, squares, OF_TORCH, batch=vectors)
loop("torch_transformer_ruled", lambda: _TorchTransformer(), squares, OF_TORCH, batch=vectors)


class _TorchTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Transformer(HIDDEN, HEADS, 1, 1, 48, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.all(x, x.flip(1))


class Bags(nn.Module):
    """A recommender: bags of tokens, a bilinear layer, an MLP."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, HIDDEN, mode="mean")
        self.other = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0)
        self.bilinear, self.mlp = nn.Bilinear(HIDDEN, HIDDEN, 16), nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids):
        return self.mlp(self.bilinear(self.bag(ids), self.other(ids).mean(1)))


loop("bags", Bags, lambda call, _, ids: call(ids).square().mean())
loop("bags_ruled", Bags, lambda call, _, ids: call(ids).square().mean(), rules(column("mlp\\.0"), row("mlp\\.2")))
loop("bags_cut", Bags, lambda call, _, ids: call(ids).square().mean(), rules(column("mlp\\.0"), row("mlp\\.2"), column("bag", partition_dim=0)))


class PlainMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(HIDDEN, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, HIDDEN))

    def forward(self, x):
        return self.net(x)


loop("plain_mlp", PlainMlp, squares, batch=vectors)
loop("plain_mlp_ruled", PlainMlp, squares, rules(column("0"), row("2")), batch=vectors)
loop("plain_mlp_gathered", PlainMlp, squares, rules(column("0", gather_output=True), column("2", gather_output=True), column("4", gather_output=True)), batch=vectors)
loop("plain_mlp_columns_alone", PlainMlp, squares, rules(column("0", "2", "4")), batch=vectors)
loop("plain_mlp_rows_alone", PlainMlp, squares, rules(row("0", "2", "4")), batch=vectors)
loop("plain_mlp_row_first", PlainMlp, squares, rules(row("0"), column("2"), row("4")), batch=vectors)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


loop("lstm", Recurrent)
loop("lstm_ruled", Recurrent, partition_config=rules(column("head")))
loop("lstm_cut", Recurrent, partition_config=rules({"patterns": [".*lstm.weight_hh_l0", ".*lstm.weight_ih_l0"], "partition_type": "column"}))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.fc = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8 * 16 * 16, 10)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return self.fc(self.c2(F.relu(self.norm(self.c1(x)))).flatten(1))


loop("conv", Conv, lambda call, _, x, y: F.cross_entropy(call(x), y), batch=_images)
loop("conv_ruled", Conv, lambda call, _, x, y: F.cross_entropy(call(x), y), rules(column("c1"), row("c2")), batch=_images)


class Mamba(nn.Module):
    """A state space layer, by a loop over time."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(HIDDEN, 128, bias=False), nn.Linear(64, HIDDEN, bias=False)
        self.conv1d = nn.Conv1d(64, 64, 4, groups=64, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(64, 4 + 16, bias=False), nn.Linear(4, 64)
        self.A_log, self.D = nn.Parameter(torch.log(torch.arange(1, 9).float().repeat(64, 1))), nn.Parameter(torch.ones(64))

    def forward(self, hidden):
        b, s, _ = hidden.shape
        x, z = self.in_proj(hidden).chunk(2, -1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :s]).transpose(1, 2)
        dt, B, C = self.x_proj(x).split([4, 8, 8], -1)
        dt, A = F.softplus(self.dt_proj(dt)), -torch.exp(self.A_log)
        state, outs = torch.zeros(b, 64, 8), []
        for t in range(s):
            state = torch.exp(dt[:, t, :, None] * A) * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None, :]
            outs.append((state * C[:, t, None, :]).sum(-1))
        return self.out_proj((torch.stack(outs, 1) + x * self.D) * F.silu(z))


loop("mamba", lambda: Lm(attention=Mamba, layers=1))
loop("mamba_ruled", lambda: Lm(attention=Mamba, layers=1), partition_config=rules(*OF_MLP, column("in_proj", shape=[2, -1], partition_dim=0), row("out_proj", "x_proj"),
                                                                                 column("dt_proj", "conv1d")))


# Checkpoints.
def _trained(tensor, stage, steps=2, make=None, folder=None, tag=None, partition_config=OF_LM, offset=0):
    own = seeded(make or small_lm())
    engine, *_ = trireme.initialize(model=own, config=configuration(tensor, stage, partition_config))
    if folder:
        engine.load_checkpoint(folder)
    for step in range(steps):
        engine.backward(next_token(engine, own, *tokens(10 * step + offset)))
        engine.step()
    return engine, own


def _folder():
    """A folder of all ranks, which rank 0 removes at its end."""
    trireme.init_distributed()
    name = [None]
    if dist.get_rank() == 0:
        folder = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
        atexit.register(folder.cleanup)
        name = [folder.name]
    dist.broadcast_object_list(name)
    return name[0]


def _checkpointed(make=None):
    def run(tensor, stage):
        """Steps, a save, a load at other degrees, and further steps; against plain PyTorch."""
        found = Differences()
        folder = _folder()
        plain = seeded(make or small_lm())
        optimizer = adamw(plain.parameters())

        def plain_steps(count, offset):
            for step in range(count):
                optimizer.zero_grad()
                next_token(plain, plain, *tokens(10 * step + offset)).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                optimizer.step()
        engine, own = _trained(tensor, stage, make=make)
        engine.save_checkpoint(folder)
        engine.destroy()
        plain_steps(2, 0)
        saved = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
        for other, other_stage in ((tensor, stage), (1, 0), (tensor // 2 or 1, 3), (dist.get_world_size(), 1)):
            plain.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            plain_steps(2, 5)
            engine, own = _trained(other, other_stage, folder=folder, make=make, offset=5)
            engine.destroy()
            for (name, one), value in zip(own.named_parameters(), plain.parameters()):
                found.see(f"weight at {other}", name, one, value)
        return found.worst
    return run


PROGRAMS.own(_checkpointed(), "checkpoint_other_degree")
PROGRAMS.own(_checkpointed(lambda: TiedLm(layers=1)), "checkpoint_other_degree_tied")


@PROGRAMS.own
def checkpoint_16bit(tensor, stage):
    found = Differences()
    folder = _folder()
    engine, own = _trained(tensor, stage)
    engine.save_16bit_model(folder, "model.bin")
    engine.destroy()
    values = torch.load(pathlib.Path(folder) / "model.bin")
    for name, parameter in own.named_parameters():
        found.see("saved", name, values[name], parameter)
    return found.worst


@PROGRAMS.own
def checkpoint_torch_save(tensor, stage):
    """torch.save() of a state_dict: refused, or whole."""
    found = Differences()
    folder = _folder()
    engine, own = _trained(tensor, stage)
    if dist.get_rank() == 0:
        torch.save(own.state_dict(), pathlib.Path(folder) / "model.pt")
    dist.barrier()
    engine.destroy()
    values = torch.load(pathlib.Path(folder) / "model.pt")
    for name, parameter in own.named_parameters():
        found.see("saved", name, values[name], parameter)
    return found.worst


@PROGRAMS.own
def checkpoint_consolidated(tensor, stage):
    found = Differences()
    folder = _folder()
    engine, own = _trained(tensor, stage)
    state = engine.module_state_dict()
    engine.destroy()
    for name, parameter in own.named_parameters():
        if state is not None and name in state:
            found.see("saved", name, state[name], parameter)
    return found.worst


@PROGRAMS.own
def gathered_parameters(tensor, stage):
    """GatheredParameters, read and written."""
    found = Differences()
    engine, own = _trained(tensor, stage)
    with trireme.zero.GatheredParameters(list(own.parameters())):
        values = {name: parameter.detach().clone() + 0 for name, parameter in own.named_parameters()}
        sums = {name: parameter.sum().item() for name, parameter in own.named_parameters()}
    engine.destroy()
    for name, parameter in own.named_parameters():
        found.see("value", name, values[name], parameter)
        found.see("sum", name, torch.tensor(sums[name]), parameter.sum(), 1e-1)
    return found.worst


@PROGRAMS.own
def two_engines(tensor, stage):
    """Two engines in one process and one loss of both."""
    found = Differences()
    make = lambda: nn.ModuleList((Lm(layers=1), Lm(layers=1)))
    own, plain = seeded(make), seeded(make)
    engines = [trireme.initialize(model=module, config=configuration(tensor, stage, OF_LM if place else None))[0] for place, module in enumerate(own)]
    optimizers = [adamw(module.parameters()) for module in plain]
    copies, rank = engines[0].dp_world_size, engines[0].global_rank // tensor
    for step in range(3):
        ids, = tokens(step * copies + rank)
        loss = F.mse_loss(engines[0](ids), engines[1](ids)) + next_token(engines[0], None, ids) + next_token(engines[1], None, ids.flip(0))
        loss.backward()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for other in range(copies):
            ids, = tokens(step * copies + other)
            expected = F.mse_loss(plain[0](ids), plain[1](ids)) + next_token(plain[0], None, ids) + next_token(plain[1], None, ids.flip(0))
            if other == rank:
                found.see("loss", str(step), loss, expected)
            (expected / copies).backward()
        for engine, module, optimizer in zip(engines, plain, optimizers):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            engine.step()
            optimizer.step()
    for engine in engines:
        engine.destroy()
    for (name, one), other in zip(own.named_parameters(), plain.parameters()):
        found.see("weight", name, one, other)
    return found.worst


@PROGRAMS.own
def no_sync(tensor, stage):
    found = Differences()
    own, plain = seeded(small_lm()), seeded(small_lm())
    engine, *_ = trireme.initialize(model=own, config=configuration(tensor, stage, OF_LM, 2))
    copies, rank = engine.dp_world_size, engine.global_rank // tensor
    with engine.no_sync():
        engine.backward(next_token(engine, own, *tokens(rank)))
    engine.step()
    engine.backward(next_token(engine, own, *tokens(copies + rank)))
    for micro in range(2 * copies):
        (next_token(plain, plain, *tokens(micro)) / 2 / copies).backward()
    for (name, one), other in zip(own.named_parameters(), plain.parameters()):
        found.see("gradient", name, trireme.utils.safe_get_full_grad(one), other.grad)
    engine.step()
    engine.destroy()
    return found.worst


def _in_16_bits(key, dtype):
    def run(tensor, stage):
        """Losses fall, are finite and near those of one rank."""
        losses = {}
        for degree in (1, tensor):
            own = seeded(small_lm())
            more = {key: {"enabled": True}}
            if key == "fp16":
                more[key]["initial_scale_power"] = 8
            engine, *_ = trireme.initialize(model=own, config=configuration(degree, stage, None, **more))
            losses[degree] = []
            for step in range(8):
                loss = next_token(lambda ids: engine(ids).float(), own, *tokens(0))
                engine.backward(loss)
                engine.step()
                losses[degree].append(loss.item())
            engine.destroy()
        found = Differences()
        found.see("loss over 1e3", str(losses), torch.tensor(losses[tensor]) / 1, torch.tensor(losses[1]))
        found.worst = {kind: [value * 1e-3, where] for kind, (value, where) in found.worst.items()}
        return found.worst
    return run


PROGRAMS.own(_in_16_bits("bf16", torch.bfloat16), "bf16")
PROGRAMS.own(_in_16_bits("fp16", torch.float16), "fp16")
PROGRAMS.own(lambda tensor, stage: _in_16_bits("torch_autocast", None)(tensor, stage), "torch_autocast")


@PROGRAMS.own
def dropout(tensor, stage):
    """Dropout in three places; whole values agree on all ranks, and the share of what is dropped is right."""
    class Dropped(Mlp):
        def act(self, x):
            kept = F.dropout(x, 0.25, self.training)
            shares.append(float((kept == 0).float().mean()))
            return kept

        def forward(self, x):
            return F.dropout(super().forward(x), 0.1, self.training)
    shares = []
    own = seeded(lambda: Lm(mlp=Dropped))
    engine, *_ = trireme.initialize(model=own, config=configuration(tensor, stage, OF_LM))
    found = Differences()
    for step in range(3):
        torch.manual_seed(11 + step)
        loss = next_token(engine, own, *tokens(engine.global_rank // tensor))
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, loss.item())
        first = engine.global_rank // tensor * tensor
        for other in losses[first:first + tensor]:
            found.see("loss", "replicas", torch.tensor(other), torch.tensor(losses[first]))
        assert math.isfinite(loss.item())
        engine.backward(loss)
        engine.step()
    assert all(abs(share - 0.25) < 0.08 for share in shares), shares
    engine.destroy()
    values = [p.norm().item() for p in own.parameters()]
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, values)
    found.see("replicas", "weights", torch.tensor(everybody[-1]), torch.tensor(everybody[0]))
    return found.worst
