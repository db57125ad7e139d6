"""Random programs of smp's step functions: which layers a program uses, on which stages, and what it does between."""

PROGRAMS = """
    import gc, random

    WIDTH = 6

    class Random(nn.Module):
        '''A program by a seed: steps over a pool of activations [samples, WIDTH]. Layers may come again, and read values.'''
        def __init__(self, seed):
            super().__init__()
            draw = random.Random(seed)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(draw.randint(3, 6))])
            self.norm = self._NORM(WIDTH)
            self.register_buffer("kept", torch.zeros(WIDTH))
            self.steps = [(draw.choice(self._KINDS), draw.randrange(len(self.layers)), draw.random(), draw.random()) for _ in range(draw.randint(5, 12))]
            # A branch to another stage now and then is refused beside statistics, and where values of inputs decide.
            self.may_branch = not {"norm", "buffer"} & {kind for kind, *_ in self.steps}
        _NORM = nn.BatchNorm1d
        _KINDS = ("layer", "layer", "layer", "layer", "functional", "add", "mul", "cat", "dropout", "item", "mask", "write", "buffer", "norm", "detach", "view", "hook", "index")
        def forward(self, x):
            pool = [x]
            for kind, which, one, other in self.steps:
                a, b, layer = pool[-1 - int(one * min(3, len(pool)))], pool[int(other * len(pool))], self.layers[which]
                if kind == "layer": y = torch.tanh(layer(a))
                elif kind == "functional": y = F.linear(a, layer.weight.t() * 0.5 + self.layers[0].weight, layer.bias)
                elif kind == "add": y = a + 0.5 * b
                elif kind == "mul": y = a * torch.sigmoid(b)
                elif kind == "cat": y = torch.cat([a[:, :WIDTH // 2], b[:, WIDTH // 2:]], 1)
                elif kind == "dropout": y = F.dropout(a, 0.3, self.training)
                elif kind == "item":
                    y = a * 1.5 if a.mean().item() > float(b.detach().mean()) else layer(a) if (self.may_branch and a.requires_grad and b.requires_grad) or smp.state.cfg.pipeline == "sequential" else a * 0.5
                elif kind == "mask": y = torch.where(a > b, a, b * 0.5)
                elif kind == "write":
                    y = a * 1.0
                    y[:, 1] += b[:, 2]
                    y.mul_(0.9)
                elif kind == "buffer":
                    with torch.no_grad():
                        self.kept.mul_(0.5).add_(a.detach().mean(0))
                    y = a - self.kept
                elif kind == "norm": y = self.norm(a)
                elif kind == "detach": y = a + b.detach()
                elif kind == "view": y = a.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH)
                elif kind == "hook":
                    y = a * 1.1
                    if y.requires_grad: y.register_hook(lambda gradient: gradient * 0.7)
                # Kinds of those alone who name them
                elif kind == "write all": y = (a * 1.0).mul_(0.9).add_(b)
                elif kind == "copy": y = torch.tanh(a.view(-1, 2, WIDTH // 2).transpose(1, 2)).contiguous().view(-1, WIDTH)
                elif kind == "compare": y = a * 1.5 if a.mean().item() > float(b.detach().mean()) + 1e-3 else a * 0.5
                elif kind == "softmax": y = torch.softmax(a, -1) * a.size(-1)
                elif kind == "slice": y = a[:, 2:2 + WIDTH // 2].repeat(1, 2)
                elif kind == "region": y = torch.utils.checkpoint.checkpoint(lambda t, u, layer=layer: torch.tanh(layer(t)) + u, a, b, use_reentrant=False)
                else:
                    rows = (a.detach()[:, 0] > 0).nonzero()[:, 0]
                    y = b.index_add(0, rows, layer(a[rows]))
                pool.append(y)
            return sum(tensor.square().mean() for tensor in pool[-3:]) + self.layers[0](pool[-1]).mean()

    def program(seed):
        '''[[losses, gradients] of two steps, weights and buffers], or the text of a refusal.'''
        torch.manual_seed(seed)
        net, draw = Random(seed), random.Random(seed + 1)
        if not smp.state.cfg.auto_partition:
            for module in (*net.layers, net.norm):
                smp.set_partition(module, draw.randrange(smp.pp_size()))
        batches = [(torch.randn(8, WIDTH),) for _ in range(2)]
        try:
            return trained(net, batches, lambda parameters: torch.optim.SGD(parameters, lr=0.05))[:2]
        finally:
            trained.model = None
            gc.collect()
"""
