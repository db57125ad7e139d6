"""Activations without their last token, `x[:, :-1]`: their sizes, and what a program makes as long as they are."""
import torch
from torch.nn import functional

from .table import BATCH, HIDDEN, LENGTH, REFUSED, RIGHT, VOCABULARY, attend, heads, hidden, joined, logits, loss_of, mlp, program, row, tokens

SHORTER = LENGTH - 1


def of_shorter(name, function, expected=RIGHT, **options):
    """Declares a loss of function(m, all but the last token's logits, ids, all logits)."""
    def forward(m, input_ids, labels):
        scores = logits(m, input_ids)
        return function(m, scores[:, :-1], input_ids, scores)
    forward.__module__ = __name__
    row(expected, name=f"shorter: {name}", **options)(forward)


def each(scores, ids):
    return loss_of(scores, ids[:, 1:], reduction="none")


of_shorter("over its length", lambda m, s, ids, _: s.square().sum() / s.shape[1] * 0.01, on_four=True)
of_shorter("over its number of elements", lambda m, s, ids, _: s.square().sum() / s.numel())
of_shorter("over its len", lambda m, s, ids, _: s.transpose(0, 1).square().sum() / len(s.transpose(0, 1)) * 0.01)
of_shorter("its sizes as numbers", lambda m, s, ids, _: (s.square().mean(), {"n": s.shape[1], "stride": s.stride(1), "rows": s.reshape(-1, VOCABULARY).shape[0]}))
of_shorter("a mean", lambda m, s, ids, _: s.square().mean() + s.square().mean(1).sqrt().mean())
of_shorter("viewed by numbers", lambda m, s, ids, _: s.reshape(BATCH, SHORTER, VOCABULARY).square().mean() + s.reshape(BATCH * SHORTER, -1).square().mean(), on_four=True)
of_shorter("viewed by a length less one", lambda m, s, ids, all_: s.contiguous().view(-1, all_.shape[1] - 1, VOCABULARY).square().mean())
of_shorter("losses viewed by its sizes", lambda m, s, ids, _: each(s, ids).view(s.size(0), s.size(1)).sum(1).mean() * 0.1)
of_shorter("losses over a length less one", lambda m, s, ids, _: each(s, ids).sum() / (ids.shape[1] - 1) / BATCH)
of_shorter("losses over their len", lambda m, s, ids, _: each(s, ids).sum() / len(each(s, ids)))
of_shorter("weighted by places", lambda m, s, ids, _: (s[..., 0] * torch.arange(ids.shape[1] - 1)).mean(), on_four=True)
of_shorter("weighted by a slice of places", lambda m, s, ids, _: (s[..., 0] * torch.arange(ids.shape[1])[:-1]).mean())
of_shorter("losses weighted by a line", lambda m, s, ids, _: (each(s, ids).view(BATCH, -1) * torch.linspace(0, 1, s.shape[1])).mean())
of_shorter("filled by a mask of places", lambda m, s, ids, _: s.masked_fill((torch.arange(SHORTER) < 5)[:, None], 0.0).square().mean())
of_shorter("chosen by where", lambda m, s, ids, _: torch.where((torch.arange(SHORTER) < 5)[None, :, None], s, torch.zeros_like(s)).square().mean())
of_shorter("an expanded mask of ids", lambda m, s, ids, _: (s * (ids[:, 1:] > 5).unsqueeze(-1).expand(-1, ids.shape[1] - 1, VOCABULARY)).square().mean())
of_shorter("twice, beside later ids", lambda m, s, ids, _: loss_of(s[:, :-1], ids[:, 2:]))
of_shorter("written into zeros", lambda m, s, ids, _: (lambda made: (made.copy_(s), made.square().mean())[1])(torch.zeros(BATCH, SHORTER, VOCABULARY)))
of_shorter("one sample of it", lambda m, s, ids, _: functional.cross_entropy(s[1], ids[1, 1:], reduction="sum") / s[1].shape[0])
of_shorter("doubled in place", lambda m, s, ids, _: s.mul_(2.0).square().mean(), RIGHT)
of_shorter("beside all of it", lambda m, s, ids, all_: (s * 0.1 + all_.detach()[:, :-1]).square().mean())


@row(RIGHT, on_four=True)
def attention_of_all_but_the_last_token(m, input_ids, labels):
    h = hidden(m, input_ids)[:, :-1]
    mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
    return m.classes(h + attend(m, h, attn_mask=mask)).square().mean()


@row(RIGHT)
def positions_of_all_but_the_last_token(m, input_ids, labels):
    x = m.embed(input_ids)[:, :-1]
    x = x + m.positions.weight[:x.shape[1]]
    return loss_of(m.head(x + mlp(m, x)), input_ids[:, 1:])


