"""State of a program beside weights: buffers that its modules replace, values of parameter groups; and what a program
is told of calls that change nothing or that ranks do not make alike."""
from harness import RankServer, launch, main
from small_model import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_AVERAGED = """
class Averaged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("first", None)
    def forward(self, x):
        self.mean = 0.5 * self.mean + x.detach().mean(0)  # a new tensor each time
        if self.first is None:
            self.first = x.detach().clone()
        return self.linear(x)
adamw = {"type": "AdamW", "params": {"lr": 0.1}}
def same_on_ranks(tensor):
    mine, sent = tensor.clone(), tensor.clone()
    deepspeed.comm.broadcast(sent, 0)
    same = torch.tensor([float(torch.equal(mine, sent))])
    deepspeed.comm.all_reduce(same)
    return same.item() == deepspeed.comm.get_world_size()
"""


class Buffers(Case):
    def test_buffers_that_a_module_replaces_are_saved_exported_loaded_and_equal_on_ranks(self):
        for stage in (1, 3):
            result = self.ran(2, _AVERAGED + f"""
torch.manual_seed(0)
engine = deepspeed.initialize(model=Averaged(), config=config({stage}, optimizer=adamw))[0]
net = engine.module
train(engine, 3)
result = [same_on_ranks(net.mean), same_on_ranks(net.first), bool(net.mean.any())]
engine.save_checkpoint(folder)
engine.save_16bit_model(folder)
if deepspeed.comm.get_rank() == 0:
    written = torch.load(folder + "/pytorch_model.bin", weights_only=True)
    result += [torch.equal(written["mean"], net.mean), torch.equal(written["first"], net.first)]
other = deepspeed.initialize(model=Averaged(), config=config({stage}, optimizer=adamw))[0]
train(other, 1, first=7)
other.load_checkpoint(folder)
result += [torch.equal(other.module.mean, net.mean), torch.equal(other.module.first, net.first)]
""")
            self.assertEqual(result, [True] * 7, stage)


class Groups(Case):
    def test_a_resume_takes_up_all_values_of_the_groups(self):
        for kind in ("Adam(net.parameters(), lr=0.01)", "SGD(net.parameters(), lr=0.01, momentum=0.9)",
                     "RMSprop(net.parameters(), lr=0.01, momentum=0.9)"):
            result = self.ran(1, f"""
def make():
    net = model()
    optimizer = torch.optim.{kind}
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=40)
    return deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config(1))[:2]
one, steered = make()
train(one, 6)
steered.param_groups[0]["weight_decay"] = 0.25
steered.param_groups[0]["note"] = "mine"
one.save_checkpoint(folder)
expected = train(one, 4, first=6)
two, restored = make()
two.load_checkpoint(folder)
values = lambda group: {{key: value for key, value in group.items() if key != "params"}}
same = restored.param_groups[0].get("note") == "mine" and restored.param_groups[0]["weight_decay"] == 0.25
result = [same, train(two, 4, first=6) == expected, values(restored.param_groups[0]) == values(steered.param_groups[0])]
""")
            self.assertEqual(result, [True] * 3, kind)

    def test_gradients_of_a_step_that_raised_do_not_join_the_next(self):
        for stage in (0, 2, 3):
            result = self.ran(2, f"""
class Raising(torch.optim.SGD):
    fails = False
    def step(self, closure=None):
        if Raising.fails:
            raise OSError("this step fails")
        return super().step(closure)
def run(raises):
    net = model()
    engine = deepspeed.initialize(model=net, optimizer=Raising(net.parameters(), lr=0.1), config=config({stage}))[0]
    train(engine, 1)
    if raises:
        Raising.fails = True
        said = raised(lambda: train(engine, 1, first=5))
        assert "OSError" in said, said
        Raising.fails = False
    losses = train(engine, 3, first=1)
    engine.destroy()
    return losses
result = [run(True), run(False)]
""")
            self.assertEqual(result[0], result[1], stage)


class Told(Case):
    def test_an_optimizer_beside_the_engine_is_told_once(self):
        script = self.snippet("""
import torch, trireme as deepspeed
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
engine = deepspeed.initialize(model=net, config={"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}})[0]
for _ in range(3):
    engine.backward(engine(torch.ones(4, 8)).sum())
    optimizer.step()
    engine.step()
result = None
""")
        status, out, err = RankServer.run(0, [script])
        self.assertEqual(status, 0, err)
        self.assertEqual((out + err).count("SGD.step() changes nothing"), 1, out + err)

    def test_a_forward_says_what_is_to_be_cast(self):
        result = self.ran(1, """
adamw = {"type": "AdamW", "params": {"lr": 0.1}}
engine = deepspeed.initialize(model=model(), config=config(bf16={"enabled": True}, optimizer=adamw))[0]
result = [raised(lambda: engine(torch.ones(4, 8, dtype=dtype))) for dtype in (torch.float32, torch.int64)]
""")
        for said, dtype in zip(result, ("fp32", "Long")):
            self.assertIn("ShapeError", said)
            self.assertIn(f"an input is {dtype} and the weights are bf16; cast the input", said[-1])

    def test_a_model_may_be_a_leaf_itself(self):
        result = self.ran(2, """
adamw = {"type": "AdamW", "params": {"lr": 0.1}}
def run(marked):
    net = model()
    if marked:
        deepspeed.utils.set_z3_leaf_modules(net, [torch.nn.Sequential])
    engine = deepspeed.initialize(model=net, config=config(3, optimizer=adamw, trireme={"gather": "copy"}))[0]
    losses = train(engine, 3)
    engine.destroy()
    return losses
result = [run(True), run(False)]
""")
        self.assertEqual(result[0], result[1])


