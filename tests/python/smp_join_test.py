"""model.join(): copies of the model with different numbers of batches."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_PROGRAM = """
    import copy

    def own_batches(copy_number, count):
        generator = torch.Generator().manual_seed(copy_number)
        return [(torch.randn(7, 6, generator=generator), torch.randint(3, (7,), generator=generator)) for _ in range(count)]

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)

    def of_plain(net, copies, divides_by_all=True, make=momentum, max_norm=None):
        '''Weights of plain PyTorch after each step of the copy with most batches.'''
        optimizer, found = make(net.parameters()), []
        for step in range(max(map(len, copies))):
            having = [batches[step] for batches in copies if step < len(batches)]
            optimizer.param_groups[0]["lr"] = 0.125 / (step + 1)
            optimizer.zero_grad()
            for batch in having:
                (net(*batch) / (len(copies) if divides_by_all else len(having))).backward()
            if max_norm:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
            found.append({name: p.flatten().tolist() for name, p in net.named_parameters()})
        return found

    def averaged(calls, bucket):
        calls.append(bucket.buffer().abs().max().item())
        torch.distributed.all_reduce(bucket.buffer(), group=smp.get_dp_process_group())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / smp.dp_size() / MICRO_BATCHES)
        return future

    def joined(net, batches, divides_by_all=True, make=momentum, max_norm=None, hook=None, **options):
        '''This copy's [losses, weights after each of its steps, and at the end].'''
        model = joined.model = smp.DistributedModel(net, **options)
        calls = joined.calls = []
        if hook:
            model.register_comm_hook(calls, hook)
        optimizer = joined.optimizer = smp.DistributedOptimizer(make(model.parameters()))
        @smp.step
        def train_step(x, y):
            loss = model(x, y)
            model.backward(loss)
            return loss
        losses = []
        with model.join(divide_by_initial_world_size=divides_by_all):
            for step, batch in enumerate(batches):
                optimizer.param_groups[0]["lr"] = 0.125 / (step + 1)
                optimizer.zero_grad()
                losses.append(train_step(*batch).reduce_mean().item())
                if max_norm:
                    optimizer.clip_master_grads(max_norm)
                optimizer.step()
        return losses

    def weights_now(model):
        return of_all({name: parameter.flatten().tolist() for name, parameter in model.local_named_parameters()})

    def everywhere(value):
        return [json.loads(text) for text in smp.state.world.gather(json.dumps(value))]

    def furthest(found, expected):
        assert set(found) == set(expected)
        return max((torch.tensor(found[name]) - torch.tensor(expected[name])).abs().max().item() for name in expected)
