"""FSDP's and DeepSpeed's programs of one model have one outcome, to the bit, in both modes; bf16 throughout is plain
PyTorch's."""
from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers")

_PROGRAM = """
    import torch, transformers, trireme
    import torch.distributed as dist
    from trireme.fsdp import MixedPrecisionPolicy, fully_shard
    trireme.init_distributed()
    RANK, RANKS, STEPS = trireme.comm.get_rank(), trireme.comm.get_world_size(), 6
    ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}

    def build(name):
        torch.manual_seed(1)
        if name == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
                                                                           use_cache=False))
            return model, model.model.layers
        if name == "vit":
            model = transformers.ViTForImageClassification(transformers.ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16,
                                                                                  patch_size=4, num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0))
            return model, model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=64, dropout_rate=0,
                                                                              decoder_start_token_id=0, use_cache=False))
        return model, [*model.encoder.block, *model.decoder.block]

    def batch(name, step, rank=None, dtype=torch.float32):
        generator = torch.Generator().manual_seed(50 + step)
        part = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
        if name == "vit":
            images, labels = torch.randn(2 * RANKS, 3, 16, 16, generator=generator), torch.randint(5, (2 * RANKS,), generator=generator)
            return {"pixel_values": images[part].to(dtype), "labels": labels[part]}
        ids = torch.randint(1, 64, (2 * RANKS, 10), generator=generator)[part]
        return {"input_ids": ids, "labels": ids}

    def told(output):
        # A bf16 loss has three digits; two models share it more easily than this sum.
        return output.loss.item(), output.logits.double().sum().item()

    def by_fsdp(name, mode, reshard):
        model, layers = build(name)
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)} if mode == "mixed" else {}
        model = model.bfloat16().float() if mode == "mixed" else model.bfloat16()
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard, **policy)
        fully_shard(model, reshard_after_forward=reshard, **policy)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        losses = []
        for step in range(STEPS):
            output = model(**batch(name, step, RANK, torch.bfloat16))
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(told(output))
        return losses

    def by_deepspeed(name, mode, stage):
        model, _ = build(name)
        low = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if mode == "low" else {}
        engine, *_ = trireme.initialize(model=model.bfloat16(), config={
            "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "bf16": {"enabled": True, **low}, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": ADAMW}})
        losses = []
        for step in range(STEPS):
            output = engine(**batch(name, step, RANK, torch.bfloat16))
            engine.backward(output.loss)
            engine.step()
            losses.append(told(output))
        engine.destroy()
        return losses

    def plain(name):
        model, _ = build(name)
        model = model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        losses = []
        for step in range(STEPS):
            found = []
            for rank in range(RANKS):
                loss = model(**batch(name, step, rank, torch.bfloat16)).loss
                (loss / RANKS).backward()
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(found[RANK])
        return losses
"""


class Equivalence(Case):
    def check(self, name):
        found = self.on_ranks(2, _PROGRAM + f"""
    result = {{"plain": plain({name!r})}}
    for mode in ("mixed", "low"):
        for reshard, stage in ((True, 3), (False, 2)):
            result[f"fsdp {{mode}} {{stage}}"] = by_fsdp({name!r}, mode, reshard)
            result[f"deepspeed {{mode}} {{stage}}"] = by_deepspeed({name!r}, mode, stage)
    result["deepspeed mixed 1"], result["deepspeed low 1"] = by_deepspeed({name!r}, "mixed", 1), by_deepspeed({name!r}, "low", 1)
""")
        expected = found.pop("plain")
        for mode in ("mixed", "low"):
            first = found[f"fsdp {mode} 3"]
            for way, losses in found.items():
                if f" {mode} " in way:
                    with self.subTest(way):
                        self.assertEqual(losses, first)
        self.assertNotEqual(found["fsdp mixed 3"], found["fsdp low 3"])
        for (one, _), other in zip(found["fsdp low 3"], expected, strict=True):
            self.assertAlmostEqual(one, other, delta=1e-2 * other)

    def test_llama(self):
        self.check("llama")

    def test_vit(self):
        self.check("vit")

    def test_t5(self):
        self.check("t5")


if __name__ == "__main__":
    main()
