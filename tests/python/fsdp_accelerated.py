"""Helpers that the tests of Accelerate's FSDP share: a run of a program, and comparisons of its records."""
import json
import pathlib

import harness
import torch

harness.RankServer.imports = ("torch._dynamo", "torch.distributed.fsdp", "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")
PROGRAMS = pathlib.Path(__file__).parent / "programs"
_AS_FSDP = """
import runpy
import trireme.as_fsdp
trireme.as_fsdp.install()
sys.argv = {words!r}
os.environ.update({environment!r})
{before}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Case(harness.Case):
    """Programs beside one process, or beside PyTorch's own FSDP."""

    def told(self, out, ranks, *, by="trireme", environment=None, program="for_fsdp/accelerated.py", before="", **options):
        """The record of a program: its line, and the tensors that it saves. `by`: "trireme", or "torch" for PyTorch's
        own FSDP; without ranks one process."""
        options = {"accumulation": 2, "out": str(self.folder / out), **options}
        (self.folder / out).mkdir()
        words = [str(PROGRAMS / program), json.dumps(options)]
        if ranks and by == "trireme":
            words = [self.write(f"{out}.py", "import os, sys\n" + _AS_FSDP.format(words=words, environment=environment or {}, before=before))]
        elif ranks:
            words = [PROGRAMS / "for_fsdp" / "on_host.py", *words]
        line = harness.result_of(harness.RankServer.run(ranks, words))
        saved = self.folder / out / "told.pt"
        return {**(torch.load(saved) if saved.exists() else {}), **line}

    def assert_same(self, found, expected, tolerance=1e-5):
        for name in ("losses", "norms", "gradients", "weights"):
            if name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
        # load_state() has brought everything back
        self.assertEqual(found["again"], found["losses"][len(found["losses"]) // 2:])

    def assert_same_model(self, one, other, tolerance, file="model.safetensors"):
        from safetensors.torch import load_file  # of the environment of these tests
        found, expected = (load_file(self.folder / out / file) for out in (one, other))
        self.assertEqual(set(found), set(expected))
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")

    def assert_trainer_resumes(self, config):
        """transformers' Trainer over FSDP by `config` trains as one process does, and resumes to the same bits, by FULL
        and SHARDED state dicts."""
        alone = self.told("alone", 0, program="trainer.py", micro=8, accumulation=1)
        config = {**config, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True}
        for name, more in (("full", {}), ("sharded", {"state_dict_type": "SHARDED_STATE_DICT"})):
            options = {"program": "trainer.py", "micro": 2, "fsdp": "full_shard auto_wrap", "fsdp_config": {**config, **more}}
            found = self.told(name, 2, **options)
            for key in ("eval_loss", "grad_norm", "learning_rate"):
                self.assert_close(found[key], alone[key])
            resumed = self.told(f"{name}-resumed", 2, resume=str(self.folder / name / "checkpoint-3"), **options)
            self.assertEqual(resumed, found)
            if name == "full":  # a sharded state dict is PyTorch's checkpoint, not a file of the model
                self.assert_same_model(f"{name}/final", "alone/final", 1e-5)
                self.assert_same_model(f"{name}-resumed/final", f"{name}/final", 0)
