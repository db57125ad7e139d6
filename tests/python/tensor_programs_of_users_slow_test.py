"""All programs of users, on two and four ranks that share layers, and with data parallel copies; each group of programs
is at another ZeRO stage.

    tensor_programs_of_users_slow_test.py PROGRAM Users.test_layers_mlp_4_2 MLPs on four ranks, of which two share
    layers
"""
import zoo
from harness import main
import tensor_programs_of_users_test as quick

_COLLECTIONS = ("layers", "operators", "loops", "families")
_AT_ONCE = 16
_BY_TOKENS = {"sequence_parallel": True}
_HEADS = "heuristics do not know which heads are in"
_NO_ROW = "heuristics find no layer"
_INSIDE_VMAP = "is inside of torch.func's vmap() or grad()"
_NOT_KNOWN = "is not known to tensor parallelism"
_EXPERTS = "this style is not there yet"
_WHOLE = "looks at whole parameters"
_BACKWARD = "write it by torch's operators"
_ELEMENTS = "it looks at more than one element at a time"
_HOOK = "so is its gradient, which has this rank's elements alone"
# Programs that are refused at every degree, and a part of the text.
REFUSED = {
    "layers": {
        **{f"attention_Packed{name}": _HEADS for name in ("Chunk", "Split", "Slices", "Unbind", "Indexed", "TensorSplit", "Unflatten")},
        "attention_RelativeEmbedding": _HEADS, "attention_RelativeKeys": _HEADS, "attention_TalkingHeads": _HEADS, "attention_OtherNames": _HEADS,
        "attention_NormOverHeads": "is a norm over all heads", "attention_Vmapped": _INSIDE_VMAP, "attention_Vmapped_ruled": _INSIDE_VMAP,
        "mlp_UnfusedGlu": _NO_ROW, "mlp_Sequence": _NO_ROW, "mlp_Maxout": _NO_ROW, "mlp_Tokens": _NO_ROW, "mlp_SqueezeExcite": _NO_ROW, "mlp_OldNormed": _NO_ROW,
        "mlp_LowRank": _NO_ROW, "mlp_TiedMatrices": _NO_ROW,
        "mlp_InPlace": "write by torch.where() instead", "mlp_InPlace_ruled": "write by torch.where() instead",
        "mlp_Put": "writes across slices", "mlp_Put_ruled": "writes across slices",
        "mlp_Recurrent": _NOT_KNOWN, "mlp_Recurrent_ruled": _NOT_KNOWN,
        "mlp_ThroughNumpy": "is a tensor of which this rank has a part", "mlp_ThroughNumpy_ruled": "is a tensor of which this rank has a part",
        **{f"mlp_{name}_ruled": "matches no parameter" for name in ("BatchedExperts", "Gated", "TiedMatrices", "Transposed")},
    },
    "operators": {
        "mlp_boolean_write": "writes across slices", "mlp_checkerboard_mask_write": "writes across slices", "mlp_channel_shuffle": _NOT_KNOWN,
        "lm_embedding_max_norm": _NOT_KNOWN,
    },
    "loops": {
        "loss_margin": _NOT_KNOWN, "loss_margin_tied": _NOT_KNOWN, "loop_lamb": _WHOLE, "loop_muon": _WHOLE, "loop_client_adafactor": "rows and columns of whole matrices",
        "loop_client_lbfgs": "calls back for the loss", "loop_inner_1": "use fewer ranks", "loop_shared_across": _NO_ROW, "loop_shared_across_ruled": "let them agree",
        "edit_data_assigned": "was given another storage", "edit_rows": "write by torch.where() instead", "edit_from_other": "writes across slices",
        "read_tolist": "is a tensor of which this rank has a part", "read_numpy": "is a tensor of which this rank has a part", "read_foreach_norm": _NOT_KNOWN,
        "loop_compiled": "leave it eager", "loop_compiled_layers": "set tensor_parallel.autotp_size to 1", "loop_timm": _HEADS, "loop_bags": _NO_ROW,
        "loop_plain_mlp": _NO_ROW, "loop_lstm": "find no numbered blocks", "loop_conv": "find no numbered blocks", "loop_lstm_cut": _NOT_KNOWN, "loop_mamba": _HEADS,
        "loop_mamba_ruled": "does not divide", "loop_inner_gradient": "create_graph=True",
        "loop_parameter_hooks": _HOOK, "loop_backward_hooks": "hook a collection around it",
    },
    "families": {
        "hf_lora_gpt2": "no rule of preset gpt2", "hf_model_mixtral": _EXPERTS, "hf_model_qwen2_moe": _EXPERTS, "hf_model_llama4_text": _EXPERTS,
        "hf_model_deepseek_v3": _EXPERTS,
        "hf_model_mamba": _NO_ROW,
    },
    # Models of Hugging Face, alone.
    "sequence": {
        **{f"{name}{cache}": _EXPERTS for name in ("Mixtral", "Mixtral with eager experts", "Mixtral with its routers' loss", "Qwen3 with experts")
           for cache in ("", ", use_cache=False")},
        **{f"{name}{cache}": _NO_ROW for name in ("Mamba", "RWKV") for cache in ("", ", use_cache=False")},
        "DistilBERT": _NO_ROW, "ALBERT": _NO_ROW, "ModernBERT": _NO_ROW, "DeBERTa": "do not know how to cut a model of type deberta-v2",
        "Llama evaluated without gradients": "expected a loss with a graph",
    },
    "optimizers": {f"optimizer {name}": words for name, words in {
        "Normed": _ELEMENTS, "Distance": _ELEMENTS, "ByDims": "on flat tensors its steps differ", "Indirect": "holds parameters of the model",
        "Listed": "belongs to no parameter", "Wanting": "Wanting needs a closure", "Idle": "left the parameters of its param_groups as they were",
        "Adafactor": "rows and columns of whole matrices", "LBFGS": "calls back for the loss"}.items()},
}
# Programs that are refused only where ranks have some tokens each between layers.
REFUSED_BY_TOKENS = {
    "layers": {"mlp_StraightThrough": _BACKWARD, "mlp_StraightThrough_ruled": _BACKWARD, "mlp_Experts": "writes across slices", "mlp_Experts_ruled": "writes across slices",
               "mlp_Gated": _NOT_KNOWN},
    "operators": {"mlp_gathered_tokens": "writes across slices", "mlp_gathered_tokens_ruled": "writes across slices"},
    "loops": {},
    "families": {"hf_adalora": "writes across slices"},
    "sequence": {},
    "optimizers": {},
}
# Programs that are neither right nor refused by name yet: values of parameters that outlive the engine, sparse
# gradients, embeddings that change their size.
OPEN = {
    "layers": set(),
    "operators": {"lm_embedding_sparse"},
    "loops": {"checkpoint_consolidated", "gathered_parameters", "checkpoint_torch_save"},
    "families": {"hf_resized_after"},
    "sequence": set(),
    "optimizers": set(),
}
# Programs that four ranks that share layers refuse: fewer heads or tokens than ranks, a write into rows of which a
# rank has none, three channels, two features.
REFUSED_ON_FOUR = {"hf_llama_3_3", "hf_gpt2_3_heads", "hf_t5_odd_heads", "loop_vocabulary_3", "loop_vocabulary_3_tied", "edit_rows_of_head", "loop_conv_ruled"}


