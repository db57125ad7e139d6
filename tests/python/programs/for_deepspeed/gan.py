"""A generator and a discriminator, each with an engine of its own. The generator's loss goes through both of them."""
import argparse

import deepspeed
import torch
from torch import nn, optim

from reporting import report

NOISE, FEATURES, BATCH = 8, 16, 8


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--niter", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--beta1", type=float, default=0.5)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1)
    opt = parser.parse_args()
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": opt.stage}}
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(11)
    net_g = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(True), nn.Linear(32, FEATURES), nn.Tanh())
    net_d = nn.Sequential(nn.Linear(FEATURES, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    criterion = nn.BCELoss()
    optimizer_d = optim.Adam(net_d.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    optimizer_g = optim.Adam(net_g.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    model_engine_d, optimizer_d, _, _ = deepspeed.initialize(args=opt, model=net_d, model_parameters=net_d.parameters(),
                                                             optimizer=optimizer_d, config=config)
    model_engine_g, optimizer_g, _, _ = deepspeed.initialize(args=opt, model=net_g, model_parameters=net_g.parameters(),
                                                             optimizer=optimizer_g, config=config)
    generator = torch.Generator().manual_seed(100 + model_engine_d.global_rank)
    errors_d, errors_g, guesses = [], [], []
    for _ in range(opt.niter):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        model_engine_d.zero_grad()
        real = torch.randn(BATCH, FEATURES, generator=generator) * 0.3 + 0.4
        label = torch.full((BATCH,), 1.0)
        output = model_engine_d(real).view(-1)
        err_d_real = criterion(output, label)
        model_engine_d.backward(err_d_real)
        guesses.append(output.mean().item())
        noise = torch.randn(BATCH, NOISE, generator=generator)
        fake = model_engine_g(noise)
        label.fill_(0.0)
        err_d_fake = criterion(model_engine_d(fake.detach()).view(-1), label)
        model_engine_d.backward(err_d_fake)
        errors_d.append((err_d_real + err_d_fake).item())
        model_engine_d.step()
        # (2) Update G: maximize log(D(G(z)))
        model_engine_g.zero_grad()
        label.fill_(1.0)
        err_g = criterion(net_d(fake).view(-1), label)
        model_engine_g.backward(err_g)
        model_engine_g.step()
        errors_g.append(err_g.item())
    report(losses=errors_d, generator=errors_g, guesses=guesses)


if __name__ == "__main__":
    main()
