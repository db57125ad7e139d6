"""The examples run on two ranks and learn."""
import json
import pathlib
import re

from harness import Case, RankServer, launch, main

RankServer.imports = ("torch._dynamo", "transformers.models.llama.modeling_llama", "peft")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"


class Examples(Case):
    """Each file of examples/python, in a folder of its own."""

    def losses(self, *words, runs=RankServer.run):
        status, out, err = runs(2, words, folder=self.folder)
        self.assertEqual(status, 0, out + err)
        losses = [float(text) for text in re.findall(r"loss'?:? '?([0-9.]+)", out)]
        self.assertGreaterEqual(len(losses), 2, out)
        return losses

    def test_from_scratch(self):
        losses = self.losses(EXAMPLES / "from_scratch.py", "30", runs=launch)
        self.assertLess(losses[-1], losses[0])
        self.assertTrue((self.folder / "checkpoints/latest").exists())

    def test_hugging_face(self):
        losses = self.losses("-m", "trireme.as_deepspeed", EXAMPLES / "hugging_face.py", runs=launch)
        self.assertLess(losses[-2], losses[0])  # the last one is the mean of all
        self.assertTrue((self.folder / "output/final/model.safetensors").exists())

    def test_two_models(self):
        losses = self.losses(EXAMPLES / "two_models.py")
        self.assertLess(losses[-1], 0.1)

    def test_lora(self):
        losses = self.losses(EXAMPLES / "lora.py")
        self.assertLess(losses[-1], losses[0])
        self.assertTrue((self.folder / "merged/model.safetensors").exists())

    def test_pipeline(self):
        losses = self.losses(EXAMPLES / "pipeline.py", "40")
        self.assertLess(losses[-1], 0.5 * losses[0])
        self.assertTrue((self.folder / "checkpoints/latest").exists())

    def test_fsdp_and_deepspeed_train_alike_in_both_modes(self):
        losses = {}
        for dialect in ("fsdp", "deepspeed"):
            for mode in ("mixed", "low"):
                out = self.folder / f"{dialect}-{mode}.json"
                words = [EXAMPLES.parent / "fsdp_and_deepspeed/train.py", "--dialect", dialect, "--mode", mode, "--lr", "1e-3", "--steps", "4", "--out", out]
                run, words = (launch, ["-m", "trireme.as_fsdp", *words]) if dialect == "fsdp" else (RankServer.run, words)
                status, _, err = run(2, words, folder=self.folder)
                self.assertEqual(status, 0, err)
                losses[dialect, mode] = [step["loss"] for step in json.loads(out.read_text())["steps"]]
        for mode in ("mixed", "low"):  # clipping's factor is torch's in the one and the engine's in the other
            for one, other in zip(losses["fsdp", mode], losses["deepspeed", mode], strict=True):
                self.assertAlmostEqual(one, other, delta=2e-3 * other)
        self.assertNotEqual(losses["fsdp", "low"], losses["fsdp", "mixed"])

    def test_none_is_long(self):
        for path in EXAMPLES.glob("*.py"):
            self.assertLessEqual(len(path.read_text().splitlines()), 60, path.name)


if __name__ == "__main__":
    main()
