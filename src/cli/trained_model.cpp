#include "cli/trained_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>

#include "cli/encoded_text.h"
#include "cli/evaluate.h"
#include "cli/init_weights.h"
#include "trireme/base/json.h"
#include "trireme/device/device.h"
#include "trireme/engine/model_engine.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/models/generate.h"
#include "trireme/models/language_model.h"
#include "trireme/tensor/partition.h"

namespace trireme::cli {
namespace {

std::shared_ptr<LanguageModel> whole_model(const TrainSetup& setup, c10::Device device) {
  auto model = make_language_model(setup.model);
  if (!setup.options.init_from.empty()) {
    const auto names = model->named_parameters().keys();
    init_weights(*model, read_initial_weights(setup.options.init_from, {names.begin(), names.end()}));
  }
  model->to(device);
  return model;
}

class ModelOnEveryRank : public TrainedModel {
 public:
  ModelOnEveryRank(const TrainSetup& setup, World& world)
      : setup_(setup),
        device_(seeded_device(setup, world)),
        model_(whole_model(setup, device_)),
        engine_(*world.group, *model_, engine_options(setup)) {}

  EngineBase& engine() override { return engine_; }
  std::optional<LoadedState> load_checkpoint(const LoadCheckpointOptions& options) override {
    return engine_.load_checkpoint(setup_.checkpoints(), options);
  }

  double step(DataLoader& loader) override {
    at::Tensor loss = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device_));
    for (int64_t micro = 0; micro < engine_.gradient_accumulation_steps(); ++micro) {
      const auto batch = on_device(loader.next(), device_);
      loss += engine_.backward(loss_of(batch));
      engine_.step();
    }
    return loss.item<double>();  // waits for the device; what it shows the user is of this step
  }

  double validate() override {
    return evaluate(*model_, [this](const TokenBatch& batch) { return loss_of(batch); }, setup_.data.held_out,
                    engine_.group(), engine_.data_place(),
                    {.samples = setup_.options.eval_samples, .micro_batch = engine_.train_micro_batch_size_per_gpu()});
  }

  std::string sample() override {
    if (setup_.data.format != DataFormat::kBytes && !setup_.tokenizer)
      return "";  // tokens that only their tokenizer can spell
    GenerateOptions options{.seed = setup_.options.seed};
    if (engine_.tensor() != nullptr)
      options.gather = [this](const at::Tensor& logits) { return engine_.tensor()->gather(logits); };
    return setup_.tokenizer ? continue_text(*model_, *setup_.tokenizer, setup_.options.prompt, options)
                            : generate_text(*model_, setup_.options.prompt, options);
  }

 private:
  at::Tensor loss_of(const TokenBatch& batch) {
    if (engine_.config().degrees.sequence == 1) return model_->loss(batch.input, batch.target);
    const at::Tensor positions = at::arange(batch.input.size(1), batch.input.options()).unsqueeze(0);
    const SequenceInputs part =
        engine_.cut({.input_ids = batch.input, .labels = batch.target, .position_ids = positions});
    return model_->loss(part.input_ids, part.labels, part.position_ids);
  }

  const TrainSetup& setup_;
  c10::Device device_;
  std::shared_ptr<LanguageModel> model_;
  Engine engine_;
};

}  // namespace

c10::Device seeded_device(const TrainSetup& setup, const World& world) {
  const c10::Device device = choose_device(setup.options.device, world.local_rank);
  manual_seed(setup.options.seed);
  manual_seed_device(device, setup.options.seed);
  return device;
}

InitializeOptions engine_options(const TrainSetup& setup) {
  // A Gpt reads sizes of activations, too, which beside parts of sequences are the whole's.
  const bool has_sizes_of_wholes = setup.config.degrees.sequence > 1;
  return {.config = setup.config,
          .partition_model = partition_model_from(parse_json(config_json(setup.model), setup.name)),
          .takes_sizes_from_inputs = has_sizes_of_wholes || std::holds_alternative<LlamaOptions>(setup.model),
          .has_record = true};
}

std::unique_ptr<TrainedModel> make_trained_model(const TrainSetup& setup, World& world) {
  if (auto model = model_in_stages(setup, world)) return model;
  return std::make_unique<ModelOnEveryRank>(setup, world);
}

}  // namespace trireme::cli
