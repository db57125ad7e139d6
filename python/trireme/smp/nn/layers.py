"""Single layers: linear, embedding, norm."""
import torch

from .module import DistributedModule, refuse


class DistributedLinear(DistributedModule, torch.nn.Linear):
    """A torch.nn.Linear; its features are those of all ranks together."""


class DistributedEmbedding(DistributedModule, torch.nn.Embedding):
    """A torch.nn.Embedding; its features are those of all ranks together.

    initializer_range   the standard deviation of new weights

    Raises  UnsupportedError: _skip_allgather, _skip_scatter_and_merge.
    """

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False, _weight=None,
                 initializer_range=0.02, _skip_allgather=False, _skip_scatter_and_merge=False):
        refuse(self, _skip_allgather=(_skip_allgather, False), _skip_scatter_and_merge=(_skip_scatter_and_merge, False))
        self._initializer_range = initializer_range
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight)

    def reset_parameters(self):
        """Draws new weights."""
        torch.nn.init.normal_(self.weight, std=self._initializer_range)
        self._fill_padding_idx_with_zero()


class FusedLayerNorm(torch.nn.LayerNorm):
    """apex's, over torch's layer_norm. Raises UnsupportedError: memory_efficient."""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False):
        refuse(self, memory_efficient=(memory_efficient, False))
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


def initialise(module, use_normal, initializer_range):
    """With `use_normal` draws the weights of linear layers in `module` anew, and sets their biases to 0; norms stay."""
    for inner in module.modules():
        if use_normal and isinstance(inner, torch.nn.Linear):
            torch.nn.init.normal_(inner.weight, std=initializer_range)
            if inner.bias is not None:
                torch.nn.init.zeros_(inner.bias)
