"""Ranks that share layers under smp's names train as one process does, and save what any number of ranks loads."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import
LARGEST = 1e-5

# `DEGREE` ranks share layers; each copy of the model has its share of the samples.
_PROGRAM = """
    size = int(os.environ.get("WORLD_SIZE", 1))
    degree = min(size, DEGREE)
    smp.init({"partitions": 1, "microbatches": 2, **({"tensor_parallel_degree": degree, "ddp": True, "prescaled_batch": True} if degree > 1 else {}), **OPTIONS})
    torch.manual_seed(5)

    def numbers(tensor):
        return tensor.detach().double().flatten().tolist()

    def own_samples(batch):
        return [tensor.chunk(smp.rdp_size())[smp.rdp_rank()] for tensor in batch]

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = smp.nn.DistributedTransformerLMHead(2, 4, 8, 32, 64, 48, 16, attention_dropout_prob=0.0, hidden_dropout_prob=0.0, causal_mask_size=16,
                                                          pre_layernorm=True, post_layernorm=False, num_token_types=2)
        def forward(self, ids):
            return self.lm((ids, None, ids % 2, None, None))

    def head_loss(model, ids):
        logits = model(ids % 48)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten() % 48), logits.detach()

    def gpt2_loss(model, ids):
        found = model(input_ids=ids, labels=ids)
        return found.loss, found.logits.detach()

    def marked_gpt2():
        with smp.tensor_parallelism():
            return gpt2(True)

    def marked_llama():
        import transformers
        with smp.tensor_parallelism():
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                                                         num_key_value_heads=2, vocab_size=64, max_position_embeddings=16))

    def batches(count=3):
        torch.manual_seed(9)
        return [(torch.randint(48, (8, 12)),) for _ in range(count)]

    def made(net, loss_of, make=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)):  # a key's bias has gradients of noise
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(make(model.parameters()))
        @smp.step
        def train_step(*batch):
            loss, logits = loss_of(model, *batch)
            model.backward(loss)
            return loss, logits
        return model, optimizer, train_step

    def taught(model, optimizer, train_step, batches, max_norm=None):
        found = []
        for batch in batches:
            optimizer.zero_grad()
            losses, logits = train_step(*own_samples(batch))
            loss = losses.reduce_mean()
            smp.state.world.all_reduce(loss, "sum")
            one = {"loss": [loss.item() / smp.size()], "sizes": list(logits.outputs[0].shape[1:]), "gradients": {name: numbers(safe_get_full_grad(p)) for name, p in model.module.named_parameters()}}
            if max_norm is not None:
                one["norm"] = [optimizer.clip_master_grads(max_norm).item()]
                one["clipped"] = {name: numbers(safe_get_full_grad(p)) for name, p in model.module.named_parameters()}
            optimizer.step()
            found.append(one)
        return found

    def state_of(model):
        return {name: numbers(tensor) for name, tensor in sorted(model.state_dict().items()) if tensor.is_floating_point()}
"""


def furthest(found, expected):
    """(the greatest difference of two structures of numbers, over the greatest number of its list, where)."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), (sorted(found), sorted(expected))
        return max((furthest(found[name], expected[name]) + (name,) for name in expected), key=lambda one: one[0])
    if isinstance(expected, list) and expected and isinstance(expected[0], (list, dict)):
        return max((furthest(one, other) for one, other in zip(found, expected, strict=True)), key=lambda one: one[0])
    size = max(0.01, *map(abs, expected))
    differences = [abs(one - other) / size for one, other in zip(found, expected, strict=True)]
    return (float("inf") if any(one != one for one in differences) else max(differences),)


class SmpTensor(Case):
    def on(self, ranks, text, degree=2, **options):
        return self.ran(ranks, _PROGRAM.replace("DEGREE", str(degree)).replace("OPTIONS", repr(options)) + text)

    def assert_close(self, found, expected, largest=LARGEST):
        difference, *where = furthest(found, expected)
        self.assertLessEqual(difference, largest, where)


_TRAINS = """
    model, optimizer, train_step = made(MODEL)
    result = [taught(model, optimizer, train_step, batches()[:2]), state_of(model)]
"""
_MODELS = {"gpt2": "marked_gpt2(), gpt2_loss", "head": "Head(), head_loss"}


class Trains(SmpTensor):
    def test_as_one_process(self):
        for name, model in _MODELS.items():
            text = _TRAINS.replace("MODEL", model)
            expected = self.on(1, text)
            for ranks in (2, 4):
                with self.subTest(name, ranks=ranks):
                    self.assert_close(self.on(ranks, text), expected)

    def test_gradients_are_clipped_by_the_norm_of_all_slices(self):
        text = """
    model, optimizer, train_step = made(MODEL)
    result = taught(model, optimizer, train_step, batches()[:2], max_norm=0.25)
"""
        for name, model in {**_MODELS, "shared keys": "marked_llama(), gpt2_loss"}.items():
            degree = 4 if name == "shared keys" else 2
            with self.subTest(name):
                expected = self.on(1, text.replace("MODEL", model))
                self.assertGreater(expected[0]["norm"][0], 0.25)
                self.assert_close(self.on(degree, text.replace("MODEL", model), degree), expected)

    def test_dropout_is_the_same_on_ranks_that_share_layers_whatever_their_seeds(self):
        found = self.on(2, """
    model, optimizer, train_step = made(Head(), head_loss)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    torch.manual_seed(smp.rank())
    before = taught(model, optimizer, train_step, batches()[:1])
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(before[0]["gradients"]["lm.position_embedding.weight"]))]
""")
        self.assertEqual(found[0], found[1])


_SAVES = """
    model, optimizer, train_step = made(MODEL)
    taught(model, optimizer, train_step, batches()[:1])
    if smp.rdp_rank() == 0:
        smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "epoch": 1}, FOLDER + "/partial.pt")
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
        if smp.rank() == 0:
            smp.save(whole, FOLDER + "/full.pt", partial=False)
    smp.barrier()
    result = [taught(model, optimizer, train_step, batches()[1:]), state_of(model)]
"""
_LOADS = """
    model, optimizer, train_step = made(MODEL)
    if LATE:
        taught(model, optimizer, train_step, batches()[:2])
        with torch.no_grad():
            [parameter.add_(1) for parameter in model.module.parameters()]
    found = smp.load(FOLDER + "/" + FILE, partial=FILE == "partial.pt")
    assert found["epoch"] == 1
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    result = [taught(model, optimizer, train_step, batches()[1:]), state_of(model)]
"""


class Saves(SmpTensor):
    def filled(self, text, file="", late=False):
        for name, value in {"MODEL": _MODELS["head"], "FOLDER": repr(str(self.folder)), "FILE": repr(file), "LATE": repr(late)}.items():
            text = text.replace(name, value)
        return text

    def test_what_ranks_with_slices_save_any_number_of_ranks_loads(self):
        for saving in (2, 4, 1):
            expected = self.on(saving, self.filled(_SAVES))
            for loading in (1, 2, 4):
                for file in ("partial.pt", "full.pt"):
                    with self.subTest(saving=saving, loading=loading, file=file):
                        self.assert_close(self.on(loading, self.filled(_LOADS, file, late=file == "full.pt")), expected)

if __name__ == "__main__":
    main()
