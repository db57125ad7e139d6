"""Operators on single tokens."""
import torch
from torch import nn
from torch.nn import functional

from .table import HIDDEN, INNER, REFUSED, RIGHT, VOCABULARY, attend, hidden, language, logits, loss_of, mlp, row, tokens


row(RIGHT, on_four=True, name="a language model")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels))
row(RIGHT, inputs=lambda step: language(step, 23), on_four=True, name="parts of unequal length")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels))
row(RIGHT, modules={"rms": lambda: nn.RMSNorm(HIDDEN)}, name="rms norm")(
    lambda m, input_ids, labels: loss_of(m.head(m.rms(m.embed(input_ids))), labels))


@row(RIGHT, modules={"scale": lambda: torch.ones(HIDDEN)})
def rms_norm_written_out(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))), labels)


@row(RIGHT)
def layer_norm_written_out(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)), labels)


@row(RIGHT)
def variance_over_features(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x / (x.var(dim=-1, keepdim=True, unbiased=False) + 1e-5).sqrt()), labels)


row(RIGHT, name="normalize over features")(lambda m, input_ids, labels: loss_of(m.head(functional.normalize(m.embed(input_ids), dim=-1)), labels))


@row(RIGHT)
def norm_over_features(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x / (1 + x.norm(dim=-1, keepdim=True))), labels)


@row(RIGHT)
def linalg_norm_over_features(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x / (1 + torch.linalg.vector_norm(x, dim=-1, keepdim=True))), labels)


@row(RIGHT, modules={"group": lambda: nn.GroupNorm(4, HIDDEN)})
def group_norm_of_each_token(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.group(x.flatten(0, 1)).view_as(x)), labels)


@row(RIGHT)
def swiglu(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + m.down(functional.silu(m.gate(x)) * m.up(x))), labels)


@row(RIGHT, modules={"both": lambda: nn.Linear(HIDDEN, 2 * INNER)})
def gate_and_up_in_one(m, input_ids, labels):
    x = m.embed(input_ids)
    gate, up = m.both(x).chunk(2, dim=-1)
    return loss_of(m.head(m.down(functional.silu(gate) * up)), labels)


@row(RIGHT, modules={"both": lambda: nn.Linear(HIDDEN, 2 * INNER)})
def gate_and_up_by_slices(m, input_ids, labels):
    x = m.both(m.embed(input_ids))
    return loss_of(m.head(m.down(torch.sigmoid(x[..., :INNER]) * x[..., INNER:])), labels)


@row(RIGHT, modules={"both": lambda: nn.Linear(HIDDEN, 2 * INNER)})
def glu(m, input_ids, labels):
    return loss_of(m.head(m.down(functional.glu(m.both(m.embed(input_ids)), dim=-1))), labels)


@row(RIGHT)
def merged_with_the_batch(m, input_ids, labels):
    x = m.embed(input_ids).view(-1, HIDDEN)
    x = mlp(m, x).reshape(*input_ids.shape, HIDDEN)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def tokens_first(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1)
    x = m.last_norm(x + mlp(m, x)).permute(1, 0, 2)
    return loss_of(m.head(x), labels)


row(RIGHT, name="softmax over features")(lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids).softmax(-1)), labels))
row(RIGHT, name="matmul with a weight")(lambda m, input_ids, labels: loss_of(m.embed(input_ids) @ m.embed.weight.T, labels))
row(RIGHT, name="einsum with a weight")(lambda m, input_ids, labels: loss_of(torch.einsum("bsd,vd->bsv", m.embed(input_ids), m.head.weight), labels))
row(RIGHT, name="tensordot with a weight")(
    lambda m, input_ids, labels: loss_of(torch.tensordot(m.embed(input_ids), m.head.weight, dims=([2], [1])), labels))
row(RIGHT, modules={"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 1)}, name="convolution of width 1")(
    lambda m, input_ids, labels: loss_of(m.head(m.conv(m.embed(input_ids).transpose(1, 2)).transpose(1, 2)), labels))


@row(RIGHT)
def addmm_of_merged_tokens(m, input_ids, labels):
    x = torch.addmm(m.out.bias, m.embed(input_ids).flatten(0, 1), m.out.weight.T)
    return loss_of(m.head(x.view(*input_ids.shape, -1)), labels)


@row(RIGHT)
def pointwise_in_place(m, input_ids, labels):
    x = m.embed(input_ids) * 1.5
    x.mul_(0.5).add_(1.0)
    x += m.out.bias
    return loss_of(m.head(x), labels)


@row(RIGHT)
def where_by_a_condition_on_activations(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.where(x > 0, x, 0.1 * x)), labels)


