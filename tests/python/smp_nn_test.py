"""smp's modules: losses, gradients and weights are those of plain PyTorch written out, of transformers' models, and
over two stages those of one process."""
from harness import RankServer, main
from smp_programs import VALUES, Case

# which optimizers of torch import
RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "transformers.models.bert.modeling_bert", "torch._dynamo")

# Transformers written out over their parameters. HEADS heads of SIZE channels, H channels, S tokens, and T of cross
# states.
_START = VALUES + """
    HEADS, SIZE, H, S, T = 4, 4, 12, 6, 5
    SIZES = {"num_attention_heads": HEADS, "attention_head_size": SIZE, "hidden_size": H, "intermediate_size": 20, "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    descend = lambda net: torch.optim.SGD(net.parameters(), lr=0.125)
    descent = lambda parameters, gradients, states, step: [p - 0.125 * g for p, g in zip(parameters, gradients)]

    def linear(w, name, x):
        return x @ w[name + ".weight"].t() + w[name + ".bias"]

    def norm(w, name, x):
        if name + ".weight" not in w:
            return x
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[name + ".weight"] + w[name + ".bias"]

    def attention(w, name, hidden, mask, causal=False, cross=None):
        x = norm(w, name + ".pre_layernorm", hidden)
        source = x if cross is None else cross
        q, k, v = (linear(w, f"{name}.{part}", of).reshape(len(of), -1, HEADS, SIZE).transpose(1, 2) for part, of in (("query", x), ("key", source), ("value", source)))
        scores = q @ k.transpose(2, 3) / SIZE ** 0.5 + mask
        if causal:
            scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
        context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(len(x), -1, HEADS * SIZE)
        return norm(w, name + ".layernorm", linear(w, name + ".dense", context) + hidden)

    def layers(w, name, hidden, mask, options, cross=None, cross_mask=None):
        for index in range(2):
            at = f"{name}.seq_layers.{index}"
            hidden = attention(w, at + ".attention", hidden, mask, "causal_mask_size" in options)
            if cross is not None:
                hidden = attention(w, at + ".cross_attention", hidden, cross_mask, cross=cross)
            inner = linear(w, at + ".output.dense1", norm(w, at + ".output.pre_layernorm", hidden))
            inner = inner.clamp(min=0) if options.get("activation") == "relu" else inner * (1 + torch.erf(inner / 2 ** 0.5)) / 2
            hidden = norm(w, at + ".output.layernorm", hidden + linear(w, at + ".output.dense2", inner))
        return hidden

    class Layers(nn.Module):
        def __init__(self, options):
            super().__init__()
            self.options, self.inner = options, nn.Linear(6, H)
            self.transformer = smp.nn.DistributedTransformer(num_layers=2, **SIZES, **options)
        def forward(self, x, mask, cross, cross_mask, y):
            if "add_cross_attention" not in self.options:
                hidden, same = self.transformer((self.inner(x), mask))
                return (hidden - y).square().mean()
            hidden, *same = self.transformer((self.inner(x), cross, mask, cross_mask))
            assert all(one is other for one, other in zip(same, (cross, mask, cross_mask), strict=True))
            return (hidden - y).square().mean()

    def layers_by_hand(net, x, mask, cross, cross_mask, y):
        w = dict(net.named_parameters())
        has_cross = "add_cross_attention" in net.options
        return (layers(w, "transformer", linear(w, "inner", x), mask, net.options, cross if has_cross else None, cross_mask) - y).square().mean()

    def hidden_at(*sizes):
        seen = torch.ones(sizes, dtype=torch.bool)
        seen[..., 1:] = torch.rand(seen[..., 1:].shape) < 0.6
        return seen

    def layers_batches(count):
        additive = lambda *sizes: torch.zeros(sizes).masked_fill(~hidden_at(*sizes), -1e4)
        return [(torch.randn(8, S, 6), additive(8, 1, 1, S), torch.randn(8, T, H), additive(8, 1, 1, T), torch.randn(8, S, H)) for _ in range(count)]

    class Head(nn.Module):
        def __init__(self, options):
            super().__init__()
            self.options = options
            self.head = smp.nn.DistributedTransformerLMHead(num_layers=2, vocab_size=16, num_positions=8, use_normal_initialization=True, initializer_range=0.2, **SIZES, **options)
        def forward(self, ids, mask, kinds, positions, cross, cross_mask):
            kinds = kinds if "num_token_types" in self.options else None
            more = {7: [cross, cross_mask], 8: [cross, cross, cross_mask]}[self.options["items"]] if "add_cross_attention" in self.options else []
            result = self.head((ids, mask, kinds, positions, *more, None))
            return result.square().mean() if "add_lm_head" in self.options else F.cross_entropy(result.transpose(1, 2), ids)

    def head_by_hand(net, ids, mask, kinds, positions, cross, cross_mask):
        w, options = dict(net.named_parameters()), net.options
        hidden = w["head.word_embedding.weight"][ids] + w["head.position_embedding.weight"][positions]
        if "num_token_types" in options:
            hidden = hidden + w["head.token_type_embedding.weight"][kinds]
        added = lambda one: torch.where(one[:, None, None] == 1, -3e38, 0.0)
        hidden = layers(w, "head.transformer", hidden, added(mask), options, cross if "add_cross_attention" in options else None, added(cross_mask))
        hidden = norm(w, "head.layernorm", hidden)
        return hidden.square().mean() if "add_lm_head" in options else F.cross_entropy((hidden @ w["head.word_embedding.weight"].t()).transpose(1, 2), ids)

    def head_batches(count):
        return [(torch.randint(16, (8, S)), (~hidden_at(8, S)).long(), torch.randint(3, (8, S)), torch.randint(8, (8, S)), torch.randn(8, T, H), (~hidden_at(8, T)).long())
                for _ in range(count)]
"""

