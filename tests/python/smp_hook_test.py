"""model.register_comm_hook(): the program joins gradients itself."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_PROGRAM = """
    import copy
    import torch.distributed as dist

    def everywhere(value):
        return [json.loads(text) for text in smp.state.world.gather(json.dumps(value))]

    def averaging(state, bucket):
        state.append([bucket.index(), bucket.is_last(), bucket.buffer().numel(), sorted(list(p.shape) for p in bucket.parameters())])
        assert all(torch.equal(one.flatten(), part) for one, part in zip(bucket.gradients(), bucket.buffer().split([p.numel() for p in bucket.parameters()])))
        future = dist.all_reduce(bucket.buffer(), group=smp.get_dp_process_group(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / (smp.dp_size() * MICRO_BATCHES))

    def trained_by(hook, state, net, max_norm=None, **options):
        model = smp.DistributedModel(net, **options)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
        if hook:
            model.register_comm_hook(state, hook)
        train_step = stepping(model)
        torch.manual_seed(7 + smp.rdp_rank())
        for batch in mlp_batches(3):
            optimizer.zero_grad()
            train_step(*batch)
            if max_norm:
                optimizer.clip_master_grads(max_norm)
            optimizer.step()
        found = {name: parameter.flatten().tolist() for name, parameter in model.local_named_parameters()}
        model.cpu()
        return found

    def furthest(found, expected):
        assert set(found) == set(expected)
        return max((torch.tensor(found[name]) - torch.tensor(expected[name])).abs().max().item() for name in expected)
"""


class Hooks(Case):
    def test_one_that_averages_gives_the_weights_of_none(self):
        for ranks, options in ((2, ""), (4, ""), (2, "max_norm=0.25")):
            with self.subTest(ranks=ranks, options=options):
                found = self.ran(ranks, _PROGRAM + f"""
    begin(partitions={ranks // 2}, ddp=True)
    net = Mlp()
    other, seen = copy.deepcopy(net), []
    expected = trained_by(None, None, other, {options})
    found = trained_by(averaging, seen, net, {options})
    result = everywhere([furthest(found, expected), seen, sum(len(values) for values in found.values())])
""")
                for difference, seen, count in found:
                    self.assertLess(difference, 1e-6)
                    self.assertEqual([one[:3] for one in seen], [[0, True, count]] * 3)

    def test_a_hook_decides_what_the_optimizer_takes(self):
        """Here gradients of this rank alone, and their signs; against plain PyTorch."""
        found = self.ran(2, _PROGRAM + """
    def signs(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer().sign())
        return future
    begin(partitions=1, ddp=True)
    net = Mlp()
    other = copy.deepcopy(net)
    found = trained_by(signs, None, net)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.125, momentum=0.5)
    torch.manual_seed(7 + smp.rdp_rank())
    for batch in mlp_batches(3):
        optimizer.zero_grad()
        for parts in zip(*(tensor.chunk(MICRO_BATCHES) for tensor in batch)):
            other(*parts).backward()
        for parameter in other.parameters():
            parameter.grad.sign_()
        optimizer.step()
    result = everywhere(furthest(found, {name: p.flatten().tolist() for name, p in other.named_parameters()}))
""")
        self.assertLess(max(found), 1e-6)

    def test_several_buckets_and_sums_and_one_of_torch(self):
        found = self.ran(2, _PROGRAM + """
    from trireme.smp import comm_hook
    comm_hook._ELEMENTS = 300
    def adding(state, bucket):
        state.append([bucket.index(), bucket.is_last(), bucket.buffer().numel()])
        return dist.all_reduce(bucket.buffer(), group=smp.get_dp_process_group(), async_op=True).get_future().then(lambda done: [done.value()[0] / smp.dp_size()])
    begin(partitions=1, ddp=True)
    net = Mlp()
    other, another, seen = copy.deepcopy(net), copy.deepcopy(net), []
    expected = trained_by(None, None, other, average_grads_across_microbatches=False)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    differences = [furthest(trained_by(hook, given, module, average_grads_across_microbatches=False), expected)
                   for hook, given, module in ((adding, seen, net), (allreduce_hook, smp.get_dp_process_group(), another))]
    result = everywhere([max(differences), seen])
""")
        for difference, seen in found:
            self.assertLess(difference, 1e-6)
            self.assertGreater(len(seen) // 3, 1)
            self.assertEqual(sum(count for _, _, count in seen[:len(seen) // 3]), 6 * 16 + 16 + 2 * (16 * 16 + 16) + 16 * 3 + 3)
            self.assertEqual([is_last for _, is_last, _ in seen[:len(seen) // 3]], [False] * (len(seen) // 3 - 1) + [True])

    def test_what_is_refused(self):
        found = self.ran(2, _PROGRAM + """
    begin(partitions=1, ddp=True)
    model = smp.DistributedModel(Mlp(), backward_passes_per_step=2)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    train_step = stepping(model)
    texts = [told(lambda: model.register_comm_hook(None, 3))]
    model.register_comm_hook([], lambda state, bucket: averaging(state, bucket))
    texts.append(told(lambda: model.register_comm_hook([], averaging)))
    batch = mlp_batches(1)[0]
    train_step(*batch)
    optimizer.clip_master_grads(1.0)
    texts.append(told(lambda: train_step(*batch)))
    result = everywhere(texts)
""")
        for texts in found:
            self.assertEqual(texts[:2], ["ConfigError: DistributedModel.register_comm_hook(): int cannot be called; give a function of (state, bucket)",
                                         "StateError: DistributedModel.register_comm_hook(): there is one already"])
            self.assertIn("a backward pass has added to gradients that the hook has joined already", texts[2])

    def test_what_is_refused_by_configuration(self):
        for options, text in (("ddp=False, partitions=2", "ConfigError: DistributedModel.register_comm_hook() needs `ddp` = true"),
                              ("shard_optimizer_state=True", "beside `shard_optimizer_state` no rank has whole gradients"),
                              ("sharded_data_parallel_degree=2", "beside `sharded_data_parallel_degree` no rank has whole gradients"),
                              ("tensor_parallel_degree=2", "beside `tensor_parallel_degree` no rank has whole gradients"), ("bf16=True", "beside `bf16` no rank has whole gradients")):
            with self.subTest(options):
                found = self.ran(2, _PROGRAM + f"""
    begin(**{{"partitions": 1, "ddp": True, **dict({options})}})
    model = smp.DistributedModel(Mlp())
    result = everywhere(told(lambda: model.register_comm_hook(None, averaging)))
""")
                for one in found:
                    self.assertIn(text, one)


if __name__ == "__main__":
    main()
