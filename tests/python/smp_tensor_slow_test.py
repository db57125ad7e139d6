"""Ranks that share layers under smp's names: more families, optimizers and ways of computing than smp_tensor_test.py
has."""
import smp_tensor_test
from harness import main

_FAMILIES = """
    import transformers as T
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64, max_position_embeddings=24)
    without_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    families = {
        "bert": lambda: T.BertForMaskedLM(T.BertConfig(**sizes, **without_dropout)),
        "roberta": lambda: T.RobertaForMaskedLM(T.RobertaConfig(**sizes, **without_dropout, pad_token_id=1)),
        "gptj": lambda: T.GPTJForCausalLM(T.GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, rotary_dim=4)),
        "gptneo": lambda: T.GPTNeoForCausalLM(T.GPTNeoConfig(hidden_size=32, num_layers=2, num_heads=4, vocab_size=64, max_position_embeddings=16,
                                                             attention_types=[[["global", "local"], 1]], window_size=8)),
        "gptneox": lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**sizes))}
    with smp.tensor_parallelism():
        net = families[FAMILY]()
    model, optimizer, train_step = made(net, gpt2_loss)
    result = [taught(model, optimizer, train_step, batches()[:2]), state_of(model)]
"""


class Trains(smp_tensor_test.SmpTensor):
    def test_smps_families_as_one_process(self):
        for family in ("bert", "roberta", "gptj", "gptneo", "gptneox"):
            text = _FAMILIES.replace("FAMILY", repr(family))
            expected = self.on(1, text)
            for options in ({"optimize": "speed"}, {"prescaled": False}):
                with self.subTest(family, **options):
                    self.assert_close(self.on(2, text, **options), expected)

    def test_activations_that_are_computed_again_give_the_same_bits(self):
        text = """
    with smp.tensor_parallelism():
        net = gpt2(True, dropout=0.3)
    net.train()
    if AGAIN:
        net.gradient_checkpointing_enable()
    model, optimizer, train_step = made(net, gpt2_loss)
    result = [taught(model, optimizer, train_step, batches()[:2]), state_of(model)]
"""
        for optimize in ("speed", "memory"):
            with self.subTest(optimize):
                self.assertEqual(*(self.on(2, text.replace("AGAIN", again), optimize=optimize) for again in ("True", "False")))

    def test_a_scaler_unscales_and_clips_as_one_process(self):
        text = """
    model = smp.DistributedModel(marked_gpt2())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler("cpu", init_scale=1024.0)
    @smp.step
    def train_step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(scaler.scale(loss))
        return loss
    for batch in batches()[:2]:
        optimizer.zero_grad()
        train_step(*own_samples(batch))
        scaler.unscale_(optimizer)
        optimizer.clip_master_grads(0.5)
        scaler.step(optimizer)
        scaler.update()
    result = state_of(model)
"""
        self.assert_close(self.on(2, text), self.on(1, text))


class Saves(smp_tensor_test.Saves):
    optimizers = ("AdamW(p, lr=1e-2, eps=1e-3)", "NAdam(p, lr=1e-2, eps=1e-3)", "SGD(p, lr=0.1, momentum=0.5)")
    cases = {saving: [(loading, file) for loading in (1, 2, 4) for file in ("partial.pt", "full.pt")] for saving in (2, 4, 1)}

    def test_checkpoints_of_the_library_load_at_any_degree(self):
        begins = """
    model, optimizer, train_step = made(Head(), head_loss)
    taught(model, optimizer, train_step, batches()[LATEST:LATEST + 1])
"""
        ends = f"""
    model.{{}}_checkpoint({str(self.folder)!r})
    result = [taught(model, optimizer, train_step, batches()[1:]), state_of(model)]
"""
        expected = self.on(2, begins.replace("LATEST", "0") + ends.format("save"))
        for ranks in (1, 2, 4):
            with self.subTest(ranks):
                self.assert_close(self.on(ranks, begins.replace("LATEST", "1") + ends.format("load")), expected)


if __name__ == "__main__":
    main()
