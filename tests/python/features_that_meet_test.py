"""Features that meet, each program beside plain PyTorch in one process: losses and every parameter's gradient, or a
refusal that names the fix."""
from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers", "trireme")

_PROGRAMS = """
import copy
import torch, trireme
from torch import nn
from torch.nn import functional as F
from trireme.utils import safe_get_full_fp32_param, safe_get_full_grad

def config(stage=0, micro=2, **more):
    return {"train_micro_batch_size_per_gpu": micro, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}

def words(*shape, seed=1):
    return torch.randint(4, 48, shape, generator=torch.Generator().manual_seed(seed))

def apart(found, expected):
    return (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-4)

def differences(make, loss_of, options, steps=2):
    '''{loss or parameter: how far its gradient is from plain PyTorch's} over some steps, of what is more than 1e-5 off.'''
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine, *_ = trireme.initialize(model=model, config=options)
    found = {}
    for step in range(steps):
        expected = loss_of(plain, plain)
        expected.backward()
        loss = loss_of(engine, model)
        engine.backward(loss)
        found[f"loss {step}"] = abs(loss.item() / expected.item() - 1)
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
            gradient = safe_get_full_grad(parameter)
            if (gradient is None) != (other.grad is None):
                found[f"{name} {step}"] = "one has no gradient"
            elif gradient is not None:
                found[f"{name} {step}"] = apart(gradient, other.grad)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()
    return {key: far for key, far in found.items() if isinstance(far, str) or not far < 1e-5}

def refusal(call):
    try:
        call()
    except trireme.errors.Error as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
"""


