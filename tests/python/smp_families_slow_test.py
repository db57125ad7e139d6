"""Models of transformers, and programs that are no line of layers, over two to four stages: losses, every gradient and
weights are those of one process, bit by bit."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert", "transformers.models.t5.modeling_t5", "transformers.models.bart.modeling_bart", "torch._dynamo")

FAMILIES = """
    def family(name, **more):
        import transformers as hf
        if name == "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                                                      vocab_size=64, max_position_embeddings=32, **more))
        if name == "mistral":
            return hf.MistralForCausalLM(hf.MistralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                                                          vocab_size=64, max_position_embeddings=32, sliding_window=4, **more))
        if name == "bert":
            return hf.BertForMaskedLM(hf.BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=64,
                                                    max_position_embeddings=32, **more))
        if name == "t5":
            return hf.T5ForConditionalGeneration(hf.T5Config(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=64,
                                                             decoder_start_token_id=0, **more))
        if name == "bart":
            return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=64, max_position_embeddings=32, d_model=32, encoder_layers=2, decoder_layers=2,
                                                                 encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
                                                                 pad_token_id=0, decoder_start_token_id=1, **more))
        if name == "falcon":
            return hf.FalconForCausalLM(hf.FalconConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=64, **more))
        if name == "gemma":
            return hf.GemmaForCausalLM(hf.GemmaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
                                                      head_dim=8, vocab_size=64, max_position_embeddings=32, **more))
        raise ValueError(name)

    def masked(count=2):
        batches = []
        for _ in range(count):
            ids, mask = torch.randint(1, 64, (8, 12)), torch.ones(8, 12, dtype=torch.long)
            mask[::2, -3:] = 0
            batches.append((ids, mask))
        return batches

    def masked_loss(model, ids, mask):
        return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
"""


class Families(Case):
    def assert_family(self, name, stages=2, options="", more="", end=None):
        found = self.assert_bits_of_one_process(FAMILIES + f"""
    begin({options})
    result = trained(family({name!r}, {more}), masked(), loss_of=masked_loss)
""", stages)
        self.assertEqual(found[3], list(range(stages)))
        if end is not None:
            self.assertEqual(found[2], end)

    def test_llama_with_grouped_queries_and_a_padding_mask(self):
        self.assert_family("llama", end="interleaved")
        self.assert_family("llama", stages=3, end="interleaved")
        self.assert_family("llama", more="tie_word_embeddings=True", end="interleaved")

    def test_mistral_falcon_and_gemma(self):
        for name in ("mistral", "falcon", "gemma"):
            with self.subTest(name):
                self.assert_family(name)

    def test_bert_whose_head_is_tied(self):
        self.assert_family("bert")

    def test_t5_whose_weight_is_tied_three_times(self):
        self.assert_family("t5", more="dropout_rate=0.1")
        self.assert_family("t5", stages=3)

    def test_bart_whose_decoder_begins_on_the_stage_of_its_encoder(self):
        self.assert_family("bart", end="interleaved")
        self.assert_family("bart", stages=3, end="interleaved")

    def test_under_autocast(self):
        self.assert_bits_of_one_process(FAMILIES + """
    begin()
    def loss_of(model, ids, mask):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return masked_loss(model, ids, mask)
    result = trained(family("llama"), masked(), loss_of=loss_of)