def uncut(name, loss, expected=RIGHT, **options):
    """Declares a loss of the logits of cut ids and the ids that the program has not cut."""
    @program(expected, forward=lambda m, input_ids, labels: logits(m, input_ids), name=f"uncut beside cut: {name}", **options)
    def step(model, cut, step):
        whole = tokens(step)
        return loss(model(**cut(input_ids=whole, labels=whole)), whole)


uncut("shifted labels", lambda scores, ids: loss_of(scores[:, :-1], ids[:, 1:]), on_four=True)
uncut("labels", loss_of)
uncut("labels of classes in the second dim", lambda scores, ids: functional.cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:]))
uncut("gathered log probabilities", lambda scores, ids: -scores[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean())
uncut("a shifted mask", lambda scores, ids: (scores[:, :-1, 0] * (ids[:, 1:] > 10)).mean())
uncut("shifted floats", lambda scores, ids: functional.mse_loss(scores[:, :-1, 0], ids[:, 1:] / VOCABULARY))
uncut("floats", lambda scores, ids: functional.smooth_l1_loss(scores[..., 0], ids / VOCABULARY))


# --- readers of one rank's elements ---

def reader(name, read, expected=REFUSED, **options):
    """Declares a loss times read(ids, activations)."""
    def forward(m, input_ids, labels):
        h = hidden(m, input_ids)
        return loss_of(m.head(h), labels) * read(input_ids, h)
    forward.__module__ = __name__
    row(expected, name=f"read: {name}", **options)(forward)


reader("bytes of a storage", lambda ids, h: h.untyped_storage().nbytes() / 1000)
reader("len of a storage", lambda ids, h: len(ids.untyped_storage()) / 1000, RIGHT)
reader("size of a typed storage", lambda ids, h: ids.storage().size() / 100, RIGHT)
reader("an offset", lambda ids, h: 1.0 + h[1:].storage_offset() / 100)
reader("a tensor by dlpack", lambda ids, h: torch.from_dlpack(ids).shape[1] / 10, RIGHT)
reader("bytes", lambda ids, h: h.nbytes / 1000, RIGHT)
reader("a compiled function", lambda ids, h: torch.compile(lambda x: x.sum() / x.shape[1], backend="eager")(h.detach()))
reader("a meta tensor", lambda ids, h: h.detach().to("meta").shape[1] / 10, RIGHT)


row(RIGHT, name="tokens taken along a dim by whole places")(
    lambda m, input_ids, labels: m.classes(torch.take_along_dim(hidden(m, input_ids), input_ids.argmin(1)[:, None, None], 1)).square().mean())
row(RIGHT, name="two tokens taken along a dim by whole places")(
    lambda m, input_ids, labels: m.classes(torch.take_along_dim(hidden(m, input_ids), input_ids.topk(2, 1).indices[..., None], 1)).square().mean())
row(RIGHT, name="features taken along a dim")(
    lambda m, input_ids, labels: loss_of(m.head(torch.take_along_dim(hidden(m, input_ids), torch.arange(HIDDEN).flip(0)[None, None], 2)), labels))


@row(RIGHT, modules={"counted": lambda: torch.nn.Embedding(VOCABULARY, HIDDEN, scale_grad_by_freq=True)})
def gradients_scaled_by_how_often_an_id_is_there(m, input_ids, labels):
    return loss_of(m.head(m.counted(input_ids)), labels)


row(RIGHT, name="a vandermonde matrix of a sample")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) + torch.vander(m.score(hidden(m, input_ids))[0, :, 0].tanh().detach()).mean())


@row(REFUSED)
def a_view_taken_before_a_part_is_written(m, input_ids, labels):
    h = hidden(m, input_ids)
    made = torch.zeros(h.shape)
    begin = made[:, :6]
    made += h
    return begin.mean()


@row(RIGHT)
def samples_written_one_by_one_into_zeros(m, input_ids, labels):
    h = hidden(m, input_ids)
    made = torch.zeros(h.shape)
    for sample in range(BATCH):
        made[sample] = h[sample] * (sample + 1)
    return loss_of(m.head(made), labels)


@row(RIGHT)
def whole_queries_of_sharded_keys(m, input_ids, labels):
    """A decoder whose ids the program has made: whole until it meets the encoder's tokens."""
    h = hidden(m, input_ids)
    shifted = input_ids.new_zeros(input_ids.shape)
    shifted[:, 1:] = input_ids[:, :-1]
    x = m.embed(shifted)
    query, key, value = (heads(part) for part in (m.up(x)[..., :HIDDEN], m.gate(h)[..., :HIDDEN], m.gate(h)[..., -HIDDEN:]))
    x = x + m.out(joined(functional.scaled_dot_product_attention(query, key, value)))
    return loss_of(m.head(x), labels)


