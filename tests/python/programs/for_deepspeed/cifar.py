"""A small convolutional network on pictures with ten classes; the data loader is the one that initialize() returns."""
import argparse

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

from reporting import report


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def pictures(count):
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.randn(count, 3, 32, 32, generator=generator) * 0.5 + (labels.view(-1, 1, 1, 1) - 4.5) / 5
    return torch.utils.data.TensorDataset(images, labels)


def main():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=2, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    args = deepspeed.add_config_arguments(parser).parse_args()
    ds_config = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": args.stage, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
                              "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False},
    }
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters, training_data=pictures(96),
                                                           config=ds_config)
    local_device = deepspeed.get_accelerator().device_name(model_engine.local_rank)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(args.epochs):
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            loss = criterion(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    report(losses=losses, rates=model_engine.get_lr(), steps=[model_engine.global_steps])


if __name__ == "__main__":
    main()
