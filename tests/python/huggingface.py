"""Helpers that the tests of Hugging Face's programs share: a run of a program with options, and configurations of
DeepSpeed."""
import json
import pathlib

import harness

harness.RankServer.imports = ("torch._dynamo",)  # which transformers imports

PROGRAMS = pathlib.Path(__file__).parent / "programs"
AUTO = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
SCHEDULER = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                                                 "total_num_steps": "auto", "warmup_type": "linear"}}


class Case(harness.Case):
    def config(self, stage, **sections):
        """The path of a configuration with "auto" wherever Hugging Face fills it."""
        zero = {"stage": stage}
        if stage == 3:
            zero.update({key: "auto" for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size",
                                                 "stage3_param_persistence_threshold")},
                        stage3_gather_16bit_weights_on_model_save=True)
        return str(self.write(f"stage{stage}-{len(sections)}.json", json.dumps({**AUTO, "zero_optimization": zero, **sections})))

    def trained(self, program, ranks, out, **options):
        """The record of a program; 0 ranks: one process without a launcher and without the name deepspeed."""
        options["out"] = str(self.folder / out)
        words = [PROGRAMS / f"{program}.py", json.dumps(options)]
        return harness.result_of(harness.RankServer.run(ranks, words, as_deepspeed=ranks > 0))

    def weights(self, out):
        """The weights that a program saved in the end."""
        from safetensors.torch import load_file  # of the environment of these tests
        return load_file(self.folder / out / "model.safetensors")

    def assert_same_weights(self, one, other, tolerance=0.0):
        one, other = self.weights(one), self.weights(other)
        self.assertEqual(set(one), set(other))
        for name, weight in one.items():
            self.assertLessEqual((weight - other[name]).abs().max().item(), tolerance, name)
