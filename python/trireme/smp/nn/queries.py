"""Methods of DistributedModel about layers that ranks along the axis "tensor" share, by the engine's cut of the model's
tensors."""
from ...errors import ConfigError


def distributed_modules(model):
    """The modules with a tensor of their own that ranks along "tensor" have parts of."""
    return _distributed(model.module, model.engine("distributed_modules()").core)


def is_distributed_parameter(model, param):
    """Whether ranks along "tensor" have parts of a parameter. Raises ConfigError: it is none of the model."""
    return _is_slice(model, "is_distributed_parameter()", param, "parameter")


def is_distributed_buffer(model, buf):
    """As is_distributed_parameter(), of a buffer."""
    return _is_slice(model, "is_distributed_buffer()", buf, "buffer")


def is_scaled_batch_parameter(model, param):
    """Whether a parameter meets the samples of all ranks along "tensor": whether it is one of distributed_modules().
    Raises ConfigError: it is none of the model."""
    return _meets_all_samples(model, "is_scaled_batch_parameter()", param, "parameter")


def is_scaled_batch_buffer(model, buf):
    """As is_scaled_batch_parameter(), of a buffer."""
    return _meets_all_samples(model, "is_scaled_batch_buffer()", buf, "buffer")


def default_reducer_named_parameters(model):
    """(name, parameter) of those of this stage whose gradients are averaged over the ranks of dp_size()."""
    return _reduced(model, "default_reducer_named_parameters()", over_all=True)


def scaled_batch_reducer_named_parameters(model):
    """(name, parameter) of those of this stage whose gradients are averaged over the ranks of rdp_size() alone."""
    return _reduced(model, "scaled_batch_reducer_named_parameters()", over_all=False)


def _distributed(module, core):
    return (inner for inner in module.modules() if any(map(core.is_slice, _own(inner))))


def _own(module):
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _of_distributed(model, call):
    """Ids of the tensors of distributed_modules()."""
    return {id(tensor) for inner in _distributed(model.module, model.engine(call).core) for tensor in _own(inner)}


def _is_slice(model, call, tensor, kind):
    core = model.engine(call).core
    _check_known(model.module, call, tensor, kind)
    return core.is_slice(tensor)


def _meets_all_samples(model, call, tensor, kind):
    distributed = _of_distributed(model, call)
    _check_known(model.module, call, tensor, kind)
    return id(tensor) in distributed


def _reduced(model, call, over_all):
    distributed = _of_distributed(model, call)
    return ((name, parameter) for name, parameter in model.local_named_parameters() if parameter.requires_grad and (id(parameter) not in distributed) == over_all)


def _check_known(module, call, tensor, kind):
    if not any(tensor is one for one in (module.parameters() if kind == "parameter" else module.buffers())):
        raise ConfigError(f"DistributedModel.{call}: {type(tensor).__name__} is no {kind} of the model")
