"""FSDP programs of several models, passes or losses for each step: towers with gathered activations, adversaries, a
teacher that follows, perturbed weights, penalties on old weights, gradients of inputs, buffers that learn."""
from fsdp_programs import Case
from harness import main

HAND = """
import copy
import torch.distributed.nn.functional as gathering
R, W, far = ranks.world().rank, ranks.world().size, {}
def plain(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
def same(name, got, wanted):  # keeps the largest difference, relative to the largest element
    got, wanted = plain(got).double(), plain(wanted).double()
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    far[name] = max(far.get(name, 0.0), float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)))
def same_loss(name, got, wanted):
    same(name, torch.tensor(mean(got)), wanted)
def same_gradients(name, model, reference):
    for (key, one), other in zip(model.named_parameters(), reference.parameters()):
        same(f"{name} gradient {key}", one.grad, other.grad)
def same_weights(name, model, reference):
    for (key, one), other in zip(model.named_parameters(), reference.parameters()):
        same(f"{name} weight {key}", one, other)
def mlp(inputs=8, outputs=4, between=nn.GELU):
    return nn.Sequential(nn.Linear(inputs, 16), between(), nn.Linear(16, 16), between(), nn.Linear(16, outputs))
def pair(model):  # (sharded, plain)
    reference = copy.deepcopy(model)
    for part in model:
        if isinstance(part, nn.Linear): fully_shard(part)
    return fully_shard(model), reference
def drawn(seed, *shapes):  # of all ranks
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]
def adam(model, rate=1e-2):
    return torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.9), eps=1e-4)
def step(*optimizers):
    for optimizer in optimizers: optimizer.step()
    for optimizer in optimizers: optimizer.zero_grad()
torch.manual_seed(0)
"""


