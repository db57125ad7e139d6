"""Programs as users write them, in layouts in which one of them was wrong once: sequences beside slices, recomputation,
pieces of which a rank gets none, stages that exchange several tensors, a checkpoint that another layout reads."""
import json
import pathlib

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

HERE = pathlib.Path(__file__).parent
LARGEST = 2e-5
_BEGIN = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import copy, json, os, pathlib, torch
from torch import nn
from torch.nn import functional as F
import trireme
from trireme.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
import parts_programs as programs
from zoo.parts import OF_LM, column, cut, row, rules
RANK = int(os.environ["RANK"])


def say(found):
    pathlib.Path(folder, f"{{RANK}}.json").write_text(json.dumps(found))


def told(call):
    try:
        return call()
    except trireme.errors.StateError as error:
        return str(error)


result = None
"""
_FIRST = """
class First(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.gain = kind, nn.Parameter(torch.randn(6))
        self.conv1, self.conv2, self.norm = nn.Conv1d(6, 6, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(2, 6)

    def forward(self, x):
        if self.kind == "conv1d":
            return self.conv1(x.mT).mT
        if self.kind == "conv2d":
            return self.conv2(x[:, None].expand(-1, 2, -1, -1)).sum(1)
        if self.kind == "group_norm":
            return self.norm(x.mT).mT
        if self.kind == "cumsum":
            return x.flip(1).cumsum(1) * self.gain
        return F.pad(x, (0, 0, 1, 0))[:, :-1] * self.gain


def first(kind):
    torch.manual_seed(3)
    model, x = First(kind), torch.randn(2, 12, 6)
    plain = copy.deepcopy(model)
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = trireme.initialize(model=model, config=config)
    loss, expected = engine(engine.cut(x)["input_ids"]).tanh().square().mean(), plain(x).tanh().square().mean()
    engine.backward(loss)
    expected.backward()
    worst = ((loss - expected) / expected).abs().item()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            own = trireme.utils.safe_get_full_grad(dict(model.named_parameters())[name])
            worst = max(worst, ((own - parameter.grad).norm() / parameter.grad.norm()).item())
    engine.destroy()
    return worst
"""
_STAGES = """
from trireme.pipe import PipelineModule
from trireme.runtime.pipe.topology import PipeModelDataParallelTopology
from zoo.parts import Attention, Block, HIDDEN, Mlp, VOCABULARY


class In(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.remember = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids):
        x = self.embed(ids)
        return x, torch.tanh(self.remember(x[:, ::2])), torch.arange(ids.shape[1]).expand_as(ids)


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.cross, self.place = Block(Attention, Mlp), Attention(), nn.Embedding(programs.LENGTH, HIDDEN)

    def forward(self, given):
        x, memory, places = given
        x = self.block(x + self.place(places))
        q, (_, k, v) = self.cross.project(x)[0], self.cross.project(memory)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.cross.o_proj(attended), memory * 1.01, places


class Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, given):
        return self.head(given[0]) + given[1].mean() * 0.1


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def stages(sequence=1, tensor=1, micro_batches=2, attention="ulysses", schedule=None, stage=0):
    torch.manual_seed(3)
    layers = [In(), Cross(), Cross(), Cross(), Cross(), Out()]
    plain = nn.Sequential(*copy.deepcopy(layers))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": programs.BATCH, "gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.0,
              "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    if sequence > 1:
        config.update(sequence_parallel_size=sequence, trireme={"sequence_attention": attention})
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor, "partition_config": OF_LM}
    made = {"num_stages": 2} if tensor == 1 else {"topology": PipeModelDataParallelTopology(2, tensor, sequence)}
    if schedule:
        made.update(schedule=schedule, chunks=2)
    module = PipelineModule(layers, loss_fn=loss_of, **made)
    engine, *_ = trireme.initialize(model=module, config=config)
    worst = {}
    for step in range(2):
        batches = [programs.batch(step * micro_batches + micro) for micro in range(micro_batches)]
        optimizer.zero_grad()
        total = sum(loss_of(plain(ids), labels) for ids, labels in batches) / micro_batches
        total.backward()
        optimizer.step()
        found = engine.train_batch(iter(batches))
        worst[f"loss {step}"] = ((found - total.detach()) / total.detach()).abs().item()
    expected = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        found = safe_get_full_fp32_param(parameter)
        if found is not None and not getattr(parameter, "ds_pipe_replicated", False):
            worst[name] = ((found - expected[name]).norm() / expected[name].norm()).item()
    engine.destroy()
    return worst
"""
_CHECKPOINT = """
def trained(first, last, layout, load=None, save=None):
    sequence, tensor, stage = layout
    torch.manual_seed(3)
    model = programs.LossInPieces()
    if load:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    config = {"train_micro_batch_size_per_gpu": programs.BATCH, "zero_optimization": {"stage": stage}, "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "eps": 1e-4}}}
    if sequence > 1:
        config["sequence_parallel_size"] = sequence
    if tensor > 1:
        partition = {**OF_LM, "layer_specs": [*OF_LM["layer_specs"], cut("embed_tokens", partition_type="skip")]}
        config["tensor_parallel"] = {"autotp_size": tensor, "partition_config": partition}
    engine, *_ = trireme.initialize(model=model, config=config)
    if load:
        assert engine.load_checkpoint(load)[0]
    for step in range(first, last):
        ids, labels = programs.batch(step)
        given = {"input_ids": ids, "labels": labels}
        engine.backward(engine(**(engine.cut(**given) if sequence > 1 else given)))
        engine.step()
    if save:
        engine.save_checkpoint(save)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter).clone()
        found["moment of " + name] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
    engine.destroy()
    return found


