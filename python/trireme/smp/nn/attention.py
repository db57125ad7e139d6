"""Attention: over packed queries, keys and values, and the block of a transformer."""
import functools
import math

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError, ShapeError
from ..config import state
from .layers import DistributedLinear, initialise
from .module import DistributedModule, check_probability, refuse, taken_apart

# Suffixes of shapes: B batch, S tokens, T tokens of keys and values, N heads, D channels of a head, H hidden channels.


class FlashAttentionLayer(DistributedModule):
    """Attention without a matrix of scores in memory, by torch's scaled_dot_product_attention.

    scale   the factor of the scores; None: 1 / (sqrt(attention_head_size) · (layer_idx + 1)), of which
            scale_attention_scores and scale_attn_by_layer_idx switch each on

    triton_flash_attention and use_alibi let forward() take a mask; the kernel is the same.

    Raises  ConfigError: a size or an index that is missing; options that do not fit each other.
    """

    def __init__(self, attention_dropout_prob=0.1, attention_head_size=None, scale_attention_scores=True, scale_attn_by_layer_idx=False, layer_idx=None, scale=None,
                 triton_flash_attention=False, use_alibi=False):
        super().__init__()
        check_probability(self, attention_dropout_prob=attention_dropout_prob)
        if triton_flash_attention and attention_dropout_prob:
            raise ConfigError("smp.nn.FlashAttentionLayer(triton_flash_attention=True) has no dropout; give attention_dropout_prob=0.0")
        if use_alibi and not triton_flash_attention:
            raise ConfigError("smp.nn.FlashAttentionLayer(use_alibi=True) needs triton_flash_attention=True; give both")
        if scale is None:
            _check_given(scale_attention_scores, attention_head_size=attention_head_size)
            _check_given(scale_attn_by_layer_idx, layer_idx=layer_idx)
            scale = 1 / math.sqrt(attention_head_size) if scale_attention_scores else 1.0
            scale = scale / (layer_idx + 1) if scale_attn_by_layer_idx else scale
        self.scale, self.attention_dropout_prob, self._takes_mask = float(scale), attention_dropout_prob, bool(use_alibi)

    def forward(self, qkv, attn_mask=None, causal=False):
        """[B, N, S, D] of `qkv`, [B, S, 3, N, D]. `attn_mask` is added to the scores. Raises ShapeError,
        ConfigError."""
        if qkv.dim() != 5 or qkv.size(2) != 3:
            raise ShapeError(f"smp.nn.FlashAttentionLayer: expected qkv of [batch, tokens, 3, heads, head size], got {list(qkv.shape)}")
        if attn_mask is not None and not self._takes_mask:
            raise ConfigError("smp.nn.FlashAttentionLayer: a mask needs triton_flash_attention=True and use_alibi=True; give both, or leave attn_mask out")
        query_BNSD, key_BNSD, value_BNSD = (part.transpose(1, 2) for part in qkv.unbind(2))
        return attend(query_BNSD, key_BNSD, value_BNSD, attn_mask, is_causal=causal, dropout=self.attention_dropout_prob if self.training else 0.0, scale=self.scale)


