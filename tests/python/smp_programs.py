"""Programs under smp's names, which tests run on one process and on several: models, their steps, and what they give
bit by bit."""
import harness

PRELUDE = """
    import contextlib, hashlib, json, os, torch
    from torch import nn
    import torch.nn.functional as F
    import trireme.smp as smp
    from trireme.utils import safe_get_full_grad
    from trireme.errors import *

    MICRO_BATCHES = 4

    def begin(**options):
        size = int(os.environ.get("WORLD_SIZE", 1))
        smp.init({"partitions": size, "microbatches": MICRO_BATCHES, **options})
        torch.manual_seed(5)

    def told(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def bits(tensor):
        return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16] if tensor is not None else None

    def of_all(own):
        '''{name: value} of all ranks.'''
        found = {}
        for text in smp.state.world.gather(json.dumps(own)):
            found.update(json.loads(text))
        return dict(sorted(found.items()))

    def gradient_of(parameter):
        try:
            return safe_get_full_grad(parameter)
        except StateError:  # none of this stage has one
            return None

    def gradients(model):
        return of_all({name: bits(gradient_of(parameter)) for name, parameter in model.local_named_parameters() if parameter.requires_grad})

    def weights(model):
        return of_all({name: bits(tensor) for named in (model.local_named_parameters(), model.local_named_buffers()) for name, tensor in named})

    def stepping(model):
        '''A step function whose loss is what the model gives.'''
        @smp.step
        def train_step(*batch):
            loss = model(*batch)
            model.backward(loss)
            return loss
        return train_step

    def trained(net, batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.125), steps=2, loss_of=None):
        '''[[losses, gradients] of each step, weights, the order of passes, stages with parameters]'''
        loss_of = loss_of or (lambda model, *batch: model(*batch))
        model = trained.model = smp.DistributedModel(net)  # for who looks at it later
        stepper = smp.DistributedOptimizer(optimizer(model.parameters()))

        @smp.step
        def train_step(*batch):
            loss = loss_of(model, *batch)
            model.backward(loss)
            return loss

        found = []
        for batch in batches[:steps]:
            stepper.zero_grad()
            losses = train_step(*batch)
            found.append([[loss.item() for loss in losses.outputs], gradients(model)])
            stepper.step()
        engine = model.engine("")
        used = sorted({engine.homes[name] for name, parameter in net.named_parameters()})
        return [found, weights(model), engine.core.pipeline, used]

    def plain(net, batches, loss_of=None):
        '''[losses, gradients] of plain PyTorch, of the first step.'''
        loss_of = loss_of or (lambda model, *batch: model(*batch))
        losses = []
        for index in range(MICRO_BATCHES):
            loss = loss_of(net, *(tensor.chunk(MICRO_BATCHES)[index] for tensor in batches[0]))
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        return [losses, dict(sorted((name, bits(parameter.grad)) for name, parameter in net.named_parameters()))]

    class Mlp(nn.Module):
        def __init__(self, dropout=0.0):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        def forward(self, x, y):
            return F.cross_entropy(self.layers(x), y)

    def mlp_batches(count=2):
        return [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(count)]

    class Cnn(nn.Module):
        def __init__(self, dropout=0.0):
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.conv2, self.norm2 = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
            self.dropout = nn.Dropout(dropout)
            self.fc1, self.fc2 = nn.Linear(8 * 16, 16), nn.Linear(16, 10)
        def forward(self, x, y):
            x = F.relu(self.norm1(self.conv1(x)))
            x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
            x = self.dropout(torch.flatten(x, 1))
            return F.cross_entropy(self.fc2(F.relu(self.fc1(x))), y)

    def cnn_batches(count=2):
        return [(torch.randn(8, 1, 12, 12), torch.randint(10, (8,))) for _ in range(count)]

    def gpt2(tied, dropout=0.0):
        import transformers
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
                                         tie_word_embeddings=tied)
        return transformers.GPT2LMHeadModel(config)

    def ids_batches(count=2):
        return [(torch.randint(64, (8, 12)),) for _ in range(count)]

    def causal_loss(model, ids):
        return model(input_ids=ids, labels=ids).loss
"""

