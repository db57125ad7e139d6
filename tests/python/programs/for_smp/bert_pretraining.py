"""Pre-training of a small BERT, whose head is tied to its embeddings, over the stages of a model. Knows nothing of
Trireme.

    bert_pretraining.py FOLDER                    trains, saves in FOLDER half-way, and checks what it loads
    bert_pretraining.py FOLDER --resume partial   trains the second half from what is there (or `full`)

The first rank of a pipeline alone has data; the others learn how many batches there are. The configuration is in
SM_HP_MP_PARAMETERS. Rank 0 writes what it saw as FOLDER/report.json.
"""
import argparse
import json
import os

import torch
import transformers

import smdistributed.modelparallel.torch as smp

VOCABULARY, LENGTH, MASK, PADDING, STEPS = 34, 16, 1, 0, 32


def batch_of(number, samples):
    """Sequences of two halves, each of one of two series of tokens; the second half may be of the first one's."""
    generator = torch.Generator().manual_seed(number)
    series, follows = torch.randint(2, (samples,), generator=generator), torch.randint(2, (samples,), generator=generator)
    of_halves = torch.stack([series, torch.where(follows == 0, series, 1 - series)], 1)
    ids = 2 + of_halves.repeat_interleave(LENGTH // 2, 1) * LENGTH + torch.arange(LENGTH)
    attention = torch.ones_like(ids)
    attention[::4, -2:] = 0
    ids = ids.masked_fill(attention == 0, PADDING)
    masked = (torch.rand(ids.shape, generator=generator) < 0.2) & (attention == 1)
    masked[:, 3] = True
    return {"input_ids": ids.masked_fill(masked, MASK), "token_type_ids": torch.arange(2).repeat_interleave(LENGTH // 2).expand(samples, -1).contiguous(),
            "attention_mask": attention, "labels": ids.masked_fill(~masked, -100), "next_sentence_label": follows}


class Batches(torch.utils.data.Dataset):
    """As many as this copy of the model takes; one process with several `copies` joins those of all of them."""

    def __init__(self, first, last, samples, copies):
        self.numbers, self.samples, self.copies = range(first, last), samples, copies

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        of_copies = range(self.copies) if self.copies > 1 else [smp.dp_rank()]
        parts = [batch_of(1000 * copy + self.numbers[index], self.samples) for copy in of_copies]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Nothing:
    """A loader of a later stage: as long, of tensors without elements."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return ({name: torch.empty(0, dtype=torch.long) for name in ("input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label")}
                for _ in range(self.length))


def loader_of(first, last, args):
    if smp.pp_rank() == 0:
        loader = torch.utils.data.DataLoader(Batches(first, last, args.batch, args.copies), batch_size=None)
        if smp.pp_size() > 1:
            smp.broadcast(len(loader), smp.PP_GROUP)
        return loader
    return Nothing(smp.recv_from(0, smp.RankType.PP_RANK))


@smp.step
def train_step(model, scaler, batch, amp):
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        found = model(**batch)
    model.backward(scaler.scale(found.loss) if amp else found.loss)
    return found.loss


@smp.step
def test_step(model, batch):
    found = model(**batch)
    labels = batch["labels"]
    masked = labels != -100
    right = (found.prediction_logits.argmax(-1) == labels) & masked
    return {"loss": found.loss, "right": right.sum(), "of": masked.sum().item()}


def build(dropout):
    config = transformers.BertConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, max_position_embeddings=LENGTH,
                                     hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, pad_token_id=PADDING, initializer_range=0.1)
    return transformers.BertForPreTraining(config)


def groups_of(model):
    named = list(model.named_parameters())
    decays = lambda name: not name.endswith("bias") and "LayerNorm" not in name
    return [{"params": [p for n, p in named if decays(n)], "weight_decay": 0.01}, {"params": [p for n, p in named if not decays(n)], "weight_decay": 0.0}]


def train(args, model, optimizer, scheduler, scaler, first, last):
    model.train()
    losses = []
    for batch in loader_of(first, last, args):
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, scaler, batch, args.amp).reduce_mean()
        if args.amp:
            scaler.unscale_(optimizer)
        norm = optimizer.clip_master_grads(1.0)
        assert smp.allgather(float(norm), smp.WORLD) == [float(norm)] * smp.size()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        scheduler.step()
        assert smp.allgather(loss.item(), smp.PP_GROUP) == [loss.item()] * smp.pp_size()
        losses.append(torch.stack(smp.allgather(loss, smp.DP_GROUP)).mean().item())
    return losses


def test(args, model):
    model.eval()
    right, of = 0, 0
    with torch.no_grad():
        for batch in loader_of(500, 504, args):
            found = test_step(model, batch)
            right, of = right + found["right"].reduce_sum().item(), of + sum(found["of"])
    return right / of


def parts_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.local_state_dict().items() if isinstance(tensor, torch.Tensor)}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def save(folder, *objects):
    """By objects' names: of the model and its optimizer this stage's part, and all of it."""
    if smp.dp_rank() == 0:
        others = {name: one.state_dict() for name, one in zip(("scheduler", "scaler"), objects[2:])}
        smp.save({"model": objects[0].local_state_dict(), "optimizer": objects[1].local_state_dict(), **others}, os.path.join(folder, "partial.pt"))
        whole = objects[0].state_dict(gather_to_rank0=True), objects[1].state_dict()
        if smp.rank() == 0:
            smp.save({"model": whole[0], "optimizer": whole[1], **others}, os.path.join(folder, "full.pt"), partial=False)
    smp.barrier()


def load(folder, kind, *objects):
    found = smp.load(os.path.join(folder, kind + ".pt"), partial=kind == "partial")
    for name, one in zip(("model", "optimizer", "scheduler", "scaler"), objects):
        one.load_state_dict(found[name])


def check_files(args, model, *others):
    expected = parts_of(model)
    for kind in ("full", "partial"):
        with torch.no_grad():
            for tensor in model.local_parameters():
                tensor.fill_(0.25)
        assert not same(parts_of(model), expected)
        load(args.folder, kind, model, *others)
        assert same(parts_of(model), expected), kind
    if smp.rank() == 0:
        plain = build(args.dropout)
        plain.load_state_dict(torch.load(os.path.join(args.folder, "full.pt"))["model"])
        assert plain.cls.predictions.decoder.weight is plain.bert.embeddings.word_embeddings.weight
        own = dict(plain.state_dict())
        assert all(torch.equal(own[name], tensor) for name, tensor in expected.items()), "the whole lacks what a stage has"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--resume", choices=("partial", "full"))
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.05)
    args = parser.parse_args()

    smp.init()
    torch.manual_seed(11)
    model = smp.DistributedModel(build(args.dropout))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model.get_module()), lr=6e-3))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8) * (1 - step / (2 * STEPS)))
    scaler = smp.amp.GradScaler(init_scale=1024.0, growth_interval=8, enabled=args.amp)
    objects = model, optimizer, scheduler, scaler

    report = {"losses": []}
    if args.resume:
        load(args.folder, args.resume, *objects)
    else:
        report["losses"].append(train(args, *objects, 0, STEPS // 2))
        save(args.folder, *objects)
        check_files(args, *objects)
    report["losses"].append(train(args, *objects, STEPS // 2, STEPS))
    report["accuracy"] = test(args, model)
    report["scale"] = scaler.get_scale()

    of_stages = smp.allgather(sum(parameter.numel() for parameter in model.local_parameters()), smp.PP_GROUP)
    assert sum(of_stages) == sum(parameter.numel() for parameter in model.get_module().parameters()) and min(of_stages) > 0, of_stages
    every = [loss for losses in report["losses"] for loss in losses]
    assert sum(every[-4:]) < (0.9 if args.resume else 0.6) * sum(every[:4]), every
    assert report["accuracy"] > 0.6, report["accuracy"]
    assert smp.allgather(report["accuracy"], smp.PP_GROUP) == [report["accuracy"]] * smp.pp_size()
    whole = model.state_dict()
    report["elements"], report["weights"] = of_stages, {name: tensor.double().sum().item() for name, tensor in whole.items()}
    if smp.rank() == 0:
        with open(os.path.join(args.folder, "report.json"), "w", encoding="utf-8") as file:
            json.dump(report, file)
    smp.barrier()


if __name__ == "__main__":
    main()
