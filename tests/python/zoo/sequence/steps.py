"""Training steps: accumulation, recomputation, frozen weights, penalties, ZeRO stages, other models on the same
thread."""
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .table import (BATCH, CLASSES, DOCUMENTED, HIDDEN, LENGTH, REFUSED, RIGHT, Net, attend, floats, generator, hidden, language, logits, loss_of,
                    mlp, program, row, tokens)


row(RIGHT, accumulation=2, on_four=True, name="two batches accumulated")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels))
row(RIGHT, accumulation=3, stage=3, name="three batches accumulated at stage 3")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels))
row(RIGHT, accumulation=2, stage=2, name="uncut terms accumulated at stage 2")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) + 0.1 * m.head.weight.square().sum())
row(RIGHT, stage=3, on_four=True, name="uncut terms at stage 3")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) + 0.1 * m.head.weight.square().sum())
row(RIGHT, config={"trireme": {"recompute": {"extra_compute": 0.333}}}, name="recomputed by the engine")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels))
row(REFUSED, says="list of modules", config={"trireme": {"recompute": "full"}}, name="recomputed wholly by the engine")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels))


def _layers():
    net = Net(lambda m, ids, labels: _stack(m, ids, labels))
    net.layers = nn.ModuleList([nn.TransformerEncoderLayer(HIDDEN, 4, 28, dropout=0.0, batch_first=True) for _ in range(3)])
    return net


def _stack(m, ids, labels):
    x = m.embed(ids)
    for layer in m.layers:
        x = layer(x)
    return loss_of(m.head(x), labels)


program(RIGHT, build=_layers, config={"trireme": {"recompute": "full"}}, on_four=True, name="a list of layers recomputed wholly by the engine")(
    lambda model, cut, step: model(*cut(**language(step)).values()))
program(RIGHT, build=_layers, stage=3, name="a list of layers at stage 3")(lambda model, cut, step: model(*cut(**language(step)).values()))


@row(RIGHT)
def a_loss_recomputed(m, input_ids, labels):
    x = hidden(m, input_ids)
    return checkpoint(lambda x: loss_of(m.head(x), labels), x, use_reentrant=False)


@row(RIGHT)
def a_loss_recomputed_with_its_count(m, input_ids, labels):
    x = hidden(m, input_ids)
    loss = checkpoint(lambda x: loss_of(m.head(x), labels, reduction="sum"), x, use_reentrant=False)
    return loss / (labels != -100).sum()


@row(RIGHT, modules={"adapter": lambda: nn.Linear(HIDDEN, HIDDEN, bias=False)})
def a_frozen_base_and_an_adapter(m, input_ids, labels):
    x = hidden(m, input_ids).detach()
    return loss_of(m.head(x + m.adapter(x)), labels)


def _frozen():
    net = Net(lambda m, ids: m.head(hidden(m, ids) + m.adapter(m.embed(ids))), {"adapter": lambda: nn.Linear(HIDDEN, HIDDEN)})
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith("adapter"))
    return net


@program(RIGHT, build=_frozen, on_four=True)
def frozen_parameters(model, cut, step):
    ids, labels = cut(**language(step)).values()
    return loss_of(model(ids), labels)


@program(RIGHT, build=_frozen)
def frozen_parameters_and_their_own_penalty(model, cut, step):
    ids, labels = cut(**language(step)).values()
    module = getattr(model, "module", model)
    return loss_of(model(ids), labels) + 0.1 * module.adapter.weight.abs().sum()


@program(RIGHT)
def evaluation_without_gradients(model, cut, step):
    ids, labels = cut(**language(step)).values()
    model.eval()
    with torch.no_grad():
        return loss_of(model(ids), labels)


@program(RIGHT)
def evaluation_in_inference_mode(model, cut, step):
    model.eval()
    with torch.inference_mode():
        ids, labels = cut(**language(step)).values()
        return loss_of(model(ids), labels).clone()


@program(RIGHT, on_four=True)
def evaluation_between_training(model, cut, step):
    ids, labels = cut(input_ids=tokens(step, 7), labels=tokens(step, 8)).values()
    model.eval()
    with torch.no_grad():
        seen = loss_of(model(ids), labels)
    model.train()
    ids, labels = cut(**language(step)).values()
    return loss_of(model(ids), labels), {"evaluated": seen}


@program(RIGHT)
def evaluation_of_a_batch_that_is_not_cut(model, cut, step):
    with torch.no_grad():
        seen = loss_of(model(tokens(step, 7)), tokens(step, 8))
    ids, labels = cut(**language(step)).values()
    return loss_of(model(ids), labels), {"evaluated": seen}


@program(RIGHT)
def generation_between_training(model, cut, step):
    """Greedy, whole on every rank."""
    ids = tokens(step, 7, length=5)
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    parts, labels = cut(**language(step)).values()
    return loss_of(model(parts), labels), {"generated": ids}


@program(RIGHT)
def another_model_on_the_same_thread(model, cut, step):
    """It sees nothing that is cut."""
    ids, labels = cut(**language(step)).values()
    loss = loss_of(model(ids), labels)
    torch.manual_seed(3)
    other = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(4 * 10, 2))
    return loss, {"other": other(floats(step, 5, 3, 12)).cumsum(1).sum()}


@program(REFUSED)
def a_gradient_penalty(model, cut, step):
    ids, labels = cut(**language(step)).values()
    loss = loss_of(model(ids), labels)
    module = getattr(model, "module", model)
    slope, = torch.autograd.grad(loss, [module.head.bias], create_graph=True)
    return loss + 0.1 * slope.square().sum()


