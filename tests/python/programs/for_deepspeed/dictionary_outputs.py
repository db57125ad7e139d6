"""A model of several inputs by name that returns a dataclass of losses and a dictionary of features."""
import argparse
import dataclasses

import deepspeed
import torch
from torch import nn

from reporting import report


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    parts: dict
    hidden: tuple = ()


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(10, 8), nn.Linear(14, 8)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, text, image=None, *, labels, return_hidden=False):
        text, image = nn.functional.normalize(self.text(text)), nn.functional.normalize(self.image(image))
        logits = text @ image.t() * self.temperature.exp()
        parts = {"text": nn.functional.cross_entropy(logits, labels), "image": nn.functional.cross_entropy(logits.t(), labels)}
        return Output(sum(parts.values()) / 2, parts, (text, image) if return_hidden else ())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(22)
    model = TwoTowers()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 5, "gradient_clipping": 1.0, "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.03, "torch_adam": True}}})
    losses, parts = [], []
    generator = torch.Generator().manual_seed(220 + engine.global_rank)
    for step in range(8):
        text = torch.randn(5, 10, generator=generator)
        output = engine(text, image=text.repeat(1, 2)[:, :14], labels=torch.arange(5), return_hidden=step % 2 == 0)
        engine.backward(output.loss + 0.01 * sum(hidden.pow(2).mean() for hidden in output.hidden))
        engine.step()
        losses.append(output.loss.item())
        parts += [part.item() for part in output.parts.values()]
    report(losses=losses, parts=parts)


if __name__ == "__main__":
    main()