class OnDisk(Case):
    def test_states_on_disk_are_those_in_memory_and_go_on_from_a_checkpoint(self):
        result = self.on_ranks(2, """
import os, torch, trireme as deepspeed
def run(offload, saves, loads, **section):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    engine = deepspeed.initialize(model=net, config=config)[0]
    if loads: engine.load_checkpoint(folder + "/" + loads)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * engine.global_steps + engine.global_rank)
        loss = engine(torch.randn(2, 64, dtype=torch.bfloat16)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if saves: engine.save_checkpoint(folder + "/" + saves)
    p = net[0].weight
    told = [losses, deepspeed.utils.safe_get_full_fp32_param(p).double().sum().item(), deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg_sq").sum().item()]
    engine.destroy()
    return told
disk = {"device": "nvme", "nvme_path": folder + "/states"}
result = [run({"device": "none"}, "memory", None), run(disk, "disk", None), run(disk, None, "memory"), run({"device": "none"}, None, "disk"),
          os.listdir(folder + "/states")]
""")
        memory, disk, to_disk, from_disk, left = result
        self.assertEqual(disk, memory)
        self.assertEqual(to_disk, from_disk)
        self.assertNotEqual(to_disk[0], memory[0])
        self.assertEqual(left, [])

    def test_weights_on_disk_are_those_in_memory(self):
        result = self.on_ranks(2, """
import os, torch, trireme as deepspeed
def run(param):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 3, "offload_param": param, "stage3_max_live_parameters": 1000}, "trireme": {"gather": "copy"}}
    engine = deepspeed.initialize(model=net, config=config)[0]
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + engine.global_rank)
        loss = engine(torch.randn(2, 64, dtype=torch.bfloat16)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 1: engine.save_checkpoint(folder + "/" + param["device"])
    engine.load_checkpoint(folder + "/" + param["device"])
    losses.append(engine(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().item())
    engine.destroy()
    return losses + [p.double().sum().item() for p in net.parameters()]
result = [run({"device": "none"}), run({"device": "nvme", "nvme_path": folder + "/weights"}), os.listdir(folder + "/weights")]
""")
        self.assertEqual(result[1], result[0])
        self.assertEqual(result[2], [])

    def test_a_folder_that_cannot_be_is_named_on_every_rank_before_training(self):
        self.write("file", "text")
        result = self.on_ranks(2, """
import json, torch, trireme as deepspeed
net = torch.nn.Linear(8, 8)
before = net.weight.detach().clone()
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
          "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": folder + "/file/states"}}}
try:
    deepspeed.initialize(model=net, config=config)
    said = ["nothing"]
except deepspeed.errors.Error as error:
    said = [type(error).__name__, str(error)]
result = [said, torch.equal(net.weight, before)]
""")
        self.assertEqual(result[0][0], "IoError")
        self.assertTrue(result[0][1].startswith("zero_optimization.offload_optimizer.nvme_path: "), result)
        self.assertIn("/file/states: the folder cannot be made", result[0][1])
        self.assertTrue(result[1])


# Rank 0 ends in the middle of a forward that rank 1 gathers for.
_LOST = """
import json, os, pathlib, signal, sys
import torch, trireme as deepspeed
folder = pathlib.Path(sys.argv[1])
rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == 1 else signal.SIG_DFL)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
engine = deepspeed.initialize(model=net, config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization":
    {"stage": 3}, "trireme": {"gather": "copy", "live_bytes": 1}})[0]
x = torch.ones(1, 64)
engine.backward(engine(x).sum())
engine.step()
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
said = []
for call in (lambda: engine(x), lambda: net(x)):
    try:
        call()
    except Exception as error:
        said.append([type(error).__name__, isinstance(error, deepspeed.errors.CommError), "rank 0" in str(error)])
(folder / "said").write_text(json.dumps(said))
"""


class Lost(Case):
    def test_a_peer_that_is_lost_in_a_forward_is_a_comm_error(self):
        launch(2, [self.write("lost.py", _LOST), self.folder], timeout_s=60)
        self.assertEqual((self.folder / "said").read_text(), '[["PeerLostError", true, true], ["PeerLostError", true, true]]')


if __name__ == "__main__":
    main()
