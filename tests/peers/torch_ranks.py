"""The program of two processes of torch_ranks_slow_test.py: `save FOLDER` or `load FOLDER`."""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_states import module_of


def whole(value):
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def save_on_ranks(folder):
    """FSDP2's shards, and tensors that are cut by their second or third dim."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=int(os.environ["RANK"]), world_size=2)
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(2):
        net(torch.full((2, 5), 1.0 + step + dist.get_rank())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(net, optimizer)
    mesh = init_device_mesh("cpu", (2,))
    for dim in (1, 2):
        weights[f"cut.{dim}"] = distribute_tensor(torch.randn(3, 5, 4), mesh, [Shard(dim)])
    dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/saved")
    expected = {"model": whole(weights), "state": whole(states["state"])}
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")
    dist.destroy_process_group()


def load_on_ranks(folder):
    """Fills the shards of two processes from what `trireme convert` wrote, and saves them whole."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=int(os.environ["RANK"]), world_size=2)
    shapes = json.load(open(f"{folder}/shapes.json", encoding="utf-8"))
    model = module_of(shapes)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=f"{folder}/converted")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    weights, states = get_state_dict(model, optimizer)
    loaded = {"model": whole(weights), "state": whole(states["state"]), "groups": states["param_groups"]}
    if dist.get_rank() == 0:
        torch.save(loaded, f"{folder}/loaded.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    (save_on_ranks if sys.argv[1] == "save" else load_on_ranks)(sys.argv[2])
