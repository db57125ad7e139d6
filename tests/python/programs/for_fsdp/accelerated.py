"""Trains by Accelerate, with FSDP where there are several ranks. Argument: JSON of `options` below; prints what rank 0
saw.

Saves after one epoch, goes on, loads and goes on again. Knows nothing of Trireme.
"""
import json
import sys

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.last = torch.nn.Linear(8, 1)
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, inputs, targets):
        for layer in self.layers:
            inputs = layer(inputs)
        return torch.nn.functional.mse_loss(self.last(inputs).float() * self.scale, targets.float())


def policy_of(options):
    """A plugin's arguments; dtypes by their names."""
    policy = options.get("mixed_precision_policy")
    dtypes = {name: getattr(torch, value) for name, value in policy.items()} if policy else None
    return {**options, **({"mixed_precision_policy": dtypes} if policy else {})}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def main(options):
    plugin = FullyShardedDataParallelPlugin(**policy_of(options["plugin"])) if "plugin" in options else None
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=options["accumulation"], mixed_precision=options.get("precision"), cpu=True,
                              parallelism_config=ParallelismConfig(**options["parallelism"]) if "parallelism" in options else None)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
    torch.manual_seed(1 + accelerator.process_index if options.get("differs") else 1)
    model = Net()
    if "dtype" in options:
        model.to(getattr(torch, options["dtype"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    # Accelerate's wrapper steps a scheduler once per process.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 * accelerator.num_processes, 0.5)
    loader = torch.utils.data.DataLoader(data, batch_size=options["micro"])
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    gradients, norms = [], []

    def epoch():
        losses = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = model(inputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    gradients.append({name.replace("_checkpoint_wrapped_module.", ""): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
                    if options.get("clips", True):
                        norms.append(float(whole(accelerator.clip_grad_norm_(model.parameters(), 1.0))))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        return losses

    losses = epoch()
    accelerator.save_state(options["out"] + "/state")
    losses += epoch()
    state = accelerator.get_state_dict(model)
    accelerator.load_state(options["out"] + "/state")
    again = epoch()
    accelerator.save_model(model, options["out"] + "/model")
    if accelerator.is_main_process:
        torch.save({"gradients": gradients, "norms": norms, "losses": losses, "weights": state}, options["out"] + "/told.pt")
        print("TEST_RESULT " + json.dumps({"losses": losses, "again": again, "lr": optimizer.param_groups[0]["lr"],
                                           "model": type(accelerator.unwrap_model(model)).__name__, "kind": str(accelerator.distributed_type)}))
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
