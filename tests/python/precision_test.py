"""Mode `low` of the configuration's two keys: weights, losses and states of plain PyTorch whose model is in bf16."""
from harness import main
from small_model import Case

_START = """
import logging
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append((record.levelname, record.getMessage()))
deepspeed.utils.logger.addHandler(handler)
deepspeed.utils.logger.setLevel(logging.DEBUG)  # at which the table of dtypes is told
def low(**more):
    return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, "gradient_clipping": 0.0, **more}
def data(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=g).bfloat16(), torch.randn(4, 3, generator=g).bfloat16()
def net(width=37, outputs=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, outputs)).bfloat16()
def loss_of(model, step):
    x, y = data(step)
    return torch.nn.functional.mse_loss(model(x)[:, :3].float(), y.float())
def plain(make, *sizes):
    model = net(*sizes)
    optimizer = make(model.parameters())
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer
def ours(make, stage, *sizes):
    model = net(*sizes)
    optimizer = make(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, **low()})
    losses = []
    for step in range(20):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine
"""
_MAKERS = """{
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True), "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01)}"""


class Low(Case):
    """On one rank, and on two that see the same micro-batches, so that the mean of their gradients is each one's."""

    def trained(self, ranks, sizes):
        """{optimizer, stage: [farthest weight, whether losses are the same, dtypes, bf16_optimizer_states(), farthest
        from the start]}."""
        return self.ran(ranks, _START + f"""
result = {{}}
for name, make in {_MAKERS}.items():
    losses, model, _ = plain(make, *{sizes})
    for stage in (0, 1, 2, 3):
        found, engine = ours(make, stage, *{sizes})
        with deepspeed.zero.GatheredParameters(engine.module):
            far = max((a.float() - b.float()).abs().max().item() for a, b in zip(engine.module.parameters(), model.parameters()))
            moved = max((a.float() - b.float()).abs().max().item() for a, b in zip(engine.module.parameters(), net(*{sizes}).parameters()))
            dtypes = sorted({{str(p.dtype) for p in engine.module.parameters()}})
        result[f"{{name}}, stage {{stage}}"] = [far, found == losses, dtypes, engine.bf16_optimizer_states(), moved]
        engine.destroy()
""")

    def test_trains_bit_by_bit_as_plain_pytorch_in_bf16(self):
        for ranks in (1, 2):
            result = self.trained(ranks, (64, 64))
            self.assertEqual(len(result), 24)
            for name, (far, has_same_losses, dtypes, is_low, moved) in result.items():
                with self.subTest(f"{name}, {ranks} ranks"):
                    self.assertEqual(far, 0)
                    self.assertTrue(has_same_losses)
                    self.assertEqual((dtypes, is_low), (["torch.bfloat16"], True))
                    self.assertGreater(moved, 0.05)

    def test_of_tensors_of_odd_sizes_only_sums_with_a_factor_are_rounded_otherwise(self):
        # PyTorch's add(…, alpha=…), of weight decay as L2 and of SGD, rounds the last elements of a tensor twice: those
        # behind its vectors.
        for name, (far, has_same_losses, *_) in self.trained(2, (37, 3)).items():
            with self.subTest(name):
                if name.split(",")[0] in ("Adam", "SGD"):
                    self.assertLessEqual(far, 1e-2)
                else:
                    self.assertEqual((far, has_same_losses), (0, True))

    def test_keeps_the_states_that_pytorch_keeps_and_takes_them_from_a_checkpoint(self):
        result = self.ran(2, _START + """
make = lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)
_, model, optimizer = plain(make)
_, engine = ours(make, 3)
safe_get_full_optimizer_state = deepspeed.utils.safe_get_full_optimizer_state
def far(engine):
    return max((safe_get_full_optimizer_state(p, name).flatten() - optimizer.state[q][name].float().flatten()).abs().max().item()
               for p, q in zip(engine.module.parameters(), model.parameters()) for name in ("exp_avg", "exp_avg_sq"))
result = [far(engine)]
engine.save_checkpoint(folder)
again, *_ = deepspeed.initialize(model=net(), config={"train_micro_batch_size_per_gpu": 4,
                                 "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}, **low()})
again.load_checkpoint(folder)
result.append(far(again))
""")
        self.assertEqual(result, [0, 0])

    def test_tells_dtypes_and_bytes_at_the_start_and_warns_where_something_is_cast_up(self):
        result = self.ran(2, _START + """
def started(**more):
    told.clear()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **more}
    deepspeed.initialize(model=net(), config=config)[0].destroy()
    return [one for one in told if "precision" in one[1]]
result = [started(**low()), started(bf16={"enabled": True})]
""")
        low, mixed = result
        self.assertEqual([level for level, _ in low], ["DEBUG"])
        self.assertIn("precision: low;", low[0][1])
        self.assertEqual([level for level, _ in mixed], ["DEBUG", "WARNING"])
        self.assertIn("precision: mixed;", mixed[0][1])
        self.assertIn("cast up to fp32 masters", mixed[1][1])


if __name__ == "__main__":
    main()
