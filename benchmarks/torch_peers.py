"""Data-parallel systems of Python on one Llama, as two ranks over gloo, for the benchmarks that run beside them."""
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile

SHAPE = dict(vocabulary=32000, hidden=768, inner=2048, layers=12, heads=12, length=128)
SMALL = dict(vocabulary=64, hidden=32, inner=64, layers=2, heads=2, length=16)
MODELS = {"llama-130m": SHAPE, "llama-9m": dict(vocabulary=4096, hidden=256, inner=688, layers=8, heads=8, length=64),
          "tiny64": dict(width=16, layers=64), "small": SMALL}
ADAMW = dict(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def make_llama(torch, shape):
    """Llama with RMSNorm, rotary embeddings and SwiGLU; returns (model, list of blocks)."""
    nn, functional = torch.nn, torch.nn.functional
    head = shape["hidden"] // shape["heads"]
    kv_heads = shape.get("kv_heads", shape["heads"])
    angles = torch.outer(torch.arange(shape["length"]), shape.get("theta", 1e4) ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)

    @functools.cache
    def cos_and_sin(dtype, device):
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def rotate(x):
        cos, sin = cos_and_sin(x.dtype, x.device)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            hidden, inner = shape["hidden"], shape["inner"]
            self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))
            self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
            self.k, self.v = (nn.Linear(hidden, kv_heads * head, bias=False) for _ in range(2))
            self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
            self.down = nn.Linear(inner, hidden, bias=False)

        def forward(self, x):
            y = self.norms[0](x)
            q, k, v = (w(y).view(*y.shape[:2], -1, head).transpose(1, 2) for w in (self.q, self.k, self.v))
            y = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True,
                                                        enable_gqa=kv_heads != shape["heads"])
            x = x + self.o(y.transpose(1, 2).flatten(2))
            y = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(shape["vocabulary"], shape["hidden"])
            self.blocks = nn.ModuleList(Block() for _ in range(shape["layers"]))
            self.norm = nn.RMSNorm(shape["hidden"], eps=1e-6)
            self.output = nn.Linear(shape["hidden"], shape["vocabulary"], bias=False)
            if shape.get("tied"):
                self.output.weight = self.embedding.weight

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.output(self.norm(x)).float()
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(1234)
    model = Llama()
    return model, list(model.blocks)


def make_layers(torch, shape):
    """Small linear layers, each with tanh: nearly all of the time is overhead of the host."""
    nn = torch.nn

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(shape["width"], shape["width"]) for _ in range(shape["layers"]))

        def forward(self, inputs, targets):
            for block in self.blocks:
                inputs = torch.tanh(block(inputs))
            return nn.functional.mse_loss(inputs.float(), targets.float())

    torch.manual_seed(1234)
    model = Layers()
    return model, list(model.blocks)


def make_model(torch, shape):
    """(model, list of blocks); called with inputs and targets it returns the loss."""
    return make_layers(torch, shape) if "width" in shape else make_llama(torch, shape)


