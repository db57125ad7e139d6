"""States and weights on disk, tried from outside: losses, every gradient, weights and states have the bits of those in
memory."""
from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers.models.llama.modeling_llama")

PROGRAM = """
import os, torch, trireme as deepspeed
from torch import nn
F = nn.functional
class Tied(nn.Module):  # tied, unused and frozen parameters
    def __init__(self):
        super().__init__()
        self.word, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.layers, self.norm = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)]), nn.LayerNorm(32)
        self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(32, 32).requires_grad_(False)
        self.head.weight = self.word.weight
    def forward(self, x, y):
        z = self.word(x)
        for layer in self.layers: z = z + F.gelu(layer(z))
        return F.cross_entropy(self.head(self.norm(self.frozen(z))).float().flatten(0, 1), y.flatten())
class Wide(nn.Module):  # more than a block of elements
    def __init__(self):
        super().__init__()
        self.word, self.a, self.b, self.c = nn.Embedding(50, 32), nn.Linear(32, 1500), nn.Linear(1500, 900), nn.Linear(900, 50)
    def forward(self, x, y):
        return F.cross_entropy(self.c(F.relu(self.b(F.relu(self.a(self.word(x)))))).float().flatten(0, 1), y.flatten())
class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                                  num_attention_heads=4, num_key_value_heads=2))
    def forward(self, x, y):
        return self.model(input_ids=x, labels=x).loss
def run(kind, disk, extra, groups):
    torch.manual_seed(3)
    model = {"tied": Tied, "wide": Wide, "llama": Llama}[kind]()
    micros = extra.get("gradient_accumulation_steps", 1)
    zero = {"stage": 2, **extra.get("zero_optimization", {})}
    if "states" in disk: zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder + "/states", "buffer_count": 3}
    if "weights" in disk: zero["offload_param"] = {"device": "nvme", "nvme_path": folder + "/states", "buffer_count": 2}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 0.3,
              "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}, **extra, "zero_optimization": zero}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    more = {"model_parameters": [{"params": [p for _, p in trained if p.dim() > 1], "weight_decay": 0.1},
                                 {"params": [p for _, p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 0.003}]} if groups else {}
    engine = deepspeed.initialize(model=model, config=config, **more)[0]
    told = {}
    for step in range(4):
        for micro in range(micros):
            numbers = torch.Generator().manual_seed(1000 * step + 100 * micro + engine.get_data_parallel_rank())
            loss = engine(torch.randint(50, (4, 8), generator=numbers), torch.randint(50, (4, 8), generator=numbers))
            engine.backward(loss)
            if micro + 1 == micros:
                told.update({f"gradient of {name}, step {step}": deepspeed.utils.safe_get_full_grad(p) for name, p in trained})
            engine.step()
        told[f"loss of step {step}"] = loss.detach()
        if step == 1: engine.save_checkpoint(folder + "/saved " + disk)
    engine.eval()
    for tag in ("before", "after"):
        with torch.no_grad(): told["evaluation " + tag] = engine(torch.arange(32).view(4, 8), torch.arange(32).view(4, 8)).detach()
        if tag == "before":
            for name, p in trained: told[name + " before"] = deepspeed.utils.safe_get_full_fp32_param(p).clone()
            engine.load_checkpoint(folder + "/saved " + disk)
    for name, p in trained:
        told[name] = deepspeed.utils.safe_get_full_fp32_param(p).clone()
        for state in ("exp_avg", "exp_avg_sq", "sum", "momentum_buffer"):
            try: told[state + " of " + name] = deepspeed.utils.safe_get_full_optimizer_state(p, state).clone()
            except deepspeed.errors.ConfigError: pass
    engine.destroy()
    return told
def same(one, other):
    if one is None or other is None: return one is other
    return torch.equal(torch.nan_to_num(one.double(), nan=7.0), torch.nan_to_num(other.double(), nan=7.0))
def compared(kind, extra, groups=False, disks=("states",)):
    memory, differs = run(kind, "", extra, groups), []
    for disk in disks:
        found = run(kind, disk, extra, groups)
        assert memory.keys() == found.keys() and os.listdir(folder + "/states") == []
        differs += [disk + ": " + name for name in memory if not same(memory[name], found[name])]
    return differs
"""

BF16, LOW = {"bf16": {"enabled": True}}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20}}  # the first steps overflow


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


class OnDisk(Case):
    """Two ranks; cases are (model, configuration, whether there are two parameter groups, what is on disk)."""

    def check(self, cases):
        found = self.on_ranks(2, PROGRAM + f"result = [compared(*case) for case in {cases!r}]", timeout_s=600)
        for case, differs in zip(cases, found, strict=True):
            with self.subTest(case):
                self.assertEqual(differs, [])

    def test_at_every_zero_stage_and_dtype(self):
        self.check([(model, {"zero_optimization": {"stage": stage}, **dtype}, False)
                    for model in ("tied", "wide", "llama") for stage in range(4) for dtype in ({}, BF16, FP16)])

    def test_with_other_optimizers_and_features(self):
        self.check([("tied", {"gradient_accumulation_steps": 3, **BF16}, True), ("wide", optimizer("Adam", lr=0.01, weight_decay=0.1), True),
                    ("wide", optimizer("Lion", lr=0.001), False), ("wide", {**optimizer("Adagrad", lr=0.01), **BF16}, False),
                    ("wide", optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True), False), ("tied", {**optimizer("SGD", lr=0.1), **BF16}, False),
                    ("wide", LOW, False), ("wide", {**LOW, "trireme": {"stochastic_rounding": True}}, False),
                    ("wide", {"deterministic": True, "zero_optimization": {"stage": 3}}, False),
                    ("llama", {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}, False),
                    ("llama", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, **BF16}, False),
                    ("wide", {"gradient_clipping": 0, "trireme": {"recompute": {"mode": "selective"}}}, False),
                    ("wide", {"zero_optimization": {"stage": 3}, "trireme": {"gather": "copy", "live_bytes": 1}}, True)])

    def test_weights_at_every_dtype_and_with_other_features(self):
        copied = {"zero_optimization": {"stage": 3}, "trireme": {"gather": "copy", "merge_below_bytes": 0, "live_bytes": 1}}
        roomy = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 60_000}}
        disks = ("weights", "states weights")
        self.check([(model, {**section, **dtype}, False, disks) for model in ("tied", "wide", "llama") for section in (copied, roomy)
                    for dtype in ({}, BF16, FP16)])
        self.check([("tied", {"gradient_accumulation_steps": 3, **BF16, **copied}, True, disks),
                    ("wide", {**optimizer("Lion", lr=0.001), **copied}, False, disks), ("wide", {**optimizer("SGD", lr=0.1), **roomy}, False, disks),
                    ("wide", {**LOW, "trireme": {"gather": "copy", "stochastic_rounding": True}, "zero_optimization": {"stage": 3}}, False, disks),
                    ("wide", {"deterministic": True, **roomy}, False, disks),
                    ("llama", {"tensor_parallel": {"autotp_size": 2}, **roomy}, False, disks),
                    ("llama", {**BF16, "gradient_clipping": 0, **roomy, "trireme": {"recompute": {"mode": "selective"}}}, False, disks)])


if __name__ == "__main__":
    main()
