"""smp's names, arguments, defaults and keys, and the limits that it had, against the package and the tables of
docs/smp.md. What is smp's is written here as its documentation has it."""
import ast
import enum
import inspect
import itertools
import json
import pathlib
import re
import types
import unittest

import torch

import trireme.smp as smp
from harness import main
from trireme.smp.config import ALIASES, KEYS

_TESTS = pathlib.Path(__file__).parent
_PAGE = (_TESTS.parents[1] / "docs/smp.md").read_text(encoding="utf-8")

_STEP = "non_split_inputs=[], input_split_axes={}, detach_outputs=True"
_MODEL = ('module, trace_device="gpu", trace_execution_times=False, trace_memory_usage=False, overlapping_allreduce=True, backward_passes_per_step=1, '
          "average_grads_across_microbatches=True, bucket_cap_mb=25, broadcast_buffers=True, gradient_as_bucket_view=False")
_RANKS = [f"{group}_{what}" for group in ("pp", "tp", "rdp", "mp", "dp") for what in ("rank", "size")] + ["rank", "size", "local_rank", "local_size"]
_GROUPS = [*(f"get_{group}_group" for group in ("pp", "tp", "rdp", "mp", "dp")), *(f"get_{group}_process_group" for group in ("pp", "tp", "rdp", "mp", "dp", "world"))]
_QUERIES = {"distributed_modules": "", "is_distributed_parameter": "param", "is_distributed_buffer": "buf", "is_scaled_batch_parameter": "param",
            "is_scaled_batch_buffer": "buf", "default_reducer_named_parameters": "", "scaled_batch_reducer_named_parameters": ""}

#: {call: its arguments}; one without a default has none that the documentation tells
SMP = {
    "init": "cfg_dict=None", "is_initialized": "", "is_tracing": "", **{name: "" for name in (*_RANKS, *_GROUPS)}, "step": _STEP, "DistributedModel": _MODEL,
    "DistributedOptimizer": "optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args={}", "partition": "index", "set_partition": "module, index",
    "barrier": "group=WORLD", "dp_barrier": "", "mp_barrier": "", "broadcast": "obj, group", "send": "obj, dest, rank_type", "recv_from": "src, rank_type",
    "allgather": "obj, group", "save": "obj, f, partial=True, pickle_module=pickle, pickle_protocol=2", "load": "f, map_location, pickle_module, pickle_load_args, partial=True",
    "save_checkpoint": "path, tag, partial=True, model, optimizer, user_content, translate_if_full=True, num_kept_partial_checkpoints=None",
    "resume_from_checkpoint": "path, tag=None, partial=True, strict=True, load_optimizer=True, load_sharded_optimizer_state=True, translate_function=None",
    "get_full_state_dict_from_sharded_data_parallel_checkpoint": "path, tag, dtype", "checkpoint": "module, preserve_rng_state=True",
    "checkpoint_sequential": 'input, strategy="each", preserve_rng_state=True, pack_args_as_tuple=False',
    "set_activation_checkpointing": "module, preserve_rng_state, pack_args_as_tuple, strategy", "tensor_parallelism": "enabled=True",
    "set_tensor_parallelism": "module, enabled=True", "tp_register": "init_hook, forward_hook, return_hook", "tp_register_with_module": "init_hook, forward_hook, return_hook",
    "delay_param_initialization": "enabled=True", "model_creation": "tensor_parallelism=False, dtype=None", "register_parameter": "module",
    **{f"model.{name}": arguments for name, arguments in {
        "backward": "tensors, grad_tensors", **{f"local_{name}": "" for name in ("buffers", "named_buffers", "parameters", "named_parameters", "modules", "named_modules")},
        "local_state_dict": "", "state_dict": "gather_to_rank0=False", "load_state_dict": "state_dict, strict, same_partition_load=False", "cpu": "", "join": "",
        "register_post_partition_hook": "hook", "register_post_step_hook": "", "register_comm_hook": "", "get_module": "", **_QUERIES}.items()},
    **{f"optimizer.{name}": arguments for name, arguments in {
        "state_dict": "", "load_state_dict": "", "local_state_dict": "gather_if_shard", "clip_master_grads": ""}.items()},
    **{f"StepOutput.{name}": "" for name in ("reduce_mean", "reduce_sum", "concat", "stack")},
}
#: What is not called; the arguments of nn's and optimizers' classes are compared in smp_nn_test.py and
#: smp_optimizers_test.py
OTHERS = ["CommGroup", "RankType", "WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP", "state", "StepOutput", "StepOutput.outputs", "model.partitioned",
          "model.module", "optimizer.optimizer", "amp.GradScaler", "optimizers.FusedAdam", "optimizers.FusedLamb", "optimizers.FusedNovoGrad",
          *(f"nn.{name}" for name in ("DistributedModule", "DistributedLinear", "DistributedEmbedding", "DistributedTransformerLayer", "DistributedTransformer",
                                      "DistributedTransformerLMHead", "DistributedAttentionLayer", "DistributedTransformerOutputLayer", "FlashAttentionLayer", "FusedLayerNorm")),
          *(f"nn.huggingface.{family}" for family in ("gpt2", "bert", "roberta", "gptj", "gptneo"))]