class SeveralModels(Case):
    """Each beside the same program on the whole batch in plain PyTorch."""

    def assert_same_as_plain(self, text):
        found = self.ran(HAND + text + "\nresult = far\n")
        self.assertGreater(len(found), 8)
        for name, difference in found.items():
            self.assertLessEqual(difference, 1e-5, name)

    def test_two_towers_learn_by_all_activations_of_all_ranks(self):
        self.assert_same_as_plain("""
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.heat = mlp(), mlp(6), nn.Parameter(torch.ones(1))
    def forward(self, x, y): return F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1), self.heat.exp()
ours = Towers(); reference = copy.deepcopy(ours)
fully_shard(ours.one); fully_shard(ours.other); fully_shard(ours)
def loss_of_pairs(a, b, heat):
    logits, labels = a @ b.T * heat, torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
o, q = adam(ours), adam(reference)
for turn in range(3):
    x, y = drawn(turn, (8, 8), (8, 6))
    a, b, heat = ours(x.chunk(W)[R], y.chunk(W)[R])
    loss, wanted = loss_of_pairs(torch.cat(gathering.all_gather(a)), torch.cat(gathering.all_gather(b)), heat), loss_of_pairs(*reference(x, y))
    loss.backward(); wanted.backward()
    same("loss", loss, wanted); same_gradients("towers", ours, reference); step(o, q)
same_weights("towers", ours, reference)
""")

    def test_adversaries_throw_each_others_gradients_away(self):
        self.assert_same_as_plain("""
(G, g), (D, d) = pair(mlp(4, 8)), pair(mlp(8, 1))
oG, oD, pG, pD = adam(G), adam(D), adam(g), adam(d)
for turn in range(3):
    z, x = drawn(turn, (8, 4), (8, 8))
    judge = lambda G, D, z, x: F.relu(1 - D(x)).mean() + F.relu(1 + D(G(z).detach())).mean()
    loss, wanted = judge(G, D, z[R::W], x[R::W]), judge(g, d, z, x)
    loss.backward(); wanted.backward()
    same_loss("judge", loss, wanted); same_gradients("judge", D, d); step(oD, pD)
    loss, wanted = -D(G(z[R::W])).mean(), -d(g(z)).mean()
    loss.backward(); wanted.backward()
    same_loss("maker", loss, wanted); same_gradients("maker", G, g); step(oG, pG); oD.zero_grad(); pD.zero_grad()
same_weights("maker", G, g); same_weights("judge", D, d)
""")

    def test_gradients_of_inputs_are_a_loss_while_the_other_model_is_frozen(self):
        self.assert_same_as_plain("""
(G, g), (D, d) = pair(mlp(4, 8, nn.Tanh)), pair(mlp(8, 1, nn.Tanh))
oG, oD, pG, pD = adam(G), adam(D), adam(g), adam(d)
def judge(G, D, z, x, share):
    with torch.no_grad(): made = G(z)
    between = (share * x + (1 - share) * made).requires_grad_(True)
    slope, = torch.autograd.grad(D(between).sum(), between, create_graph=True)
    return D(made).mean() - D(x).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
for turn in range(4):
    z, x, share = drawn(turn, (8, 4), (8, 8), (8, 1)); share = share.sigmoid()
    loss, wanted = judge(G, D, z[R::W], x[R::W], share[R::W]), judge(g, d, z, x, share)
    loss.backward(); wanted.backward()
    same_loss("judge", loss, wanted); same_gradients("judge", D, d); step(oD, pD)
    if turn % 2:
        for p in [*D.parameters(), *d.parameters()]: p.requires_grad_(False)
        loss, wanted = -D(G(z[R::W])).mean(), -d(g(z)).mean()
        loss.backward(); wanted.backward()
        same_loss("maker", loss, wanted); same_gradients("maker", G, g); step(oG, pG)
        for p in [*D.parameters(), *d.parameters()]: p.requires_grad_(True)
same_weights("maker", G, g); same_weights("judge", D, d)
""")

    def test_a_sharded_teacher_follows_its_pupil(self):
        self.assert_same_as_plain("""
pupil = mlp(); teacher = copy.deepcopy(pupil).requires_grad_(False)
(S, s), (T, t) = pair(pupil), pair(teacher)
o, q = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, nesterov=True) for one in (S, s))
for turn in range(4):
    x, = drawn(turn, (8, 8))
    distance = lambda S, T, x: -(F.softmax(T(x) * 2, -1) * F.log_softmax(S(x), -1)).sum(-1).mean()
    loss, wanted = distance(S, T, x[R::W]), distance(s, t, x)
    loss.backward(); wanted.backward()
    same_loss("loss", loss, wanted); same_gradients("pupil", S, s); step(o, q)
    with torch.no_grad():
        for master, one in ((T, S), (t, s)):
            for a, b in zip(master.parameters(), one.parameters()): a.lerp_(b, 0.1)
same_weights("pupil", S, s); same_weights("teacher", T, t)
""")

    def test_a_second_pass_with_perturbed_weights_gives_the_gradient(self):
        self.assert_same_as_plain("""
ours, reference = pair(mlp())
o, q = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (ours, reference))
def sharp(model, optimizer, x):
    (model(x) - 1).square().mean().backward()
    with torch.no_grad():
        norm = torch.stack([plain(p.grad.norm()) for p in model.parameters()]).norm()
        old = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters(): p.add_(p.grad * (0.05 / norm))
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    with torch.no_grad():
        for p, value in zip(model.parameters(), old): p.copy_(value)
    return loss
for turn in range(3):
    x, = drawn(turn, (8, 8))
    loss, wanted = sharp(ours, o, x[R::W]), sharp(reference, q, x)
    same_loss("loss", loss, wanted); same_gradients("perturbed", ours, reference); step(o, q)
same_weights("end", ours, reference)
""")

    def test_a_penalty_on_old_weights_counts_by_squares_of_old_gradients(self):
        self.assert_same_as_plain("""
ours, reference = pair(mlp())
o, q = (torch.optim.SGD(one.parameters(), lr=0.05) for one in (ours, reference))
models = ((ours, lambda x: x[R::W]), (reference, lambda x: x))
weight = [{n: torch.zeros(p.shape) for n, p in reference.named_parameters()} for _ in models]
for turn in range(2):
    x, = drawn(turn, (8, 8))
    for (model, cut), sums in zip(models, weight):
        model(cut(x)).square().mean().backward()
        for n, p in model.named_parameters(): sums[n] += plain(p.grad) ** 2
        model.zero_grad()
old = [{n: p.detach().clone() for n, p in model.named_parameters()} for model, _ in models]
for turn in range(2, 5):
    x, = drawn(turn, (8, 8))
    losses = []
    for (model, cut), sums, before in zip(models, weight, old):
        penalty = sum((sums[n] * (p - before[n]) ** 2).sum() for n, p in model.named_parameters()) * 10 + model[2].weight.abs().sum() * 1e-2
        losses.append((model(cut(x)) - 1).square().mean() + penalty)
        losses[-1].backward()
    same_loss("loss", *losses); same_gradients("penalised", ours, reference); step(o, q)
same_weights("end", ours, reference)
""")

    def test_a_codebook_in_a_buffer_learns_by_what_all_ranks_have_seen(self):
        self.assert_same_as_plain("""
class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out, self.is_shared = nn.Linear(8, 4), nn.Linear(4, 8), False
        self.register_buffer("book", torch.randn(6, 4)); self.register_buffer("turns", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        z = self.into(x); place = torch.cdist(z, self.book).argmin(-1); code = self.book[place]
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(place, 6).float(); count, total = chosen.sum(0), chosen.T @ z
                if self.is_shared: ranks.world().all_reduce(count, "sum"); ranks.world().all_reduce(total, "sum")
                self.book[count > 0] = 0.9 * self.book[count > 0] + 0.1 * (total / count[:, None].clamp(min=1))[count > 0]; self.turns += 1
        return self.out(z + (code - z).detach()), F.mse_loss(z, code.detach())
ours = Codes(); reference = copy.deepcopy(ours); ours.is_shared = True
fully_shard(ours.into); fully_shard(ours.out); fully_shard(ours)
o, q = adam(ours), adam(reference)
for turn in range(4):
    x, = drawn(turn, (8, 8))
    losses = []
    for model, part in ((ours, x[R::W]), (reference, x)):
        found, distance = model(part); losses.append(F.mse_loss(found, part) + distance); losses[-1].backward()
    same_loss("loss", *losses); same_gradients("codes", ours, reference); step(o, q)
    same("book", ours.book, reference.book); same("turns", ours.turns, reference.turns)
same_weights("end", ours, reference); same("saved", ours.state_dict()["book"], reference.book)
""")


if __name__ == "__main__":
    main()