class Users(quick.Programs):
    """A test for each collection and first word of its programs' names."""


def _is_open(collection, name):
    return name in OPEN[collection] or name.removesuffix("_ruled") in OPEN[collection]


def _of(collection, names, ranks, tensor, left_out=(), **options):
    def test(self):
        # Data parallel copies have batch statistics of their own.
        names_here = [name for name in names if ranks == tensor or not name.startswith("mlp_Batched")]
        right = [name for name in names_here if name not in REFUSED[collection] and name not in left_out and not _is_open(collection, name)
                 and (tensor < 4 or not (name in REFUSED_ON_FOUR or name.startswith("mlp_one_each")))]
        for place in range(0, len(right), _AT_ONCE):
            self.assert_right(ranks, tensor, place // _AT_ONCE % 4, collection, right[place:place + _AT_ONCE], timeout_s=900, **options)
    return test


def _refused(collection):
    def test(self):
        self.assert_refused(2, 2, 2, collection, REFUSED[collection])
        self.assert_refused(2, 2, 2, collection, REFUSED_BY_TOKENS[collection], section=_BY_TOKENS)
    return test


for _collection in _COLLECTIONS:
    _programs = zoo.collection(_collection)
    for _first in sorted({_name.partition("_")[0] for _name in _programs}):
        _names = [_name for _name in _programs if _name.partition("_")[0] == _first]
        for _ranks, _tensor in ((2, 2), (4, 4), (4, 2)):
            setattr(Users, f"test_{_collection}_{_first}_{_ranks}_{_tensor}", _of(_collection, _names, _ranks, _tensor))
        setattr(Users, f"test_{_collection}_{_first}_by_tokens", _of(_collection, _names, 2, 2, REFUSED_BY_TOKENS[_collection], section=_BY_TOKENS))
    setattr(Users, f"test_{_collection}_refused", _refused(_collection))

Users.test_sequence_known_models_2_2 = _of("sequence", [_name for _name, _program in zoo.programs("sequence", "known_models").items() if not _program.unavailable], 2, 2)
Users.test_sequence_refused = _refused("sequence")
# Rprop's steps are signs, which a gradient of rounding has by chance.
Users.test_optimizers_2_2 = _of("optimizers", list(zoo.collection("optimizers")), 2, 2, {"optimizer Rprop"})
Users.test_optimizers_refused = _refused("optimizers")


if __name__ == "__main__":
    main()
