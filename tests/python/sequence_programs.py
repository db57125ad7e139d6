"""Models of Hugging Face, each trained on whole samples by plain PyTorch and on parts of them by engines; every rank
does both."""
import copy
import functools

import torch
import trireme
from zoo import hugging_face

STEPS, LENGTH, VOCABULARY = 10, 22, hugging_face.SIZES["vocab_size"]
llama, gpt2, qwen2, phi3 = (functools.partial(hugging_face.model, name, use_cache=False) for name in ("llama", "gpt2", "qwen2", "phi3"))
MODELS = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2, "phi3": phi3, "bert": functools.partial(hugging_face.model, "BertForMaskedLM")}


def batch(name, step, padded):
    """Two samples for a model; where `padded` the second ends early."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, :LENGTH // 2 - 1] = -100
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -5:] = 0
        labels[mask == 0] = -100
    whole = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH).unsqueeze(0)}
    if name == "bert":  # which else makes them up itself
        whole["token_type_ids"] = torch.zeros_like(ids)
    return {**whole, "attention_mask": mask} if padded else whole


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _plain(name, model, padded):
    optimizer, losses, gradients = _optimizer(model), [], {}
    for step in range(STEPS):
        loss = model(**batch(name, step, padded)).loss
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def _cut(name, model, padded, size, attention, stage):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "sequence_parallel_size": size,
              "zero_optimization": {"stage": stage}, "trireme": {"sequence_attention": attention}}
    engine, *_ = trireme.initialize(model=model, optimizer=_optimizer(model), config=config)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = engine(**engine.cut(**batch(name, step, padded))).loss
        engine.backward(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = {key: trireme.utils.safe_get_full_grad(p) for key, p in model.named_parameters()}
        engine.step()
    engine.destroy()
    return losses, gradients


def difference(name, attention, stage, size, padded=False):
    """The largest of losses, relative, and of the first step's gradients, relative to the largest of their
    parameter."""
    torch.manual_seed(1)
    model = MODELS[name]().train()
    losses, gradients = _plain(name, copy.deepcopy(model), padded)
    own_losses, own_gradients = _cut(name, model, padded, size, attention, stage)
    found = max(abs(own - one) / one for own, one in zip(own_losses, losses))
    for parameter, gradient in gradients.items():
        scale = max(gradient.abs().max().item(), 1e-3)
        found = max(found, (own_gradients[parameter] - gradient).abs().max().item() / scale)
    return found
