"""Micro-batches of different sizes: a batch that `microbatches` does not divide."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_PROGRAM = """
    import copy
    COUNTS = (7, 8, 9)  # samples of the batches, over 4 micro-batches

    def own_batches(seed, counts=COUNTS):
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)) for count in counts]

    def adding_up(net, copies, lr=0.125):
        '''[losses of the first copy, gradients, weights] of each step of plain PyTorch that adds up micro-batches by
        their samples.'''
        found = []
        for batches in zip(*copies):
            net.zero_grad()
            losses = []
            for number, (x, y) in enumerate(batches):
                for part, labels in zip(x.tensor_split(MICRO_BATCHES), y.tensor_split(MICRO_BATCHES)):
                    loss = net(part, labels)
                    (loss * (len(part) / len(x)) / len(copies)).backward()
                    losses += [loss.item()] if number == 0 else []
            gradients = {name: p.grad.flatten().tolist() for name, p in net.named_parameters()}
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(p.grad, alpha=lr)
            found.append([losses, gradients, {name: p.flatten().tolist() for name, p in net.named_parameters()}])
        return found

    def by_smp(net, batches, lr=0.125, **options):
        model = by_smp.model = smp.DistributedModel(net, **options)
        optimizer = by_smp.optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr))
        @smp.step
        def train_step(x, y):
            loss = model(x, y)
            model.backward(loss)
            return loss
        found, by_smp.means = [], []
        for batch in batches:
            optimizer.zero_grad()
            losses = train_step(*batch)
            found.append([[loss.item() for loss in losses.outputs], numbers(model, gradient_of)])
            optimizer.step()
            found[-1].append(numbers(model, lambda parameter: parameter))
            by_smp.means.append(losses.reduce_mean().item())
        return found

    def numbers(model, of):
        return of_all({name: of(parameter).flatten().tolist() for name, parameter in model.local_named_parameters()})

    def furthest(found, expected):
        '''The greatest difference of two numbers.'''
        if isinstance(expected, dict):
            assert set(found) == set(expected)
            return max(furthest(found[key], expected[key]) for key in expected)
        if isinstance(expected, list):
            assert len(found) == len(expected)
            return max(map(furthest, found, expected))
        return abs(found - expected) if found == found else float("inf")
"""


class Uneven(Case):
    def assert_near_plain(self, ranks, pipeline, copies=1):
        """Losses, gradients and weights of three steps; those of one copy have the bits. Gradients are those of the
        mean over the batch."""
        found = self.ran(ranks, _PROGRAM + f"""
    begin(partitions={ranks // copies}, ddp={copies > 1}, pipeline={pipeline!r})
    net = Mlp()
    other, whole = copy.deepcopy(net), copy.deepcopy(net)
    copies = [own_batches(number) for number in range({copies})]
    given, expected = by_smp(net, copies[smp.dp_rank()]), adding_up(other, copies)
    losses = [whole(*batches[0]) for batches in copies]
    (sum(losses) / len(losses)).backward()
    of_whole = {{name: p.grad.flatten().tolist() for name, p in whole.named_parameters()}}
    result = [given == expected, furthest(given, expected), furthest(given[0][1], of_whole), abs(by_smp.means[0] - losses[0].item()), len(given),
              by_smp.model.engine("").core.pipeline]
""")
        self.assertTrue(found[0] or copies > 1)
        self.assertLess(max(found[1:4]), 1e-6)
        self.assertEqual(found[4], 3)
        return found[5]

    def test_one_stage(self):
        self.assert_near_plain(1, "interleaved")

    def test_two_stages(self):
        for pipeline in ("interleaved", "simple", "sequential"):
            with self.subTest(pipeline):
                self.assertEqual(self.assert_near_plain(2, pipeline), pipeline)

    def test_two_copies_of_two_stages(self):
        for pipeline in ("interleaved", "simple", "sequential"):
            with self.subTest(pipeline):
                self.assertEqual(self.assert_near_plain(4, pipeline, copies=2), pipeline)

    def test_a_sum_over_micro_batches_has_no_weights(self):
        found = self.ran(2, _PROGRAM + """
    begin()
    net = Mlp()
    other, batches = copy.deepcopy(net), own_batches(0)[:1]
    given = by_smp(net, batches, average_grads_across_microbatches=False)
    for part, labels in zip(*(tensor.tensor_split(MICRO_BATCHES) for tensor in batches[0])):
        other(part, labels).backward()
    result = furthest(given[0][1], {name: p.grad.flatten().tolist() for name, p in other.named_parameters()})
""")
        self.assertLess(found, 1e-6)

    def test_a_program_that_comes_back_to_a_stage_and_gives_gradients(self):
        found = self.ran(2, _PROGRAM + """
    begin()
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle = nn.Linear(6, 6), nn.Linear(6, 6)
        def forward(self, x):
            return F.linear(F.relu(self.middle(F.relu(self.first(x)))), self.first.weight[:3])
    net = Tied()
    other = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(x, y):
        losses = F.cross_entropy(model(x), y, reduction="none")
        model.backward(losses, torch.full_like(losses, 1 / len(losses), requires_grad=False))
        return losses
    result = []
    for x, y in own_batches(1, (9, 8, 6)):
        losses = train_step(x, y)
        expected = F.cross_entropy(other(x), y, reduction="none")
        other.zero_grad()
        expected.mean().backward()
        result.append([furthest(numbers(model, gradient_of), {name: p.grad.flatten().tolist() for name, p in other.named_parameters()}),
                       furthest(losses.concat().tolist(), expected.tolist())])
        model.zero_grad()
""")
        self.assertEqual(len(found), 3)
        self.assertLess(max(map(max, found)), 1e-6)

    def test_ranks_that_share_layers_get_rows_of_their_samples(self):
        found = self.ran(2, _PROGRAM + """
    begin(partitions=1, tensor_parallel_degree=2, ddp=True, microbatches=2)
    with smp.tensor_parallelism():
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    other = copy.deepcopy(net)
    copies = [own_batches(number, (5,))[0] for number in range(2)]
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(x, y):
        out = model(x)
        loss = F.cross_entropy(out, y)
        model.backward(loss)
        return loss, out
    losses, out = train_step(*copies[smp.tp_rank()])
    x, y = map(torch.cat, zip(*copies))
    expected = F.cross_entropy(other(x), y)
    expected.backward()
    given = {name: gradient_of(p).flatten().tolist() for name, p in model.local_named_parameters()}
    result = [furthest(given, {name: p.grad.flatten().tolist() for name, p in other.named_parameters()}), abs(losses.reduce_mean().item() - expected.item()),
              (out.concat() - other(copies[smp.tp_rank()][0])).abs().max().item(), len(out.concat())]
""")
        self.assertLess(max(found[:3]), 1e-6)
        self.assertEqual(found[3], 5)


if __name__ == "__main__":
    main()
