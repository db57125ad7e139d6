"""apex's optimizers under smp: losses, gradients and weights are those of their published updates, written out in
fp64."""
from harness import RankServer, main
from smp_programs import VALUES, Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

# An update in fp64 gives new parameters of parameters, gradients, states and the number of the step.
_START = VALUES + """
    from trireme.ops import lamb
    from trireme.smp.optimizers import FusedAdam, FusedLamb, FusedNovoGrad

    def scaled(model, *batch):
        return 20 * model(*batch)  # gradients whose norm is far above 1

    def groups(net, **of_weights):
        weights = [p for p in net.parameters() if p.dim() > 1]
        return [{"params": weights, **of_weights}, {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}]

    def adam(bias_correction=True, decoupled=True, decay=0.1, lr=0.01, beta3=0.1, eps=1e-8, trust=None, limit=math.inf):
        def update(parameters, gradients, states, step):
            total = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            assert total > 2
            new = []
            for p, g, state in zip(parameters, gradients, states):
                own_decay = decay if p.dim() > 1 else 0.0
                g = g / max(1.0, total / limit)
                if not decoupled:
                    g = g + own_decay * p
                state["m"] = 0.9 * state.get("m", 0) + beta3 * g
                state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
                first, second = (1 - 0.9 ** step, 1 - 0.999 ** step) if bias_correction else (1, 1)
                u = state["m"] / first / ((state["v"] / second).sqrt() + eps)
                if decoupled:
                    u = u + own_decay * p
                ratio = p.norm() / u.norm() if trust == "all" or trust == "decayed" and own_decay else 1
                new.append(p - lr * ratio * u)
            return new
        return update

    def novograd(inside=False, averaging=True, infinite=False, zero=False, bias_correction=True, decay=0.1, lr=0.01, eps=1e-8):
        def update(parameters, gradients, states, step):
            new = []
            for p, g, state in zip(parameters, gradients, states):
                own_decay = decay if p.dim() > 1 else 0.0
                norm = g.abs().max() if infinite else g.norm()
                before = state.get("v", 0.0 if zero else norm)
                state["v"] = 0.98 * before + 0.02 * norm if infinite else (0.98 * before ** 2 + 0.02 * norm ** 2) ** 0.5
                first, second = (1 - 0.95 ** step, (1 - 0.98 ** step) ** 0.5) if bias_correction else (1, 1)
                size, share = state["v"] / second + eps, 0.05 if averaging else 1
                state["m"] = 0.95 * state.get("m", 0) + share * (g / size + own_decay * p if inside else g)
                new.append(p - lr * (state["m"] / first if inside else state["m"] / first / size + own_decay * p))
            return new
        return update
"""

_ADAM = {"FusedAdam(groups(net, weight_decay=0.1), lr=0.01)": "adam()",
         "FusedAdam(groups(net, weight_decay=0.1), lr=0.01, adam_w_mode=False)": "adam(decoupled=False)",
         "FusedAdam(groups(net, weight_decay=0.1), lr=0.01, bias_correction=False)": "adam(bias_correction=False)"}
_LAMB = {"FusedLamb(groups(net, weight_decay=0.1), lr=0.01)": "adam(eps=1e-6, trust='decayed', limit=1.0)",
         "FusedLamb(groups(net, weight_decay=0.1), lr=0.01, use_nvlamb=True, max_grad_norm=2.0)": "adam(eps=1e-6, trust='all', limit=2.0)",
         "FusedLamb(groups(net, weight_decay=0.1), lr=0.01, use_nvlamb=True, grad_averaging=False)": "adam(eps=1e-6, trust='all', limit=1.0, beta3=1.0)",
         "FusedLamb(groups(net, weight_decay=0.1), lr=0.01, adam_w_mode=False, bias_correction=False, max_grad_norm=math.inf)":
             "adam(eps=1e-6, trust='decayed', decoupled=False, bias_correction=False)"}
