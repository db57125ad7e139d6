"""smp's modules: those that layers over several ranks are made of, and what is said of a program's own."""
from .attention import DistributedAttentionLayer, FlashAttentionLayer
from .layers import DistributedEmbedding, DistributedLinear, FusedLayerNorm
from .module import DistributedModule
from .transformer import DistributedTransformer, DistributedTransformerLayer, DistributedTransformerLMHead, DistributedTransformerOutputLayer
from . import huggingface

__all__ = ["DistributedAttentionLayer", "DistributedEmbedding", "DistributedLinear", "DistributedModule", "DistributedTransformer", "DistributedTransformerLMHead",
           "DistributedTransformerLayer", "DistributedTransformerOutputLayer", "FlashAttentionLayer", "FusedLayerNorm", "huggingface"]
