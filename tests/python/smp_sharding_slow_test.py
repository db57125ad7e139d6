"""Shards beside layers that ranks share, and in groups over stages."""
from harness import main
from smp_programs import Case

_TEXT = """
    smp.init({"partitions": STAGES, "microbatches": 2, "ddp": True, OPTIONS})
    torch.manual_seed(5)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = smp.nn.DistributedLinear(6, 16), smp.nn.DistributedLinear(16, 4)
            self.norm = nn.LayerNorm(16)
        def forward(self, x, y):
            return F.cross_entropy(self.down(self.norm(torch.tanh(self.up(x)))), y)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    train_step = stepping(model)
    torch.manual_seed(50 + smp.rdp_rank())
    batches, found = [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(4)], []
    if not SAVES:
        saved = smp.load(PATH)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(0 if SAVES else 2, 4):
        optimizer.zero_grad()
        losses = [loss.item() for loss in train_step(*batches[step]).outputs]
        norm = float(optimizer.clip_master_grads(0.1))
        optimizer.step()
        if step >= 2:
            found.append([losses, norm])
        if SAVES and step == 1:
            parts = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(gather_if_shard=False)}
            if smp.state.cfg.zero_stage or smp.rdp_rank() == 0:
                smp.save(parts, PATH)
    result = [found, {name: bits(value) for name, value in model.state_dict().items()},
              {f"{number}.{name}": bits(value) for number, one in optimizer.state_dict()["state"].items() for name, value in one.items()}]
"""
_ZERO_1, _ZERO_3 = '"shard_optimizer_state": True', '"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9'


class Sharded(Case):
    def _run(self, ranks, stages, options, path, saves):
        values = {"STAGES": str(stages), "OPTIONS": options, "PATH": repr(path), "SAVES": str(saves)}
        text = _TEXT
        for name, value in values.items():
            text = text.replace(name, value)
        return self.ran(ranks, text)

    def test_beside_layers_that_ranks_share(self):
        layers = '"tensor_parallel_degree": 2, "prescaled_batch": True, '
        expected = self._run(4, 1, layers, f"{self.folder}/whole", True)
        for number, options in enumerate((_ZERO_1, _ZERO_3)):
            path = f"{self.folder}/{number}"
            self.assertEqual(self._run(4, 1, layers + options, path, True), expected)
            self.assertEqual(self._run(4, 1, layers + options, path, False), expected)
            self.assertEqual(self._run(4, 1, layers, path, False), expected)

    def test_in_groups_over_stages(self):
        expected = self._run(8, 2, "", f"{self.folder}/whole", True)
        for number, options in enumerate((_ZERO_1, _ZERO_3)):  # ZeRO 3 in two groups of two ranks, on each stage
            path = f"{self.folder}/{number}"
            found = self._run(8, 2, options, path, True)
            for (losses, norm), (others, other) in zip(found[0], expected[0], strict=True):
                self.assertEqual(losses[0], others[0])
                self.assert_close([*losses, norm], [*others, other], 1e-5)
            self.assertEqual(self._run(8, 2, options, path, False), found)


if __name__ == "__main__":
    main()
