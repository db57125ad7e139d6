"""Changes that the package makes in torch and other packages are in the table of patches, and come off again."""
import os
import pathlib

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "accelerate", "transformers.masking_utils")
_PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/patches.md"

# Changes by torch itself, as it trains, are made before the comparison begins.
_PRELUDE = f"""
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import copy, functools, gc, multiprocessing.spawn
import warnings
warnings.simplefilter("ignore")  # of names that are read for the comparison alone
import torch, torch._dynamo, torch._dynamo.trace_rules, torch.distributed.fsdp, torch.distributed.checkpoint.state_dict, torch.distributed._composable.fsdp
import torch.distributed.tensor, torch.distributed.fsdp.sharded_grad_scaler, torch.utils.flop_counter, accelerate, transformers.masking_utils
from torch import nn
from torch.nn import functional as F
from attributes import Attributes
torch.jit._builtins._get_builtin_table()
for kind in (torch.optim.AdamW, torch.optim.SGD):
    kind([nn.Parameter(torch.zeros(1))]).step()
PACKAGES = ("torch", "accelerate", "transformers", "multiprocessing")
OWN = ("torch.distributed.distributed_c10d.", "torch.jit._builtins._builtin_table", "torch.utils.hooks.RemovableHandle.next_id",
       "torch._custom_class_base._FakeScriptObject_cls")
CALLS = ("._dir", "simple_registry.singleton._data", "_lazy_seed_tracker.call_order")  # operators, what was read; seeds of devices that are not there
start = Attributes(*PACKAGES)

def changed():
    '''What is not as at the start, but for what torch does when ranks join.'''
    return {{name: key for name, key in start.changed().items() if not name.startswith(OWN) and not name.endswith(CALLS)}}

def rows():
    '''{{(owner, name) of what rows name: dotted name}}'''
    found = {{}}
    for row in [row for room in patches.applied().values() for row in room]:
        for module, name in row.names():
            if module in sys.modules and module.partition(".")[0] in PACKAGES:
                *classes, last = name.split(".")
                owner = functools.reduce(getattr, classes, sys.modules[module])
                if name == row.name or hasattr(owner, last):  # which not each version has
                    found[id(owner), last] = f"{{module}}.{{name}}"
    return found

def without_row():
    known = set(rows())
    holders = {{id(getattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], None)) for name in rows().values() if name.rpartition(".")[0] in sys.modules}}
    return [name for name, key in changed().items() if key not in known and key[0] not in holders]

def without_change():
    found = set(changed().values())
    holders = {{key[0] for key in found}}
    return [name for key, name in rows().items() if key not in found and id(getattr(sys.modules.get(name.rpartition(".")[0]), key[1], None)) not in holders]
"""
_FEATURES = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.project, self.head = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)
    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        parts = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(attended + x).flatten(0, 1), labels.flatten())