def resumed(saves, loads):
    path = os.path.join(folder, "_".join(map(str, (*saves, *loads))))
    expected = trained(0, 4, (1, 1, 0))
    trained(0, 2, saves, save=path)
    found = trained(2, 4, loads, load=path)
    return {name: ((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-4)).item() for name in expected}
"""


class Layouts(Case):
    def of_ranks(self, ranks, text, timeout_s=240):
        """Arguments of say(), by rank."""
        self.on_ranks(ranks, _BEGIN + text, timeout_s=timeout_s)
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(ranks)]

    def assert_small(self, ranks, text, **options):
        """Every rank says {case: {what: difference}}, all of them small."""
        for rank, found in enumerate(self.of_ranks(ranks, text, **options)):
            self.assertTrue(found)
            for case, differences in found.items():
                self.assertTrue(differences, case)
                for what, difference in differences.items():
                    with self.subTest(case, rank=rank, what=what):
                        self.assertLessEqual(difference, LARGEST)

    def assert_programs(self, ranks, cases, **options):
        """`cases`: (program, parts of sequences, slices, arguments of compare())."""
        self.assert_small(ranks, f"""
say({{" ".join(map(str, case)): {{kind: apart for kind, (apart, _) in programs.compare(*case[:3], **case[3]).items()}} for case in {cases!r}}})
""", **options)

    def assert_stages(self, ranks, cases, **options):
        self.assert_small(ranks, _STAGES + f"say({{str(case): stages(**case) for case in {cases!r}}})", **options)

    def assert_resumed(self, ranks, pairs, **options):
        """`pairs` of layouts, each (parts of sequences, slices, ZeRO stage): of the save and of the load."""
        self.assert_small(ranks, _CHECKPOINT + f"say({{str(pair): resumed(*pair) for pair in {pairs!r}}})", **options)


SELECTIVE = {"trireme": {"recompute": "selective"}}


class Quick(Layouts):
    def test_recomputation_of_operators_beside_parts_and_slices(self):
        self.assert_programs(2, [("SoftmaxOverTokensByHand", 2, 1, SELECTIVE), ("CheckpointByHooks", 1, 2, SELECTIVE), ("CheckpointByHooks", 2, 1, SELECTIVE)])

    def test_sequences_beside_slices(self):
        self.assert_programs(4, [("LargestFeature", 2, 2, {}), ("PackedDocuments", 2, 2, {"stage": 2}), ("LinearChain", 2, 2, {"stage": 1})])

    def test_a_loss_of_pieces_of_which_the_last_is_shorter_than_there_are_ranks(self):
        self.assert_programs(4, [("LossInPieces", 4, 1, {})])

    def test_a_key_head_that_would_be_cut_is_refused_by_its_cause(self):
        for found in self.of_ranks(4, """say(told(lambda: programs.compare("OneKeyHead", 2, 2)))"""):
            self.assertIn("attends by features of which each rank has some", found)
            self.assertIn("give each rank whole heads of keys", found)

    def test_writes_and_image_features_at_places_are_refused_by_their_cause(self):
        found = self.of_ranks(2, """
class Put(programs.Model):
    def change(self, x, ids):
        x = x.clone()
        x[torch.arange(ids.size(0)), ids.sum(1) % ids.size(1)] += 1.0
        return x


class Scatter(programs.Model):
    def change(self, x, ids):
        return x.masked_scatter((ids % 3 == 0)[..., None], torch.ones(ids.numel(), x.size(-1)))


programs.PROGRAMS.update(Put=(Put, {}), Scatter=(Scatter, {}))
say([told(lambda: programs.compare(name, 2, 1)) for name in ("Put", "Scatter")])
""")
        for put, scatter in found:
            self.assertIn("index_put_ needs whole tensors, and sequence parallelism cuts dim 1", put)
            self.assertIn("masked_scatter needs whole tensors, and sequence parallelism cuts dim 1", scatter)
            for text in (put, scatter):
                self.assertNotIn("attention", text)
                self.assertIn("torch.where()", text)

    def test_first_operators_of_an_input_with_fewer_samples_than_ranks(self):
        found = self.of_ranks(4, _FIRST + """say({kind: told(lambda: first(kind)) for kind in ("conv1d", "conv2d", "group_norm", "cumsum", "shift")})""")
        for of_rank in found:
            for kind in ("conv1d", "conv2d"):
                self.assertIn("aten::convolution has windows along dim 2 of", of_rank[kind])
            self.assertIn("aten::native_group_norm normalises over dim 2 of [2, 6, 12]", of_rank["group_norm"])
            for kind in ("cumsum", "shift"):
                self.assertLessEqual(of_rank[kind], LARGEST)

    def test_stages_that_exchange_several_tensors(self):
        self.assert_stages(2, [{"micro_batches": 4, "schedule": "zb-v"}, {"stage": 2}])

    def test_a_checkpoint_goes_on_in_another_layout(self):
        self.assert_resumed(2, [((2, 1, 3), (1, 2, 1)), ((1, 2, 3), (1, 1, 2))])


if __name__ == "__main__":
    main()
