"""Which stage has which tensor: what a trace tells of a model, the cut that follows from it, and a program's own
placement."""
from harness import Case, RankServer, main

RankServer.imports = ("transformers",)

_PROGRAM = """
    import random, sys, torch
    from torch import nn
    import trireme.smp as smp
    from trireme.smp import trace
    from trireme.smp.config import checked, resolved, state
    from trireme.smp.partition import assignments_text, homes_of
    class World:
        rank = 1
    def told(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    def begin(stages, **options):
        state.set(cfg=resolved(checked({"partitions": stages, "microbatches": 4, **options}), stages), world=World, topology=None, place=None)
    def homes(model, *args, limit_bytes=10**12, **kwargs):
        return homes_of(model, args, kwargs, limit_bytes=limit_bytes)
    def order(model, *args, **kwargs):
        return [[atom.module, *[name.rpartition(".")[2] for name in atom.tensors]] for atom in trace.traced(model, args, kwargs).atoms]
    torch.manual_seed(0)
"""

_TRANSFORMERS = _PROGRAM + """
    import transformers as hf
    sizes = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256, vocab_size=16, pad_token_id=0)
    ids = torch.randint(1, 16, (2, 16))
"""


class Trace(Case):
    def test_atoms_stand_in_the_order_of_the_first_use_of_a_parameter(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.after = nn.Parameter(torch.ones(4))
            self.late, self.early = nn.Linear(4, 4), nn.Linear(4, 4)
            self.before = nn.Parameter(torch.ones(4))
            self.never = nn.Parameter(torch.ones(4))
        def forward(self, x):
            return self.late(self.early(torch.relu(x) * self.before)) + self.after + self.early(x)
    result = [order(nn.Sequential(Block(), nn.Linear(4, 1)), torch.ones(2, 4)), order(Block(), torch.ones(2, 4))[0]]
""")
        self.assertEqual(found, [[["0", "before", "never"], ["0.early", "weight", "bias"], ["0.late", "weight", "bias"], ["0", "after"], ["1", "weight", "bias"]],
                                 ["", "before", "never"]])

    def test_buffers_are_where_their_module_is_and_transient_ones_have_no_home(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(4))
            self.register_buffer("code", torch.ones(4), persistent=False)
        def forward(self, x):
            return x * self.kept + self.code
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), Table())
    result = [order(model, torch.randn(3, 2, 4)), model[1].num_batches_tracked.item(), model[1].running_mean.tolist()]
""")
        self.assertEqual([[module, *sorted(names)] for module, *names in found[0]],
                         [["0", "bias", "weight"], ["1", "bias", "num_batches_tracked", "running_mean", "running_var", "weight"],
                          ["2", "num_batches_tracked", "running_mean", "running_var"], ["3", "kept"]])
        self.assertEqual(found[1:], [0, [0, 0]])

    def test_counts_are_those_of_the_operators(self):
        found = self.on_ranks(0, _PROGRAM + """
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))
    one, two = trace.traced(model, (torch.ones(5, 8),), {}).atoms
    model[0].half(); model[2].weight.requires_grad_(False)
    half, frozen = trace.by_registration(model).atoms
    result = [one.flops, two.flops, one.output_bytes, two.output_bytes, one.crossing_bytes, two.crossing_bytes, one.state_bytes, half.state_bytes, frozen.state_bytes,
              one.bytes(3)]
""")
        elements = 8 * 16 + 16
        # 5 rows of 16 are made twice, by the layer and by the activation behind it; the second alone crosses
        self.assertEqual(found, [2 * 5 * 8 * 16, 2 * 5 * 16 * 4, 2 * 320, 80, 320, 0, 16 * elements, 20 * elements, 4 * 64, 16 * elements + 3 * 640])

    def test_attention_is_one_operator_that_keeps_no_scores_with_values_and_without(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Attention(nn.Linear):
        def forward(self, x, read=False):
            y = super().forward(x).unflatten(-1, (2, 4)).transpose(1, 2)
            if read:
                x.sum().item()
            return nn.functional.scaled_dot_product_attention(y, y[:, :, :3], value=y[:, :, :3])
    model = Attention(8, 8, bias=False)
    atoms = [trace.traced(model, (torch.ones(2, 6, 8), read), {}).atoms[0] for read in (False, True)]
    result = [[atom.flops, atom.output_bytes] for atom in atoms]
""")
        # a product of 12 rows, and scores of 6 by 3 over 4 elements twice, for 2 samples of 2 heads; two results of 12
        # rows
        self.assertEqual(found[0], [2 * 12 * 8 * 8 + 2 * 2 * 2 * 6 * 3 * (4 + 4), 2 * 12 * 8 * 4])
        self.assertEqual(found[1], found[0])

    def test_operators_of_a_module_count_for_it_before_its_first_parameter_too(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
        def forward(self, x):
            return self.weight * (x - x.mean())
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(8, 8, bias=False), Norm()
        def forward(self, x):
            return self.norm(x) + self.inner(x)
    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        def forward(self, x):
            y = self.first(x)
            self.second(y)
            return torch.relu(y)
    one, norm = trace.traced(nn.Sequential(nn.Linear(8, 8, bias=False), Norm()), (torch.ones(5, 8),), {}).atoms
    result = [one.output_bytes, one.crossing_bytes, norm.output_bytes, order(Late(), torch.ones(5, 8)),
              [atom.output_bytes for atom in trace.traced(Back(), (torch.ones(5, 8),), {}).atoms]]
""")
        rows = 5 * 8 * 4
        # one product; a mean, a difference and a product
        self.assertEqual(found, [rows, rows, 4 + 2 * rows, [["norm", "weight"], ["inner", "weight"]], [2 * rows, rows]])

    def test_costs_weigh_shares_of_memory_and_of_time(self):
        found = self.on_ranks(0, _PROGRAM + """
    atoms = [trace.Atom("a", state_bytes=300, flops=10), trace.Atom("b", state_bytes=100, flops=30)]
    result = [trace.Trace(atoms).costs(weight, 1) for weight in (1, 0, 0.8)]
    result.append(trace.Trace([trace.Atom("a", state_bytes=1)]).costs(0.8, 1))
""")
        self.assertEqual(found, [[750_000_000, 250_000_000], [250_000_000, 750_000_000], [650_000_000, 350_000_000], [800_000_000]])

    def test_a_trace_needs_no_values_and_draws_no_numbers(self):
        found = self.on_ranks(0, _PROGRAM + """
    seen = []
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls, self.cache, self.last = nn.Linear(4, 4), 0, {}, None
        def forward(self, x):
            self.calls += 1
            self.last = self.cache["y"] = self.linear(nn.functional.dropout(x + torch.rand(4)))
            random.random()
            seen.append([smp.is_tracing(), x.device.type, torch.zeros(1).device.type])
            return self.last
    model = Model()
    states = torch.get_rng_state(), random.getstate()
    trace.traced(model, (torch.ones(2, 4),), {})
    same = [torch.equal(states[0], torch.get_rng_state()), states[1] == random.getstate()]
    result = [seen, same, smp.is_tracing(), model.calls, model.cache, model.last, len(model.linear._forward_hooks), len(model.linear._forward_pre_hooks),
              type(model.linear.weight).__name__, model.linear.weight.device.type]
""")
        self.assertEqual(found, [[[True, "meta", "meta"]], [True, True], False, 0, {}, None, 0, 0, "Parameter", "cpu"])

    def test_where_values_decide_the_model_runs_with_them_and_leaves_nothing(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros(2))
            self.mean, self.steps = torch.zeros(4), []
        def forward(self, x):
            self.count.add_(1)
            self.mean.add_(x.mean(0))
            self.steps.append(1)
            if x.sum() > 0:
                return self.norm(self.b(self.a(nn.functional.dropout(x))))
            return self.norm(self.a(self.b(x)))
    model = Model()
    states = torch.get_rng_state()
    result = [[name for name, *_ in order(model, sign * torch.ones(3, 4))] for sign in (1, -1)]
    result += [model.count.tolist(), model.mean.tolist(), model.steps, model.norm.running_mean.tolist(), torch.equal(states, torch.get_rng_state()),
               model.a.weight.grad is None]