@row(RIGHT)
def masked_fill_by_ids(m, input_ids, labels):
    x = m.embed(input_ids).masked_fill((input_ids < 9).unsqueeze(-1), 0.0)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def concatenated_features(m, input_ids, labels):
    x = torch.cat([m.up(m.embed(input_ids))[..., :10], m.out(m.embed(input_ids))[..., 10:]], dim=-1)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def stacked_layers_averaged(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.stack([x, m.out(x), mlp(m, x)], dim=0).mean(0)), labels)


@row(RIGHT)
def stacked_layers_behind(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.stack([x, m.out(x)], dim=-1).sum(-1)), labels)


@row(RIGHT)
def stacked_layers_before_features(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.stack([x, m.out(x)], dim=2).mean(2)), labels)


row(RIGHT, name="dropped out by nothing")(
    lambda m, input_ids, labels: loss_of(m.head(functional.dropout(m.embed(input_ids), 0.0, training=True)), labels))


@row(RIGHT, modules={"drop": lambda: nn.Dropout(0.5)})
def dropout_of_an_evaluated_model(m, input_ids, labels):
    m.drop.eval()
    return loss_of(m.head(m.drop(m.embed(input_ids))), labels)


@row(RIGHT)
def dropped_paths_of_whole_samples(m, input_ids, labels):
    """Stochastic depth with a seed: the same samples on every rank."""
    x = m.embed(input_ids)
    keep = torch.bernoulli(torch.full((x.shape[0], 1, 1), 0.5), generator=torch.Generator().manual_seed(3))
    return loss_of(m.head(x + mlp(m, x) * keep / 0.5), labels)


@row(RIGHT)
def drop_path_as_timm_writes_it(m, input_ids, labels):
    x = m.embed(input_ids)
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).fill_(1.0)
    return loss_of(m.head(x + mlp(m, x) * mask.div_(0.5)), labels)


@row(RIGHT, modules={"prelu": lambda: nn.PReLU(), "scale": lambda: torch.full((HIDDEN,), 0.1)})
def activations_and_layer_scale(m, input_ids, labels):
    x = m.embed(input_ids)
    x = x + m.scale * m.prelu(m.out(x)) + functional.softplus(x) + functional.leaky_relu(x) + x.clamp(-1, 1) + torch.tanh(x)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def quadratic_of_features(m, input_ids, labels):
    """An outer product of each token's features."""
    x = m.embed(input_ids)
    outer = x[..., :5].unsqueeze(-1) * x[..., 5:9].unsqueeze(-2)
    return loss_of(m.head(outer.flatten(2)), labels)


@row(RIGHT, modules={"experts": lambda: torch.randn(3, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)) * 0.2})
def dense_mixture_of_experts(m, input_ids, labels):
    x = m.embed(input_ids)
    gates = m.classes(x)[..., :3].softmax(-1)
    y = torch.stack([x @ expert for expert in m.experts], dim=-1)
    return loss_of(m.head((y * gates.unsqueeze(2)).sum(-1)), labels)


def _router(m, x):
    weight, chosen = m.classes(x).softmax(-1).topk(2, dim=-1)
    return weight / weight.sum(-1, keepdim=True), chosen


_EXPERTS = {"experts": lambda: nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(5)])}


@row(RIGHT, modules=_EXPERTS, on_four=True)
def experts_by_index_add(m, input_ids, labels):
    x = hidden(m, input_ids).flatten(0, 1)
    weight, chosen = _router(m, x)
    result = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, slot = torch.where(chosen == number)
        result.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return loss_of(m.head(result.view(*input_ids.shape, -1)), labels)


@row(RIGHT, modules=_EXPERTS)
def experts_by_index_put(m, input_ids, labels):
    x = hidden(m, input_ids).flatten(0, 1)
    weight, chosen = _router(m, x)
    result = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        is_here = (chosen == number).any(-1)
        if is_here.any():
            share = torch.where(chosen == number, weight, 0.0).sum(-1)[is_here]
            result[is_here] += expert(x[is_here]) * share[:, None]
    return loss_of(m.head(result.view(*input_ids.shape, -1)), labels)


@row(RIGHT, modules=_EXPERTS)
def experts_by_dense_weights(m, input_ids, labels):
    x = hidden(m, input_ids)
    weight, chosen = _router(m, x)
    share = torch.zeros_like(m.classes(x)).scatter(-1, chosen, weight)
    return loss_of(m.head(sum(expert(x) * share[..., number:number + 1] for number, expert in enumerate(m.experts))), labels)


