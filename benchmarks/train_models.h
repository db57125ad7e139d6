// The models that train_bench compares systems on, behind one face.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>

#include "trireme/models/language_model.h"

namespace benchmarks {

struct Batch {
  at::Tensor input;
  at::Tensor target;
};

/// The models of the comparison behind one face: forward to the loss.
class Model : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const Batch& batch) = 0;
  virtual Batch batch(int step, int rank, int ranks) const = 0;
};

class Mlp final : public Model {
 public:
  Mlp(int64_t width, int64_t samples)
      : width_(width), samples_(samples), layers_(register_module("layers", torch::nn::Sequential())) {
    for (int i = 0; i < 64; ++i) {
      layers_->push_back(torch::nn::Linear(width, width));
      layers_->push_back(torch::nn::Tanh());
    }
  }
  at::Tensor forward(const Batch& batch) override {
    const at::ScalarType dtype = parameters().front().scalar_type();
    return at::mse_loss(layers_->forward(batch.input.to(dtype)).to(at::kFloat), batch.target);
  }
  Batch batch(int step, int rank, int ranks) const override {
    torch::manual_seed(9000 + step % 4);
    const int64_t mine = samples_ / ranks;
    return {at::randn({samples_, width_}).narrow(0, rank * mine, mine),
            at::randn({samples_, width_}).narrow(0, rank * mine, mine)};
  }

 private:
  int64_t width_, samples_;
  torch::nn::Sequential layers_;
};

class Llama final : public Model {
 public:
  Llama(const trireme::ModelOptions& options, int64_t samples, int64_t length)
      : vocabulary_(trireme::vocab_size(options)), samples_(samples), length_(length) {
    net_ = register_module("net", trireme::make_language_model(options));
  }
  at::Tensor forward(const Batch& batch) override { return net_->loss(batch.input, batch.target); }
  Batch batch(int step, int rank, int ranks) const override {
    torch::manual_seed(9000 + step % 4);
    const at::Tensor tokens = at::randint(vocabulary_, {samples_, length_ + 1}, at::kLong);
    const at::Tensor mine = tokens.narrow(0, rank * (samples_ / ranks), samples_ / ranks);
    return {mine.narrow(1, 0, length_).contiguous(), mine.narrow(1, 1, length_).contiguous()};
  }

 private:
  int64_t vocabulary_, samples_, length_;
  std::shared_ptr<trireme::LanguageModel> net_;
};

/// `samples` of `length` tokens are what a Llama is trained on in a step, by all ranks together.
inline std::shared_ptr<Model> make_model(const std::string& name, int64_t samples = 2, int64_t length = 128) {
  torch::manual_seed(1234);
  if (name == "tiny64") return std::make_shared<Mlp>(16, 32);
  if (name == "mlp64") return std::make_shared<Mlp>(256, 32);
  if (name == "mlp1024") return std::make_shared<Mlp>(1024, 8);
  if (name == "llama-9m")
    return std::make_shared<Llama>(trireme::LlamaOptions{.vocab_size = 4096,
                                                         .hidden_size = 256,
                                                         .intermediate_size = 688,
                                                         .num_hidden_layers = 8,
                                                         .num_attention_heads = 8,
                                                         .num_key_value_heads = 8},
                                   4, 64);
  // For offloading: its states take 64 GB.
  if (name == "llama-4b")
    return std::make_shared<Llama>(trireme::LlamaOptions{.vocab_size = 128256,
                                                         .hidden_size = 3072,
                                                         .intermediate_size = 8192,
                                                         .num_hidden_layers = 36,
                                                         .num_attention_heads = 24,
                                                         .num_key_value_heads = 8,
                                                         .max_position_embeddings = 8192,
                                                         .tie_word_embeddings = true},
                                   samples, length);
  return std::make_shared<Llama>(trireme::model_options(name), samples, length);
}

}  // namespace benchmarks
