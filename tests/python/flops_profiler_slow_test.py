"""The profiler of FLOPs on models of Hugging Face: as many as torch.utils.flop_counter has, forward and backward."""
import flops_counted
from harness import Case, main


class Models(Case):
    def test_have_as_many_as_torchs_counter(self):
        for name in flops_counted.MODELS:
            with self.subTest(name):
                found = flops_counted.compare_model(name)
                self.assertEqual(found["trireme"], found["torch"])
                self.assertGreater(min(found["trireme"]), 0)
                self.assertEqual(found["uncounted"], {})

    def test_of_zero_3_on_two_ranks_have_those_of_plain_pytorch(self):
        result = self.on_ranks(2, """
            import torch, trireme, flops_counted
            from zoo import hugging_face
            result = {}
            for name in ("llama", "bert sdpa", "t5", "llama checkpointed, reentrant"):
                expected = flops_counted.compare_model(name)["torch"]
                kind, more, batch_of = flops_counted.MODELS[name]
                model = hugging_face.model(kind, **more).train()
                if "checkpointed" in name:
                    hugging_face.checkpointed(model, reentrant=True).enable_input_require_grads()
                config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "trireme": {"gather": "copy"},
                          "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}
                engine, *_ = trireme.initialize(model=model, config=config)
                batch = batch_of()
                found = flops_counted.by_trireme(model, lambda: engine(**batch).loss, engine.backward)[0]
                engine.step()
                engine.destroy()
                result[name] = (found, expected)
        """, timeout_s=500)
        for name, (found, expected) in result.items():
            self.assertEqual(found, expected, name)


if __name__ == "__main__":
    main()