class Features(Case):
    def on(self, ranks, text):
        return self.on_ranks(ranks, _PROGRAMS + text)

    def test_models_that_make_their_own_positions_keep_them_under_sequences(self):
        found = self.on(2, """
import transformers as T
sizes = dict(vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=34)
off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
models = {"RoBERTa": lambda: T.RobertaForMaskedLM(T.RobertaConfig(**sizes, **off, intermediate_size=32)),
          "OPT": lambda: T.OPTForCausalLM(T.OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0)),
          "BERT": lambda: T.BertForMaskedLM(T.BertConfig(**sizes, **off, intermediate_size=32)),
          "Llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**sizes, intermediate_size=32, use_cache=False))}
ids, mask = words(2, 12), torch.ones(2, 12, dtype=torch.long)
mask[0, :4] = 0
batch = {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
result = {}
for name, make in models.items():
    for attention in ("ulysses", "ring"):
        options = config(1, sequence_parallel_size=2, trireme={"sequence_attention": attention})
        result[f"{name}, {attention}"] = differences(make, lambda called, model: called(**batch).loss, options)
""")
        self.assertEqual(found, dict.fromkeys(found, {}))

    def test_tiles_go_with_factories_recomputation_and_shifted_logits(self):
        found = self.on(1, """
from torch.utils.checkpoint import checkpoint
x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))

class Gathers(nn.Module):
    '''A mixture of experts that gathers its output in a tensor like its input.'''
    def __init__(self, like):
        super().__init__()
        self.up, self.experts, self.down, self.like = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), nn.Linear(16, 2), like
    def forward(self, x):
        h = self.up(x)
        out = getattr(torch, self.like)(h)
        for number, expert in enumerate(self.experts):
            rows = torch.arange(number, 8, 2)
            out = out.index_add(0, rows, expert(h[rows]))
        return self.down(out)

class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)

class Layers(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.into, self.reentrant = nn.Linear(8, 16), reentrant
        self.layers = nn.ModuleList(Block(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
    def forward(self, x):
        x = self.into(x)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x

loss = lambda called, model: called(x).pow(2).mean()
tiled = {"tiled": {"mlp_tokens": 3}}
result = {like: differences(lambda: Gathers(like), loss, config(micro=8, trireme=tiled)) for like in ("zeros_like", "ones_like")}
result["full"] = differences(Layers, loss, config(micro=8, trireme={"recompute": "full", **tiled}))
result["selective"] = differences(Layers, loss, config(micro=8, trireme={"recompute": "selective", **tiled}))
for reentrant in (False, True):
    result[f"checkpoint, reentrant {reentrant}"] = differences(lambda: Layers(reentrant), loss, config(micro=8, trireme=tiled))
""")
        self.assertEqual(found, dict.fromkeys(found, {}))
        shifted = self.on(2, """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48, bias=False)
    def forward(self, ids):
        return self.head(self.embed(ids))

def loss_of(called, model):
    ids = labels = words(2, 16)
    if called is not model:
        part = called.cut(input_ids=ids, labels=labels)
        ids, labels = part["input_ids"], part["labels"]
    return F.cross_entropy(called(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

result = {f"{attention}, {kind}": differences(Model, loss_of, config(sequence_parallel_size=2, trireme={"sequence_attention": attention, "tiled": {kind: 4}}))
          for attention in ("ulysses", "ring") for kind in ("loss_tokens", "mlp_tokens")}
""")
        self.assertEqual(shifted, dict.fromkeys(shifted, {}))

    def test_tensor_ranks_alone_train_under_copy_and_refuse_what_needs_wholes(self):
        whole, found, refused = self.on(2, """
import transformers as T
def llama():
    return T.LlamaForCausalLM(T.LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, use_cache=False))
batch = {"input_ids": words(2, 16), "labels": words(2, 16)}
found = {f"{gather}, tokens {tokens}": differences(llama, lambda called, model: called(**batch).loss,
            config(3, tensor_parallel={"autotp_size": 2, "sequence_parallel": tokens}, trireme={"gather": gather}))
         for gather in ("copy", "shared") for tokens in (False, True)}

class ByNorm(torch.optim.Optimizer):
    '''Looks at whole parameters, as LARS does.'''
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-8)), alpha=-0.1)

def cut(optimizer=None, degree=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    options = config(tensor_parallel={"autotp_size": degree, "partition_config": {"use_default_specs": False, "layer_specs": [
        {"patterns": [r"0\\.weight"], "partition_type": "column"}, {"patterns": [r"2\\.weight"], "partition_type": "row"}]}})
    if optimizer is not None:
        del options["optimizer"]
    return trireme.initialize(model=model, optimizer=optimizer and optimizer(model.parameters()), config=options)[0]

engine, x = cut(), torch.randn(4, 8)
refused = [refusal(lambda: cut(ByNorm)), refusal(lambda: torch.func.jvp(engine, (x,), (torch.ones_like(x),)))]
with torch.autograd.forward_ad.dual_level():
    refused.append(refusal(lambda: engine(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))))
result = [cut(ByNorm, degree=1).client_optimizer is not None, found, refused]
""")
        self.assertTrue(whole)
        self.assertEqual(found, dict.fromkeys(found, {}))
        self.assertIn("it looks at more than one element at a time; at stage 0 without tensor_parallel every rank has whole parameters", refused[0])
        self.assertIn("inside of torch.func's jvp(), grad() or vmap()", refused[1])
        self.assertIn("gets a tangent of forward-mode differentiation (jvp())", refused[2])

    def test_a_scheduler_of_the_programs_leads_both_parts_of_muon(self):
        rates = self.on(2, """
torch.manual_seed(0)  # with some weights the first steps of Muon turn the gradient
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
options = config(1, optimizer={"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.002}})
engine, optimizer, _, _ = trireme.initialize(model=model, config=options, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** step))
moved = []
for step in range(3):
    before = safe_get_full_fp32_param(model[0].bias).clone()
    engine.backward(1e3 * engine(torch.ones(2, 8)).sum())
    engine.step()
    moved.append((safe_get_full_fp32_param(model[0].bias) - before).abs().mean().item())
result = moved
""")
        # The gradient of the bias keeps its direction, so that Adam moves it by the learning rate.
        self.assert_close(rates, [0.002, 0.001, 0.0005], relative=0.05)

    def test_values_that_ranks_draw_differently_are_those_of_rank_0_before_initialize(self):
        apart = self.on(2, """
import torch.distributed as dist
trireme.init_distributed()
torch.manual_seed(dist.get_rank())
with trireme.zero.Init(config_dict_or_path=config(3)):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 64))
read = []
for parameter in model.parameters():
    with trireme.zero.GatheredParameters(parameter), torch.no_grad():
        read.append(parameter.clone())
engine, *_ = trireme.initialize(model=model, config=config(3))
torch.manual_seed(0)
expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 64))
apart = torch.tensor([[(one - other).abs().max().item() for one in (before, safe_get_full_fp32_param(parameter))]
                      for before, parameter, other in zip(read, model.parameters(), expected.parameters())])
dist.all_reduce(apart, dist.ReduceOp.MAX)
result = apart.tolist()
""")
        self.assertEqual(apart, [[0.0, 0.0]] * 4)

    def test_clipping_by_value_is_refused_with_what_to_call_instead(self):
        refused, clipped = self.on(1, """
model = nn.Linear(8, 1)
engine, *_ = trireme.initialize(model=model, config=config())
engine.backward(engine(torch.ones(2, 8)).pow(2).sum())
refused = refusal(lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01))
for parameter in model.parameters():
    trireme.utils.safe_set_full_grad(parameter, safe_get_full_grad(parameter).clamp(-0.01, 0.01))
before = model.weight.detach().clone()
engine.step()
result = [refused, (model.weight - before).abs().max().item()]
""")
        self.assertIn("safe_set_full_grad(p, safe_get_full_grad(p).clamp(-value, value))", refused)
        self.assertAlmostEqual(clipped, 0.001, places=6)


if __name__ == "__main__":
    main()