_NOVOGRAD = {"FusedNovoGrad(groups(net, weight_decay=0.1), lr=0.01, betas=(0.95, 0.98))": "novograd()",
             "FusedNovoGrad(groups(net, weight_decay=0.1), lr=0.01, betas=(0.95, 0.98), reg_inside_moment=True, grad_averaging=False)": "novograd(inside=True, averaging=False)",
             "FusedNovoGrad(groups(net, weight_decay=0.1), lr=0.01, betas=(0.95, 0.98), norm_type=0, init_zero=True)": "novograd(infinite=True, zero=True)",
             "FusedNovoGrad(groups(net, weight_decay=0.1), lr=0.01, betas=(0.95, 0.98), init_zero=True, bias_correction=False)": "novograd(zero=True, bias_correction=False)"}


def _listed(cases):
    """(make, update) of cases, as a program has them."""
    return ", ".join(f"(lambda net: {make}, {update})" for make, update in cases.items())


class Optimizers(Case):
    def assert_as_published(self, cases):
        """On one process, over two stages, and with two copies of the model."""
        for ranks, options in ((1, ""), (2, ""), (2, "partitions=1, ddp=True")):
            found = self.ran(ranks, _START + f"""
    begin({options})
    result = []
    for make, update in ({_listed(cases)},):
        net, batches = Mlp(), mlp_batches(3)
        expected = by_hand(copy.deepcopy(net), batches, update, scaled)
        result.append(furthest(by_smp(net, batches, make, scaled), expected))
        forget()
""")
            for make, difference in zip(cases, found, strict=True):
                with self.subTest(make, ranks=ranks, options=options):
                    self.assertLess(difference, 2e-5)  # fp32 over three steps

    def test_adam(self):
        self.assert_as_published(_ADAM)

    def test_lamb(self):
        self.assert_as_published(_LAMB)

    def test_novograd(self):
        self.assert_as_published(_NOVOGRAD)

    def test_step_themselves_outside_of_smp(self):
        """As plain optimizers, of the gradients that they find."""
        cases = {**_ADAM, **_LAMB, **_NOVOGRAD}
        found = self.ran(1, _START + f"""
    torch.manual_seed(5)
    result = []
    for make, update in ({_listed(cases)},):
        net, batches = Mlp(), mlp_batches(3)
        expected = by_hand(copy.deepcopy(net), batches, update, scaled)
        optimizer, found = make(net), []
        for batch in batches:
            optimizer.zero_grad()
            losses = [scaled(net, *(tensor.chunk(MICRO_BATCHES)[index] for tensor in batch)) for index in range(MICRO_BATCHES)]
            torch.stack(losses).mean().backward()
            gradients = {{name: p.grad.flatten().tolist() for name, p in net.named_parameters()}}
            optimizer.step()
            found.append([[loss.item() for loss in losses], gradients, {{name: p.flatten().tolist() for name, p in net.named_parameters()}}])
        result.append(furthest(found, expected))
""")
        for make, difference in zip(cases, found, strict=True):
            with self.subTest(make):
                if difference >= 2e-5:
                    self.skip_where_mkl_rounds_otherwise()
                self.assertLess(difference, 2e-5)

    def test_defaults_are_those_of_apex(self):
        found = self.ran(1, _START + """
    result = [[made.defaults, made.set_grad_none] for made in (kind(Mlp().parameters()) for kind in (FusedAdam, FusedLamb, FusedNovoGrad))]
    result.append([FusedAdam(Mlp().parameters()).adam_w_mode, FusedLamb(Mlp().parameters()).max_grad_norm, FusedLamb(Mlp().parameters()).use_nvlamb])
""")
        common = {"lr": 1e-3, "bias_correction": True, "betas": [0.9, 0.999]}
        self.assertEqual(found, [[{**common, "eps": 1e-8, "weight_decay": 0.0}, True], [{**common, "eps": 1e-6, "weight_decay": 0.01, "grad_averaging": True}, True],
                                 [{**common, "eps": 1e-8, "weight_decay": 0.0, "grad_averaging": True, "norm_type": 2, "init_zero": False}, True], [True, 1.0, False]])

    def test_states_go_on_where_they_were(self):
        """A state dict of two stages, loaded by a new model and optimizer, has the next steps' bits."""
        cases = {make: "None" for make in (next(iter(_ADAM)), next(iter(_LAMB)), list(_LAMB)[1], next(iter(_NOVOGRAD)), "lamb.FusedLamb(net.parameters(), lr=0.01)")}
        found = self.ran(2, _START + f"""
    begin()
    result = []
    for make, _ in ({_listed(cases)},):
        net, batches = Mlp(), mlp_batches(4)
        fresh = copy.deepcopy(net)
        by_smp(net, batches[:2], make, scaled)
        saved = copy.deepcopy([by_smp.model.state_dict(), by_smp.optimizer.state_dict()])
        through = by_smp(net, batches[2:], make, scaled, by_smp.model, by_smp.optimizer)
        forget()
        model, optimizer = smp.DistributedModel(fresh), smp.DistributedOptimizer(make(fresh))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        result.append(by_smp(fresh, batches[2:], make, scaled, model, optimizer) == through)
        model = optimizer = forget()
""")
        self.assertEqual(found, [True] * len(cases))

    def test_the_library_updates_where_it_has_the_same_mathematics(self):
        found = self.ran(1, _START + f"""
    from trireme.training.optimizers import section_of
    net, result = Mlp(), []
    for made in ({", ".join([*_ADAM, *_LAMB, *_NOVOGRAD])}):
        made.limits_norm = False
        section = section_of(made)
        result.append(section and section["type"])
""")
        self.assertEqual(found, ["Adam", "Adam", None, None, "Lamb", None, None, None, None, None, None])

    def test_what_they_cannot_do_is_refused_by_name(self):
        found = self.ran(1, _START + """
    weights = list(Mlp().parameters())
    calls = [lambda: FusedAdam(weights, capturable=True), lambda: FusedAdam(weights, master_weights=True), lambda: FusedAdam(weights, amsgrad=True),
             lambda: FusedLamb(weights, amsgrad=True), lambda: FusedLamb(weights, max_grad_norm=0.0), lambda: FusedLamb(weights, lr=-1.0),
             lambda: FusedNovoGrad(weights, amsgrad=True), lambda: FusedNovoGrad(weights, norm_type=1), lambda: FusedNovoGrad([{"params": weights, "betas": (0.9, 1.0)}])]
    result = [told(call) for call in calls]
""")
        for text, part in zip(found, ["UnsupportedError: smp.optimizers.FusedAdam(capturable=True) is not there yet", "UnsupportedError: smp.optimizers.FusedAdam(master_weights=True)",
                                      "RuntimeError: FusedAdam does not support the AMSGrad variant", "RuntimeError: FusedLamb does not", "ConfigError: smp.optimizers.FusedLamb(max_grad_norm=0.0): expected",
                                      "ConfigError: smp.optimizers.FusedLamb(lr=-1.0): expected 0 or more", "RuntimeError: FusedNovoGrad does not", "ConfigError: smp.optimizers.FusedNovoGrad(norm_type=1)",
                                      "ConfigError: smp.optimizers.FusedNovoGrad(betas=(0.9, 1.0)): expected two numbers"], strict=True):
            self.assertTrue(text.startswith(part), (text, part))

    def test_norms_of_parameters_that_ranks_divide_are_refused_by_name(self):
        found = self.ran(2, _START + """
    import trireme
    def refused(make):
        net = Mlp()
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
        return told(lambda: trireme.initialize(model=net, optimizer=make(net), config=config))
    result = [refused(lambda net: FusedNovoGrad(net.parameters())), refused(lambda net: FusedLamb(net.parameters(), max_grad_norm=math.inf)),
              refused(lambda net: FusedLamb(net.parameters()))]
""")
        divided = "UnsupportedError: optimizer: Fused{} cannot step itself here, on flat parts of the parameters: with the parameters divided over ranks"
        for text, part in zip(found, [divided.format("NovoGrad"), divided.format("Lamb"), "UnsupportedError: smp.optimizers.FusedLamb: the norm of the whole model"], strict=True):
            self.assertTrue(text.startswith(part), (text, part))


if __name__ == "__main__":
    main()