@row(RIGHT, modules=_EXPERTS)
def experts_by_one_hot(m, input_ids, labels):
    x = hidden(m, input_ids)
    weight, chosen = _router(m, x)
    share = (functional.one_hot(chosen, 5) * weight.unsqueeze(-1)).sum(-2)
    return loss_of(m.head(sum(expert(x) * share[..., number, None] for number, expert in enumerate(m.experts))), labels)


@row(RIGHT, modules=_EXPERTS, on_four=True)
def router_with_a_balancing_loss(m, input_ids, labels):
    """The auxiliary loss is a product of two means over all tokens."""
    x = hidden(m, input_ids)
    chances = m.classes(x).softmax(-1)
    chosen = functional.one_hot(chances.argmax(-1), 5).float()
    balance = 5 * (chances.mean((0, 1)) * chosen.mean((0, 1))).sum()
    return loss_of(m.head(x), labels) + 0.1 * balance


@row(RIGHT)
def router_with_a_balancing_loss_of_merged_tokens(m, input_ids, labels):
    x = hidden(m, input_ids)
    chances = m.classes(x).view(-1, 5).softmax(-1)
    chosen = functional.one_hot(chances.argmax(-1), 5).float()
    return loss_of(m.head(x), labels) + 0.1 * 5 * (chances.mean(0) * chosen.mean(0)).sum()


@row(RIGHT)
def router_with_a_capacity(m, input_ids, labels):
    """An expert takes its first eight tokens of the whole batch."""
    x = hidden(m, input_ids)
    chosen = m.classes(x).argmax(-1).flatten()
    place = functional.one_hot(chosen, 5).cumsum(0).gather(1, chosen[:, None]).squeeze(1)
    kept = (place <= 8).view(*input_ids.shape, 1)
    return loss_of(m.head(x + mlp(m, x) * kept), labels)


@row(RIGHT)
def experts_choose_tokens(m, input_ids, labels):
    x = hidden(m, input_ids)
    weight, token = m.classes(x).softmax(-1).topk(4, dim=1)
    picked = torch.gather(x, 1, token[..., 0:1].expand(-1, -1, HIDDEN)) * weight[..., 0:1]
    x = x.scatter_add(1, token[..., 0:1].expand(-1, -1, HIDDEN), mlp(m, picked))
    return loss_of(m.head(x), labels)


row(RIGHT, name="sorted features")(lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids).sort(dim=-1).values), labels))
row(RIGHT, name="rolled features")(lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids).roll(2, dims=-1).flip(-1)), labels))
row(RIGHT, name="running sum of features")(lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids).cumsum(-1)), labels))


@row(RIGHT)
def largest_of_features(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x - x.amax(-1, keepdim=True) + x.max(-1, keepdim=True).values), labels)


row(RIGHT, name="padded features")(lambda m, input_ids, labels: loss_of(m.head(functional.pad(m.embed(input_ids)[..., :15], (2, 3))), labels))


@row(REFUSED)
def pooled_features(m, input_ids, labels):
    """A one-dimensional pool over features, tokens merged with the batch."""
    x = functional.avg_pool1d(m.embed(input_ids), 3, 1, 1)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def bilinear(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(functional.bilinear(x, x, m.head.weight.unsqueeze(1).expand(-1, HIDDEN, -1) * 0.1), labels)


@row(RIGHT)
def a_sample_at_a_time(m, input_ids, labels):
    x = torch.stack([attend(m, m.embed(sample)[None], is_causal=True)[0] for sample in input_ids.unbind(0)])
    return loss_of(m.head(x), labels)


@row(RIGHT, inputs=lambda step: {"input_ids": tokens(step, batch=1), "labels": tokens(step, 4, batch=1)})
def one_sample_without_a_batch_dim(m, input_ids, labels):
    x = m.embed(input_ids.squeeze(0))
    return functional.cross_entropy(m.head(x + mlp(m, x)), labels.squeeze(0))


@row(RIGHT, modules={"bag": lambda: nn.EmbeddingBag(VOCABULARY, HIDDEN, mode="mean")}, on_four=True)
def embedding_bag_of_merged_ids(m, input_ids, labels):
    """Bags of one id each."""
    x = m.bag(input_ids.reshape(-1, 1)).view(*input_ids.shape, HIDDEN)
    return loss_of(m.head(x), labels)


