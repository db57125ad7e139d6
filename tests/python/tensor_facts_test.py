"""Facts of a Python model for partition rules: the configuration and the merged tp_plan of transformers', none of
another."""
from harness import Case, RankServer, main

RankServer.imports = ("transformers",)

_MODELS = """
    import json, torch, transformers
    import trireme
    from trireme.tensor import model_facts
    from trireme.tensor.plan import partition_text
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=64, pad_token_id=0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    def refusal(call):
        try:
            return call()
        except trireme.errors.ConfigError as error:
            return str(error)
"""


class Facts(Case):
    def test_a_model_of_transformers_tells_its_configuration_and_the_plan_of_the_instance(self):
        result = self.on_ranks(0, _MODELS + """
    facts = model_facts.facts_of(llama)
    config, plan = json.loads(facts.config), dict(facts.tp_plan)
    llama.tp_plan = {"model.layers.*.mlp.up_proj": "colwise"}
    result = [config["model_type"], config["num_attention_heads"], config["num_key_value_heads"], plan["model.embed_tokens"], plan["lm_head"],
              plan["model.layers.*.self_attn.o_proj"], len(plan) > 8, model_facts.facts_of(llama).tp_plan,
              [one for one in model_facts.parameters_of(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True))) if one[2]]]
""")
        self.assertEqual(result[:3], ["llama", 4, 2])
        self.assertEqual(result[3:7], ["embedding_rowwise", "colwise_gather_output", "rowwise", True])
        self.assertEqual(result[7:], [[["model.layers.*.mlp.up_proj", "colwise"]], [["model.embed_tokens.weight", [64, 32], ["lm_head.weight"]]]])

    def test_a_model_around_one_of_transformers_tells_its_plan_by_the_names_there(self):
        result = self.on_ranks(0, _MODELS + """
    class Reward(torch.nn.Module):
        def __init__(self, *models):
            super().__init__()
            self.models, self.head = torch.nn.ModuleList(models), torch.nn.Linear(32, 1)
    facts = model_facts.facts_of(Reward(llama.model))
    other = transformers.Qwen2Model(transformers.Qwen2Config(**sizes))
    plain = model_facts.facts_of(torch.nn.Linear(2, 2))
    result = [dict(facts.tp_plan)["models.0.layers.*.self_attn.o_proj"], json.loads(facts.config)["model_type"],
              "matches no parameter" in partition_text(Reward(llama.model), 2), [plain.config, plain.tp_plan],
              refusal(lambda: model_facts.facts_of(Reward(llama.model, other)))]
""")
        self.assertEqual(result[:4], ["rowwise", "llama", False, ["", []]])
        self.assertIn("models.0 and models.1 are models of transformers with other configurations", result[4])

    def test_heads_of_a_model_of_several_parts_are_those_of_the_parts_that_have_a_plan(self):
        result = self.on_ranks(0, _MODELS + """
    with torch.device("meta"):
        images = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(text_config=sizes))
        two = transformers.T5GemmaModel(transformers.T5GemmaConfig(encoder=transformers.T5GemmaModuleConfig(**sizes),
                                                                   decoder=transformers.T5GemmaModuleConfig(**{**sizes, "num_attention_heads": 8})))
    config = json.loads(model_facts.facts_of(images).config)
    result = [config["model_type"], config["num_attention_heads"], config["num_key_value_heads"], "num_attention_heads" in json.loads(model_facts.facts_of(two).config),
              partition_text(two, 2)]
""")
        self.assertEqual(result[:4], ["gemma3", 4, 2, False])
        self.assertIn("equal shares, each of whole heads, whose number is unknown", result[4])

    def test_layers_with_numbers_of_heads_of_their_own_are_refused(self):
        told = self.on_ranks(0, _MODELS + """
    with torch.device("meta"):
        model = transformers.EmbeddingGemma2TextModel(transformers.EmbeddingGemma2TextConfig())
    result = refusal(lambda: model_facts.facts_of(model).config)
""")
        self.assertIn("layers of EmbeddingGemma2TextModel have numbers of their own of `num_key_value_heads`", told)

    def test_a_plan_can_be_read_before_training(self):
        result = self.on_ranks(0, _MODELS + """
    result = [partition_text(llama, 2), refusal(lambda: partition_text(llama, 64)),
              partition_text(torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 8)), 2, partition_config={"layer_specs": [
                  {"patterns": ["0.weight"]}, {"patterns": ["1.weight"], "partition_type": "row"}]})]
""")
        self.assertIn("rules of the model's tp_plan", result[0])
        self.assertIn("64", result[1])
        self.assertIn("partition_config", result[2])


if __name__ == "__main__":
    main()
