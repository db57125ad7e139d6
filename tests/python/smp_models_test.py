"""Several models in one program under smp's names: losses, gradients and weights are those of plain PyTorch, bit by
bit, on one stage, on two, and on two that data-parallel ranks have twice."""
from harness import RankServer, main
from smp_programs import Case
from smp_several import BOTH, GAN, JOINT, SeveralCase

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import


class Bits(SeveralCase):
    def test_gan(self):
        self.assert_bits_of_pytorch(GAN + """
    begin()
    result = both(gan, block(4, 6), block(6, 1))
""")

    def test_two_models_by_one_loss_and_one_of_them_alone(self):
        self.assert_bits_of_pytorch(JOINT + """
    begin()
    result = both(joint, block(6, 6), block(6, 3))
""")

    def test_two_stages_that_data_parallel_ranks_have_twice(self):
        """Each rank takes samples of its own."""
        self.assert_bits_of_pytorch(JOINT + """
    begin(partitions=2, ddp=True)
    result = both(joint, block(6, 6), block(6, 3))
""", ranks=(4,))

    def test_placed_by_hand_on_opposite_stages(self):
        self.assert_bits_of_pytorch(GAN + """
    begin(auto_partition=False, default_partition=1)
    g, d = block(4, 6), block(6, 1)
    smp.set_partition(d, 0)
    result = both(gan, g, d)
""", ranks=(2,))

    def test_one_that_is_made_between_steps_on_one_stage(self):
        self.assert_bits_of_pytorch("""
    begin()
    def program(names, net, other):
        net, found = names.model(net), []
        optimizer = names.optimizer(adam(net))

        @names.step
        def first(x):
            loss = net(x).square().mean()
            names.backward(net, loss)
            return loss

        found.append(names.losses(first(torch.randn(8, 6))))
        optimizer.step()
        other = names.model(other)
        for_other = names.optimizer(adam(other))

        @names.step
        def second(x):
            loss = (net(x) - other(x)).square().mean()
            names.backward(net, loss)
            return loss

        optimizer.zero_grad(), for_other.zero_grad()
        found.append(names.losses(second(torch.randn(8, 6))))
        found.append([names.gradients(net), names.gradients(other)])
        optimizer.step(), for_other.step()
        return [found, names.weights(net), names.weights(other)]
    result = both(program, block(6, 3), block(6, 3))
""", ranks=(1,))

    def test_a_teacher_without_gradients_and_a_student(self):
        """The teacher is used under no_grad(), or frozen, with batch norm in it; the student is made first."""
        self.assert_bits_of_pytorch("""
    begin()
    def distilled(names, student, teacher):
        for parameter in teacher.parameters():
            parameter.requires_grad_(False)
        teacher.eval()
        student, teacher = names.model(student), names.model(teacher)
        optimizer = names.optimizer(adam(student))

        @names.step
        def train_step(x):
            with torch.no_grad():
                wanted = teacher(x).softmax(1)
            loss = F.kl_div(student(x).log_softmax(1), wanted, reduction="batchmean") + 0.125 * F.mse_loss(teacher(student(x)[:, :1] * x), x[:, :3])
            names.backward(student, loss)
            return loss

        found = []
        for _ in range(3):
            optimizer.zero_grad()
            losses = names.losses(train_step(torch.randn(8, 6)))
            found.append([losses, names.gradients(student)])
            optimizer.step()
        return [found, names.weights(student), names.weights(teacher)]
    result = both(distilled, block(6, 3), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
""")

    def test_a_model_and_its_average(self):
        """The average has the stages of its model, so that each stage updates its own part between steps."""
        self.assert_bits_of_pytorch("""
    begin()
    def averaged(names, net):
        average = copy.deepcopy(net).requires_grad_(False)
        net, average = names.model(net), names.model(average)
        optimizer = names.optimizer(adam(net))

        @names.step
        def train_step(x):
            loss = F.mse_loss(net(x), average(x))
            names.backward(net, loss)
            return loss

        found = []
        own = lambda model: list((model.local_named_parameters if names is Smp else model.named_parameters)())
        for _ in range(3):
            optimizer.zero_grad()
            losses = names.losses(train_step(torch.randn(8, 6)))
            found.append([losses, names.gradients(net)])
            optimizer.step()
            with torch.no_grad():
                for (name, parameter), (other, mean) in zip(own(net), own(average), strict=True):
                    assert name == other
                    mean.mul_(0.75).add_(parameter, alpha=0.25)
        return [found, names.weights(net), names.weights(average)]
    net = block(6, 3)
    result = both(averaged, net)
    assert all(result[0][0][1][1].values())
""")


