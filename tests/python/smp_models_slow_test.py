"""Several models under smp's names, as smp_models_test.py has them: with other configurations and modules."""
from harness import RankServer, main
from smp_several import BOTH, GAN, JOINT, SeveralCase

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import


class Bits(SeveralCase):
    def test_models_of_one_layer(self):
        self.assert_bits_of_pytorch(GAN + """
    begin()
    result = both(gan, nn.Linear(4, 6), nn.Linear(6, 1))
""")

    def test_batch_norm_in_both(self):
        self.assert_bits_of_pytorch(GAN + """
    begin(pipeline="simple", microbatches=2)
    MICRO_BATCHES = 2
    def normed(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, outputs))
    result = both(gan, normed(4, 6), normed(6, 1))
""")

    def test_shards_of_optimizer_states(self):
        for stages, ranks in ((1, 2), (2, 4)):
            self.assert_bits_of_pytorch(JOINT + f"""
    begin(partitions={stages}, ddp=True, shard_optimizer_state=True)
    result = both(joint, block(6, 6), block(6, 3))
""", ranks=(ranks,))

    def test_bf16_and_dropout_have_the_bits_of_one_stage(self):
        for text in ("""
    begin(bf16=True)
    of_floats = bits
    bits = lambda tensor: None if tensor is None else of_floats(tensor.float())
    result = joint(Smp, block(6, 6), block(6, 3))
""", """
    begin()
    def dropping(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, outputs))
    result = joint(Smp, dropping(6, 6), dropping(6, 3))
"""):
            with self.subTest(text):
                self.assertEqual(*(self.ran(ranks, BOTH + JOINT + text) for ranks in (2, 1)))

    def test_a_detached_generator_a_frozen_critic_and_a_scaler_of_both(self):
        self.assert_bits_of_pytorch("""
    begin()
    def program(names, g, d):
        g, d = names.model(g), names.model(d)
        for_g, for_d = names.optimizer(adam(g)), names.optimizer(adam(d))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

        @names.step
        def train_d(real, noise):
            loss = d(real).square().mean() - d(g(noise).detach()).square().mean()
            names.backward(d, scaler.scale(loss))
            return loss

        @names.step
        def train_g(noise):
            loss = d(g(noise)).square().mean()
            names.backward(g, scaler.scale(loss))
            return loss

        found = []
        for _ in range(3):
            real, noise = torch.randn(8, 6), torch.randn(8, 4)
            for parameter in d.parameters():
                parameter.requires_grad_(True)
            for_d.zero_grad()
            found.append(names.losses(train_d(real, noise)))
            scaler.step(for_d)
            for parameter in d.parameters():
                parameter.requires_grad_(False)
            for_g.zero_grad()
            found.append([names.losses(train_g(noise)), names.gradients(g)])
            scaler.step(for_g)
            scaler.update()
        return [found, names.weights(g), names.weights(d)]
    result = both(program, block(4, 6), block(6, 1))
""")


if __name__ == "__main__":
    main()
