"""Trains by Accelerate. Argument: JSON of `options` below; prints what rank 0 saw.

Saves after one epoch, goes on, loads and goes on again. Knows nothing of Trireme.
"""
import json
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 32)
        self.second = torch.nn.Linear(32, 1)

    def forward(self, inputs, targets):
        return torch.nn.functional.mse_loss(self.second(torch.relu(self.first(inputs))), targets)


def plugin_of(options):
    if "config" in options:
        return DeepSpeedPlugin(hf_ds_config=options["config"])
    if "stage" in options:
        return DeepSpeedPlugin(zero_stage=options["stage"], gradient_accumulation_steps=options["accumulation"],
                               gradient_clipping=1.0, zero3_save_16bit_model=True)
    return None


def optimizer_of(options, model, accelerator):
    if "config" in options:
        from accelerate.utils import DummyOptim, DummyScheduler
        optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.0)
        return optimizer, DummyScheduler(optimizer, warmup_num_steps=3, total_num_steps=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    # Accelerate's wrapper steps a scheduler once per process.
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3 * accelerator.num_processes, 0.5)


def main(options):
    plugin = plugin_of(options)
    # Accelerate 1.15 finds no backend by itself on a host without a GPU.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if plugin else []
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=options["accumulation"], kwargs_handlers=handlers)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
    torch.manual_seed(1)
    model = Net()
    optimizer, scheduler = optimizer_of(options, model, accelerator)
    loader = torch.utils.data.DataLoader(data, batch_size=options["micro"])
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def epoch():
        losses = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = model(inputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        return losses

    losses = epoch()
    accelerator.save_state(options["out"] + "/state")
    losses += epoch()
    accelerator.load_state(options["out"] + "/state")
    again = epoch()
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, options["out"] + "/model")
    if accelerator.is_main_process:
        print("TEST_RESULT " + json.dumps({
            "losses": losses, "again": again, "lr": optimizer.param_groups[0]["lr"], "bias": state["first.bias"].tolist(),
            "model": type(accelerator.unwrap_model(model)).__name__, "kind": str(accelerator.distributed_type)}))
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
