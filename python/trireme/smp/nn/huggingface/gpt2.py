"""State dicts of GPT-2."""
from .names import kept


def translate_state_dict_to_hf_gpt2(state_dict, max_seq_len=None):
    """A state dict of the DistributedModel under transformers' names: the same."""
    return kept("translate_state_dict_to_hf_gpt2", state_dict, max_seq_len)


def translate_hf_state_dict_to_smdistributed_gpt2(state_dict):
    """A state dict of transformers under the names of the DistributedModel: the same."""
    return kept("translate_hf_state_dict_to_smdistributed_gpt2", state_dict)
