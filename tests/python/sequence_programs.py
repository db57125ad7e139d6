"""Programs of the zoo's collection "samples", each trained on whole samples by plain PyTorch and on parts of them by
engines; every rank does both."""
import copy

import torch
import trireme
from zoo import samples

STEPS = 10


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _train(program, model, called, backward, step, gradient_of):
    """(losses, the first step's gradients)."""
    losses, gradients = [], {}
    for number in range(STEPS):
        loss = program.loss(called, model, *program.batch(number))
        backward(loss)
        losses.append(loss.item())
        if number == 0:
            gradients = {name: gradient_of(parameter) for name, parameter in model.named_parameters()}
        step()
    return losses, gradients


def difference(name, attention, stage, size, padded=False):
    """The largest of losses, relative, and of the first step's gradients, relative to the largest of their
    parameter."""
    program = samples.PROGRAMS[f"samples {name}{', padded' * padded}"]
    torch.manual_seed(1)
    model = program.build().train()
    plain = copy.deepcopy(model)
    optimizer = _optimizer(plain)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    losses, gradients = _train(program, plain, plain, torch.Tensor.backward, step, lambda parameter: parameter.grad)
    engine, *_ = trireme.initialize(model=model, optimizer=_optimizer(model), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "sequence_parallel_size": size, "zero_optimization": {"stage": stage},
        "trireme": {"sequence_attention": attention}})
    own_losses, own_gradients = _train(program, model, lambda **whole: engine(**engine.cut(**whole)), engine.backward, engine.step,
                                       trireme.utils.safe_get_full_grad)
    engine.destroy()
    found = max(abs(own - one) / one for own, one in zip(own_losses, losses))
    for parameter, gradient in gradients.items():
        if gradient is not None:
            scale = max(gradient.abs().max().item(), 1e-3)
            found = max(found, (own_gradients[parameter] - gradient).abs().max().item() / scale)
    return found
