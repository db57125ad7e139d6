#!/usr/bin/env python3
"""DeepSpeed's side of deepspeed_checkpoint_slow_test.cpp: the same small net, data and configuration as there.

    deepspeed_run.py train FOLDER STAGE DTYPE       three steps, save into FOLDER, two more steps
    deepspeed_run.py resume FOLDER STAGE DTYPE      load from FOLDER, two steps
    deepspeed_run.py compare FOLDER CHECKPOINT      zero_to_fp32's weights of FOLDER are those of Trireme's CHECKPOINT

The losses of the last two steps, means over the ranks, go to FOLDER/losses.json.
"""
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys

RANKS = 2


def batch(torch, step, rank):
    i, j = torch.arange(4).view(4, 1), torch.arange(5).view(1, 5)
    return ((i * 7 + j * 3 + step * 5 + rank * 11) % 13 - 6).float() / 8


def make_net(torch):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(5, 7)
            self.mid = torch.nn.Linear(7, 7)
            self.frozen = torch.nn.Linear(7, 7, bias=False)
            self.out = torch.nn.Linear(7, 3)
            self.tied = torch.nn.Linear(7, 7)
            self.tied.weight = self.mid.weight
            self.frozen.weight.requires_grad_(False)
            self.register_buffer("scale", torch.full((3,), 1.5))
            self.register_buffer("count", torch.tensor(7))

        def forward(self, x):
            for layer in (self.embed, self.mid, self.frozen, self.tied):
                x = torch.tanh(layer(x))
            return self.out(x) * self.scale.to(x.dtype)

    return Net()


def run_rank(mode, folder, stage, dtype):
    import deepspeed
    import torch
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    net = make_net(torch)
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    groups = [{"params": [p for name, p in trained if "bias" not in name]},
              {"params": [p for name, p in trained if "bias" in name], "weight_decay": 0.0}]
    config = json.loads((folder.parent / "ds_config.json").read_text())
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)

    def step(number):
        x = batch(torch, number, rank).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        return mean.item() / RANKS

    if mode == "train":
        for number in range(3):
            step(number)
        engine.save_checkpoint(str(folder), client_state={"epoch": 3, "left_out": torch.ones(2)})
    else:
        path, client_state = engine.load_checkpoint(str(folder))
        assert path is not None and client_state["epoch"] == 3, client_state
        assert engine.global_steps == 3 and engine.global_samples == 24, (engine.global_steps, engine.global_samples)
    losses = [step(3), step(4)]
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def shards_of(torch, checkpoint):
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        raw = path.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        for name, entry in json.loads(raw[8:8 + length]).items():
            if name == "__metadata__" or entry["dtype"] != "F32":
                continue
            begin, end = entry["data_offsets"]
            if begin < end:
                tensors[name] = torch.frombuffer(bytearray(raw[8 + length + begin:8 + length + end]), dtype=torch.float32)
    return tensors


def compare(folder, checkpoint):
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    shards = shards_of(torch, checkpoint)
    whole = {}
    for tensor in manifest["tensors"]:
        parts = [shards[name] for s in tensor["slices"]
                 for name in (tensor["name"], f'{tensor["name"]}[{s["begin"]}:{s["begin"] + s["numel"]}]') if name in shards]
        if parts:
            whole[tensor["name"]] = torch.cat(parts).view(tensor["shape"])
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    trained = [tensor["name"].removeprefix("model.") for tensor in manifest["tensors"]
               if tensor.get("values", {}).get("steps", 0) > 0]
    assert len(trained) == 7, trained
    for name in trained:
        ours = whole.get("master." + name, whole.get("model." + name))
        assert torch.equal(weights[name].contiguous(), ours), name
    assert weights["tied.weight"].data_ptr() == weights["mid.weight"].data_ptr() or torch.equal(
        weights["tied.weight"].contiguous(), weights["mid.weight"].contiguous())


def launch():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = pathlib.Path(sys.executable).parent
    common = dict(os.environ, WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", PEER_RANK="1",
                  PATH=f"{here}{os.pathsep}{os.environ['PATH']}",  # for ninja
                  TORCH_EXTENSIONS_DIR=str(here.parent / "extensions"))
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=dict(common, RANK=str(rank), LOCAL_RANK=str(rank)))
             for rank in range(RANKS)]
    codes = [rank.wait() for rank in ranks]
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        compare(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
    elif "PEER_RANK" not in os.environ:
        launch()
    else:
        run_rank(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