#: {key: its default}; "": follows from others, or must be given
DEFAULTS = {
    "pipeline_parallel_degree": "", "microbatches": 1, "active_microbatches": "", "pipeline": "interleaved", "optimize": "memory", "placement_strategy": "cluster",
    "auto_partition": True, "default_partition": 0, "memory_weight": "", "ddp": False, "horovod": False, "contiguous": True, "ddp_port": None, "ddp_dist_backend": "auto",
    "deterministic_server": False, "tensor_parallel_degree": 1, "prescaled_batch": False, "shard_optimizer_state": False, "offload_activations": False,
    "activation_loading_horizon": 4, "fp16": False, "bf16": False, "fp16_params": False, "delayed_parameter_initialization": False, "skip_tracing": False,
    "sharded_data_parallel_degree": 1, "sdp_reduce_bucket_size": 5e8, "sdp_param_persistence_threshold": 1e6, "sdp_max_live_parameters": 1e9,
    "sdp_hierarchical_allgather": True, "sdp_gradient_clipping": 1.0, "static_mode": False, "fast_mode": False, "checkpoint_attentions": False, "_match_weights": False,
    "partition_file": None, "load_partition": False, "overlapping_allreduce": True,
}
OURS = {"partition_method"}
LIMITS = 33


def rows(title, page=_PAGE):
    """Cells of the rows of all tables of a section, without their heads."""
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    if section is None:
        raise AssertionError(f"docs/smp.md has no section '{title}'")
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    heads = {index for index, line in enumerate(lines) if set(line) <= set("|- ")}
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for index, line in enumerate(lines) if index not in heads and index + 1 not in heads]


def spans(cell):
    """Code in a cell, with the braces of several names expanded, without smp's own prefix."""
    found = []
    for text in re.findall(r"`([^`]+)`", cell):
        parts = [part.strip("{}").split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^{}]*\})", text)]
        found += ["".join(one).removeprefix("@").removeprefix("smp.") for one in itertools.product(*parts)]
    return found


class _Net(torch.nn.Linear):
    pass


def _optimizer():
    return smp.DistributedOptimizer(torch.optim.SGD(_Net(1, 1).parameters()))


_SPACES = {"": smp, "model": smp.DistributedModel, "optimizer": _optimizer(), "StepOutput": smp.StepOutput, "amp": smp.amp, "nn": smp.nn, "optimizers": smp.optimizers}


def named(name):
    """The thing of a name such as init, model.backward or nn.DistributedLinear. Raises AttributeError: there is
    none."""
    space, _, member = name.partition(".")
    if member and space in _SPACES:
        found = _SPACES[space]
        for part in member.split("."):
            found = getattr(found, part)
        return found
    return getattr(smp, name)


def signature(name):
    """The inspect.Signature as a program sees it: of a method without self."""
    found = inspect.signature(named(name))
    if name.startswith(("model.", "StepOutput.")):
        return found.replace(parameters=list(found.parameters.values())[1:])
    return found


def shown(name):
    """A call as the page has it."""
    parameters = [one.replace(default=_Text(text_of(one.default)), annotation=one.empty) if one.default is not one.empty else one.replace(annotation=one.empty)
                  for one in signature(name).parameters.values()]
    return name + str(inspect.Signature(parameters))


class _Text(str):
    __repr__ = str.__str__


def text_of(default):
    """A default as it is written."""
    if isinstance(default, enum.Enum):
        return default.name
    if isinstance(default, types.ModuleType):
        return default.__name__
    return json.dumps(default) if isinstance(default, str) else repr(default)


def arguments_of(text):
    """{name: default as text; None: none is told} of arguments in any order."""
    found = {}
    for one in ast.parse(f"f({text})", mode="eval").body.args if "=" not in text else _split(text):
        name, _, default = (ast.unparse(one) if isinstance(one, ast.AST) else one).partition("=")
        found[name.strip()] = default.strip() or None
    return found


def _split(text):
    return re.split(r", (?=\w+(?:=|,|$))", text)


def _is_none(text):
    return text in ("None", "{}", "[]", "()")


