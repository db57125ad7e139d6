"""The profiler of FLOPs: as many as torch.utils.flop_counter has, by module, plain and in an engine."""
import contextlib
import io
import re
import unittest

import flops_counted
import torch
import trireme
from harness import Case, main
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from trireme.errors import ConfigError, StateError, UnsupportedError
from trireme.profiling.flops_profiler import (FlopsProfiler, bytes_to_string, duration_to_string, flops_to_string, get_model_profile,
                                              macs_to_string, number_to_string, params_to_string)

B = 2  # samples


class Block(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 4), reentrant

    def inner(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        if self.reentrant is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Nested(nn.Module):
    """A block that is used twice, one that two names share, and a list that is never called."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first = Block(reentrant)
        self.blocks = nn.ModuleList([Block(reentrant), self.first])
        self.twice = nn.Linear(4, 4, bias=False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        x = self.twice(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.twice(x).sum()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.many = nn.Linear(8, 24), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, 5, 8)
        return self.many(y, y, y)[0].sum()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, dilation=2, padding="same"),
                                 nn.ConvTranspose2d(4, 6, 3, stride=2))

    def forward(self, x):
        return self.all(x).sum()


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5, 4, 6))

    def forward(self, x):
        y = torch.einsum("bi,ij,cjk->bck", x, self.a, self.b)
        return (y @ self.b.transpose(1, 2)[0] + torch.tensordot(y, self.b, ([2], [2])).sum()).sum() + torch.baddbmm(y, y, y.mT @ y).sum()


CASES = {"nested": (Nested, (B, 4)), "recomputed": (lambda: Nested(False), (B, 4)), "recomputed by reentrance": (lambda: Nested(True), (B, 4)),
         "attention": (Attention, (B, 5, 8)), "convolutions": (Convolutions, (B, 3, 9, 9)), "products": (Products, (B, 3))}


class Profiler(Case):
    def test_has_as_many_as_torchs_counter_forward_and_backward(self):
        for name, (make, sizes) in CASES.items():
            with self.subTest(name):
                torch.manual_seed(1)
                model, x = make(), torch.randn(sizes, requires_grad=True)
                found = flops_counted.compare(model, lambda model=model, x=x: model(x))
                self.assertEqual(found["trireme"], found["torch"])
                self.assertGreater(min(found["trireme"]), 0)
                self.assertEqual(found["uncounted"], {})

    def test_of_convolutions_in_every_form_has_as_many_as_torchs_counter(self):
        for dims in (1, 2, 3):
            plain, transposed = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
            for name, kind, sizes, options in (
                    ("plain", plain, (4, 6, 3), {"stride": 2, "padding": 1}), ("dilated", plain, (4, 6, 2), {"dilation": 2}),
                    ("same", plain, (4, 6, 3), {"padding": "same"}), ("of width 1", plain, (4, 6, 1), {}),
                    ("grouped", plain, (4, 6, 3), {"groups": 2}), ("depthwise", plain, (4, 8, 3), {"groups": 4}),
                    ("transposed", transposed, (4, 6, 3), {"stride": 2, "output_padding": 1}),
                    ("transposed in groups", transposed, (4, 6, 3), {"groups": 2})):
                with self.subTest(name, dims=dims):
                    model, x = kind(*sizes, **options), torch.randn(B, 4, *[5] * dims, requires_grad=True)
                    found = flops_counted.compare(model, lambda model=model, x=x: model(x).sum())
                    forward, backward = found["torch"]
                    # torch's counter multiplies the gradient of the weight by the groups.
                    self.assertEqual(backward, forward * (1 + options.get("groups", 1)))
                    self.assertEqual(found["trireme"], (forward, 2 * forward))

    def test_of_a_grouped_convolution_has_those_of_its_groups(self):
        model, x = nn.Conv2d(4, 8, 3, groups=4), torch.randn(B, 4, 6, 6, requires_grad=True)
        (forward, backward), _ = flops_counted.by_trireme(model, lambda: model(x).sum())
        self.assertEqual((forward, backward), (2 * B * 16 * 8 * 1 * 9, 2 * 2 * B * 16 * 8 * 1 * 9))

    def test_has_them_by_module(self):
        block, linear = 2 * B * (4 * 6 + 6 * 4), 2 * B * 4 * 4
        for reentrant, again in ((None, 0), (False, 1), (True, 1)):
            with self.subTest(reentrant=reentrant):
                model, x = Nested(reentrant), torch.randn(B, 4, requires_grad=True)
                _, profiler = flops_counted.by_trireme(model, lambda model=model, x=x: model(x))
                found = flops_counted.of_modules(profiler)
                # torch stops to compute again where backward has what it needs, before the last product's result.
                inner = {"up": block // 2, "down": block // 2}
                for name, times in (("first", 2), ("blocks.0", 1), ("blocks.1", 2), ("blocks", 3)):
                    self.assertEqual(found[name][:2], (times * block, 2 * times * block), name)
                for name, flops in inner.items():
                    self.assertEqual(found[f"first.{name}"][:2], (2 * flops, 4 * flops))
                self.assertEqual(found["twice"], (2 * linear, 4 * linear, 0))
                self.assertEqual(found["unused"], (0, 0, 0))
                self.assertEqual(found[""][0], 3 * block + 2 * linear)
                self.assertEqual(found[""][2], found["blocks"][2])
                self.assertGreaterEqual(found[""][2], again * 3 * inner["up"])
                self.assertEqual(found[""][2] > 0, bool(again))

    def test_gives_a_module_the_work_of_those_that_it_calls_whoever_owns_them(self):
        class Caller(nn.Module):
            def forward(self, linear, x):  # pylint: disable=arguments-differ
                return linear(x)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.caller = nn.Linear(4, 4), Caller()

            def forward(self, x):
                return self.caller(self.linear, x).sum()

        model, x = Model(), torch.randn(B, 4)
        found = flops_counted.of_modules(flops_counted.by_trireme(model, lambda: model(x))[1])
        self.assertEqual([found[name][0] for name in ("", "linear", "caller")], [2 * B * 16] * 3)

    def test_tells_what_it_cannot_count(self):
        model, x = nn.LSTM(3, 4), torch.randn(5, B, 3)
        _, profiler = flops_counted.by_trireme(model, lambda: model(x)[0].sum())
        self.assertIn("aten::lstm", profiler.get_uncounted())
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            profiler.print_model_profile()
        self.assertIn("NOT COUNTED", said.getvalue())
        self.assertIn("aten::lstm (1)", said.getvalue())

    def test_counts_nothing_before_and_after(self):
        model, x = nn.Linear(4, 4), torch.randn(B, 4)
        profiler = FlopsProfiler(model)
        with self.assertRaisesRegex(StateError, "start_profile"):
            profiler.get_total_flops()
        model(x)
        profiler.start_profile()
        model(x)
        self.assertEqual(profiler.get_total_macs(), B * 16)
        profiler.reset_profile()
        self.assertEqual(profiler.get_total_macs(), 0)
        model(x)
        profiler.stop_profile()
        model(x)
        self.assertEqual((profiler.get_total_macs(), profiler.get_total_params()), (B * 16, 20))
        self.assertGreater(profiler.get_total_duration(), 0)
        profiler.end_profile()
        self.assertEqual((len(model._forward_hooks), len(model._forward_pre_hooks)), (0, 0))  # pylint: disable=protected-access
        with self.assertRaises(StateError):
            profiler.get_total_macs()

    def test_gives_the_work_of_ignored_classes_to_their_callers(self):
        model, x = Nested(), torch.randn(B, 4)
        profiler = FlopsProfiler(model)
        profiler.start_profile(ignore_list=[nn.Linear])
        model(x)
        profiler.stop_profile()
        found = flops_counted.of_modules(profiler)
        self.assertEqual(found["first.up"], (0, 0, 0))
        self.assertEqual(found["first"][0], 2 * 2 * B * 48)

    def test_refuses_a_compiled_model(self):
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].compile(backend="eager")
        with self.assertRaisesRegex(UnsupportedError, "Linear is compiled"):
            FlopsProfiler(model).start_profile()

    def test_hooks_end_with_an_exception_of_the_model(self):
        class Failing(nn.Linear):
            def forward(self, x):
                super().forward(x)
                raise ValueError("no")

        model, x = nn.Sequential(nn.Sequential(Failing(4, 4))), torch.randn(B, 4)
        profiler = FlopsProfiler(model)
        profiler.start_profile()
        with self.assertRaises(ValueError):
            model(x)
        torch.mm(x, torch.randn(4, 4))
        profiler.stop_profile()
        self.assertEqual(flops_counted.of_modules(profiler)["0"][0], 2 * B * 16)
        self.assertEqual(profiler.get_total_macs(), 2 * B * 16)


class ModelProfile(Case):
    def test_gives_numbers_or_texts_and_leaves_the_model_in_its_mode(self):
        model = nn.Sequential(nn.Linear(1000, 500), nn.Dropout(0.5), nn.Linear(500, 10))
        model[1].eval()
        macs, params = 4 * (1000 * 500 + 500 * 10), 1001 * 500 + 501 * 10
        self.assertEqual(get_model_profile(model, (4, 1000), print_profile=False, as_string=False), (2 * macs, macs, params))
        self.assertEqual(get_model_profile(model, args=[torch.ones(4, 1000)], print_profile=False), ("4.04 M", "2.02 MMACs", "505.51 K"))
        self.assertEqual([module.training for module in model.modules()], [True, True, False, True])

    def test_prints_every_module_with_its_share(self):
        path = self.folder / "deep" / "profile.txt"
        get_model_profile(Nested(), (B, 4), output_file=str(path), top_modules=2)
        text = path.read_text()
        for part in ("FLOPs profile at step 1", "forward MACs:", "depth 2:", "(twice) Linear: 16 = 10.53%, 64 MACs = 18.18%", "(0) Block:",
                     "(1) Block:", "[the same module as an earlier (first)]"):
            self.assertIn(part, text)
        get_model_profile(Nested(), (B, 4), output_file=str(path), detailed=False, module_depth=1)
        text = path.read_text()
        self.assertNotIn("(twice)", text)
        self.assertNotIn("depth 2:", text)
        self.assertIn("depth 1:", text)

    def test_refuses_no_arguments_and_other_modes(self):
        with self.assertRaisesRegex(ConfigError, "input_shape"):
            get_model_profile(nn.Linear(1, 1))
        with self.assertRaisesRegex(ConfigError, "'train'"):
            get_model_profile(nn.Linear(1, 1), (1, 1), mode="train")


class Quantities(unittest.TestCase):
    def test_have_the_prefix_that_fits(self):
        self.assertEqual([number_to_string(number) for number in (0, 7, 1500, 2.5e6, 3.14159e9, 4e12, 0.002)],
                         ["0 ", "7 ", "1.5 K", "2.5 M", "3.14 G", "4 T", "2 m"])
        self.assertEqual((flops_to_string(2e12), macs_to_string(1.5e9), params_to_string(1.25e9), bytes_to_string(1e6)),
                         ("2 TFLOPS", "1.5 GMACs", "1.25 B", "1 MB"))
        self.assertEqual([duration_to_string(seconds) for seconds in (2.5, 0.0123456, 3e-6)], ["2.5 s", "12.35 ms", "3 us"])

    def test_have_the_units_that_are_asked_for(self):
        self.assertEqual((flops_to_string(2e12, "GFLOPS"), macs_to_string(2e9, "MMACs", 0), params_to_string(2e9, "B"), duration_to_string(2, "ms")),
                         ("2000 GFLOPS", "2000 MMACs", "2 B", "2000 ms"))


_ENGINE = """
    import pathlib, torch, trireme
    import flops_profiler_test as shared, flops_counted

    def train(stage, profiled, steps=3, accumulation=1, **section):
        torch.manual_seed(1)
        model = shared.Nested()
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": stage},
                  "trireme": {"gather": "copy", "merge_below_bytes": 0}, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
        if profiled:
            config["flops_profiler"] = {"enabled": True, "output_file": folder + "/profile.txt", **section}
        engine, *_ = trireme.initialize(model=model, config=config)
        rank = engine.world.rank
        seen, losses, path = {}, [], pathlib.Path(folder) / "profile.txt"
        if profiled:
            end = engine.flops_profiler.end_profile
            def ending():
                if engine.flops_profiler.started and engine.flops_profiler.step_seconds is not None:
                    seen.update(flops_counted.of_modules(engine.flops_profiler), step=engine.global_steps, printed=path.exists())
                end()
            engine.flops_profiler.end_profile = ending
            write = engine.flops_profiler.print_model_profile
            def writing(*arguments, **options):
                seen["reports"] = seen.get("reports", 0) + 1
                write(*arguments, **options)
            engine.flops_profiler.print_model_profile = writing
        for step in range(steps * accumulation):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        text = path.read_text() if path.exists() else ""
        engine.world.barrier()
        path.unlink(missing_ok=True)
        return {"losses": losses, "seen": {key: value for key, value in seen.items()}, "text": text, "enabled": engine.flops_profiler_enabled(),
                "step": engine.flops_profiler_profile_step(), "none": engine.flops_profiler is None}

    def plain():
        model = shared.Nested()
        x = torch.randn(2, 4, requires_grad=True)
        return flops_counted.of_modules(flops_counted.by_trireme(model, lambda: model(x))[1])
"""


class OfAnEngine(Case):
    def test_a_report_that_cannot_be_written_is_printed_and_training_goes_on(self):
        blocked = self.write("file", "no folder")
        printed, plain, profiled = self.on_ranks(2, _ENGINE + f"""
    import contextlib, io
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        profiled = train(2, True, output_file={str(blocked / "profile.txt")!r})["losses"]
    result = [text.getvalue(), train(2, False)["losses"], profiled]
""")
        self.assertIn("FLOPs profile at step 1", printed)
        self.assertEqual(profiled, plain)

    def test_a_step_on_two_ranks_has_the_flops_of_plain_pytorch_and_trains_as_without(self):
        for stage in (0, 3):
            with self.subTest(stage=stage):
                result = self.on_ranks(2, _ENGINE + f"""
    with_profile, without = train({stage}, True, top_modules=3), train({stage}, False)
    result = [with_profile, without, plain()]
""")
                profiled, without, plain = result
                self.assertEqual(profiled["losses"], without["losses"])
                self.assertEqual([profiled["seen"].pop(key) for key in ("step", "printed", "reports")], [2, True, 1])
                self.assertEqual(profiled["seen"], plain)
                self.assertEqual((profiled["enabled"], profiled["step"], profiled["none"]), (True, 1, False))
                self.assertEqual((without["enabled"], without["text"], without["none"]), (False, "", True))
                for part in ("FLOPs profile at step 1", "ranks:                                                      2", "backward latency:",
                             "optimizer step latency:", "samples per second, all ranks:", "(twice) Linear:"):
                    self.assertIn(part, profiled["text"])

    def test_of_accumulated_micro_batches_the_last_one_is_told_once(self):
        profiled = self.on_ranks(1, _ENGINE + """
    result = train(1, True, accumulation=3, profile_step=0, detailed=False)
""")
        self.assertEqual([profiled["seen"].pop(key) for key in ("step", "reports")], [1, 1])
        self.assertEqual(profiled["seen"][""][0], 2 * B * (3 * 48 + 2 * 16))
        self.assertEqual(profiled["text"].count("FLOPs profile at step 0"), 1)

    def test_where_ranks_share_layers_each_counts_its_slices(self):
        found = self.on_ranks(2, """
    import torch, trireme, flops_counted
    from torch import nn
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        def forward(self, x):
            return self.down_proj(torch.relu(self.up_proj(x)))
    torch.manual_seed(1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": [
                  {"patterns": [".*up_proj.weight$"], "partition_type": "column"}, {"patterns": [".*down_proj.weight$"], "partition_type": "row"}]}}}
    engine, *_ = trireme.initialize(model=Mlp(), config=config)
    x = torch.randn(2, 4)
    (forward, backward), profiler = flops_counted.by_trireme(engine.module, lambda: engine(x).sum(), engine.backward)
    result = [forward, flops_counted.of_modules(profiler), profiler.get_total_params()]