class Programs(Case):
    _ACTORS = BOTH + """
    begin()
    def made():
        torch.manual_seed(3)
        nets = block(6, 6), block(6, 3)
        models = [smp.DistributedModel(net) for net in nets]
        return models, [smp.DistributedOptimizer(adam(model)) for model in models]

    @smp.step
    def train_step(x, y):
        loss = F.cross_entropy(models[1](torch.relu(models[0](x))), y)
        loss.backward()
        return loss

    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(4)]
    def trained(batches):
        for batch in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            train_step(*batch)
            for optimizer in optimizers:
                optimizer.step()
        return [Smp.weights(model) for model in models]
"""

    def test_states_of_each_are_saved_and_loaded(self):
        for ranks in (1, 2):
            with self.subTest(ranks):
                found, expected = self.ran(ranks, self._ACTORS + """
    models, optimizers = made()
    trained(batches[:2])
    kept = [(model.state_dict(), optimizer.state_dict()) for model, optimizer in zip(models, optimizers)]
    partial = [(model.local_state_dict(), optimizer.local_state_dict()) for model, optimizer in zip(models, optimizers)]
    expected = trained(batches[2:])
    found = []
    for saved in (kept, partial):
        del models, optimizers
        models, optimizers = made()
        for index, (weights_of, states_of) in enumerate(saved):
            models[index].load_state_dict(weights_of)
            optimizers[index].load_state_dict(states_of)
        found.append(trained(batches[2:]))
    result = [found, [expected, expected]]
""")
                self.assertEqual(found, expected)

    def test_one_that_the_program_has_deleted_takes_part_no_longer(self):
        for ranks in (1, 2):
            with self.subTest(ranks):
                found, expected = self.ran(ranks, self._ACTORS + """
    models, optimizers = made()
    trained(batches[:1])
    del models[0], optimizers[0]
    @smp.step
    def train_second(x, y):
        loss = F.cross_entropy(models[0](x), y)
        loss.backward()
        return loss
    net = block(6, 3)
    net.load_state_dict(models[0].state_dict())
    optimizers[0].zero_grad()
    losses = [loss.item() for loss in train_second(*batches[1]).outputs]
    result = [[losses, gradients(models[0])], plain(net, batches[1:], lambda net, x, y: F.cross_entropy(net(x), y))]
""")
                self.assertEqual(found, expected)

    def test_a_step_function_adds_to_gradients_that_were_taken_and_dropped_later(self):
        """As a generator's step does to those of the discriminator; taking them once more is refused."""
        found = self.ran(2, self._ACTORS + """
    models, optimizers = made()
    trained(batches[:1])
    optimizers[0].zero_grad()
    train_step(*batches[1])
    optimizers[0].step()
    refused = [told(lambda: optimizers[1].clip_master_grads(1.0)), told(optimizers[1].step)]
    optimizers[0].zero_grad(), optimizers[1].zero_grad()
    train_step(*batches[2])
    optimizers[1].step()
    result = [refused, told(optimizers[1].step)]
""")
        for text, call in zip(found[0], ("optimizer.clip_master_grads()", "optimizer.step()")):
            self.assertTrue(text.startswith(f"StateError: {call}: gradients of the optimizer.step() before were not dropped"), text)
        self.assertIn("no step function has called backward()", found[1])


class Refused(Case):
    def test_what_is_not_there_yet(self):
        found = self.ran(2, BOTH + """
    begin()
    shared = block(6, 6)
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = shared, nn.Linear(6, 3)
    first = smp.DistributedModel(shared)
    result = [told(lambda: smp.DistributedModel(Outer()))]
    second = smp.DistributedModel(block(6, 3))
    joint = smp.DistributedOptimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    result.append(told(joint.zero_grad))
    other = smp.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    result.append(told(other.step))
    with smp.delay_param_initialization():
        large = nn.Linear(512, 512)
    result.append(told(lambda: smp.DistributedModel(large)))
    del joint
    @smp.step
    def train_step(x):
        loss = second(first(x)).square().mean()
        second.backward(loss)
        return loss
    train_step(torch.randn(8, 6))
    result.append(told(lambda: smp.DistributedModel(block(6, 6))))
    result.append(told(lambda: smp.resume_from_checkpoint("nowhere")))
""")
        expected = ("'inner.0.weight' is a tensor of another one, too", "one optimizer over parameters of 2 models is not there yet", "its parameters are of none of the program's 2 models",
                    "several with smp.delay_param_initialization() are not there yet", "tensors of another one have got their stages", "which of the program's 2 models is meant")
        self.assertEqual(len(found), len(expected))
        for text, part in zip(found, expected):
            self.assertIn(part, text)

    def test_configurations(self):
        for ranks, options, part in ((2, "fp16=True", "`fp16`"), (2, "partitions=1, ddp=True, tensor_parallel_degree=2", "`tensor_parallel_degree` above 1"),
                                     (2, "partitions=1, ddp=True, sharded_data_parallel_degree=2", "`sharded_data_parallel_degree` above 1")):
            with self.subTest(options):
                found = self.ran(ranks, BOTH + f"""
    begin({options})
    first = smp.DistributedModel(block(6, 6))
    result = told(lambda: smp.DistributedModel(block(6, 6)))
""")
                self.assertIn(f"UnsupportedError: smp.DistributedModel: this program has 1 already, and several with {part}", found)


if __name__ == "__main__":
    main()
