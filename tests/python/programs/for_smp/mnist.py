"""Digits by a convolutional network over the stages of a model. Knows nothing of Trireme.

    mnist.py FOLDER                    trains two epochs, saves after the first in FOLDER, and checks what it loads
    mnist.py FOLDER --resume partial   trains the second epoch from what is there (or `full`)

The configuration is in SM_HP_MP_PARAMETERS. Rank 0 writes what it saw as FOLDER/report.json.
"""
import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

SIZE, CLASSES = 12, 10


class Digits(torch.utils.data.Dataset):
    """Noisy copies of one image for each digit."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(CLASSES, 1, SIZE, SIZE, generator=generator)
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(CLASSES, (count,), generator=generator)
        self.images = images[self.targets] + 0.7 * torch.randn(count, 1, SIZE, SIZE, generator=generator)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return torch.flatten(F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2), 1)


class Classifier(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout1, self.dropout2 = nn.Dropout(dropout / 2), nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(16 * 16, 32), nn.Linear(32, CLASSES)

    def forward(self, x):
        x = self.dropout2(F.relu(self.fc1(self.dropout1(x))))
        return F.log_softmax(self.fc2(x), 1)


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.features, self.classifier = Features(), Classifier(dropout)

    def forward(self, x):
        return self.classifier(self.features(x))


def autocast(amp):
    return torch.autocast("cpu", torch.bfloat16, enabled=amp)


@smp.step
def train_step(model, scaler, data, target, amp):
    with autocast(amp):
        output = model(data)
    loss = F.nll_loss(output.float(), target, reduction="mean")
    model.backward(scaler.scale(loss) if amp else loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    predicted = output.argmax(dim=1, keepdim=True)
    return loss, predicted.eq(target.view_as(predicted)).sum().item()


def epoch_of(dataset, epoch, batch, copies):
    """The batches of this rank's copy of the model; one process with several `copies` joins those of all of them."""
    mine = range(copies) if copies > 1 else [smp.dp_rank()]
    loaders = []
    for copy in mine:
        sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=max(copies, smp.dp_size()), rank=copy, seed=7, drop_last=True)
        sampler.set_epoch(epoch)
        loaders.append(torch.utils.data.DataLoader(dataset, batch_size=batch, sampler=sampler, drop_last=True))
    for parts in zip(*loaders):
        yield tuple(torch.cat(tensors) for tensors in zip(*parts))


def train(args, model, scaler, optimizer, dataset, epoch):
    model.train()
    losses = []
    for data, target in epoch_of(dataset, epoch, args.batch, args.copies):
        optimizer.zero_grad()
        _, loss_of_parts = train_step(model, scaler, data, target, args.amp)
        loss = loss_of_parts.reduce_mean()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        of_stages = smp.allgather(loss.item(), smp.PP_GROUP)
        assert of_stages == [loss.item()] * smp.pp_size(), of_stages
        of_copies = smp.allgather(loss.item(), smp.DP_GROUP)
        losses.append(sum(of_copies) / len(of_copies))
    return losses


def test(model, dataset):
    """(mean loss, share of right ones); test_step() gives lists with a number for each micro-batch."""
    model.eval()
    loss, correct, parts = 0.0, 0, smp.state.cfg.microbatches
    with torch.no_grad():
        for data, target in torch.utils.data.DataLoader(dataset, batch_size=40):
            losses, corrects = test_step(model, data, target)
            assert isinstance(losses, list) and len(losses) == len(corrects) == parts
            loss, correct = loss + sum(losses), correct + sum(corrects)
    return loss / len(dataset), correct / len(dataset)


def parts_of(model):
    """{name: tensor} of this stage, as they are now."""
    return {name: tensor.detach().clone() for name, tensor in model.local_state_dict().items() if isinstance(tensor, torch.Tensor)}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def save(folder, model, optimizer, scheduler, scaler):
    if smp.dp_rank() == 0:
        smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()},
                 os.path.join(folder, "partial.pt"), partial=True)
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
        if smp.rank() == 0:
            smp.save(whole, os.path.join(folder, "full.pt"), partial=False)
    smp.barrier()