""")


class Shapes(Case):
    def test_a_path_there_and_back_with_skips(self):
        text = """
    begin(auto_partition=False, default_partition=0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d, self.e = (nn.Linear(8, 8) for _ in range(5))
        def forward(self, x, y):
            a = torch.tanh(self.a(x)); b = torch.tanh(self.b(a)); c = torch.tanh(self.c(b) + a); d = torch.tanh(self.d(c)) + b
            return F.cross_entropy(self.e(d + a + a * c), y)
    net = Net()
    if smp.pp_size() > 1:
        for part, stage in ((net.b, 1), (net.c, 2), (net.d, 1)):
            smp.set_partition(part, stage)
    result = trained(net, [(torch.randn(8, 8), torch.randint(8, (8,))) for _ in range(2)])
"""
        self.assert_bits_of_one_process(text, stages=3)

    def test_a_recursive_tree_whose_shape_is_in_the_data(self):
        text = """
    begin(auto_partition=False, default_partition=0)
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf, self.join, self.deep, self.out = nn.Linear(6, 8), nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        def grow(self, x):
            if len(x) == 1 or x[:, 0].abs().max().item() < 0.4:
                return torch.tanh(self.leaf(x)).mean(0)
            cut = int((x[:, 0] > 0).sum().clamp(1, len(x) - 1))
            joined = torch.tanh(self.join(torch.cat([self.grow(x[:cut]), self.grow(x[cut:])])))
            return self.deep(joined) if joined.sum() > 0 else joined
        def forward(self, x, y):
            return F.cross_entropy(self.out(self.grow(x)).expand(len(y), -1), y)
    net = Tree()
    if smp.pp_size() > 1:
        for part, stage in ((net.join, 1), (net.deep, smp.pp_size() - 1)):
            smp.set_partition(part, stage)
    result = trained(net, [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(2)])
"""
        self.assert_bits_of_one_process(text)
        self.assert_bits_of_one_process(text, stages=3)

    def test_masks_buffers_of_nobody_and_writes_in_place(self):
        text = """
    begin(auto_partition=False, default_partition=0)
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.a, self.b, self.h = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 20)
            self.norm = nn.LayerNorm(8)
            self.register_buffer("seen", torch.zeros(()), persistent=False)
        def forward(self, ids, y):
            x = self.e(ids) + self.e(torch.arange(ids.size(1)))
            skip = self.a(x)
            x = x + self.norm(F.gelu(self.b(x)))
            if x.abs().mean().item() > 0.1:
                x = x * 1.5
            x = torch.tanh(self.a(x)) + skip
            x = F.dropout(self.norm(self.b(x)), 0.1, self.training) * 1
            x.mul_(0.5)
            self.seen = self.seen + x.detach().abs().mean()
            room = torch.zeros(x.size(0), x.size(1) + 1, 8)
            room[:, 1:] = x
            keep = y > 5
            return F.cross_entropy(self.h(room[:, 1:] + 0)[keep], y[keep]) + 0.01 * self.seen
    net = Odd()
    if smp.pp_size() > 1:
        for part in (net.b, net.h, net.norm):
            smp.set_partition(part, 1)
    result = trained(net, [(torch.randint(20, (8, 6)), torch.randint(20, (8, 6))) for _ in range(2)])
"""
        self.assert_bits_of_one_process(text)

    def test_an_average_of_weights_that_a_module_keeps(self):
        text = """
    begin()
    class Averaged(Mlp):
        def __init__(self):
            super().__init__()
            self.mean = None
        def forward(self, x, y):
            h = self.layers[:4](x)
            with torch.no_grad():
                self.mean = h.mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * h.mean(0)
            return F.cross_entropy(self.layers[4:](h - self.mean), y)
    result = trained(Averaged(), mlp_batches())
"""
        self.assert_bits_of_one_process(text)

    def test_an_lstm_and_a_transformer_of_torch(self):
        text = """
    begin(auto_partition=False, default_partition=0)
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.rnn, self.out = nn.Embedding(30, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        def forward(self, ids, y):
            x, _ = self.rnn(self.word(ids))
            return F.cross_entropy(self.out(self.layer(x)).flatten(0, 1), y.flatten())
    net = Tagger()
    if smp.pp_size() > 1:
        for part in (net.out, net.layer):
            smp.set_partition(part, 1)
    result = trained(net, [(torch.randint(30, (8, 6)), torch.randint(5, (8, 6))) for _ in range(2)])
"""
        self.assert_bits_of_one_process(text)

    def test_beside_data_parallel_ranks(self):
        text = """
    size = int(os.environ.get("WORLD_SIZE", 1))
    smp.init({"partitions": max(1, size // 2), "microbatches": 4, "ddp": True})
    torch.manual_seed(5)
    batches = mlp_batches()
    own = [tuple(tensor.chunk(2)[smp.rdp_rank()] for tensor in batch) for batch in batches]
    net = Mlp(0.1)
    result = trained(net, own)
    result[0] = [[step[1]] for step in result[0]]
"""
        alone, found = self.ran(2, text), self.ran(4, text)
        self.assertEqual(found[:2], alone[:2])


if __name__ == "__main__":
    main()
