"""Programs of several models under smp's names, which are written once and run as plain PyTorch's, too."""
from smp_programs import Case

# Programs are written once. With Plain in the place of smp's names they are those of plain PyTorch, which adds up
# micro-batches.
BOTH = """
    import copy

    class Plain:
        '''The names of a program, of plain PyTorch.'''
        parameters = []
        @staticmethod
        def model(net):
            Plain.parameters += net.parameters()
            return net
        @staticmethod
        def optimizer(optimizer):
            return optimizer
        @staticmethod
        def backward(model, loss):
            (loss / MICRO_BATCHES).backward()
        @staticmethod
        def step(function):
            '''On the samples of all data-parallel ranks, whose gradients are averaged.'''
            def run(*batch):
                copies, found, sums = smp.dp_size(), [], []
                for index in range(copies):
                    before = [p.grad for p in Plain.parameters]
                    for p in Plain.parameters:
                        p.grad = None
                    own = [tensor.chunk(copies)[index] for tensor in batch]
                    found.append([function(*(tensor.chunk(MICRO_BATCHES)[index] for tensor in own)) for index in range(MICRO_BATCHES)])
                    for p, grad in zip(Plain.parameters, before):
                        p.grad = grad if p.grad is None else p.grad / copies if grad is None else grad + p.grad / copies
                return found[smp.dp_rank()]
            return run
        @staticmethod
        def losses(found):
            return [loss.item() for loss in found]
        @staticmethod
        def gradients(model):
            return {name: bits(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        @staticmethod
        def weights(model):
            return {name: bits(tensor) for name, tensor in model.state_dict().items()}

    class Smp:
        model, optimizer = smp.DistributedModel, smp.DistributedOptimizer
        @staticmethod
        def step(function):
            inner = smp.step(function)
            return lambda *batch: inner(*(tensor.chunk(smp.dp_size())[smp.dp_rank()] for tensor in batch))
        @staticmethod
        def backward(model, loss):
            model.backward(loss)
        @staticmethod
        def losses(found):
            return [loss.item() for loss in found.outputs]
        @staticmethod
        def gradients(model):
            return {name: value for name, value in gradients(model).items() if value is not None}
        @staticmethod
        def weights(model):
            return {name: bits(tensor) for name, tensor in model.state_dict().items()}

    def block(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))

    def adam(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def both(program, *nets):
        '''What `program` gives of smp and of plain PyTorch, with the same nets.'''
        kept = [copy.deepcopy(net) for net in nets]
        state = torch.get_rng_state()
        expected = program(Plain, *kept)
        torch.set_rng_state(state)
        return [program(Smp, *nets), expected]
"""

GAN = """
    def gan(names, g, d):
        g, d = names.model(g), names.model(d)
        for_g, for_d = names.optimizer(adam(g)), names.optimizer(adam(d))
        ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)

        @names.step
        def train_d(real, noise, one, zero):
            with torch.no_grad():
                fake = g(noise)
            loss = F.binary_cross_entropy_with_logits(d(real), one) + F.binary_cross_entropy_with_logits(d(fake), zero)
            names.backward(d, loss)
            return loss

        @names.step
        def train_g(noise, one):
            loss = F.binary_cross_entropy_with_logits(d(g(noise)), one)
            names.backward(g, loss)
            return loss

        found = []
        for _ in range(3):
            real, noise = torch.randn(8, 6), torch.randn(8, 4)
            for_d.zero_grad()
            losses = names.losses(train_d(real, noise, ones, zeros))
            found.append([losses, names.gradients(d)])
            for_d.step()
            for_g.zero_grad()
            losses = names.losses(train_g(noise, ones))
            found.append([losses, names.gradients(g)])
            for_g.step()
        return [found, names.weights(g), names.weights(d)]
"""


JOINT = """
    def joint(names, first, second):
        first, second = names.model(first), names.model(second)
        for_first, for_second = names.optimizer(adam(first)), names.optimizer(torch.optim.SGD(second.parameters(), lr=0.125, momentum=0.5))

        @names.step
        def train_both(x, y):
            loss = F.cross_entropy(second(torch.relu(first(x))), y)
            names.backward(second, loss)
            return loss

        @names.step
        def train_first(x, y):
            loss = F.mse_loss(first(x), x)
            names.backward(first, loss)
            return loss

        found = []
        for step in (train_both, train_first, train_both, train_both):
            for_first.zero_grad(), for_second.zero_grad()
            losses = names.losses(step(torch.randn(8, 6), torch.randint(3, (8,))))
            found.append([losses, names.gradients(first), names.gradients(second)])
            for_first.step()
            if step is train_both:
                for_second.step()
        return [found, names.weights(first), names.weights(second)]
"""


class SeveralCase(Case):
    def assert_bits_of_pytorch(self, text, ranks=(1, 2)):
        """`text` leaves both() in `result`."""
        for size in ranks:
            with self.subTest(size):
                found, expected = self.ran(size, BOTH + text)
                self.assertEqual(found, expected)