@program(DOCUMENTED)
def gradients_by_autograd_grad(model, cut, step):
    """A program that looks at gradients itself sees its own part of them."""
    ids, labels = cut(**language(step)).values()
    loss = loss_of(model(ids), labels)
    module = getattr(model, "module", model)
    slope, = torch.autograd.grad(loss, [module.head.bias], retain_graph=True)
    return loss, {"slope": slope}


@row(DOCUMENTED)
def a_hook_on_activations(m, input_ids, labels):
    """Gradients of activations divided by their own norm, which is that of this rank's tokens: hooks run in
    backward."""
    x = hidden(m, input_ids)
    x.register_hook(lambda gradient: gradient / gradient.norm() * 0.1)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def a_hook_that_scales_activations(m, input_ids, labels):
    x = hidden(m, input_ids)
    x.register_hook(lambda gradient: gradient * 0.5)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def activations_kept_by_a_hook(m, input_ids, labels):
    seen = []
    handle = m.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    scores = logits(m, input_ids)
    handle.remove()
    return loss_of(scores, labels) + 0.1 * seen[0].square().mean()


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return 2 * x * gradient


row(RIGHT, name="an autograd function of each token")(lambda m, input_ids, labels: loss_of(m.head(_Double.apply(hidden(m, input_ids))), labels))


class _OverTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(1).cumsum(1).flip(1)


row(RIGHT, name="an autograd function over tokens")(lambda m, input_ids, labels: loss_of(m.head(_OverTokens.apply(hidden(m, input_ids))), labels))
row(REFUSED, name="an operator of another library")(lambda m, input_ids, labels: loss_of(m.head(_custom(hidden(m, input_ids))), labels))


@torch.library.custom_op("sequence_table::over_tokens", mutates_args=())
def _custom(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1).clone()


_custom.register_autograd(lambda ctx, gradient: gradient.flip(1))


@row(RIGHT)
def saved_on_the_host(m, input_ids, labels):
    with torch.autograd.graph.save_on_cpu():
        return loss_of(logits(m, input_ids), labels)


@row(REFUSED)
def vmapped_over_samples(m, input_ids, labels):
    x = hidden(m, input_ids)
    return loss_of(torch.vmap(m.head)(x), labels)


@row(RIGHT, config={"gradient_clipping": 0.5}, name="clipped gradients, at stage 1", stage=1)
def clipped(m, input_ids, labels):
    return loss_of(logits(m, input_ids) * 1e-3, labels)


@program(RIGHT, modules={"codes": lambda: nn.Embedding(CLASSES, HIDDEN)}, forward=lambda m, ids, kind: m.head(hidden(m, ids) + m.codes(kind)[:, None]))
def a_condition_of_each_sample(model, cut, step):
    """One embedding for a sample, added to each of its tokens."""
    ids, labels = cut(**language(step)).values()
    return loss_of(model(ids, torch.tensor([0, 4, 2])), labels)


@program(RIGHT, modules={"film": lambda: nn.Linear(7, 2 * HIDDEN)},
         forward=lambda m, ids, code: m.head(hidden(m, ids) * (1 + m.film(code).chunk(2, -1)[0][:, None]) + m.film(code).chunk(2, -1)[1][:, None]))
def modulation_of_each_sample(model, cut, step):
    """A diffusion transformer's shift and scale."""
    ids, labels = cut(**language(step)).values()
    return loss_of(model(ids, floats(step, BATCH, 7)), labels)


@program(RIGHT, forward=lambda m, x, noise: m.out(hidden_of(m, x + noise)))
def denoising(model, cut, step):
    """Noise of the whole batch, cut with it."""
    x, noise = cut(input_ids=floats(step, BATCH, LENGTH, HIDDEN), noise=floats(step, BATCH, LENGTH, HIDDEN, salt=3)).values()
    return functional.mse_loss(model(x, noise), noise)


def hidden_of(m, x):
    x = x + attend(m, m.norm(x))
    return m.last_norm(x + mlp(m, x))


@program(RIGHT, forward=lambda m, x: m.out(hidden_of(m, x)))
def noise_made_of_a_part_s_shape(model, cut, step):
    """randn_like with a seed of the program's: every rank makes the same noise for its tokens."""
    x = cut(input_ids=floats(step, BATCH, LENGTH, HIDDEN))["input_ids"]
    noise = torch.randn(x.shape, generator=generator(step, 8))
    return (model(x + noise) - noise).square().mean()


@row(RIGHT, modules={"codes": lambda: nn.Embedding(7, HIDDEN)})
def vector_quantization(m, input_ids, labels):
    x = hidden(m, input_ids)
    distance = x.square().sum(-1, keepdim=True) - 2 * x @ m.codes.weight.T + m.codes.weight.square().sum(-1)
    picked = m.codes(distance.argmin(-1))
    return loss_of(m.head(x + (picked - x).detach()), labels) + (x.detach() - picked).square().mean() + 0.25 * (x - picked.detach()).square().mean()


@row(RIGHT, modules={"seen": lambda: nn.BatchNorm1d(1)})
def a_moving_average_of_activations(m, input_ids, labels):
    """A buffer that follows all tokens' mean."""
    x = hidden(m, input_ids)
    m.seen.running_mean.lerp_(x.detach().mean().view(1), 0.5)
    return loss_of(m.head(x), labels), {"followed": m.seen.running_mean.clone()}


@row(RIGHT)
def a_mean_of_activations_shown(m, input_ids, labels):
    x = hidden(m, input_ids)
    return loss_of(m.head(x), labels), {"mean": x.mean().item(), "largest": x.abs().max().item()}


@row(RIGHT)
def perplexity_of_each_sample_shown(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none").view_as(labels)
    return loss.sum(), {"samples": (loss.sum(1) / (labels != -100).sum(1)).exp()}


