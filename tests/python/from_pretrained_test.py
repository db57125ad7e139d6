"""A model that `trireme convert --to huggingface` or `trireme consolidate` writes is one that transformers'
from_pretrained() opens."""
import json
import subprocess

from harness import PROGRAM, Case, main, run

LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32, "rope_theta": 5000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
GPT = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
PROMPT, TOKENS = "the story ", 12


def opened(folder):
    """The model of a folder, which must have each weight of its class and no other."""
    import transformers
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
    return model.eval()


class FromPretrained(Case):
    def trireme(self, *words):
        status, out, err = run([PROGRAM, *words], folder=self.folder)
        self.assertEqual(status, 0, err)
        return out, err

    def train(self, config, *flags):
        """The folder of a run of `trireme train` on config.json, a folder of its own."""
        (self.folder / "model").mkdir(exist_ok=True)
        self.write("model/config.json", json.dumps(config))
        self.write("story.txt", "".join(f"line {i * 7919 % 1000} of the story\n" for i in range(3000)))
        self.trireme("train", "--model", "model/config.json", "--data", "story.txt", "--seq", "32", "--batch", "2", "--steps", "3", "--eval-samples", "4",
                     "--out", "run", *flags)
        return self.folder / "run"

    def test_a_run_of_the_program_is_the_model_that_it_was(self):
        import safetensors
        import torch
        for config in (LLAMA, GPT):
            with self.subTest(config["model_type"]):
                self.folder = self.folder / config["model_type"]
                self.folder.mkdir()
                self.train(config)
                said, _ = self.trireme("convert", "run", "copy", "--to", "huggingface")
                with safetensors.safe_open(self.folder / "copy" / "model.safetensors", "pt") as file:
                    self.assertIn(f": {len(file.keys())} tensors of ", said)
                model = opened(self.folder / "copy")
                self.assertIsNone(model.config.eos_token_id)
                words = ["generate", "--checkpoint", "run", "--prompt", PROMPT, "--temperature", "0", "--tokens", str(TOKENS)]
                # bytes of any kind
                text = subprocess.run([PROGRAM, *words], cwd=self.folder, stdout=subprocess.PIPE, check=True).stdout
                prompt = torch.tensor([list(PROMPT.encode())])
                with torch.no_grad():
                    tokens = model.generate(prompt, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
                self.assertEqual(bytes(tokens[0].tolist()), text.removesuffix(b"\n"))

    def test_the_dtype_is_that_of_the_weights(self):
        import torch
        self.train(LLAMA)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            self.trireme("consolidate", "run", name, "--dtype", name)
            said = json.loads((self.folder / name / "config.json").read_text())
            self.assertEqual(said["torch_dtype"], str(dtype).removeprefix("torch."))
            import transformers
            model = transformers.AutoModelForCausalLM.from_pretrained(self.folder / name, dtype="auto")
            self.assertEqual({weight.dtype for weight in model.parameters()}, {dtype})

    def test_the_tokenizer_of_the_models_folder_goes_along(self):
        import tokenizers
        import transformers
        (self.folder / "model").mkdir()
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"line": 1, "story": 2, "?": 0}, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(self.folder / "model")
        self.write("model/notes.txt", "of no use to a tokenizer")
        self.write("model/generation_config.json", json.dumps({"max_new_tokens": 3}))
        self.train(LLAMA)
        self.trireme("convert", "run", "copy", "--to", "huggingface")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder / "copy")
        self.assertEqual(tokenizer("line story line")["input_ids"], [1, 2, 1])
        self.assertEqual(opened(self.folder / "copy").generation_config.max_new_tokens, 3)
        self.assertFalse((self.folder / "copy/notes.txt").exists())
        (self.folder / "model").rename(self.folder / "moved")
        self.trireme("consolidate", "run", "without")
        self.assertFalse((self.folder / "without/tokenizer.json").exists())
        self.trireme("consolidate", "run", "with", "--model", "moved")
        self.assertEqual(transformers.AutoTokenizer.from_pretrained(self.folder / "with")("story")["input_ids"], [2])
        opened(self.folder / "with")

    def test_an_engine_of_a_model_of_transformers_says_which_it_is(self):
        import torch
        result = self.on_ranks(2, """
            import torch, transformers, trireme
            torch.manual_seed(0)
            model = transformers.MistralForCausalLM(transformers.MistralConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
                tie_word_embeddings=True))
            engine = trireme.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
                                        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})[0]
            ids = torch.arange(12)[None]
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            engine.save_checkpoint(folder + "/checkpoints", client_state={"mine": 1})
            again = engine.load_checkpoint(folder + "/checkpoints")[1]
            with torch.no_grad():
                result = {"loss": engine(input_ids=ids, labels=ids).loss.item(), "state": again}
        """)
        self.assertEqual(result["state"], {"mine": 1})
        self.trireme("convert", "checkpoints", "copy", "--to", "huggingface")
        model = opened(self.folder / "copy")
        self.assertEqual((type(model).__name__, model.config.sliding_window), ("MistralForCausalLM", 8))
        ids = torch.arange(12)[None]
        with torch.no_grad():
            self.assertAlmostEqual(model(input_ids=ids, labels=ids).loss.item(), result["loss"], delta=1e-5)

    def test_what_would_be_another_model_is_refused(self):
        self.train(LLAMA)
        (self.folder / "other").mkdir()
        self.write("other/config.json", json.dumps({**LLAMA, "num_key_value_heads": 4}))
        for words, why in ((["consolidate", "run", "out", "--model", "other"], "num_key_value_heads is 4 there, 2 here"),
                           (["consolidate", "run", "out", "--model", "model", "--file", "w.safetensors"], "here is w.safetensors"),
                           (["consolidate", "run", "out", "--model", "story.txt"], "there is no config.json in it"),
                           (["consolidate", "run", "other"], "is of another model: num_key_value_heads is 4 there, 2 here"),
                           (["convert", "run", "out", "--to", "dcp", "--model", "model"], "--model model has no meaning with --to dcp")):
            status, _, err = run([PROGRAM, *words], folder=self.folder)
            self.assertNotEqual(status, 0)
            self.assertIn(why, err)
            self.assertFalse((self.folder / "out").exists())
            self.assertEqual([file.name for file in (self.folder / "other").iterdir()], ["config.json"])
        self.trireme("consolidate", "run", "alone", "--weights-only")
        self.assertEqual([file.name for file in (self.folder / "alone").iterdir()], ["model.safetensors"])
        self.trireme("consolidate", "run", "other", "--overwrite")
        opened(self.folder / "other")


if __name__ == "__main__":
    main()
