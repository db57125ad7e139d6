"""A loader of the engine's over a dataset of dictionaries, with a function that makes batches of samples of different
lengths."""
import argparse

import deepspeed
import torch
from deepspeed.utils import RepeatingLoader
from torch import nn

from reporting import report


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(15)
        lengths = torch.randint(3, 9, (count,), generator=generator)
        self.samples = [{"input_ids": torch.randint(1, 30, (int(length),), generator=generator)} for length in lengths]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def collate(samples):
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "labels": (ids.sum(1) % 2)}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, batch_first=True)
        self.out = nn.Linear(16, 2)

    def forward(self, input_ids, labels):
        _, (hidden, _) = self.lstm(self.embedding(input_ids))
        return nn.functional.cross_entropy(self.out(hidden[-1]), labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(16)
    model = Classifier()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}})
    loader = engine.deepspeed_io(Sentences(40), collate_fn=collate)
    batches = iter(RepeatingLoader(loader))
    losses = []
    for _ in range(12):
        batch = next(batches)
        loss = engine(input_ids=batch["input_ids"], labels=batch["labels"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report(losses=losses, lengths=[len(loader)])


if __name__ == "__main__":
    main()
