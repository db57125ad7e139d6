// A model in pipeline stages.
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "cli/evaluate.h"
#include "cli/init_weights.h"
#include "cli/trained_model.h"
#include "trireme/models/language_model.h"
#include "trireme/pipeline/pipeline_engine.h"

namespace trireme::cli {
namespace {

InitialWeights initial_weights(const std::filesystem::path& path, const std::vector<ModelLayer>& layers) {
  std::set<std::string> names;
  bool has_tied = false;
  for (const ModelLayer& layer : layers) {
    if (layer.is_tied && std::exchange(has_tied, true)) continue;
    for (const std::string& name : layer.make()->named_parameters().keys()) names.insert(layer.name + "." + name);
  }
  return read_initial_weights(path, names);
}

std::vector<LayerSpec> layer_specs(const TrainSetup& setup, c10::Device device) {
  const std::vector<ModelLayer> layers = language_model_layers(setup.model, setup.options.seq);
  std::shared_ptr<const InitialWeights> weights;
  if (!setup.options.init_from.empty())
    weights = std::make_shared<InitialWeights>(initial_weights(setup.options.init_from, layers));
  std::vector<LayerSpec> specs;
  std::string tied_name;
  for (const ModelLayer& layer : layers) {
    if (layer.is_tied && tied_name.empty()) tied_name = layer.name;
    specs.push_back({.type = layer.type,
                     .make =
                         [make = layer.make, weights, device, name = layer.is_tied ? tied_name : layer.name] {
                           auto module = make();
                           if (weights) init_weights(*module, *weights, name + ".");
                           module->to(device);
                           return module;
                         },
                     .forward = [layer](torch::nn::Module* module,
                                        const c10::IValue& value) { return run_layer(layer, *module, value); },
                     .name = layer.name,
                     .tie = layer.is_tied ? "embedding" : "",
                     .cost = static_cast<double>(layer.multiply_adds)});
  }
  return specs;
}

PipelineModule pipeline_module(const TrainSetup& setup, c10::Device device) {
  const PipelineConfig& cut = setup.config.pipeline;
  // Layers of a pipeline are recomputed by their number.
  const bool recomputes_layers = setup.config.recompute.mode == RecomputeMode::kFull;
  const int64_t interval = cut.activation_checkpoint_interval;
  return PipelineModule(layer_specs(setup, device),
                        {.stages = setup.config.degrees.pipe,
                         .loss =
                             [](const c10::IValue& logits, const c10::IValue& targets) {
                               return at::cross_entropy_loss(logits.toTensor().flatten(0, 1).to(at::kFloat),
                                                             targets.toTensor().flatten());
                             },
                         .partition_method = cut.partition,
                         .seed_layers = true,
                         .base_seed = static_cast<int64_t>(setup.options.seed),
                         .activation_checkpoint_interval =
                             static_cast<int>(recomputes_layers ? std::max<int64_t>(interval, 1) : interval),
                         .schedule = cut.schedule,
                         .chunks = static_cast<int>(cut.chunks)});
}

InitializeOptions options_of_stage(const TrainSetup& setup) {
  InitializeOptions options = engine_options(setup);
  Config config = setup.config;
  if (config.recompute.mode == RecomputeMode::kFull) config.recompute = {};
  options.config = std::move(config);
  return options;
}

class ModelInStages : public TrainedModel {
 public:
  ModelInStages(const TrainSetup& setup, World& world)
      : setup_(setup),
        device_(seeded_device(setup, world)),
        engine_(*world.group, pipeline_module(setup, device_), options_of_stage(setup)) {}

  EngineBase& engine() override { return engine_; }
  std::optional<LoadedState> load_checkpoint(const LoadCheckpointOptions& options) override {
    return engine_.load_checkpoint(setup_.checkpoints(), options);
  }

  double step(DataLoader& loader) override {
    int64_t left = engine_.gradient_accumulation_steps();
    const at::Tensor loss = engine_.train_batch([&] {
      --left;
      return std::optional(micro_batch(loader.next()));
    });
    // The loader of a stage without data stands where the others' do.
    while (left-- > 0) (void)loader.next();
    return loss.item<double>();
  }

  // As few different sizes of micro-batches as can be: full ones, the rest in equal parts, and what cannot be divided
  // by every data-parallel rank alike.
  double validate() override {
    const int64_t ranks = engine_.data_place().size, micro = engine_.train_micro_batch_size_per_gpu();
    const int64_t samples = std::min(setup_.options.eval_samples, setup_.data.held_out.size());
    const int64_t rounds = samples / (micro * ranks);
    double sum = 0;
    int64_t begin = rounds * micro * ranks;
    if (rounds > 0) sum += mean_loss(0, micro, micro, rounds) * static_cast<double>(begin);
    const int64_t each = (samples - begin) / ranks;
    if (each > 0) sum += mean_loss(begin, each, each, 1) * static_cast<double>(each * ranks);
    begin += each * ranks;
    if (begin < samples) sum += mean_loss(begin, samples - begin, 0, 1) * static_cast<double>(samples - begin);
    return sum / static_cast<double>(samples);
  }

  std::string sample() override { return ""; }  // tokens one by one would pass all stages each time
  bool samples_later() const override { return true; }

 private:
  MicroBatch micro_batch(TokenBatch batch) const {
    batch = on_device(std::move(batch), device_);
    if (setup_.config.degrees.sequence == 1) return {batch.input, batch.target};
    const at::Tensor positions = at::arange(batch.input.size(1), batch.input.options()).unsqueeze(0);
    return {std::make_tuple(batch.input, positions), batch.target};
  }

  // The mean loss of `count` micro-batches of `size` samples from `begin` on; data-parallel ranks are `stride` samples
  // apart.
  double mean_loss(int64_t begin, int64_t size, int64_t stride, int64_t count) {
    const DataPlace data = engine_.data_place();
    int64_t next = begin + data.rank * stride;
    engine_.reset_activation_shape();
    const EvalResult result = engine_.eval_batch(
        [&] {
          std::vector<int64_t> indices(size);
          std::iota(indices.begin(), indices.end(), next);
          next += data.size * stride;
          return std::optional(micro_batch(setup_.data.held_out.batch(indices)));
        },
        {.micro_batches = static_cast<int>(count)});
    engine_.reset_activation_shape();
    return result.loss.item<double>();
  }

  const TrainSetup& setup_;
  c10::Device device_;
  PipelineEngine engine_;
};

}  // namespace

std::unique_ptr<TrainedModel> model_in_stages(const TrainSetup& setup, World& world) {
  return setup.config.degrees.pipe > 1 ? std::make_unique<ModelInStages>(setup, world) : nullptr;
}

}  // namespace trireme::cli