@row(RIGHT)
def few_whole_queries_of_sharded_keys(m, input_ids, labels):
    h = hidden(m, input_ids)
    query, key, value = (heads(part) for part in (m.positions.weight[None, :9].expand(BATCH, -1, -1), h, h))
    return m.classes(joined(functional.scaled_dot_product_attention(query, key, value))).square().mean()


@row(RIGHT)
def floats_beside_zeros_of_all_sizes(m, input_ids, labels):
    h = hidden(m, input_ids)
    return functional.mse_loss(h, torch.zeros(h.shape)) + functional.l1_loss(h, m.positions.weight[:LENGTH].expand_as(h))


# --- draws and transforms ---

@row(REFUSED)
def noise_of_a_generator_of_the_program(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(h + torch.empty_like(h).normal_(generator=torch.Generator().manual_seed(1))), labels)


@row(RIGHT)
def noise_of_a_generator_of_all_sizes(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(h + torch.randn(h.shape, generator=torch.Generator().manual_seed(1))), labels)


@row(REFUSED)
def tokens_masked_by_a_generator_of_the_program(m, input_ids, labels):
    chances = torch.full_like(input_ids, 0.3, dtype=torch.float)
    masked = torch.bernoulli(chances, generator=torch.Generator().manual_seed(1)).bool()
    return loss_of(logits(m, input_ids.masked_fill(masked, 1)), labels)


@row(RIGHT)
def tokens_masked_by_a_generator_of_all_sizes(m, input_ids, labels):
    masked = torch.bernoulli(torch.full(input_ids.shape, 0.3), generator=torch.Generator().manual_seed(1)).bool()
    return loss_of(logits(m, input_ids.masked_fill(masked, 1)), labels)


@row(REFUSED)
def a_vmapped_function_that_captures_a_part(m, input_ids, labels):
    h = hidden(m, input_ids)
    return torch.vmap(lambda scale: h * scale)(torch.tensor([1.0, 2.0])).square().mean()


@row(RIGHT)
def vmapped_counts_of_a_captured_part(m, input_ids, labels):
    counts = torch.vmap(lambda word: (input_ids == word).sum())(torch.arange(VOCABULARY))
    return loss_of(logits(m, input_ids), labels) * counts.max() / 100


row(RIGHT, name="a likelihood of a distribution")(
    lambda m, input_ids, labels: -torch.distributions.Categorical(logits=logits(m, input_ids)).log_prob(input_ids).mean())


@row(RIGHT, on_four=True)
def single_tokens_as_slices(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(torch.cat([h[:, :1], h[:, -1:], h[:, 7:8], h[:, [0, 5, 20]]], 1)).square().mean()


@row(REFUSED)
def sizes_compared_by_libtorch(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(h), labels) * (2.0 if h.is_same_size(torch.empty(BATCH, LENGTH // 2, HIDDEN)) else 1.0)


@row(REFUSED)
def a_view_of_a_part_s_length_taken_before_a_part_is_written(m, input_ids, labels):
    h = hidden(m, input_ids)
    made = torch.zeros(h.shape)
    begin = made[:, :LENGTH // 2]
    made += h
    return begin.mean()


@row(REFUSED)
def all_but_the_last_token_written_behind_a_first_one(m, input_ids, labels):
    h = hidden(m, input_ids)
    made = torch.zeros(h.shape)
    made[:, 1:] = h[:, :-1]
    return made.square().mean()


@row(RIGHT)
def a_buffer_written_twice(m, input_ids, labels):
    h = hidden(m, input_ids)
    made = torch.zeros(h.shape)
    made[..., :4] = h[..., :4]
    made += h
    made[..., 8:] *= 0.5
    made.mul_(2.0)
    return loss_of(m.head(made), labels)


@row(RIGHT)
def views_of_a_buffer_written_in_place(m, input_ids, labels):
    h = hidden(m, input_ids)
    made = torch.zeros(h.shape)
    made += h
    made[..., 8:].mul_(0.5)
    made.transpose(0, 1)[..., :3].add_(h.transpose(0, 1)[..., :3])
    made[:, 5] = 0.0
    made.view(BATCH, -1, 4, HIDDEN // 4)[:, :, 1].add_(1.0)
    return loss_of(m.head(made), labels)


@row(RIGHT)
def some_tokens_of_a_buffer_read(m, input_ids, labels):
    h = hidden(m, input_ids)
    made = torch.zeros(h.shape)
    made += h
    return (made[:, :6] * torch.linspace(-1, 1, HIDDEN)).sum() * 0.1
