"""Exchanges along "tensor" and "sequence" by operator, told by an engine that is asked for them."""
import pathlib

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers")

HERE = pathlib.Path(__file__).parent
PROGRAM = f"import sys; sys.path.insert(0, {str(HERE)!r}); import tensor_programs as programs\n" + """
import trireme

def told(**keys):
    model = programs.build("llama")
    engine, *_ = trireme.initialize(model=model, config={**programs.config(1, 1, 2), "train_micro_batch_size_per_gpu": 1, **keys})
    batch = programs.batch(0)
    sizes = [*batch["input_ids"].shape, model.config.hidden_size, model.config.num_hidden_layers]

    def step():
        engine.backward(engine(**(engine.cut(**batch) if "sequence_parallel_size" in keys else batch)).loss)
        engine.step()

    step()
    found = [len(engine.exchanges())]
    engine.count_exchanges()
    step()
    rows, table = engine.exchanges(), engine.exchange_table()
    engine.count_exchanges(False)
    step()
    found.append(len(engine.exchanges()))
    assert rows == sorted(rows, key=lambda row: -row.bytes_sent) and all(row.what in table for row in rows), table
    engine.destroy()
    return [[row._asdict() for row in rows], sizes, found]

"""


class Exchanges(Case):
    def told(self, keys):
        rows, sizes, unasked = self.on_ranks(2, PROGRAM + f"result = told(**{keys!r})")
        self.assertEqual(unasked, [0, 0])
        return {(row["what"], row["way"]): (row["axis"], row["exchanges"], row["bytes_sent"]) for row in rows}, sizes

    def test_slices_send_two_sums_of_all_tokens_a_layer_each_way(self):
        rows, (samples, tokens, hidden, layers) = self.told({"tensor_parallel": {"autotp_size": 2}})
        for layer in range(layers):
            for what in ("self_attn.o_proj.weight\" in forward", "mlp.down_proj.weight\" in forward", "self_attn.q_proj.weight\" in backward",
                         "mlp.gate_proj.weight\" in backward"):
                # An all-reduce over two ranks sends as many bytes as there are.
                self.assertEqual(rows[f"aten::linear of \"model.layers.{layer}.{what}", "sum"], ("tensor", 1, samples * tokens * hidden * 4))

    def test_heads_send_half_of_queries_keys_values_and_results_each_way(self):
        rows, (samples, tokens, hidden, layers) = self.told({"sequence_parallel_size": 2})
        # Blocks are as large as those of the rank with most tokens; the model has repeated keys and values for all
        # heads.
        own = samples * ((tokens + 1) // 2) * hidden * 4
        for direction in ("forward", "backward"):
            self.assertEqual(rows[f"aten::scaled_dot_product_attention in {direction}", "recut"],
                             ("sequence", 4 * layers, layers * 4 * own // 2))


if __name__ == "__main__":
    main()
