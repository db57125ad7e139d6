"""An FSDP1 program as people write it. Arguments: a file for its outcome, and the name of a strategy. Prints whose FSDP
it had."""
import contextlib
import copy
import functools
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import functional as F
from train import Block, Decoder


def micro_batches(step):
    everybodys = torch.randint(31, (8, 9), generator=torch.Generator().manual_seed(step))
    return everybodys.chunk(dist.get_world_size())[dist.get_rank()].chunk(2)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten()) / 2


def wrapped(strategy, precision):
    torch.manual_seed(0)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FSDP(Decoder(), auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu"), use_orig_params=True,
                mixed_precision=precision)


def optimizer_of(model):
    decayed = [p for name, p in model.named_parameters() if "norm" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)


def train(model, optimizer, steps):
    losses, norms = [], []
    for step in steps:
        first, second = micro_batches(step)
        # PyTorch's FSDP1 adds up in bf16 what it does not reduce.
        with contextlib.nullcontext() if "bf16" in sys.argv else model.no_sync():
            loss = loss_of(model, first)
            loss.backward()
        last = loss_of(model, second)
        last.backward()
        total = (loss + last).detach()
        # the last digit of a factor would flip digits of bf16
        norms.append(float(model.clip_grad_norm_(50 if "bf16" in sys.argv else 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses, norms


def main():
    path, strategy = sys.argv[1:3]
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16) if "bf16" in sys.argv[3:] else None
    dist.init_process_group("gloo")
    model = wrapped(strategy, precision)
    assert isinstance(model, FSDP) and isinstance(model.module, Decoder) and len(FSDP.fsdp_modules(model)) == 4
    optimizer = optimizer_of(model)
    losses, norms = train(model, optimizer, range(3))
    # PyTorch's own ends by SIGSEGV on a host with offload_to_cpu.
    whole = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
        state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    assert bool(state) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        torch.save(state, path + ".state")
    dist.barrier()
    again = wrapped(strategy, precision)
    other = optimizer_of(again)
    with FSDP.state_dict_type(again, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), whole[1]):
        again.load_state_dict(torch.load(path + ".state"))
        other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, copy.deepcopy(states) if dist.get_rank() == 0 else None))
    more, others = train(again, other, range(3, 6))
    kept = {}
    if precision is None:
        with FSDP.summon_full_params(again, writeback=False):
            kept = {name: p.detach().clone() for name, p in again.named_parameters()}
        with FSDP.summon_full_params(again), torch.no_grad():
            again.word.weight.mul_(2)
    final = again.state_dict()
    assert not [name for name in final if "_fsdp" in name]
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({"losses": losses + more, "norms": norms + others, "weights": dict(final), "kept": kept, "saved": dict(state), "states": states["state"]}, path)
        print("module of FSDP:", FSDP.__module__, os.environ["WORLD_SIZE"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