class DistributedAttentionLayer(DistributedModule):
    """Attention, a linear layer, dropout and the residual, with a norm before, after, or both.

    causal_mask_size    the most tokens that there are, of which each sees those up to itself; None: each sees all.
                        Cross attention sees all

    Raises  ConfigError: a combination.
    """

    def __init__(self, num_attention_heads=32, attention_head_size=32, hidden_size=1024, attention_dropout_prob=0.1, hidden_dropout_prob=0.1, layernorm_epsilon=1e-5,
                 initializer_range=0.02, use_normal_initialization=False, cross_attention=False, causal_mask_size=None, pre_layernorm=False, post_layernorm=True,
                 use_alibi=False, alibi_bias_max=8):
        super().__init__()
        refuse(self, use_alibi=(use_alibi, False), alibi_bias_max=(alibi_bias_max, 8))
        check_probability(self, attention_dropout_prob=attention_dropout_prob, hidden_dropout_prob=hidden_dropout_prob)
        self.num_attention_heads, self.attention_head_size = num_attention_heads, attention_head_size
        self.cross_attention, self.causal_mask_size = cross_attention, None if cross_attention else causal_mask_size
        self.attention_dropout_prob = attention_dropout_prob
        inner_size = num_attention_heads * attention_head_size
        self.query, self.key, self.value = (DistributedLinear(hidden_size, inner_size) for _ in range(3))
        self.dense = DistributedLinear(inner_size, hidden_size)
        self.dropout = torch.nn.Dropout(hidden_dropout_prob)
        add_norms(self, hidden_size, layernorm_epsilon, pre_layernorm, post_layernorm)
        initialise(self, use_normal_initialization, initializer_range)

    def forward(self, inputs):
        """[B, S, H] of (hidden_states, attention_mask), or with cross_attention of (hidden_states, cross_states,
        attention_mask). The mask, [B, 1, 1, T], is added to the scores; None: there is none. Raises ShapeError."""
        names = ("hidden_states", "cross_states", "attention_mask") if self.cross_attention else ("hidden_states", "attention_mask")
        hidden_BSH, *cross, mask = taken_apart(self, inputs, names)
        self._check(hidden_BSH, mask)
        normed_BSH = hidden_BSH if self.pre_layernorm is None else self.pre_layernorm(hidden_BSH)
        source_BTH = cross[0] if cross else normed_BSH
        query_BNSD, key_BNTD, value_BNTD = self._heads(self.query(normed_BSH)), self._heads(self.key(source_BTH)), self._heads(self.value(source_BTH))
        context_BNSD = attend(query_BNSD, key_BNTD, value_BNTD, mask, is_causal=self.causal_mask_size is not None,
                              dropout=self.attention_dropout_prob if self.training else 0.0)
        output_BSH = hidden_BSH + self.dropout(self.dense(context_BNSD.transpose(1, 2).flatten(2)))
        return output_BSH if self.layernorm is None else self.layernorm(output_BSH)

    def _heads(self, projected_BSH):
        return projected_BSH.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def _check(self, hidden_BSH, mask):
        if self.causal_mask_size is not None and hidden_BSH.size(1) > self.causal_mask_size:
            raise ShapeError(f"smp.nn.DistributedAttentionLayer: {hidden_BSH.size(1)} tokens, and causal_mask_size is {self.causal_mask_size}; give shorter sequences")
        if mask is not None and not mask.is_floating_point():
            raise ShapeError(f"smp.nn.DistributedAttentionLayer: the mask is {mask.dtype}; expected numbers that are added to the scores, 0 where a token is seen")


def add_norms(module, hidden_size, epsilon, pre_layernorm, post_layernorm):
    """Gives `module` its norms: `pre_layernorm` and `layernorm`, None where there is none. Raises ConfigError:
    neither."""
    if not pre_layernorm and not post_layernorm:
        raise ConfigError(f"smp.nn.{type(module).__name__}: pre_layernorm and post_layernorm are both False; give True for one of them")
    module.pre_layernorm = torch.nn.LayerNorm(hidden_size, eps=epsilon) if pre_layernorm else None
    module.layernorm = torch.nn.LayerNorm(hidden_size, eps=epsilon) if post_layernorm else None


def attend(query_BNSD, key_BNTD, value_BNTD, mask, *, is_causal, dropout, scale=None):
    """[B, N, S, D]. `mask` is added to the scores; with `is_causal` a token sees those up to itself alone. With
    `checkpoint_attentions` it is computed again in the backward pass."""
    if mask is not None:
        mask = mask.to(query_BNSD.dtype)
        if is_causal:
            future_ST = torch.ones(query_BNSD.size(2), key_BNTD.size(2), dtype=torch.bool, device=mask.device).triu(1)
            mask = torch.where(future_ST, float("-inf"), mask)
    compute = functools.partial(scaled_dot_product_attention, dropout_p=dropout, is_causal=is_causal and mask is None, scale=scale)
    if state.is_initialized and state.cfg.checkpoint_attentions and torch.is_grad_enabled():
        return checkpoint(compute, query_BNSD, key_BNTD, value_BNTD, mask, use_reentrant=False)
    return compute(query_BNSD, key_BNTD, value_BNTD, mask)


def _check_given(is_needed, **values):
    for name, value in values.items():
        if is_needed and value is None:
            raise ConfigError(f"smp.nn.FlashAttentionLayer: {name} is missing; give it, or scale")
