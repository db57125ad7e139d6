"""Transformers, of one layer up to a model with embeddings and a head."""
import torch
from torch.nn import functional

from ...errors import ConfigError, ShapeError, UnsupportedError
from .attention import DistributedAttentionLayer, add_norms
from .layers import DistributedEmbedding, DistributedLinear, initialise
from .module import DistributedModule, check_probability, refuse, taken_apart

_ACTIVATIONS = {"gelu": functional.gelu, "relu": functional.relu}


class DistributedTransformerOutputLayer(DistributedModule):
    """Two linear layers with an activation between them, dropout and the residual, with a norm before, after, or both.

    Raises  ConfigError: an activation that is not there, no norm. UnsupportedError: fp32_residual_addition.
    """

    def __init__(self, hidden_size=1024, intermediate_size=4096, hidden_dropout_prob=0.1, activation="gelu", layernorm_epsilon=1e-5, initializer_range=0.02,
                 use_normal_initialization=False, pre_layernorm=False, post_layernorm=True, fp32_residual_addition=False):
        super().__init__()
        refuse(self, fp32_residual_addition=(fp32_residual_addition, False))
        check_probability(self, hidden_dropout_prob=hidden_dropout_prob)
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"smp.nn.{type(self).__name__}(activation={activation!r}): expected one of {', '.join(_ACTIVATIONS)}")
        self.activation = activation
        self.dense1, self.dense2 = DistributedLinear(hidden_size, intermediate_size), DistributedLinear(intermediate_size, hidden_size)
        self.dropout = torch.nn.Dropout(hidden_dropout_prob)
        add_norms(self, hidden_size, layernorm_epsilon, pre_layernorm, post_layernorm)
        initialise(self, use_normal_initialization, initializer_range)

    def forward(self, inp):
        """A tensor of the sizes of `inp`, [batch, tokens, hidden]."""
        normed = inp if self.pre_layernorm is None else self.pre_layernorm(inp)
        output = inp + self.dropout(self.dense2(_ACTIVATIONS[self.activation](self.dense1(normed))))
        return output if self.layernorm is None else self.layernorm(output)


class DistributedTransformerLayer(DistributedModule):
    """Attention to the own sequence, with add_cross_attention then to another one, and an output layer."""

    def __init__(self, num_attention_heads=32, attention_head_size=32, hidden_size=1024, intermediate_size=4096, attention_dropout_prob=0.1, hidden_dropout_prob=0.1,
                 activation="gelu", layernorm_epsilon=1e-5, initializer_range=0.02, use_normal_initialization=False, causal_mask_size=None, add_cross_attention=False,
                 pre_layernorm=False, post_layernorm=True, use_alibi=False, alibi_bias_max=8):
        super().__init__()
        refuse(self, use_alibi=(use_alibi, False), alibi_bias_max=(alibi_bias_max, 8))
        common = {"hidden_size": hidden_size, "hidden_dropout_prob": hidden_dropout_prob, "layernorm_epsilon": layernorm_epsilon, "initializer_range": initializer_range,
                  "use_normal_initialization": use_normal_initialization, "pre_layernorm": pre_layernorm, "post_layernorm": post_layernorm}
        attention = {**common, "num_attention_heads": num_attention_heads, "attention_head_size": attention_head_size, "attention_dropout_prob": attention_dropout_prob}
        self.add_cross_attention = add_cross_attention
        self.attention = DistributedAttentionLayer(causal_mask_size=causal_mask_size, **attention)
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(cross_attention=True, **attention)
        self.output = DistributedTransformerOutputLayer(intermediate_size=intermediate_size, activation=activation, **common)

    def forward(self, inputs):
        """(hidden_states, attention_mask), or with add_cross_attention (hidden_states, cross_states, attention_mask,
        cross_mask), with new hidden states; masks as those of DistributedAttentionLayer. Raises ShapeError."""
        if not self.add_cross_attention:
            hidden, mask = taken_apart(self, inputs, ("hidden_states", "attention_mask"))
            return self.output(self.attention((hidden, mask))), mask
        hidden, cross_states, mask, cross_mask = taken_apart(self, inputs, ("hidden_states", "cross_states", "attention_mask", "cross_mask"))
        attended = self.cross_attention((self.attention((hidden, mask)), cross_states, cross_mask))
        return self.output(attended), cross_states, mask, cross_mask