class Names(unittest.TestCase):
    def test_every_name_of_smp_is_there_with_its_arguments_and_defaults(self):
        for name in OTHERS:
            if name != "model.module":  # of an object
                named(name)
        for name, text in SMP.items():
            with self.subTest(name):
                parameters = signature(name).parameters
                for argument, default in arguments_of(text).items():
                    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and argument not in parameters and default is None:
                        continue
                    self.assertIn(argument, parameters)
                    if default is not None:
                        ours = text_of(parameters[argument].default)
                        self.assertTrue(ours == default or _is_none(ours) and _is_none(default), f"{argument}: {ours}, and smp's is {default}")
                order = [argument for argument in arguments_of(text) if argument in parameters]
                self.assertEqual(order, [argument for argument in parameters if argument in order])

    def test_every_call_has_a_row_with_its_arguments_and_each_row_is_one(self):
        on_page = {}
        for calls, more in rows("Arguments"):
            for call in spans(calls):
                on_page[call.partition("(")[0]] = call, more
        for name, text in SMP.items():
            with self.subTest(name):
                self.assertIn(name, on_page)
        for name, (call, more) in on_page.items():
            with self.subTest(name):
                self.assertEqual(call, shown(name))
                self.assertIn(name, SMP)
                known = arguments_of(SMP[name])
                ours = [argument for argument, one in signature(name).parameters.items() if argument not in known and one.default is not one.empty]
                for argument in ours:
                    self.assertIn(f"`{argument}`", more)

    def test_every_name_has_a_row_and_each_row_a_name(self):
        arguments = {argument for name in ("DistributedModel", "DistributedOptimizer", "step", "init", *(f"nn.{name}" for name in smp.nn.__all__ if name != "huggingface"))
                     for argument in signature(name).parameters}
        seen = set()
        for title in ("Names", "Arguments", "Modules", "Checkpointing"):
            for name in (span for row in rows(title) for span in spans(row[0])):
                bare = name.partition("(")[0].partition("=")[0]
                candidates = [bare, *(f"{space}.{bare}" for space in _SPACES if space), f"nn.huggingface.{bare}"]
                seen.update(candidates if bare.count(".") == 0 else [bare, f"nn.{bare}"])
                if bare in arguments or bare in ("model", "…", "model.module"):
                    continue
                self.assertTrue(any(self._is_there(one) for one in candidates), f"docs/smp.md, {title}: `{name}` is no name of trireme.smp")
        for name in (*OTHERS, *SMP):
            if not name.startswith("nn.huggingface"):
                self.assertIn(name, seen, f"docs/smp.md has no row with `{name}`")
        for name in smp.__all__:
            self.assertTrue(name in seen or name in ("nn", "optimizers", "amp"), f"docs/smp.md has no row with `{name}`")

    @staticmethod
    def _is_there(name):
        try:
            if name.endswith("…"):  # of several
                space, _, begin = name.rstrip("…").rpartition(".")
                return any(one.startswith(begin) for one in dir(named(space) if "." in space or space not in _SPACES else _SPACES[space]))
            named(name)
        except AttributeError:
            return False
        return True


class Keys(unittest.TestCase):
    def test_every_key_of_smp_has_its_default(self):
        self.assertEqual(set(DEFAULTS) | OURS, set(KEYS))
        self.assertEqual(ALIASES, {"partitions": "pipeline_parallel_degree"})
        for name, default in DEFAULTS.items():
            self.assertEqual((KEYS[name].default, type(KEYS[name].default)), (None, type(None)) if default == "" else (default, type(default)), name)

    def test_every_key_has_a_row_with_its_default_and_each_row_is_a_key(self):
        on_page = {}
        for keys, default, _ in rows("Configuration"):
            for key in spans(keys):
                self.assertNotIn(key, on_page)
                on_page[key] = default
        self.assertEqual(set(on_page), set(KEYS) | set(ALIASES))
        for name, key in KEYS.items():
            with self.subTest(name):
                if key.default is None and DEFAULTS.get(name) == "":
                    self.assertTrue(on_page[name] and on_page[name] != "null")
                else:
                    self.assertEqual(json.loads(on_page[name]), key.default)


class Limits(unittest.TestCase):
    def test_each_is_lifted_or_refused_or_stays_and_a_test_shows_it(self):
        seen = []
        for number, _, state, shown_by in rows("Limits that smp had"):
            seen.append(int(number))
            with self.subTest(number):
                self.assertRegex(state, r"^(lifted|refused: .{20,}|stays: .{20,}|lifted; refused: .{20,})$")
                cited = spans(shown_by)
                self.assertTrue(cited)
                for file, test in zip(cited[::2], cited[1::2], strict=True):
                    self.assertIn(test, tests_of(file), f"limit {number}: {file} has no test {test}")
        self.assertEqual(seen, list(range(1, LIMITS + 1)))


def tests_of(file):
    """Class.method of all tests of a file."""
    tree = ast.parse((_TESTS / file).read_text(encoding="utf-8"))
    return {f"{one.name}.{method.name}" for one in tree.body if isinstance(one, ast.ClassDef) for method in one.body
            if isinstance(method, ast.FunctionDef) and method.name.startswith("test_")}


if __name__ == "__main__":
    main()