""")
        self.assertEqual(found[0], 2 * B * (4 * 4 + 4 * 4))
        self.assertEqual((found[1]["up_proj"][0], found[1]["down_proj"][0]), (2 * B * 16, 2 * B * 16))

    def test_of_a_pipeline_are_those_of_each_stages_modules_and_their_sums(self):
        text, plain, profiled = self.on_ranks(2, """
    import pathlib, torch, trireme
    from torch import nn
    from trireme.pipe import PipelineModule
    def train(**section):
        torch.manual_seed(1)
        module = PipelineModule([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)], num_stages=2, partition_method="type:Linear", loss_fn=nn.MSELoss())
        engine, *_ = trireme.initialize(model=module, config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "flops_profiler": section})
        batches = iter([(torch.full((2, 4), 0.1 * n), torch.ones(2, 2)) for n in range(9)])
        losses = [engine.train_batch(batches).item() for _ in range(3)]
        assert engine.flops_profiler is None or not engine.flops_profiler.started
        engine.destroy()
        return losses
    profiled = train(enabled=True, profile_step=1, output_file=folder + "/profile.txt")
    result = [pathlib.Path(folder + "/profile.txt").read_text(), train(), profiled] if trireme.comm.get_rank() == 0 else train()
""")
        self.assertEqual(profiled, plain)
        value = lambda name, part: re.search(rf"^{re.escape(name)}: +(.*)$", part, re.MULTILINE)[1]
        whole, first, second = text.split("FLOPs profile of ")[1:]
        self.assertTrue(whole.startswith("all 2 stages at step 1"))
        self.assertTrue(first.startswith("stage 0 at step 1"))
        self.assertTrue(second.startswith("stage 1 at step 1"))
        samples, products = 3 * 2, (4 * 8, 8 * 2)
        # The first stage's input needs no gradient.
        for part, forward, backward, params in ((first, samples * products[0], samples * products[0], 40),
                                                (second, samples * products[1], 2 * samples * products[1], 18),
                                                (whole, samples * sum(products), samples * (products[0] + 2 * products[1]), 58)):
            self.assertEqual(value("parameters of the model", part), params_to_string(params))
            self.assertEqual(value("forward MACs", part), macs_to_string(forward))
            self.assertEqual(value("backward FLOPs, recomputation included", part), number_to_string(2 * backward).rstrip())
        self.assertIn("latency of train_batch():", whole)
        self.assertRegex(first, r"\(\S+\) Linear: 40 ")

class OfHuggingFace(Case):
    """Others: flops_profiler_slow_test.py."""

    def test_a_model_has_as_many_as_torchs_counter(self):
        for name in ("gpt2 sdpa", "llama"):
            with self.subTest(name):
                found = flops_counted.compare_model(name)
                self.assertEqual(found["trireme"], found["torch"])


class Names(Case):
    def test_are_those_of_deepspeed(self):
        result = self.on_ranks(1, """
    from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
    from deepspeed.profiling.flops_profiler.profiler import flops_to_string, number_to_string
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.profiling.constants import FLOPS_PROFILER_PROFILE_STEP
    import trireme
    section = DeepSpeedFlopsProfilerConfig({"flops_profiler": {"profile_step": 7}})
    config = trireme.DeepSpeedConfig({"train_batch_size": 1, "flops_profiler": {"enabled": True}})
    result = [FlopsProfiler is trireme.profiling.flops_profiler.FlopsProfiler, section.profile_step, section.top_modules, FLOPS_PROFILER_PROFILE_STEP,
              config.flops_profiler_config.enabled]
""", as_deepspeed=True)
        self.assertEqual(result, [True, 7, 1, "profile_step", True])


if __name__ == "__main__":
    main()
