#include "trireme/pipeline/pipeline_module.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "pipeline/kept_random_state.h"
#include "trireme/base/error.h"
#include "trireme/pipeline/layer_profile.h"
#include "trireme/pipeline/values.h"
#include "trireme/recompute/recompute.h"
#include "trireme/schedule/partition.h"

namespace trireme {
namespace {

/// "torch::nn::LinearImpl" -> "Linear"
std::string class_of(std::string type) {
  type = type.substr(type.rfind(':') + 1);
  if (type.ends_with("Impl")) type.resize(type.size() - 4);
  return type;
}

int64_t trainable_parameters(const LayerSpec& layer) {
  int64_t count = 0;
  if (layer.make)
    for (const at::Tensor& parameter : layer.make()->parameters())
      if (parameter.requires_grad()) count += parameter.numel();
  return count;
}

/// The layers' costs as whole numbers, of which the largest is a million.
std::vector<int64_t> costs_of(const std::vector<LayerSpec>& layers) {
  double largest = 0;
  for (const LayerSpec& layer : layers) largest = std::max(largest, layer.cost);
  std::vector<int64_t> costs;
  for (const LayerSpec& layer : layers) costs.push_back(std::llround(1e6 * layer.cost / largest));
  return costs;
}

/// A layer as its stage runs it.
struct BuiltLayer {
  std::string type;
  std::shared_ptr<torch::nn::Module> module;
  std::function<c10::IValue(torch::nn::Module*, c10::IValue)> forward;
};
using Layers = std::vector<BuiltLayer>;

c10::IValue run_layers(const Layers& layers, c10::IValue value) {
  for (const BuiltLayer& layer : layers) value = layer.forward(layer.module.get(), std::move(value));
  return value;
}

std::vector<at::Tensor> parameters_of(const Layers& layers) {
  std::vector<at::Tensor> parameters;
  for (const BuiltLayer& layer : layers)
    if (layer.module)
      for (const at::Tensor& parameter : layer.module->parameters()) parameters.push_back(parameter);
  return parameters;
}

bool is_recomputed(const Layers& layers, const std::vector<std::string>& classes) {
  const auto has_parameters = [](const BuiltLayer& it) { return it.module && !it.module->parameters().empty(); };
  if (classes.empty()) return std::any_of(layers.begin(), layers.end(), has_parameters);
  return std::all_of(layers.begin(), layers.end(), [&](const BuiltLayer& it) {
    return std::find(classes.begin(), classes.end(), it.type) != classes.end();
  });
}

at::Tensor parameter_of(const torch::nn::Module& module, const std::string& name, const std::string& key) {
  const auto parameters = module.named_parameters();
  if (const at::Tensor* const found = parameters.find(name)) return *found;
  throw ConfigError(str("PipelineModule: tied layers '", key, "' share '", name, "', which a ", class_of(module.name()),
                        " does not have; name one of its parameters"));
}

/// Registers `child` under `path`, "model.layers.3", in modules that are made where there are none.
void add_at(torch::nn::Module& root, const std::string& path, const std::shared_ptr<torch::nn::Module>& child) {
  const size_t dot = path.find('.');
  if (dot == std::string::npos) {
    root.register_module(path, child);
    return;
  }
  const std::string first = path.substr(0, dot);
  const auto children = root.named_children();
  const auto* const known = children.find(first);
  torch::nn::Module& next = known ? **known : *root.register_module(first, std::make_shared<torch::nn::Module>());
  add_at(next, path.substr(dot + 1), child);
}

c10::IValue recomputed(const StageModel::Part& compute, const c10::IValue& value) {
  FlatValue input = flatten(value);
  const auto run = [compute, structure = input.structure](const std::vector<at::Tensor>& tensors) {
    return compute(unflatten({tensors, structure}));
  };
  return recompute(RecomputeOptions{}, run, input.tensors);
}

/// The layers as one function, an interval of them at a time recomputed.
StageModel::Part part_of(const Layers& layers, const PipelineModuleOptions& options) {
  const int interval = options.activation_checkpoint_interval;
  if (interval == 0) return [layers](c10::IValue value) { return run_layers(layers, std::move(value)); };
  std::vector<std::pair<Layers, bool>> segments;
  for (size_t begin = 0; begin < layers.size(); begin += static_cast<size_t>(interval)) {
    const size_t end = std::min(layers.size(), begin + static_cast<size_t>(interval));
    Layers segment(layers.begin() + static_cast<ptrdiff_t>(begin), layers.begin() + static_cast<ptrdiff_t>(end));
    const bool again = is_recomputed(segment, options.checkpointable_layers);
    segments.emplace_back(std::move(segment), again);
  }
  const auto recompute_by = options.activation_checkpoint_func
                                ? options.activation_checkpoint_func
                                : decltype(options.activation_checkpoint_func)(recomputed);
  return [segments, recompute_by](c10::IValue value) {
    for (const auto& [segment, again] : segments) {
      const auto run = [segment = segment](c10::IValue inner) { return run_layers(segment, std::move(inner)); };
      value = again ? recompute_by(run, std::move(value)) : run(std::move(value));
    }
    return value;
  };
}

}  // namespace

LayerSpec tied(std::string key, LayerSpec spec, std::vector<std::string> parameters) {
  spec.tie = std::move(key);
  spec.tied_parameters = std::move(parameters);
  return spec;
}

PipelineModule::PipelineModule(std::vector<LayerSpec> layers, PipelineModuleOptions options)
    : layers_(std::move(layers)), options_(std::move(options)) {
  if (layers_.empty()) throw ConfigError("PipelineModule: there is no layer; give it the model's layers in order");
  if (!options_.loss) throw ConfigError("PipelineModule: there is no loss; set PipelineModuleOptions::loss");
  if (options_.stages < 1) throw ConfigError(str("PipelineModule: stages=", options_.stages, "; use 1 or more"));
  if (options_.chunks < 1) throw ConfigError(str("PipelineModule: chunks=", options_.chunks, "; use 1 or more"));
  if (options_.activation_checkpoint_interval < 0)
    throw ConfigError(str("PipelineModule: activation_checkpoint_interval=", options_.activation_checkpoint_interval,
                          "; use a number of layers, or 0 to recompute nothing"));
  std::set<std::string> classes;
  for (const LayerSpec& layer : layers_) classes.insert(class_of(layer.type));
  for (std::string& name : options_.checkpointable_layers) {
    name = class_of(name);
    if (classes.contains(name)) continue;
    std::string known;
    for (const std::string& each : classes) known += str(known.empty() ? "'" : ", '", each, "'");
    throw ConfigError(str("PipelineModule: checkpointable_layers has '", name,
                          "', which is the class of no layer; there are ", known));
  }
}

std::vector<LayerSpec> PipelineModule::layers_of(const torch::nn::Sequential& model) {
  std::vector<LayerSpec> layers;
  for (const torch::nn::AnyModule& element : *model)
    layers.push_back(
        {.type = element.ptr()->name(),
         .make = [module = element.ptr()] { return module; },
         .forward =
             [layer = torch::nn::AnyModule(element)](torch::nn::Module*, const c10::IValue& value) mutable {
               return c10::IValue(layer.forward<at::Tensor>(value.toTensor()));
             }});
  return layers;
}

std::vector<int64_t> PipelineModule::parts() const {
  if (!bounds_.empty()) return bounds_;
  const int count = options_.stages * options_.chunks;
  std::string method = options_.partition_method;
  std::transform(method.begin(), method.end(), method.begin(), [](unsigned char c) { return std::tolower(c); });
  if (method == "uniform") return pipeline::partition_uniform(static_cast<int64_t>(layers_.size()), count);
  const auto has_cost = [](const LayerSpec& layer) { return layer.cost > 0; };
  if (method == "best" && std::any_of(layers_.begin(), layers_.end(), has_cost))
    return pipeline::partition_balanced(costs_of(layers_), count);
  if (method == "parameters" || method == "best") {
    const KeptRandomState kept;
    std::vector<int64_t> weights;
    for (const LayerSpec& layer : layers_) weights.push_back(trainable_parameters(layer));
    return pipeline::partition_balanced(weights, count);
  }
  if (method == "profile") {
    if (options_.profile_input.isNone())
      throw ConfigError(
          "PipelineModule: partition_method 'profile' measures the layers; set profile_input, what the first layer "
          "takes");
    return partition_profiled(profile_layers(layers_, options_.profile_input), options_);
  }
  if (method.starts_with("type:")) {
    std::vector<std::string> classes;
    for (const LayerSpec& layer : layers_) classes.push_back(class_of(layer.type));
    return pipeline::partition_by_type(classes, options_.partition_method.substr(5), count);
  }
  throw ConfigError(str("PipelineModule: partition_method '", options_.partition_method,
                        "'; use 'best', 'parameters', 'uniform', 'type:REGEX' or 'profile'"));
}

PipelineModule PipelineModule::with_parts(std::vector<int64_t> bounds) const {
  PipelineModule module = *this;
  module.bounds_ = std::move(bounds);
  return module;
}

StageModel PipelineModule::build(int stage) const {
  const std::vector<int64_t> bounds = parts();
  const pipeline::Schedule shape =
      pipeline::make_schedule(options_.schedule, options_.stages, 2 * options_.stages, options_.chunks);
  if (shape.chunks != options_.chunks)
    throw ConfigError(str("PipelineModule: schedule '", options_.schedule, "' has ", shape.chunks,
                          " chunks on each stage, and chunks=", options_.chunks, "; set it to ", shape.chunks));
  StageModel model{.module = std::make_shared<torch::nn::Module>(), .parts = {}, .loss = options_.loss};
  model.parts.resize(shape.chunks);
  model.parameters.resize(shape.chunks);

  struct Tied {
    std::string name;                                         // of the first layer
    std::vector<int> parts;                                   // that have it
    std::vector<std::vector<std::string>> parameters;         // by parts, within the layer
    std::vector<std::shared_ptr<torch::nn::Module>> modules;  // by parts; null: on another stage
  };
  std::map<std::string, Tied> ties;
  for (int part = 0; part < shape.parts(); ++part) {
    const bool is_here = shape.stage_of(part) == stage;
    Layers layers;
    for (int64_t i = bounds[part]; i < bounds[part + 1]; ++i) {
      const LayerSpec& spec = layers_[i];
      Tied* const tied = spec.tie.empty() ? nullptr : &ties[spec.tie];
      if (tied && tied->parts.empty()) tied->name = name_of(i);
      const bool is_known = tied && !tied->parts.empty() && tied->parts.back() == part;
      if (tied && !is_known) {
        tied->parts.push_back(part);
        tied->parameters.push_back(spec.tied_parameters);
        tied->modules.emplace_back();
      }
      if (!is_here) continue;
      BuiltLayer& built = layers.emplace_back(BuiltLayer{class_of(spec.type), {}, spec.forward});
      if (is_known) {
        built.module = tied->modules.back();  // one part has the layer once
        continue;
      }
      if (!spec.make) continue;
      seed(i);
      built.module = spec.make();
      add_at(*model.module, name_of(i), built.module);
      if (tied) tied->modules.back() = built.module;
    }
    if (!is_here) continue;
    model.parts[shape.chunk_of(part)] = part_of(layers, options_);
    model.parameters[shape.chunk_of(part)] = parameters_of(layers);
  }
  for (const auto& [key, tied] : ties) {
    if (tied.parts.size() < 2) continue;
    for (size_t which = 0; which < tied.parameters.front().size(); ++which) {
      Tie& tie = model.ties.emplace_back(
          Tie{.name = str(tied.name, ".", tied.parameters.front()[which]), .parts = tied.parts, .parameters = {}});
      for (size_t i = 0; i < tied.parts.size(); ++i) {
        if (tied.parameters[i].size() != tied.parameters.front().size())
          throw ConfigError(str("PipelineModule: tied layers '", key, "' name ", tied.parameters.front().size(),
                                " and ", tied.parameters[i].size(), " parameters; name as many in each"));
        const auto& module = tied.modules[i];
        tie.parameters.push_back(module ? parameter_of(*module, tied.parameters[i][which], key) : at::Tensor());
      }
    }
  }
  return model;
}

std::string PipelineModule::name_of(int64_t layer) const {
  return layers_[layer].name.empty() ? std::to_string(layer) : layers_[layer].name;
}

void PipelineModule::seed(int64_t layer) const {
  if (!options_.seed_layers) return;
  const int64_t seed = options_.base_seed + layer;
  options_.seed_fn ? options_.seed_fn(seed) : manual_seed(static_cast<uint64_t>(seed));
}

}  // namespace trireme
