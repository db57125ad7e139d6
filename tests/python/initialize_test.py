"""What initialize() makes of its arguments, and what it refuses before anything has changed."""
from harness import Case, main

_START = """
    import torch, trireme as deepspeed
    from torch import nn

    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    SGD = {**CONFIG, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}

    def refusal(**arguments):
        try:
            deepspeed.initialize(**arguments)
        except deepspeed.errors.Error as error:
            return f"{type(error).__name__}: {error}"
        return "not refused"
"""


class Initialize(Case):
    """Parameter groups, callables, refusals."""

    def test_groups_keep_their_hyperparameters_whoever_makes_the_optimizer(self):
        result = self.on_ranks(2, _START + """
    def rates(net, **arguments):
        before = [p.detach().clone() for p in net.parameters()]
        groups = [{"params": [net[0].weight], "lr": 0.3}, {"params": [net[0].bias], "lr": 0.2}, {"params": list(net[2].parameters())}]
        engine, optimizer, *_ = deepspeed.initialize(model=net, model_parameters=groups, **arguments)
        engine.backward(engine(torch.ones(2, 4)).sum())
        gradients = [deepspeed.utils.safe_get_full_grad(p) for p in net.parameters()]
        engine.step()
        steps = [((b - p.detach()).abs().sum() / g.abs().sum()).item() for b, p, g in zip(before, net.parameters(), gradients)]
        return steps, [group["lr"] for group in optimizer.param_groups]

    result = [rates(model(), config=SGD), rates(model(), config={**CONFIG, "gradient_clipping": 0},
                                                optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01))]
""")
        for steps, rates in result:
            self.assertEqual(rates, [0.3, 0.2, 0.01])
            self.assert_close(steps, [0.3, 0.2, 0.01, 0.01], 1e-4)

    def test_what_cannot_be_meant_is_refused_and_leaves_the_model_alone(self):
        result = self.on_ranks(1, _START + """
    net, other = model(), model()
    used_up = iter(net.parameters())
    list(used_up)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(other.parameters(), lr=1.0), 0.1)
    result = {"foreign": refusal(model=net, model_parameters=other.parameters(), config=SGD),
              "used up": refusal(model=net, model_parameters=used_up, config=SGD),
              "scheduler": refusal(model=net, lr_scheduler=scheduler, config=SGD),
              "stage": refusal(model=net, model_parameters=net[0].parameters(), config={**SGD, "zero_optimization": {"stage": 4}})}
    trainable = [p.requires_grad for p in net.parameters()]
    engine, *_ = deepspeed.initialize(model=net, config=SGD)
    try:
        engine.save_checkpoint(folder, client_state={"settings": object()})
    except deepspeed.errors.ConfigError as error:
        result["client_state"] = str(error)
    result = [result, trainable, os.path.exists(os.path.join(folder, "latest"))]
""")
        texts, trainable, saved = result
        self.assertIn("is no parameter of the model", texts["foreign"])
        self.assertIn("a generator that was used up", texts["used up"])
        self.assertIn("this ExponentialLR steers another optimizer", texts["scheduler"])
        self.assertIn("zero_optimization.stage", texts["stage"])
        self.assertIn("client_state['settings'] is a builtins.object", texts["client_state"])
        self.assertEqual(trainable, [True] * 4)
        self.assertFalse(saved)

    def test_configurations_that_differ_by_rank_are_named_on_every_rank(self):
        result = self.on_ranks(2, _START + """
    rank = deepspeed.comm.world().rank
    lr = refusal(model=model(), config={**SGD, "optimizer": {"type": "SGD", "params": {"lr": 0.01 + rank}}})
    kind = refusal(model=model(), config={**SGD, "optimizer": {"type": ("SGD", "Lamb")[rank], "params": {"lr": 0.01}}})
    result = [lr, kind]
""")
        self.assertIn("differ in `optimizer.params.lr` (here 0.01)", result[0])
        self.assertRegex(result[1], "^ConfigError: initialize: the ranks' configurations (differ|have different)")


if __name__ == "__main__":
    main()
