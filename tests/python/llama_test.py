"""A Hugging Face Llama (fp32): every stage on 1, 2 and 4 ranks against plain PyTorch on the whole batch."""
from harness import Case, RankServer, main

RankServer.imports = ("transformers.models.llama.modeling_llama", "torch._dynamo")

_TRAIN = """
    import torch, torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM
    import trireme as deepspeed
    BATCH, VOCABULARY = 4, 512

    def build():
        torch.manual_seed(1)
        return LlamaForCausalLM(LlamaConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8,
                                            intermediate_size=HIDDEN * 43 // 16, vocab_size=VOCABULARY, use_cache=False))

    def loss_of(model, step, rank=0, size=1):
        ids = torch.randint(0, VOCABULARY, (BATCH, 17), generator=torch.Generator().manual_seed(step))
        ids = ids[rank * BATCH // size:(rank + 1) * BATCH // size]
        logits = model(input_ids=ids[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def plain():
        model = build()
        optimizer, losses = optimizer_of(model), []
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def sharded(stage, gather):
        model = build()
        config = {"train_batch_size": BATCH, "zero_optimization": {"stage": stage}, "trireme": {"gather": gather}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
        losses = []
        for step in range(STEPS):
            loss = loss_of(engine, step, engine.global_rank, engine.world_size)
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / engine.world_size)
        engine.destroy()
        return losses
"""


class Llama(Case):
    """Losses of some steps; llama_slow_test.py has a larger model."""

    layers, hidden, steps = 3, 64, 8

    def test_one_rank_gives_the_losses_of_plain_pytorch_at_every_stage(self):
        self._compare(1)

    def test_two_ranks_give_them_too_and_every_stage_the_same_bits(self):
        self._compare(2)

    def test_four_ranks_give_them_too_and_every_stage_the_same_bits(self):
        self._compare(4)

    def _compare(self, ranks):
        expected, *found = self.on_ranks(ranks, f"""
    LAYERS, HIDDEN, STEPS = {self.layers}, {self.hidden}, {self.steps}
""" + _TRAIN + """
    result = [sharded(stage, "auto") for stage in range(4)] + [sharded(3, "copy")]
    result.insert(0, plain() if os.environ["RANK"] == "0" else None)
""")
        for losses in found:
            self.assert_close(losses, expected, 1e-6)
            self.assertEqual(losses, found[0])


if __name__ == "__main__":
    main()