""")
        self.assertEqual(found, [["", "a", "b", "norm"], ["", "b", "a", "norm"], [0, 0], [0, 0, 0, 0], [], [0, 0, 0, 0], True, True])

    def test_what_the_model_raises_is_raised(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Model(nn.Linear):
        def forward(self, x):
            raise ZeroDivisionError("of the program")
    model = Model(2, 2)
    result = [told(lambda: trace.traced(model, (torch.ones(1, 2),), {})), smp.is_tracing(), told(lambda: trace.by_registration(nn.Sequential(nn.LazyLinear(2)))),
              len(model._forward_hooks)]
""")
        self.assertEqual(found, ["ZeroDivisionError: of the program", False, "UnsupportedError: smp: '0.weight' gets its shape in the first forward, which is not there "
                                 "yet; call the model once before it is wrapped", 0])

    def test_tied_parameters_count_where_they_are_first(self):
        found = self.on_ranks(0, _TRANSFORMERS + """
    tied, untied = (hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=128, n_positions=32, tie_word_embeddings=tie, bos_token_id=0, eos_token_id=0))
                    for tie in (True, False))
    one, other = (trace.traced(model, (), {"input_ids": ids}).atoms for model in (tied, untied))
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=128, decoder_start_token_id=0))
    result = [[atom.module for atom in one][:2], [atom.module for atom in other][-2:], len(other) - len(one), one[0].flops, other[0].flops, other[-1].flops,
              [name for name, *_ in order(t5, input_ids=ids, labels=ids)]]
""")
        head = 2 * 32 * 32 * 128
        self.assertEqual(found[:6], [["transformer.wte", "transformer.wpe"], ["transformer.ln_f", "lm_head"], 1, head, 0, head])
        self.assertEqual([found[6][0], found[6][-1]], ["shared", "decoder.final_layer_norm"])
        self.assertNotIn("encoder.embed_tokens", found[6])


