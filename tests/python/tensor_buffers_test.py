"""Buffers of a model whose layers are cut: running statistics of channels that ranks share, and slices that a program
keeps. Evaluations and buffers are compared with plain PyTorch."""
import unittest

from harness import Case, main

_BEGIN = """
import torch, deepspeed
from torch import nn
deepspeed.init_distributed()
torch.set_num_threads(1)


def engine_of(model, up, down, lr=0.1):
    layers = [{"patterns": [up + "(weight|bias)"], "partition_type": "column"}, {"patterns": [down + "weight"], "partition_type": "row"}]
    return deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": lr}}, "gradient_clipping": 0.0,
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": layers}}})[0]


def batch(step):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step)) + 1
"""


class TensorBuffers(Case):
    def test_running_statistics_of_channels_that_are_cut(self):
        program = _BEGIN + """
for norm in (lambda: nn.BatchNorm1d(4), lambda: nn.BatchNorm1d(4, momentum=None, affine=False), lambda: nn.InstanceNorm1d(4, track_running_stats=True)):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 4), norm(), nn.Linear(4, 8))
    own, plain = make(), make()
    is_instance = isinstance(plain[1], nn.InstanceNorm1d)
    def loss_of(call, model, x):
        if is_instance:  # channels before the length
            return model[2](model[1](model[0](x).view(2, 4, 4).mT).mT).square().mean()
        return call(x).square().mean()
    engine, optimizer = engine_of(own, "0[.]", "2[.]"), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        loss, expected = loss_of(engine, own, batch(step)), loss_of(plain, plain, batch(step))
        assert abs(loss - expected) < 1e-5, (step, loss, expected)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for name in ("running_mean", "running_var"):
        found, wanted = getattr(own[1], name), getattr(plain[1], name)
        assert torch.allclose(found, wanted, atol=1e-5), (name, found, wanted)
    own.eval(), plain.eval()
    with torch.no_grad():
        assert abs(loss_of(engine, own, batch(9)) - loss_of(plain, plain, batch(9))) < 1e-5
    engine.destroy()
result = "compared"
"""
        self.assertEqual(self.on_ranks(2, program, as_deepspeed=True), "compared")

    def test_a_slice_in_a_buffer_is_refused_by_name(self):
        program = _BEGIN + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        h = self.up(x)
        self.average = (0.9 * self.average + 0.1 * h.mean(0)).detach()
        return self.down(h - self.average)


own = Net()
engine = engine_of(own, "up.", "down.")
engine.backward(engine(batch(0)).square().mean())
before = own.down.bias.detach().clone()
try:
    engine.step()
    result = "took it"
except Exception as error:
    result = str(error)
assert torch.equal(own.down.bias, before)
"""
        self.assertIn("buffer 'average' [4] is a part of a tensor that is cut over ranks", self.on_ranks(2, program, as_deepspeed=True))


if __name__ == "__main__":
    main()
