"""`checkpoint_attentions`: attention that is computed again in the backward pass."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_PROGRAM = """
    import copy
    from trireme.smp.nn import attention
    calls, computed = [], attention.scaled_dot_product_attention
    def counted(*args, **kwargs):
        calls.append(1)
        return computed(*args, **kwargs)
    attention.scaled_dot_product_attention = counted

    class Net(nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.blocks = smp.nn.DistributedTransformer(num_layers=2, num_attention_heads=4, attention_head_size=4, hidden_size=16, intermediate_size=32,
                                                        attention_dropout_prob=dropout, hidden_dropout_prob=dropout, causal_mask_size=12)
            self.head = nn.Linear(16, 3)
        def forward(self, x, y):
            return F.cross_entropy(self.head(self.blocks((x, None))[0].mean(1)), y)

    def batches_of(count):
        return [(torch.randn(8, 12, 16), torch.randint(3, (8,))) for _ in range(count)]

    def everywhere(value):
        return [json.loads(text) for text in smp.state.world.gather(json.dumps(value))]
"""


class Attention(Case):
    def trained(self, ranks, options, dropout):
        """[trained() on rank 0, how often each rank has begun attention in two steps]"""
        return self.ran(ranks, _PROGRAM + f"""
    begin({options})
    found = trained(Net({dropout}), batches_of(2))
    result = [found[:2], everywhere(len(calls))]
""")

    def test_has_the_bits_of_attention_that_is_kept(self):
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                (kept, of_kept), (again, of_again) = self.trained(ranks, "", 0.2), self.trained(ranks, "checkpoint_attentions=True", 0.2)
                self.assertEqual(again, kept)
                # Two layers, four micro-batches and two steps; the second time each stage runs its own.
                if ranks == 1:
                    self.assertEqual(of_kept, [16])
                self.assertEqual(sum(of_again) - sum(of_kept), 16)

    def test_has_the_numbers_of_plain_pytorch(self):
        found = self.ran(2, _PROGRAM + """
    begin(checkpoint_attentions=True)
    net, batches = Net(0.0), batches_of(1)
    expected = plain(copy.deepcopy(net), batches)
    given = trained(net, batches, steps=1)
    result = [given[0][0], expected]
""")
        self.assertEqual(found[0], found[1])

    def test_over_ranks_that_share_layers(self):
        found = self.ran(2, _PROGRAM + """
    begin(partitions=1, tensor_parallel_degree=2, ddp=True, prescaled_batch=True, checkpoint_attentions=True)
    net, batches = Net(0.0), batches_of(1)
    other = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    losses = stepping(model)(*batches[0])
    loss = other(*batches[0])
    loss.backward()
    differences = [(gradient_of(p) - q.grad).abs().max().item() for (_, p), (_, q) in zip(model.local_named_parameters(), other.named_parameters(), strict=True)]
    result = [abs(losses.reduce_mean().item() - loss.item()), max(differences), len(calls)]
""")
        self.assertLess(max(found[:2]), 1e-6)
        self.assertEqual(found[2], 16 + 4)  # twice in each layer, of each micro-batch and of the plain model


if __name__ == "__main__":
    main()