def load(folder, kind, model, optimizer, scheduler, scaler):
    found = smp.load(os.path.join(folder, kind + ".pt"), partial=kind == "partial")
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["scheduler"])
    scaler.load_state_dict(found["scaler"])


def check_local(model, partitioned):
    assert partitioned == [True], partitioned
    own = sum(parameter.numel() for parameter in model.local_parameters())
    assert own > 0
    of_stages = smp.allgather(own, smp.PP_GROUP)
    assert sum(of_stages) == sum(parameter.numel() for parameter in model.get_module().parameters()), of_stages
    assert sum(len(names) for names in smp.allgather([name for name, _ in model.local_named_parameters()], smp.PP_GROUP)) == 12
    return of_stages


def check_files(args, model, optimizer, scheduler, scaler, dataset):
    """Saved tensors come back into the model, and into a plain one of one process."""
    expected = parts_of(model)
    for kind in ("partial", "full"):
        with torch.no_grad():
            for tensor in model.local_parameters():
                tensor.zero_()
        assert not same(parts_of(model), expected)
        load(args.folder, kind, model, optimizer, scheduler, scaler)
        assert same(parts_of(model), expected), kind
    if smp.rank() == 0:
        plain = Net(args.dropout)
        plain.load_state_dict(torch.load(os.path.join(args.folder, "full.pt"))["model"])
        plain.eval()
        with torch.no_grad():
            return (plain(dataset.images).argmax(1) == dataset.targets).float().mean().item()
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--resume", choices=("partial", "full"))
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.2)
    args = parser.parse_args()

    smp.init()
    torch.manual_seed(3)
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = Net(args.dropout).to(device)
    model = smp.DistributedModel(model, trace_device="cpu")
    optimizer = torch.optim.Adadelta(model.parameters(), lr=2.0)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    scaler = smp.amp.GradScaler(init_scale=256.0, enabled=args.amp)
    partitioned = []
    model.register_post_partition_hook(lambda model, optimizer: partitioned.append(model.partitioned))
    if smp.pp_size() == 1:
        partitioned.append(True)

    dataset, held_out = Digits(480, 1), Digits(200, 2)
    report = {"losses": [], "accuracies": []}
    if args.resume:
        load(args.folder, args.resume, model, optimizer, scheduler, scaler)
    for epoch in range(1 if args.resume else 0, 2):
        report["losses"].append(train(args, model, scaler, optimizer, dataset, epoch))
        report["elements"] = check_local(model, partitioned)
        scheduler.step()
        loss, accuracy = test(model, held_out)
        assert smp.allgather((loss, accuracy), smp.PP_GROUP) == [(loss, accuracy)] * smp.pp_size()
        report["accuracies"].append(accuracy)
        if epoch == 0:
            save(args.folder, model, optimizer, scheduler, scaler)
            alone = check_files(args, model, optimizer, scheduler, scaler, held_out)
            assert alone is None or abs(alone - accuracy) < 0.011, (alone, accuracy)
    assert abs(optimizer.param_groups[0]["lr"] - 2.0 * 0.49) < 1e-9
    every = [loss for losses in report["losses"] for loss in losses]
    assert every[-1] < (0.7 if args.resume else 0.3) * every[0], every
    assert report["accuracies"][-1] > 0.9, report["accuracies"]
    whole = model.state_dict()
    report["weights"] = {name: tensor.double().sum().item() for name, tensor in whole.items()}
    if smp.rank() == 0:
        with open(os.path.join(args.folder, "report.json"), "w", encoding="utf-8") as file:
            json.dump(report, file)
    smp.barrier()


if __name__ == "__main__":
    main()