def make_batch(torch, shape, index, samples, bf16):
    """(inputs, targets) of `samples` samples; four batches go round."""
    generator = torch.Generator().manual_seed(9000 + index % 4)
    if "width" in shape:
        inputs, targets = torch.randn(2, samples, shape["width"], generator=generator)
        return (inputs.bfloat16() if bf16 else inputs), targets
    tokens = torch.randint(shape["vocabulary"], (samples, shape["length"] + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Peer:
    """A system to train with: a step, and the objects that hold its state."""

    def __init__(self, step, module=None, optimizer=None, engine=None):
        self.step, self.module, self.optimizer, self.engine = step, module, optimizer, engine


def torch_peer(torch, module, parameters, masters, clips=True, reads_loss=True):
    """AdamW on `parameters`, or on fp32 `masters` of them."""
    optimizer = torch.optim.AdamW(masters or parameters, fused=True, **ADAMW)

    def step(tokens, targets):
        loss = module(tokens, targets)
        loss.backward()
        for master, parameter in zip(masters or (), parameters):
            master.grad, parameter.grad = parameter.grad.float(), None
        if clips:
            torch.nn.utils.clip_grad_norm_(masters or parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        return loss.item() if reads_loss else loss.detach()

    return Peer(step, module, optimizer)


def make_nocomm(torch, shape, bf16, wrap=lambda model: model):
    """Plain PyTorch: ranks that exchange nothing."""
    model, _ = make_model(torch, shape)
    model = model.bfloat16() if bf16 else model
    parameters = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in parameters] if bf16 else None
    return torch_peer(torch, wrap(model), parameters, masters)


def make_ddp(torch, shape, bf16):
    return make_nocomm(torch, shape, bf16, torch.nn.parallel.DistributedDataParallel)


def make_fsdp2(torch, shape, bf16, fsdp=None):
    """With torch.distributed.fsdp, or another module of its names."""
    from torch.distributed.device_mesh import init_device_mesh
    if fsdp is None:
        from torch.distributed import fsdp
    model, blocks = make_model(torch, shape)
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if bf16 else fsdp.MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in [*blocks, model]:
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    return torch_peer(torch, model, list(model.parameters()), None)


def make_as_fsdp(torch, shape, bf16):
    """FSDP2's program on Trireme."""
    import trireme.fsdp
    return make_fsdp2(torch, shape, bf16, trireme.fsdp)


def make_trireme(torch, shape, bf16):
    import trireme
    return make_deepspeed(torch, shape, bf16, package=trireme)


def make_deepspeed(torch, shape, bf16, stage=3, package=None):
    if package is None:
        import deepspeed as package
    package.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model, _ = make_model(torch, shape)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": bf16},
              "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    if bf16:
        config["data_types"] = {"grad_accum_dtype": "bf16"}  # DeepSpeed's default with ZeRO; Trireme's is fp32
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine = package.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(tokens, targets):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Peer(step, model, optimizer, engine)


MAKERS = {"ddp": make_ddp, "fsdp2": make_fsdp2, "deepspeed": make_deepspeed}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class PeerFailed(Exception):
    pass


def run_ranks(script, case, size=2, limit_s=900):
    """The JSON that rank 0 of `size` processes of `script --rank-of CASE` printed. A peer that fails is run once more:
    a crash of its own now and then is no failure of the benchmark. Raises PeerFailed, after `limit_s` too."""
    try:
        return _run_ranks_once(script, case, size, limit_s)
    except PeerFailed as error:
        if case["system"] in ("trireme", "as_fsdp"):
            raise
        print(f"{case['system']} failed and is run once more: {error}", flush=True)
        return _run_ranks_once(script, case, size, limit_s)


def _run_ranks_once(script, case, size, limit_s):
    accelerator = {} if case.get("gpu") else dict(DS_ACCELERATOR="cpu")
    environment = dict(os.environ, **accelerator, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1",
                       MASTER_PORT=str(free_port()), PYTHONWARNINGS="ignore", GLOO_SOCKET_IFNAME="lo",
                       PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])  # ninja, for DeepSpeed
    command = [sys.executable, script, "--rank-of", json.dumps(case)]
    with tempfile.TemporaryFile("w+") as log:  # the peers' many warnings are shown only where one failed
        ranks = [subprocess.Popen(command, env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)),
                                  stdout=subprocess.PIPE, stderr=log, text=True) for rank in range(size)]
        try:
            outputs = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
        except subprocess.TimeoutExpired as error:
            for rank in ranks:
                rank.kill()
                rank.wait()
            raise PeerFailed(f"no end in {limit_s} s") from error
        if any(rank.returncode for rank in ranks):
            log.seek(0)
            raise PeerFailed(f"exit statuses {[rank.returncode for rank in ranks]}\n{log.read()[-2000:]}")
    return next(json.loads(line) for line in outputs[0].splitlines() if line.startswith('{"seconds"'))
