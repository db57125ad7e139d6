// Stages of parts of sequences train as one process that has whole sequences.
#include "tests/axes/pipeline_sequence.h"
#include "tests/support/error_of.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/index.h>
#include <ATen/ops/zeros.h>

#include <cmath>

namespace trireme::pipeline_sequence {
namespace {

using testing::error_of;

TEST(PipelineSequence, TrainsAsOneProcessAtEveryZeroStage) {
  for (const SequenceAttention attention : {SequenceAttention::kUlysses, SequenceAttention::kRing})
    for (int zero = 0; zero <= 3; ++zero) {
      SCOPED_TRACE(str("ZeRO ", zero, attention == SequenceAttention::kRing ? ", ring" : ", Ulysses"));
      Recipe recipe = recipe_of_blocks();
      recipe.attention = attention;
      recipe.configure = [zero](Config& config) { config.pager.stage = zero; };
      expect_parity(recipe);
    }
}

TEST(PipelineSequence, TrainsAsOneProcessUnderEverySchedule) {
  for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"})
    for (const bool is_tied : {false, true}) {
      SCOPED_TRACE(str(schedule, is_tied ? ", tied" : ""));
      Recipe recipe = recipe_of_blocks(is_tied);
      recipe.schedule = schedule;
      recipe.attention = is_tied ? SequenceAttention::kRing : SequenceAttention::kUlysses;
      recipe.configure = [](Config& config) { config.pager.stage = 2; };
      expect_parity(recipe);
    }
}

TEST(PipelineSequence, TrainsAsOneProcessBesideDataParallelRanks) {
  for (const int zero : {1, 3}) {
    SCOPED_TRACE(str("ZeRO ", zero));
    Recipe recipe = recipe_of_blocks(/*is_tied=*/true);
    recipe.data = 2;
    recipe.configure = [zero](Config& config) { config.pager.stage = zero; };
    expect_parity(recipe);
    recipe.configure = [zero](Config& config) {
      config.pager.stage = zero;
      config.degrees.replicas = 2;
    };
    expect_parity(recipe);
  }
}

TEST(PipelineSequence, TrainsAsOneProcessOverMoreStagesAndParts) {
  Recipe recipe = recipe_of_blocks();
  recipe.stages = 3;
  recipe.sequence = 3;
  recipe.attention = SequenceAttention::kRing;
  expect_parity(recipe);
}

TEST(PipelineSequence, TrainsBuiltInModelsAsOneProcess) {
  const LlamaOptions llama{.vocab_size = kVocabulary,
                           .hidden_size = 16,
                           .intermediate_size = 24,
                           .num_hidden_layers = 2,
                           .num_attention_heads = 4,
                           .num_key_value_heads = 2,
                           .max_position_embeddings = 16};
  const GptOptions gpt{.vocab_size = kVocabulary, .n_embd = 16, .n_layer = 2, .n_head = 4, .n_positions = 16};
  for (const auto& layers : {llama_layers(llama), gpt_layers(gpt)})
    for (const SequenceAttention attention : {SequenceAttention::kUlysses, SequenceAttention::kRing})
      for (const char* schedule : {"1f1b", "zb-h1"}) {
        SCOPED_TRACE(str(layers[0].name, ", ", schedule));
        expect_parity({.schedule = schedule,
                       .attention = attention,
                       .layers = built_in(layers),
                       .batch = positioned_batch,
                       .configure = [](Config& config) { config.pager.stage = 3; }});
      }
}

TEST(PipelineSequence, TrainsAsOneProcessWithRecomputation) {
  for (const char* schedule : {"1f1b", "zb-v"}) {
    SCOPED_TRACE(schedule);
    Recipe recipe = recipe_of_blocks();
    recipe.schedule = schedule;
    recipe.change_options = [](PipelineModuleOptions& options) { options.activation_checkpoint_interval = 1; };
    expect_parity(recipe);
    recipe.change_options = {};
    recipe.configure = [](Config& config) { config.recompute.mode = RecomputeMode::kSelective; };
    expect_parity(recipe);
  }
}

/// The same blocks with dropout of activations, which are parts.
std::vector<LayerSpec> with_dropout() {
  std::vector<LayerSpec> layers = hand_written();
  for (size_t i = 1; i + 1 < layers.size(); ++i)
    layers[i].forward = [forward = layers[i].forward](torch::nn::Module* module, const c10::IValue& value) {
      const c10::IValue result = forward(module, value);
      return c10::IValue(
          std::make_tuple(at::dropout(at_place(result, 0), 0.3, true), at_place(result, 1), at_place(result, 2)));
    };
  return layers;
}

/// A deterministic micro-batch draws on each stage where the one before has stopped: as over one stage.
TEST(PipelineSequence, ADeterministicRunDrawsAsOverOneStage) {
  const auto run = [](int stages) {
    Recipe recipe{.stages = stages, .layers = with_dropout(), .batch = masked_batch, .configure = [](Config& config) {
                    config.pager.deterministic = true;
                  }};
    return train_in_stages(recipe);
  };
  const Outcome one = run(1), two = run(2);
  expect_near(two, one);
  EXPECT_GT(std::abs(one.steps[0].loss - train_plain(recipe_of_blocks()).steps[0].loss), 1e-3);
}

/// Runs a step on each rank, and returns what each one was told.
std::vector<std::string> told_by(const Recipe& recipe,
                                 const std::function<MicroBatches(PipelineEngine&, int rank)>& batches) {
  std::vector<std::string> told(static_cast<size_t>(recipe.ranks()));
  run_ranks(recipe.ranks(), [&](Rank& rank) {
    PipelineModule module = module_of(recipe);
    auto engine = trireme::initialize(rank.world(), module, {.config = config_of(recipe)});
    told[static_cast<size_t>(rank.id())] = error_of([&] { engine.train_batch(batches(engine, rank.id())); });
  });
  return told;
}

void expect_refused(const Recipe& recipe, const std::string& words) {
  for (const std::string& text :
       told_by(recipe, [&](PipelineEngine&engine, int) { return batches_of(recipe, engine.data_place()); }))
    EXPECT_SAYS(text, words);
}

/// `change` between the layers of the two stages.
Recipe with_boundary(const std::function<c10::IValue(const c10::IValue&)>& change) {
  Recipe recipe = recipe_of_blocks();
  recipe.layers[2].forward = [forward = recipe.layers[2].forward, change](torch::nn::Module* module,
                                                                          const c10::IValue& value) {
    return change(forward(module, value));
  };
  return recipe;
}

TEST(PipelineSequence, TokensThatAMaskHasTakenGoToTheNextStage) {
  const auto change = [](LayerSpec& layer, bool before,
                         const std::function<at::Tensor(const at::Tensor&, const at::Tensor& mask)>& x_of) {
    layer.forward = [forward = layer.forward, before, x_of](torch::nn::Module* module, const c10::IValue& value) {
      const auto changed = [&](const c10::IValue& of) {
        const at::Tensor mask = at_place(of, 2);
        return c10::IValue(std::make_tuple(x_of(at_place(of, 0), mask), at_place(of, 1), mask));
      };
      return before ? forward(module, changed(value)) : changed(forward(module, value));
    };
  };
  Recipe recipe = recipe_of_blocks();
  change(recipe.layers[2], /*before=*/false,
         [](const at::Tensor& x, const at::Tensor& mask) { return at::index(x, {mask.to(at::kBool)}); });
  change(recipe.layers[3], /*before=*/true, [](const at::Tensor& x, const at::Tensor& mask) {
    const at::Tensor all = at::zeros({mask.size(0), mask.size(1), x.size(-1)});
    return all.index_put({mask.to(at::kBool)}, x);
  });
  expect_near(train_in_stages(recipe), train_plain(recipe));
}

TEST(PipelineSequence, RefusesOnEveryRankACutThatCannotBeTold) {
  const Recipe recipe = with_boundary([](const c10::IValue& value) {
    at::Tensor made = at::zeros(at_place(value, 0).sizes());
    made.copy_(at_place(value, 0));
    return c10::IValue(std::make_tuple(made, at_place(value, 1), at_place(value, 2)));
  });
  expect_refused(recipe, "written at this rank's part alone; write by torch.where() instead, or into a part");
}

TEST(PipelineSequence, RefusesOnEveryRankOtherBatchesOfASequence) {
  const Recipe recipe = recipe_of_blocks();
  for (const int other : {1, 3}) {
    for (const std::string& text : told_by(recipe, [&](PipelineEngine&, int rank) {
           return batches_of(recipe, {.rank = rank == other ? 7 : 0, .size = 1});
         }))
      EXPECT_SAYS(text, "ranks that share a sequence get the same micro-batches");
  }
}

TEST(PipelineSequence, RefusesSequencesOfFewTokensOnEveryRankAndGoesOn) {
  const Recipe recipe = recipe_of_blocks();
  std::mutex mutex;
  int trained = 0;
  run_ranks(4, [&](Rank& rank) {
    PipelineModule module = module_of(recipe);
    auto engine = trireme::initialize(rank.world(), module, {.config = config_of(recipe)});
    const auto few = [&]() -> std::optional<MicroBatch> {
      const at::Tensor ids = tokens_of(0).narrow(1, 0, 3);
      return MicroBatch{std::make_tuple(ids, positions().narrow(1, 0, 3), at::ones({2, 3}, at::kBool)), ids};
    };
    EXPECT_SAYS(error_of([&] { engine.train_batch(few); }), "micro-batches of 3 tokens (dim 1 of the first input)");
    engine.train_batch(batches_of(recipe, engine.data_place()));
    const std::lock_guard lock(mutex);
    ++trained;
  });
  EXPECT_EQ(trained, 4);
}

/// Logits of an evaluation have all tokens, and the loss is theirs.
TEST(PipelineSequence, EvaluatesWholeOutputs) {
  Recipe recipe = recipe_of_blocks();
  recipe.steps = 0;
  std::vector<at::Tensor> logits;
  std::mutex mutex;
  run_ranks(4, [&](Rank& rank) {
    PipelineModule module = module_of(recipe);
    auto engine = trireme::initialize(rank.world(), module, {.config = config_of(recipe)});
    const EvalResult result =
        engine.eval_batch(batches_of(recipe, engine.data_place()), {.micro_batches = 1, .returns_outputs = true});
    const at::Tensor expected_loss =
        engine.runner().is_last_stage() ? loss_of(result.outputs.at(0), masked_batch(0).labels) : at::Tensor();
    if (!expected_loss.defined()) return;
    const std::lock_guard lock(mutex);
    EXPECT_NEAR(result.loss.item<double>(), expected_loss.item<double>(), 1e-6);
    logits.push_back(result.outputs.at(0).toTensor());
  });
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  c10::IValue value = masked_batch(0).inputs;
  for (const LayerSpec& layer : recipe.layers) value = layer.forward(modules.emplace_back(layer.make()).get(), value);
  ASSERT_EQ(logits.size(), 2u);
  for (const at::Tensor& some : logits) {
    ASSERT_EQ(some.sizes(), (std::vector<int64_t>{2, kLength, kVocabulary}));
    EXPECT_LE((some - value.toTensor()).norm().item<double>(), 1e-6 * value.toTensor().norm().item<double>());
  }
}

/// A program may cut its batches by engine.cut().
TEST(PipelineSequence, LeavesBatchesThatTheProgramHasCut) {
  Recipe recipe = recipe_of_blocks();
  recipe.steps = 1;
  const Outcome expected = train_plain(recipe);
  run_ranks(4, [&](Rank& rank) {
    PipelineModule module = module_of(recipe);
    auto engine = trireme::initialize(rank.world(), module, {.config = config_of(recipe)});
    int64_t number = 0;
    const at::Tensor loss = engine.train_batch([&] {
      const MicroBatch whole = masked_batch(number++);
      const SequenceInputs part = engine.cut({.input_ids = at_place(whole.inputs, 0),
                                              .labels = whole.labels.toTensor(),
                                              .position_ids = at_place(whole.inputs, 1),
                                              .attention_mask = at_place(whole.inputs, 2)});
      return std::optional(
          MicroBatch{std::make_tuple(part.input_ids, part.position_ids, part.attention_mask), part.labels});
    });
    EXPECT_NEAR(loss.item<double>(), expected.steps[0].loss, 1e-6 * expected.steps[0].loss);
  });
}

}  // namespace
}  // namespace trireme::pipeline_sequence