"""


class Joined(Case):
    def assert_weights_of_plain(self, ranks, counts, options="", of_init="", of_both="", shared=1, hook=None):
        """After all batches, on every rank. `shared`: ranks that share layers; `hook`: joins gradients."""
        found = self.ran(ranks, _PROGRAM + f"""
    begin(partitions={ranks // len(counts) // shared}, ddp=True, tensor_parallel_degree={shared}, {of_init})
    net = Mlp()
    smp.set_tensor_parallelism(net)
    other = copy.deepcopy(net)
    copies = [own_batches(number, count) for number, count in enumerate({counts})]
    losses = joined(net, copies[smp.rdp_rank()], {of_both}hook={hook}, {options})
    if {shared} > 1:  # a rank has slices
        mine = {{name: value.flatten().tolist() for name, value in joined.model.state_dict().items()}}
    else:
        mine = {{name: parameter.flatten().tolist() for name, parameter in joined.model.local_named_parameters()}}
    expected = of_plain(other, copies, {of_both})[-1]
    result = everywhere([furthest(mine, {{name: expected[name] for name in mine}}), len(losses), [call > 0 for call in joined.calls]])
""")
        self.assertEqual(sorted(count for _, count, _ in found), sorted(list(counts) * (ranks // len(counts))))
        self.assertLess(max(difference for difference, _, _ in found), 1e-6)
        for _, count, calls in found:
            self.assertEqual(calls, [step < count for step in range(max(counts))] if hook else [])

    def test_the_other_copy_goes_on_whoever_ends_first(self):
        for counts in ((1, 3), (3, 1)):
            with self.subTest(counts=counts):
                self.assert_weights_of_plain(2, counts, of_both="max_norm=0.25, ")

    def test_means_over_copies_that_have_a_batch(self):
        self.assert_weights_of_plain(2, (3, 1), of_both="divides_by_all=False, ")

    def test_two_copies_of_two_stages(self):
        self.assert_weights_of_plain(4, (1, 3))

    def test_two_copies_of_layers_that_ranks_share(self):
        for prescaled in (True, False):
            with self.subTest(prescaled_batch=prescaled):
                self.assert_weights_of_plain(4, (1, 3), of_init=f"prescaled_batch={prescaled}", of_both="max_norm=0.25, ", shared=2)

    def test_a_hook_of_copies_without_batches_joins_zeros(self):
        for divides in (True, False):
            with self.subTest(divides_by_all=divides):
                self.assert_weights_of_plain(4, (1, 3), of_both=f"divides_by_all={divides}, ", hook="averaged")

    def test_sharded_states_and_parameters(self):
        self.assert_weights_of_plain(2, (1, 3), of_init="sharded_data_parallel_degree=2, sdp_gradient_clipping=1e9")

    def test_as_many_batches_are_as_without(self):
        self.assert_weights_of_plain(2, (2, 2))

    def test_buffers_are_of_copies_that_have_a_batch(self):
        found = self.ran(2, _PROGRAM + """
    begin(partitions=1, ddp=True)
    net = Cnn()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    train_step = stepping(model)
    torch.manual_seed(smp.rdp_rank())
    batches = cnn_batches(1 + 2 * smp.rdp_rank())
    with model.join():
        for batch in batches:
            optimizer.zero_grad()
            train_step(*batch)
            optimizer.step()
    # The first step's are rank 0's, the others' those of rank 1.
    torch.manual_seed(0)
    of_first = cnn_batches(1)
    torch.manual_seed(1)
    of_second = cnn_batches(3)
    torch.manual_seed(5)
    plain_net = Cnn()
    for x, y in of_first + of_second[1:]:
        for parts in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
            plain_net(*parts)
    expected = {name: bits(buffer) for name, buffer in plain_net.named_buffers()}
    result = everywhere([{name: bits(buffer) for name, buffer in net.named_buffers()} == expected, expected["norm1.num_batches_tracked"] == bits(torch.tensor(12))])
""")
        self.assertEqual(found, [[True, True]] * 2)


class Refused(Case):
    def test_what_cannot_be_followed_is_named_on_every_rank(self):
        for ranks, batches, loop, text in (
                (4, "2 if smp.rank() == 1 else 1", "", r"rank \d has no batch any more, and rank 1, which has a part of the same copy of the model, has one"),
                (2, "smp.rank()", "", r"rank 0 has ended without a call of smp.step: .*train_step\(\), so that it has no arguments to follow with"),
                (2, "1", "model.state_dict()", r"^StateError: DistributedModel.state_dict\(\): inside of model.join\(\), where"),
                (2, "1", "optimizer.state_dict()", r"^StateError: optimizer.state_dict\(\): inside of model.join\(\), where"),
                (2, "1", "model.join().__enter__()", r"inside of another one"),
                (2, "1", "optimizer.zero_grad() if smp.rank() else train_step(*batch)", r"rank 0 calls smp.step: .*train_step\(\) and rank 1 zero_grad\(\)")):
            with self.subTest(text):
                found = self.ran(ranks, _PROGRAM + f"""
    begin(partitions={ranks // 2}, ddp=True)
    model = smp.DistributedModel(Mlp())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    train_step = stepping(model)
    def train():
        with model.join():
            for batch in mlp_batches({batches}):
                {loop or "pass"}
                optimizer.zero_grad()
                train_step(*batch)
                optimizer.step()
    result = everywhere(told(train))
""")
                for one in found:
                    self.assertRegex(one, text)

    def test_arguments(self):
        found = self.ran(2, _PROGRAM + """
    begin(partitions=1, ddp=True)
    model = smp.DistributedModel(Mlp())
    train_step = stepping(model)
    def early():
        with model.join(throw_on_early_termination=True):
            for batch in mlp_batches(1 + smp.rank()):
                train_step(*batch)
    def disabled():
        with model.join(enable=False):
            return model.joined is None
    result = everywhere([told(lambda: model.join(enable=1)), told(model.join(smp.rank() == 0).__enter__), told(disabled), told(early), model.joined is None])
""")
        for rank, (enable, differs, disabled, early, has_ended) in enumerate(found):
            self.assertEqual(enable, "ConfigError: DistributedModel.join(enable=1): expected True or False")
            self.assertIn(f"the ranks' configurations differ in `divide_by_initial_world_size` (here {rank == 0})", differs)
            self.assertEqual([disabled, has_ended], [True, True])
            self.assertRegex(early, r"^StateError: DistributedModel.join\(\): rank 0 has no batch any more, before rank 1 .*, and throw_on_early_termination=True")


if __name__ == "__main__":
    main()
