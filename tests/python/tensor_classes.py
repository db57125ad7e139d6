"""Classes of zoo/classes.py, each trained by plain PyTorch and by ranks that share its layers.

    trireme launch --num_gpus 2 python tests/python/tensor_classes.py CONFIGURATION [CLASS ...] what rank 0 finds, as
    JSON
"""
import copy
import json
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
import transformers
import trireme
from zoo.classes import ADAMW, CLIPPING, SAMPLES, STEPS, brief, configurations, loss_of, tiny, trained

LARGEST = 1e-5
# Rounding noise would be most of a gradient that is zero by mathematics, as those of the biases of keys are.
SMALLEST = 1e-3
# Where a gradient is further away than LARGEST, it may be so by this much of what last bits of weights do to it:
# Sinkhorn's iterations lose digits.
ROUNDINGS = 3
NOT_THERE = ("mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts", "ep_router")


def _apart(found, expected, smallest):
    """{name: how far tensors are apart, relative to norms}."""
    result = {}
    for name, value in expected.items():
        other = found.get(name)
        alike = other is not None and other.shape == value.shape
        result[name] = ((other - value).norm() / value.norm().clamp(min=smallest)).item() if alike else float("inf")
    return result


def compared(model, batches, expected, tensor, stage):
    """{"losses", "gradients", "weights": {name: the relative difference}} of an engine beside `expected`."""
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": ADAMW}, "tensor_parallel": {"autotp_size": tensor}}
    engine, *_ = trireme.initialize(model=model, config=config)
    losses, gradients = [], {}
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(engine(**batches[step]))
        engine.backward(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = {name: trireme.utils.safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}
        engine.step()
    weights = {name: trireme.utils.safe_get_full_fp32_param(p).detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    engine.destroy()
    numbers = lambda one: {str(step): torch.tensor([value]) for step, value in enumerate(one)}
    none = {name: 1.0 for name, gradient in gradients.items() if gradient is not None and name not in expected[1] and gradient.abs().max() > 0}
    return {"losses": _apart(numbers(losses), numbers(expected[0]), 1e-12), "gradients": _apart(gradients, expected[1], SMALLEST * _total(expected[1])),
            "gradients where there are none": none, "weights": _apart(weights, {name: expected[2][name] for name in expected[1]}, 1e-3)}


def _total(gradients):
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()


def _rounding(model, batches, expected):
    """{name: how far a gradient goes, relative to its norm, when weights change by their last bits}, by plain
    PyTorch."""
    found = dict.fromkeys(expected[1], 0.0)
    for seed in range(3):
        moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1 + torch.randint(-1, 2, parameter.shape, generator=generator) * torch.finfo(torch.float32).eps / 2)
        for name, away in _apart(trained(moved, batches, 1)[1], expected[1], SMALLEST * _total(expected[1])).items():
            found[name] = max(found[name], away)
    return found


def _verdict(model, batches, expected, tensor, stage):
    """{"what": "alike", "refused", "DIFFERENT" or "crash", "why"}, of the rank that has the worst."""
    before = copy.deepcopy(model)
    try:
        apart = compared(model, batches, expected, tensor, stage)
    except trireme.errors.Error as error:
        return {"what": "refused", "why": str(error)}
    except Exception as error:  # pylint: disable=broad-exception-caught
        return {"what": "crash", "why": brief(error) + "\n" + traceback.format_exc()[-1500:]}
    worst = {f"{kind} of {name}": away for kind, found in apart.items() for name, away in found.items() if not away <= LARGEST}
    if worst and all(kind.startswith("gradients of ") for kind in worst):
        rounding = _rounding(before, batches, expected)
        worst = {kind: away for kind, away in worst.items() if not away <= ROUNDINGS * rounding[kind.removeprefix("gradients of ")]}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, worst)
    worst = next(filter(None, every), {})
    return {"what": "DIFFERENT" if worst else "alike", "why": worst or max(away for found in apart.values() for away in found.values())}


def _left_whole(model):
    """The model with a tp_plan of its own, as its class's, without experts and styles that are not there: those layers
    are whole on every rank."""
    plan = trireme.tensor.model_facts._plan_of(model)  # pylint: disable=protected-access
    not_there = [key for key, style in plan.items() if style in NOT_THERE]
    model.tp_plan = {key: style for key, style in plan.items() if not any(key == other or key.startswith(f"{other}.") for other in not_there)}
    return model


def judged(configuration, names, tensor=2, stage=3):
    """{"class", "what", "why"} on this rank: "alike", "refused", "not run", "no plan", "DIFFERENT" or "crash".
    Collective.

    Where a style is refused, "whole" is the same of the model whose plan has no such styles.
    """
    trireme.init_distributed()
    try:
        name, model, batches, expected = tiny(configuration, names)
    except LookupError:
        return {"class": "", "what": "no plan", "why": ""}
    except RuntimeError as error:
        return {"class": "", "what": "not run", "why": str(error)}
    again = copy.deepcopy(model)
    found = {"class": f"{name}({', '.join(batches[0])})", **_verdict(model, batches, expected, tensor, stage)}
    if "this style is not there yet" in str(found["why"]):
        found["whole"] = _verdict(_left_whole(again), batches, expected, tensor, stage)
    return found


def main(configuration, names):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = names or configurations()[configuration]
    return judged(configuration, names)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2:]), indent=1))