# Beside PRELUDE, for what is compared with mathematics written out: by_hand() and by_smp() give [losses, gradients,
# weights] of each step, as numbers.
VALUES = """
    import copy, math

    def by_hand(net, batches, update, loss_of):
        found, states = [], [{} for _ in net.parameters()]
        for step, batch in enumerate(batches, 1):
            net.zero_grad()
            losses = []
            for index in range(MICRO_BATCHES):
                loss = loss_of(net, *(tensor.chunk(MICRO_BATCHES)[index] for tensor in batch))
                (loss / MICRO_BATCHES).backward()
                losses.append(loss.item())
            parameters = list(net.parameters())
            gradients = [p.grad.double() for p in parameters]
            for p, new in zip(parameters, update([p.detach().double() for p in parameters], gradients, states, step)):
                p.data.copy_(new)
            found.append([losses, {name: p.grad.flatten().tolist() for name, p in net.named_parameters()}, {name: p.flatten().tolist() for name, p in net.named_parameters()}])
        return found

    def by_smp(net, batches, make, loss_of, model=None, optimizer=None):
        model = by_smp.model = model or smp.DistributedModel(net)
        optimizer = by_smp.optimizer = optimizer or smp.DistributedOptimizer(make(net))
        @smp.step
        def train_step(*batch):
            loss = loss_of(model, *batch)
            model.backward(loss)
            return loss
        found = []
        for batch in batches:
            optimizer.zero_grad()
            losses = [loss.item() for loss in train_step(*batch).outputs]
            gradients = of_all({name: gradient_of(p).flatten().tolist() for name, p in model.local_named_parameters()})
            optimizer.step()
            found.append([losses, gradients, of_all({name: p.flatten().tolist() for name, p in model.local_named_parameters()})])
        return found

    def forget():
        by_smp.model.cpu()
        by_smp.model = by_smp.optimizer = None

    def furthest(found, expected):
        '''The greatest difference, over the greatest of its tensor, or 0.01.'''
        def of(one, other):
            return (torch.tensor(one) - torch.tensor(other)).abs().max().item() / max(torch.tensor(other).abs().max().item(), 0.01)
        differences = []
        for now, then in zip(found, expected, strict=True):
            differences.append(of(now[0], then[0]))
            for values, others in zip(now[1:], then[1:]):
                assert set(values) == set(others), (sorted(values), sorted(others))
                differences += [of(values[name], others[name]) for name in others]
        return torch.tensor(differences).max().item()  # not-a-number is the greatest
"""


class Case(harness.Case):
    def ran(self, ranks, text, **options):
        """The `result` on rank 0 of a program that begins with PRELUDE."""
        return self.on_ranks(ranks, PRELUDE + text, **options)

    def skip_where_mkl_rounds_otherwise(self):
        """Skips where MKL's functions are not correctly rounded, as on processors of another maker than its own: there
        PyTorch's own numbers have other last bits than IEEE's, and depend on where a tensor lies in memory."""
        if not self.ran(1, """
    x = torch.linspace(0.1, 9, 999)
    result = torch.equal(x.sqrt(), x.double().sqrt().float())
"""):
            self.skipTest("torch.sqrt() is not correctly rounded on this processor")

    def assert_bits_of_one_process(self, text, stages=2):
        """`text` leaves trained() in `result`: on several stages it has the bits of one process. Returns it of
        several."""
        alone, found = self.ran(1, text), self.ran(stages, text)
        self.assertEqual(found[0], alone[0])
        self.assertEqual(found[1], alone[1])
        self.assertTrue(all(found[0][0][1].values()))
        return found