class DistributedTransformer(DistributedModule):
    """A sequence of DistributedTransformerLayers, `seq_layers`, whose argument and result are those of one."""

    def __init__(self, num_layers=12, num_attention_heads=32, attention_head_size=32, hidden_size=1024, intermediate_size=4096, attention_dropout_prob=0.1,
                 hidden_dropout_prob=0.1, activation="gelu", layernorm_epsilon=1e-5, initializer_range=0.02, use_normal_initialization=False, causal_mask_size=None,
                 add_cross_attention=False, pre_layernorm=False, post_layernorm=True, use_alibi=False, alibi_bias_max=8):
        super().__init__()
        layers = [DistributedTransformerLayer(num_attention_heads, attention_head_size, hidden_size, intermediate_size, attention_dropout_prob, hidden_dropout_prob,
                                              activation, layernorm_epsilon, initializer_range, use_normal_initialization, causal_mask_size, add_cross_attention,
                                              pre_layernorm, post_layernorm, use_alibi, alibi_bias_max) for _ in range(num_layers)]
        self.seq_layers = torch.nn.Sequential(*layers)

    def forward(self, inputs):
        """See DistributedTransformerLayer."""
        return self.seq_layers(inputs)


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings of tokens, positions and, with num_token_types, kinds of tokens, a DistributedTransformer, and with
    add_lm_head a head without bias, which has the weight of the embedding of tokens.

    With a norm before each layer alone there is one more behind the last. New embeddings are normal, with
    initializer_range.
    """

    def __init__(self, num_layers=12, num_attention_heads=32, attention_head_size=32, hidden_size=1024, intermediate_size=4096, vocab_size=30522, num_positions=1024,
                 attention_dropout_prob=0.1, hidden_dropout_prob=0.1, activation="gelu", layernorm_epsilon=1e-5, num_token_types=0, causal_mask_size=None,
                 add_cross_attention=False, add_lm_head=True, initializer_range=0.02, use_normal_initialization=False, pre_layernorm=False, post_layernorm=True,
                 use_alibi=False, alibi_bias_max=8):
        super().__init__()
        self.add_cross_attention, self.add_lm_head, self.num_positions = add_cross_attention, add_lm_head, num_positions
        self.word_embedding = DistributedEmbedding(vocab_size, hidden_size, initializer_range=initializer_range)
        self.position_embedding = DistributedEmbedding(num_positions, hidden_size, initializer_range=initializer_range)
        self.token_type_embedding = DistributedEmbedding(num_token_types, hidden_size, initializer_range=initializer_range) if num_token_types else None
        self.dropout = torch.nn.Dropout(hidden_dropout_prob)
        self.transformer = DistributedTransformer(num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size, attention_dropout_prob,
                                                  hidden_dropout_prob, activation, layernorm_epsilon, initializer_range, use_normal_initialization, causal_mask_size,
                                                  add_cross_attention, pre_layernorm, post_layernorm, use_alibi, alibi_bias_max)
        self.layernorm = None if post_layernorm else torch.nn.LayerNorm(hidden_size, eps=layernorm_epsilon)

    def forward(self, inputs):
        """Logits [batch, tokens, vocabulary], without a head hidden states, of (input_ids, attention_mask,
        token_type_ids, position_ids, labels); with add_cross_attention cross_states and cross_mask stand before labels,
        cross_states once or, as in smp's documentation, twice. Masks are 1 at tokens that are not seen, [batch,
        tokens]. All but input_ids may be None.

        Raises  ShapeError: another form. UnsupportedError: labels.
        """
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", *(("cross_states", "cross_mask") if self.add_cross_attention else ()), "labels")
        input_ids, mask, token_type_ids, position_ids, *cross, labels = taken_apart(self, self._once(inputs), names)
        if labels is not None:
            raise UnsupportedError("smp.nn.DistributedTransformerLMHead: labels are not there yet, since smp's documentation does not tell the loss; give None, and "
                                   "compute the loss of the logits")
        hidden = self.dropout(self._embedded(input_ids, token_type_ids, position_ids))
        masks = [_added(one, hidden) for one in (mask, *cross[1:])]
        hidden = self.transformer((hidden, *cross[:1], *masks))[0]
        hidden = hidden if self.layernorm is None else self.layernorm(hidden)
        return functional.linear(hidden, self.word_embedding.weight) if self.add_lm_head else hidden  # pylint: disable=not-callable

    def _once(self, inputs):
        """`inputs` with cross_states once."""
        if self.add_cross_attention and isinstance(inputs, (tuple, list)) and len(inputs) == 8:
            if inputs[4] is not inputs[5]:
                raise ShapeError("smp.nn.DistributedTransformerLMHead: cross_states stand twice among the inputs, and are two tensors; give them once")
            return (*inputs[:5], *inputs[6:])
        return inputs

    def _embedded(self, input_ids, token_type_ids, position_ids):
        if token_type_ids is not None and self.token_type_embedding is None:
            raise ShapeError("smp.nn.DistributedTransformerLMHead: token_type_ids, and num_token_types is 0; give None, or num_token_types")
        if input_ids.size(1) > self.num_positions:
            raise ShapeError(f"smp.nn.DistributedTransformerLMHead: {input_ids.size(1)} tokens, and num_positions is {self.num_positions}; give shorter sequences")
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1), device=input_ids.device)[None]
        embedded = self.word_embedding(input_ids) + self.position_embedding(position_ids)
        return embedded if token_type_ids is None else embedded + self.token_type_embedding(token_type_ids)


def _added(mask, hidden):
    """[batch, 1, 1, tokens] to add to scores, of a mask that is 1 at tokens that are not seen."""
    return None if mask is None else mask[:, None, None].to(hidden.dtype) * torch.finfo(hidden.dtype).min