_LAYERS = ["{}", "dict(pre_layernorm=True)", "dict(pre_layernorm=True, post_layernorm=False)", "dict(causal_mask_size=8)", "dict(activation='relu', causal_mask_size=6)",
           "dict(add_cross_attention=True)", "dict(add_cross_attention=True, causal_mask_size=8, pre_layernorm=True, post_layernorm=False)"]
_HEADS = ["{}", "dict(num_token_types=3, add_lm_head=False)", "dict(causal_mask_size=8, pre_layernorm=True, post_layernorm=False)",
          "dict(add_cross_attention=True, items=7)", "dict(add_cross_attention=True, items=8)"]


class Modules(Case):
    def assert_as_written_out(self, kind, batches, by_hand, options):
        """On one process and over two stages."""
        for ranks in (1, 2):
            found = self.ran(ranks, _START + f"""
    begin()
    result = []
    for options in ({", ".join(options)},):
        given = {{name: value for name, value in options.items() if name != "items"}}
        net, batches = {kind}(given), {batches}(2)
        net.options = options
        with torch.no_grad():
            [p.add_(0.1 * torch.randn(p.shape)) for p in net.parameters() if p.dim() < 2]  # norms are not ones, biases not zeros
        expected = by_hand(copy.deepcopy(net), batches, descent, {by_hand})
        result.append(furthest(by_smp(net, batches, descend, lambda model, *batch: model(*batch)), expected))
        forget()
""")
            for option, difference in zip(options, found, strict=True):
                with self.subTest(option, ranks=ranks):
                    self.assertLess(difference, 2e-5)  # fp32 over two layers and two steps

    def test_layers_and_transformers(self):
        self.assert_as_written_out("Layers", "layers_batches", "layers_by_hand", _LAYERS)

    def test_transformers_with_embeddings_and_head(self):
        self.assert_as_written_out("Head", "head_batches", "head_by_hand", _HEADS)

    def test_dropout_over_two_stages_has_the_bits_of_one_process(self):
        self.assert_bits_of_one_process(_START + """
    begin()
    SIZES.update(attention_dropout_prob=0.2, hidden_dropout_prob=0.1)
    result = trained(Layers(dict(causal_mask_size=8)), layers_batches(2))
""")

    def test_dropout_is_where_it_is_documented(self):
        """With all of it dropped a block gives its residual; in evaluation nothing is dropped."""
        found = self.ran(1, _START + """
    x, mask = torch.randn(2, S, H), torch.zeros(2, 1, 1, S)
    def block(kind, **options):
        return kind(**{name: value for name, value in SIZES.items() if name in smp_names(kind)} | options | {"pre_layernorm": True, "post_layernorm": False})
    def smp_names(kind):
        import inspect
        return inspect.signature(kind).parameters
    attention, output = block(smp.nn.DistributedAttentionLayer, hidden_dropout_prob=1.0), block(smp.nn.DistributedTransformerOutputLayer, hidden_dropout_prob=1.0)
    result = [torch.equal(attention((x, mask)), x), torch.equal(output(x), x)]
    result += [torch.equal(attention.eval()((x, mask)), x), torch.equal(output.eval()(x), x)]
    scores = block(smp.nn.DistributedAttentionLayer, attention_dropout_prob=1.0)
    result.append(torch.allclose(scores((x, mask)), x + scores.dense.bias))
""")
        self.assertEqual(found, [True, True, False, False, True])

    def test_gpt2_of_transformers(self):
        found = self.ran(1, _START + """
    import transformers
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=24, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu",
                                     initializer_range=0.2)
    theirs = transformers.GPT2LMHeadModel(config)
    ours = smp.nn.DistributedTransformerLMHead(num_layers=2, num_attention_heads=4, attention_head_size=4, hidden_size=16, intermediate_size=64, vocab_size=24, num_positions=8,
                                               attention_dropout_prob=0.0, hidden_dropout_prob=0.0, causal_mask_size=8, pre_layernorm=True, post_layernorm=False)
    pairs = [(ours.word_embedding.weight, theirs.transformer.wte.weight), (ours.position_embedding.weight, theirs.transformer.wpe.weight)]
    of_norm = lambda one, other: [(one.weight, other.weight), (one.bias, other.bias)]
    pairs += of_norm(ours.layernorm, theirs.transformer.ln_f)
    for layer, block in zip(ours.transformer.seq_layers, theirs.transformer.h):
        for index, part in enumerate((layer.attention.query, layer.attention.key, layer.attention.value)):
            pairs += [(part.weight, block.attn.c_attn.weight, index), (part.bias, block.attn.c_attn.bias, index)]
        for one, other in ((layer.attention.dense, block.attn.c_proj), (layer.output.dense1, block.mlp.c_fc), (layer.output.dense2, block.mlp.c_proj)):
            pairs += [(one.weight, other.weight, 0), (one.bias, other.bias)]
        pairs += of_norm(layer.attention.pre_layernorm, block.ln_1) + of_norm(layer.output.pre_layernorm, block.ln_2)
    assert len(pairs) == len(list(ours.parameters()))
    def part_of(value, one, index=None):
        if index is None:
            return value
        return (value.t() if one.dim() == 2 else value)[index * len(one):(index + 1) * len(one)]
    with torch.no_grad():
        for one, other, *index in pairs:
            one.copy_(part_of(other, one, *index))
    ids, seen = torch.randint(24, (3, 8)), torch.ones(3, 8, dtype=torch.long)
    seen[0, 6:] = 0
    their_logits = theirs(input_ids=ids, attention_mask=seen).logits
    our_logits = ours((ids, 1 - seen, None, None, None))
    weights = torch.randn(their_logits.shape)
    (their_logits * weights).sum().backward()
    (our_logits * weights).sum().backward()
    result = [(our_logits - their_logits).abs().max().item()]
    result += [((one.grad - part_of(other.grad, one, *index)).abs().max() / other.grad.abs().max()).item() for one, other, *index in pairs]
""")
        self.assertLess(max(found), 2e-5)

    def test_encoder_of_bert_of_transformers(self):
        found = self.ran(1, _START + """
    import transformers
    from transformers.models.bert.modeling_bert import BertLayer
    config = transformers.BertConfig(hidden_size=H, num_attention_heads=3, intermediate_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5,
                                     attn_implementation="eager")
    theirs = BertLayer(config)
    ours = smp.nn.DistributedTransformerLayer(3, 4, H, 20, 0.0, 0.0)
    names = {"attention.query": "attention.self.query", "attention.key": "attention.self.key", "attention.value": "attention.self.value", "attention.dense": "attention.output.dense",
             "attention.layernorm": "attention.output.LayerNorm", "output.dense1": "intermediate.dense", "output.dense2": "output.dense", "output.layernorm": "output.LayerNorm"}
    ours.load_state_dict({f"{name}.{part}": theirs.state_dict()[f"{other}.{part}"] for name, other in names.items() for part in ("weight", "bias")})
    x, mask, weights = torch.randn(2, S, H), torch.zeros(2, 1, 1, S), torch.randn(2, S, H)
    mask[0, ..., 4:] = -1e4
    expected = theirs(x, mask)
    expected = expected[0] if isinstance(expected, tuple) else expected
    found, same = ours((x, mask))
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    their_grads = {name: p.grad for name, p in theirs.named_parameters()}
    result = [same is mask, (found - expected).abs().max().item()]
    result += [(p.grad - their_grads[names[name.rpartition(".")[0]] + "." + name.rpartition(".")[2]]).abs().max().item() for name, p in ours.named_parameters()]
""")
        self.assertIs(found[0], True)
        self.assertLess(max(found[1:]), 2e-5)

    def test_ranks_that_share_layers_train_as_one_process(self):
        """By the rules that the library has for any model, a head for each rank."""
        found = self.ran(2, _START + """
    import trireme
    torch.manual_seed(5)
    SIZES["num_attention_heads"] = HEADS = 2
    net, batches = Head(dict(causal_mask_size=8, pre_layernorm=True, post_layernorm=False)), head_batches(2)
    plain = copy.deepcopy(net)
    engine = trireme.initialize(model=net, config={"train_micro_batch_size_per_gpu": 8, "tensor_parallel": {"autotp_size": 2}, "gradient_clipping": 0.0,
                                                   "optimizer": {"type": "SGD", "params": {"lr": 0.125}}})[0]
    optimizer, result = descend(plain), []
    for batch in batches:
        optimizer.zero_grad()
        losses = engine(*batch), plain(*batch)
        engine.backward(losses[0])
        losses[1].backward()
        result.append(abs(losses[0].item() - losses[1].item()))
        result += [(safe_get_full_grad(one) - other.grad).abs().max().item() for one, other in zip(net.parameters(), plain.parameters(), strict=True)]
        engine.step()
        optimizer.step()
    query = net.head.transformer.seq_layers[0].attention.query.weight
    result = [result, engine.core.is_slice(query)]
""")
        self.assertTrue(found[1])
        self.assertLess(max(found[0]), 1e-6)

    def test_flash_attention(self):
        found = self.ran(1, _START + """
    qkv = torch.randn(2, S, 3, HEADS, 4, requires_grad=True)
    bias = torch.randn(1, HEADS, 1, S)
    def difference(factor, causal, mask, **options):
        layer = smp.nn.FlashAttentionLayer(0.0, **options)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        scores = q @ k.transpose(2, 3) * factor + (0 if mask is None else mask)
        if causal:
            scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
        expected, found = scores.softmax(-1) @ v, layer(qkv, attn_mask=mask, causal=causal)
        weights = torch.randn(expected.shape)
        gradients = [torch.autograd.grad((value * weights).sum(), qkv)[0] for value in (expected, found)]
        return max((expected - found).abs().max().item(), (gradients[0] - gradients[1]).abs().max().item())
    result = [difference(1 / 2, False, None, attention_head_size=4), difference(1 / 2, True, None, attention_head_size=4),
              difference(1 / 6, True, None, attention_head_size=4, scale_attn_by_layer_idx=True, layer_idx=2),
              difference(1 / 3, False, None, scale_attention_scores=False, scale_attn_by_layer_idx=True, layer_idx=2), difference(1, False, None, scale_attention_scores=False),
              difference(0.3, False, None, scale=0.3), difference(0.3, True, bias, scale=0.3, triton_flash_attention=True, use_alibi=True),
              difference(0.3, False, bias, scale=0.3, triton_flash_attention=True, use_alibi=True)]
    dropped = smp.nn.FlashAttentionLayer(1.0, 4)
    result += [dropped(qkv).abs().max().item(), 1 - bool(dropped.eval()(qkv).abs().max())]
""")
        self.assertLess(max(found), 1e-5)

    def test_single_layers_are_those_of_pytorch(self):
        found = self.ran(1, _START + """
    def same(ours, theirs, *arguments):
        assert isinstance(ours, type(theirs)), type(ours)
        ours.load_state_dict(theirs.state_dict())
        results = [module(*arguments) for module in (ours, theirs)]
        [value.square().sum().backward() for value in results]
        return torch.equal(*results) and all(torch.equal(one.grad, other.grad) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True))
    ids = torch.tensor([[0, 3, 1], [3, 3, 2]])
    result = [same(smp.nn.DistributedLinear(4, 3), nn.Linear(4, 3), torch.randn(5, 4)),
              same(smp.nn.DistributedEmbedding(4, 3, 1, 0.5, 1.0, True), nn.Embedding(4, 3, 1, 0.5, 1.0, True), ids),
              same(smp.nn.FusedLayerNorm((3, 4), 1e-3), nn.LayerNorm((3, 4), 1e-3), torch.randn(2, 3, 4)),
              torch.equal(smp.nn.FusedLayerNorm(4, elementwise_affine=False)(x := torch.randn(2, 4)), F.layer_norm(x, (4,)))]
    made = smp.nn.DistributedEmbedding(1000, 64, padding_idx=1, initializer_range=0.5)
    result += [abs(made.weight.std().item() - 0.5) < 0.01, made.weight[1].abs().max().item(), smp.nn.FusedLayerNorm(4, elementwise_affine=False).weight]
""")
        self.assertEqual(found, [True] * 5 + [0, None])

    def test_initial_weights(self):
        found = self.ran(1, _START + """
    def spread(**options):
        layer = smp.nn.DistributedTransformerLayer(4, 16, 64, 256, **options)
        return [round(layer.attention.query.weight.std().item(), 2), round(layer.output.dense1.weight.std().item(), 2), bool(layer.output.dense2.bias.abs().max())]
    plain = 1 / 64 ** 0.5 / 3 ** 0.5
    result = [spread(use_normal_initialization=True, initializer_range=0.2), spread(), [round(plain, 2)] * 2 + [True]]
""")
        self.assertEqual(found[0], [0.2, 0.2, False])
        self.assertEqual(found[1], found[2])

    def test_arguments_are_those_of_the_documentation(self):
        layer = {"num_attention_heads": 32, "attention_head_size": 32, "hidden_size": 1024, "intermediate_size": 4096, "attention_dropout_prob": 0.1, "hidden_dropout_prob": 0.1,
                 "activation": "gelu", "layernorm_epsilon": 1e-5, "initializer_range": 0.02, "use_normal_initialization": False, "causal_mask_size": None,
                 "add_cross_attention": False, "pre_layernorm": False, "post_layernorm": True, "use_alibi": False, "alibi_bias_max": 8}
        of_attention = {name: value for name, value in layer.items() if name not in ("intermediate_size", "activation", "add_cross_attention")}
        of_output = {name: layer[name] for name in ("hidden_size", "intermediate_size", "hidden_dropout_prob", "activation", "layernorm_epsilon", "initializer_range",
                                                    "use_normal_initialization", "pre_layernorm", "post_layernorm")}
        expected = {
            "DistributedTransformerLayer": layer, "DistributedTransformer": {"num_layers": 12, **layer},
            "DistributedTransformerLMHead": {"num_layers": 12, **layer, "vocab_size": 30522, "num_positions": 1024, "num_token_types": 0, "add_lm_head": True},
            "DistributedAttentionLayer": {**of_attention, "cross_attention": False}, "DistributedTransformerOutputLayer": {**of_output, "fp32_residual_addition": False},
            "DistributedEmbedding": {"num_embeddings": "given", "embedding_dim": "given", "padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False,
                                     "_weight": None, "initializer_range": 0.02, "_skip_allgather": False, "_skip_scatter_and_merge": False},
            "FlashAttentionLayer": {"attention_dropout_prob": 0.1, "attention_head_size": None, "scale_attention_scores": True, "scale_attn_by_layer_idx": False, "layer_idx": None,
                                    "scale": None, "triton_flash_attention": False, "use_alibi": False},
            "FusedLayerNorm": {"normalized_shape": "given", "eps": 1e-5, "elementwise_affine": True, "memory_efficient": False}}
        found = self.ran(1, f"""
    import inspect
    result = {{}}
    for name in {list(expected)}:
        parameters = inspect.signature(getattr(smp.nn, name)).parameters.values()
        result[name] = {{one.name: "given" if one.default is inspect.Parameter.empty else one.default for one in parameters}}
    assert list(inspect.signature(smp.nn.DistributedLinear).parameters)[:2] == ["in_features", "out_features"]
    assert all(issubclass(getattr(smp.nn, name), smp.nn.DistributedModule) for name in smp.nn.__all__ if name.startswith("Distributed"))
""")
        self.assertEqual(found, expected)

    def test_what_is_not_there_is_refused_by_name(self):
        found = self.ran(1, _START + """
    n = smp.nn
    layer, cross = n.DistributedTransformerLayer(**SIZES, causal_mask_size=4), n.DistributedTransformerLayer(**SIZES, add_cross_attention=True)
    head = n.DistributedTransformerLMHead(1, **SIZES, vocab_size=8, num_positions=4)
    crossed = n.DistributedTransformerLMHead(1, **SIZES, vocab_size=8, num_positions=4, add_cross_attention=True)
    x, mask, ids, flash = torch.randn(2, 4, H), torch.zeros(2, 1, 1, 4), torch.zeros(2, 4, dtype=torch.long), n.FlashAttentionLayer(0.0, 4)
    calls = [lambda: n.DistributedTransformerLayer(use_alibi=True), lambda: n.DistributedTransformer(alibi_bias_max=4), lambda: n.DistributedAttentionLayer(use_alibi=True),
             lambda: n.DistributedTransformerOutputLayer(fp32_residual_addition=True), lambda: n.DistributedEmbedding(2, 2, _skip_allgather=True),
             lambda: n.DistributedEmbedding(2, 2, _skip_scatter_and_merge=True), lambda: n.FusedLayerNorm(4, memory_efficient=True),
             lambda: head((ids, None, None, None, ids)),
             lambda: n.DistributedTransformerLayer(activation="swish"), lambda: n.DistributedTransformerLayer(post_layernorm=False), lambda: n.DistributedTransformerLayer(hidden_dropout_prob=2),
             lambda: n.FlashAttentionLayer(0.0), lambda: n.FlashAttentionLayer(0.0, 4, scale_attn_by_layer_idx=True), lambda: n.FlashAttentionLayer(0.1, 4, triton_flash_attention=True),
             lambda: n.FlashAttentionLayer(0.0, 4, use_alibi=True), lambda: flash(torch.zeros(1, 2, 3, 1, 4), attn_mask=mask),
             lambda: layer(x), lambda: cross((x, mask)), lambda: layer((torch.randn(2, 5, H), None)), lambda: layer((x, mask == 0)), lambda: flash(torch.zeros(1, 2, 1, 4)),
             lambda: head((ids, None, ids, None, None)), lambda: head((torch.zeros(2, 5, dtype=torch.long), None, None, None, None)), lambda: head((ids, None)),
             lambda: crossed((ids, None, None, None, x, x + 1, None, None))]
    result = [told(call) for call in calls]
""")
        unsupported, config, shape = found[:8], found[8:16], found[16:]
        for texts, kind, parts in ((unsupported, "UnsupportedError", ["DistributedTransformerLayer(use_alibi=True)", "DistributedTransformerLayer(alibi_bias_max=4)", "DistributedAttentionLayer(use_alibi=True)",
                                                                      "DistributedTransformerOutputLayer(fp32_residual_addition=True)", "DistributedEmbedding(_skip_allgather=True)",
                                                                      "DistributedEmbedding(_skip_scatter_and_merge=True)", "FusedLayerNorm(memory_efficient=True)", "labels are not there yet"]),
                                   (config, "ConfigError", ["activation='swish'", "are both False", "hidden_dropout_prob=2", "attention_head_size is missing", "layer_idx is missing", "has no dropout",
                                                            "needs triton_flash_attention", "a mask needs"]),
                                   (shape, "ShapeError", ["one tuple (hidden_states, attention_mask), got Tensor", "cross_mask), got 2 items", "5 tokens, and causal_mask_size is 4", "the mask is torch.bool",
                                                          "expected qkv of", "token_type_ids, and num_token_types is 0", "5 tokens, and num_positions is 4", "labels), got 2 items", "two tensors"])):
            for text, part in zip(texts, parts, strict=True):
                self.assertTrue(str(text).startswith(f"{kind}: smp.nn."), (text, part))
                self.assertIn(part, text)


if __name__ == "__main__":
    main()