class Cut(Case):
    def test_models_of_transformers_are_cut_between_layers(self):
        found = self.on_ranks(0, _TRANSFORMERS + """
    result = []
    for model in (hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0)),
                  hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=128, n_positions=32, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)),
                  hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))):
        begin(2)
        placed = homes(model, input_ids=ids, labels=ids)
        # values decide where a mask is given
        same = homes(model, input_ids=ids, labels=ids, attention_mask=(ids > 5).long()) == placed
        of_layer = {}
        for name, stage in placed.items():
            layer = ".".join(name.split(".")[:3])
            of_layer.setdefault(layer if ".h." in name or ".layers." in name else name, set()).add(stage)
        result.append([list(of_layer.values()) == [{stage} for stage in sorted(next(iter(found)) for found in of_layer.values())], same, set(placed.values()) == {0, 1},
                       sorted(placed) == sorted(name for name, _ in model.named_parameters())])
""")
        self.assertEqual(found, [[True] * 4] * 3)

    def test_stages_that_come_back_to_each_other_are_taken_where_one_would_have_nearly_all(self):
        found = self.on_ranks(0, _TRANSFORMERS + """
    import collections
    model = hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=64, max_position_embeddings=32, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
                                                          decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, pad_token_id=0, decoder_start_token_id=1))
    result = []
    for stages in (2, 3):
        begin(stages)
        found = trace.traced(model, (), dict(input_ids=ids, labels=ids))
        placed = homes(model, input_ids=ids, labels=ids)
        cost = collections.Counter()
        for atom, of_atom in zip(found.atoms, found.costs(state.cfg.memory_weight, 4)):
            cost[placed[atom.tensors[0]]] += of_atom
        result.append([sorted(cost), max(cost.values()) / sum(cost.values())])
""")
        for stages, (used, heaviest) in zip((2, 3), found, strict=True):
            self.assertEqual(used, list(range(stages)))
            self.assertLess(heaviest, 1.5 / stages)

    def test_the_tree_is_the_published_algorithm(self):
        found = self.on_ranks(0, _PROGRAM + """
    def layer():
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body, self.stem = nn.Linear(8, 8), nn.Sequential(layer(), layer(), layer(), layer()), nn.Linear(8, 8)
        def forward(self, x):
            return self.head(self.body(self.stem(x)))
    begin(2, partition_method="tree", memory_weight=1, active_microbatches=1)
    result = {name.rpartition(".")[0]: stage for name, stage in homes(Model(), torch.zeros(0, 8)).items()}
""")
        # Stem and body (9 layers), children of the root in the order of the program, are a segment, which gets both
        # devices. There the body gets both, of quotients 8 and 4 beside the stem's 1; its layers are cut into halves.
        self.assertEqual(found, {"head": 0, "stem": 0, **{f"body.{index}.{inner}": index // 2 for index in range(4) for inner in (0, 1)}})

    def test_what_does_not_fit_is_named(self):
        found = self.on_ranks(0, _PROGRAM + """
    begin(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400))
    result = told(lambda: homes(model, torch.ones(1, 4), limit_bytes=10_000))
""")
        self.assertTrue(found.startswith("ConfigError: partition: '1' takes 38400 bytes, and a rank has 10000; "), found)

    def test_without_a_trace_the_order_is_that_of_registration(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        def forward(self, x):
            return self.last(self.first(x))
    begin(2)
    traced = homes(Model(), torch.ones(1, 4))
    begin(2, skip_tracing=True)
    result = [traced["first.weight"], traced["last.weight"], homes(Model())]
""")
        self.assertEqual(found, [0, 1, {"last.weight": 0, "last.bias": 0, "first.weight": 1, "first.bias": 1}])

    def test_one_stage_has_all_without_a_trace(self):
        found = self.on_ranks(0, _PROGRAM + """
    begin(1)
    result = homes(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "no argument of it")
""")
        self.assertEqual(found, {f"{name}": 0 for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")})

    def test_the_log_names_the_outermost_modules_of_each_stage(self):
        found = self.on_ranks(0, _PROGRAM + """
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    names = list(dict(model.named_parameters()))
    result = [assignments_text(model, dict(zip(names, [0] * 6 + [1] * 2)), 3), assignments_text(model, dict.fromkeys(names, 0), 1),
              assignments_text(model, dict(zip(names, [0] * 5 + [1] * 3)), 2)]
""")
        self.assertEqual(found, ["Partition assignments:\n  stage 0: 18 elements; 0, 1.0\n  stage 1: 3 elements; 1.1\n  stage 2: 0 elements; nothing",
                                 "Partition assignments:\n  stage 0: 21 elements; the whole model",
                                 "Partition assignments:\n  stage 0: 16 elements; 0, 1.0.weight\n  stage 1: 5 elements; 1.1, 1.0.bias"])


class ByHand(Case):
    _MODEL = _PROGRAM + """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            with smp.partition(1):
                self.child0 = nn.Linear(2, 2)
                with smp.partition(2):
                    self.child1 = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
                self.child2 = nn.Linear(2, 2)
            self.child3 = nn.Linear(2, 2)
            self.own = nn.Parameter(torch.ones(2))
    def placed(model):
        return {name.rpartition(".")[0]: stage for name, stage in homes(model).items()}
"""

    def test_the_innermost_partition_holds_and_others_get_the_default(self):
        found = self.on_ranks(0, self._MODEL + """
    before = nn.Module.__init__
    begin(4, auto_partition=False, default_partition=3)
    model = Model()
    tied = Model()
    tied.child3.weight = tied.child1[0].weight
    result = [placed(model), nn.Module.__init__ is before, homes(tied)["child1.0.weight"], "child3.weight" in homes(tied)]
""")
        self.assertEqual(found, [{"": 3, "child0": 1, "child1.0": 2, "child1.1": 2, "child2": 1, "child3": 3}, True, 2, False])

    def test_set_partition_places_a_module_with_all_in_it(self):
        found = self.on_ranks(0, self._MODEL + """
    begin(4, auto_partition=False, default_partition=0)
    model = Model()
    smp.set_partition(model.child1, 3)
    smp.set_partition(model.child3, 2)
    result = placed(model)
""")
        self.assertEqual(found, {"": 0, "child0": 1, "child1.0": 3, "child1.1": 3, "child2": 1, "child3": 2})

    def test_both_are_ignored_where_the_partition_is_automatic(self):
        found = self.on_ranks(0, self._MODEL + """
    begin(4)
    model = Model()
    smp.set_partition(model, 3)
    result = any("_smp_partition" in vars(module) for module in model.modules())
""")
        self.assertFalse(found)

    def test_a_partition_that_there_is_not_is_an_error(self):
        found = self.on_ranks(0, self._MODEL + """
    def enter(index):
        with smp.partition(index):
            return nn.Linear(1, 1)
    before = nn.Module.__init__
    missing = told(Model)
    result = [missing]
    for automatic in (True, False):
        begin(2, auto_partition=automatic, default_partition=0)
        result += [told(Model), told(lambda: enter(-1)), told(lambda: enter("1")), told(lambda: smp.set_partition(nn.Linear(1, 1), 2))]
    result.append([nn.Module.__init__ is before, "_smp_partition" in vars(nn.Linear(1, 1))])
""")
        fix = "there are 2 partitions; give 0 to 1, or another `pipeline_parallel_degree`"
        self.assertEqual(found[0], "StateError: smp.state.cfg: there is none yet; call smp.init() first")
        self.assertEqual(found[1:5], [f"ConfigError: smp.partition(2): {fix}", f"ConfigError: smp.partition(-1): {fix}", f"ConfigError: smp.partition('1'): {fix}",
                                      f"ConfigError: smp.set_partition(2): {fix}"])
        self.assertEqual(found[5:9], found[1:5])
        self.assertEqual(found[9], [True, False])


if __name__ == "__main__":
    main()