def train_sequences():
    torch.manual_seed(0)
    with trireme.zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}):
        net = Attention()
    engine, *_ = trireme.initialize(model=net, config={"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "zero_optimization": {"stage": 3},
                                                       "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
    losses = []
    for step in range(2):
        ids = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=ids, labels=ids.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses

def train_sharded():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    torch.distributed.fsdp.fully_shard(net[0])
    torch.distributed.fsdp.fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return net, optimizer

def train_stages():
    smp = trireme.smp
    smp.init({"partitions": 2})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    @smp.step
    def train_step(x):
        model(x).sum().backward()
    train_step(torch.ones(2, 4))
    optimizer.step()
    return model, optimizer, train_step
"""


class Patches(Case):
    def test_an_import_changes_nothing_and_what_features_change_has_a_row_and_comes_off_again(self):
        self.write("later.py", "from accelerate.utils import load_fsdp_model\nfrom torch.autograd import grad\n")
        result = self.on_ranks(2, _PRELUDE + """
import trireme, trireme.fsdp, trireme.pipe, trireme.smp, trireme.as_fsdp, trireme.as_deepspeed, trireme.as_smp
from trireme import patches
result = {"imports": list(changed()), "rooms at import": list(patches.applied())}
""" + _FEATURES + """
sys.path.insert(0, folder)
trireme.init_distributed()
engine, result["losses"] = train_sequences()
result["of an engine"] = without_row() + without_change()
trireme.as_fsdp.install()
trireme.as_deepspeed.install()
trireme.as_smp.install()
import deepspeed.zero, later
import smdistributed.modelparallel.torch as smp
net, optimizer = train_sharded()
of_stages = train_stages()
result["of all"] = without_row() + without_change()
result["left out"] = sorted(set(patches.ROOMS) - set(patches.applied()))
try:
    patches.remove_all()
except trireme.errors.StateError as error:
    result["alive"] = str(error)
for one in trireme.ranks.living():
    one.destroy()
del one, engine, net, optimizer, of_stages
patches.remove_all()
gc.collect()
result["left"], result["rows left"] = list(changed()), list(patches.applied())
import ctypes, accelerate.utils
result["is a sequence"] = ctypes.pythonapi.PySequence_Check(ctypes.py_object(torch.ones(1)))
result["by name"] = later.load_fsdp_model is accelerate.utils.load_fsdp_model and later.grad is torch.autograd.grad
result["deepspeed"] = [name for name in sys.modules if name.startswith("deepspeed")]
engine, result["again"] = train_sequences()
result["of it again"] = without_row() + without_change()
engine.destroy()
""")
        self.assertIn(result["rooms at import"], [[], ["uncaught"]])
        for what in ("imports", "of an engine", "of all", "left", "rows left", "of it again", "deepspeed"):
            with self.subTest(what):
                self.assertEqual(result[what], [])
        self.assertIn(result["left out"], [[], ["uncaught"]])
        self.assertRegex(result["alive"], r"patches\.remove_all\(\): \d+ objects that need them live .*end engines by destroy\(\)")
        self.assertFalse(result["is a sequence"])
        self.assertTrue(result["by name"])
        self.assertEqual(result["again"], result["losses"])

    def test_a_change_without_a_row_is_found(self):
        result = self.on_ranks(0, _PRELUDE + """
import trireme
from trireme import patches
torch.nn.functional.relu = lambda x: x
torch.Tensor.planted = property(lambda self: 1)
torch.nn.modules.module._global_forward_hooks[1] = print
torch._dynamo.callback.callback_handler.end_callbacks.append(print)
torch.backends.mha._is_fastpath_enabled = False
result = sorted(name.rpartition(".")[2] for name in without_row())
""")
        self.assertEqual(result, ["_global_forward_hooks", "_is_fastpath_enabled", "end_callbacks", "planted", "relu"])

    def test_wrappers_of_one_name_have_one_order_and_what_another_has_put_there_stays(self):
        result = self.on_ranks(0, """
import math, sys, types
from trireme import patches
from trireme.errors import StateError

class Thing:
    def method(self): return ["original"]
    @staticmethod
    def static(): return ["original"]
    @classmethod
    def of_class(cls): return [cls.__name__]
    value = property(lambda self: ["original"])
class Below(Thing): pass
place = sys.modules["place"] = types.ModuleType("place")
place.Thing, place.Below, before = Thing, Below, dict(vars(Thing))

def room(name, *names):
    def said(original):
        if isinstance(original, classmethod):
            return lambda cls: original.__get__(None, cls)() + [name]
        return lambda *args: original(*args) + [name]
    return patches.Patches(f"trireme.{name}", "", [patches.Wrapped("place", one, "", said) for one in names])

names = ("Thing.method", "Thing.static", "Thing.of_class", "Thing.value")
read = lambda: [Thing().method(), Thing.static(), Below.of_class(), Thing().value]
orders = []
for order in (("watch.clipping", "fsdp.optimizers"), ("fsdp.optimizers", "watch.clipping")):
    rooms = [room(one, *names) for one in order]
    for one in rooms + rooms:
        one.apply()
    orders.append(read())
    patches.remove_all()
    assert {name: vars(Thing)[name] for name in before} == before and all(vars(Thing)[name] is before[name] for name in before if name != "__dict__")
result = {"orders": orders}
inherited = room("fsdp.dcp", "Below.method")
inherited.apply()
result["inherited"] = Below().method()
patches.remove_all()
result["inherited is gone"] = "method" not in vars(Below)

first, second = room("watch.clipping", "Thing.method"), room("fsdp.optimizers", "Thing.method")
first.apply()
ours, Thing.method = Thing.method, lambda self: ["theirs"]
second.apply()
result["over theirs"] = Thing().method()
try:
    patches.remove_all()
except StateError as error:
    result["covered"], result["still"] = str(error), Thing().method()
patches._Changes.places.clear(), patches._Changes.rooms.clear(), patches._Changes.waits.clear()
late = room("fsdp.dcp", "function")
try:
    patches.Patches("trireme.elsewhere", "", []).apply()
except Exception as error:
    result["room"] = str(error)
late = patches.Patches("trireme.fsdp.dcp", "", [patches.Wrapped("later", "function", "", lambda original: lambda: original() + 1),
                                               patches.Added("later", "held", "", lambda held: [held.append(1), held.clear][1])])
finders = list(sys.meta_path)
late.apply()
patches.remove_all()
result["no wait"] = sys.meta_path == finders
late.apply()
sys.path.insert(0, folder)
open(folder + "/later.py", "w").write("def function(): return 1\\nheld = []\\n")
import importlib.util
importlib.util.find_spec("later")
import later
result["late"] = [later.function(), later.held[:], sys.meta_path == finders]
patches.remove_all()
result["late"] += [later.function(), later.held[:]]
""")
        both = ["watch.clipping", "fsdp.optimizers"]
        self.assertEqual(result["orders"], [[["original", *both], ["original", *both], ["Below", *both], ["original", *both]]] * 2)
        self.assertEqual(result["inherited"], ["original", "fsdp.dcp"])
        self.assertTrue(result["inherited is gone"])
        self.assertEqual(result["over theirs"], ["theirs", "fsdp.optimizers"])
        self.assertIn("patches.remove_all(): place.Thing.method got another value since trireme has replaced it", result["covered"])
        self.assertEqual(result["still"], ["theirs", "fsdp.optimizers"])
        self.assertIn("elsewhere is not in ROOMS", result["room"])
        self.assertTrue(result["no wait"])
        self.assertEqual(result["late"], [2, [1], True, 1, []])

    def test_pythons_hook_of_errors_comes_off(self):
        self.assertTrue(self.on_ranks(0, """
import sys, trireme
from trireme import patches
was_ours = sys.excepthook is not sys.__excepthook__
patches.remove_all()
result = was_ours and sys.excepthook is sys.__excepthook__
""", launched=True))

    def test_the_page_is_the_table(self):
        from trireme import patches  # pylint: disable=import-outside-toplevel
        made = patches.page()
        if "TRIREME_UPDATE_DOCS" in os.environ:
            _PAGE.write_text(made)
        else:
            self.assertEqual(_PAGE.read_text(), made, "TRIREME_UPDATE_DOCS=1 patches_test.py writes docs/patches.md anew")


if __name__ == "__main__":
    main()
