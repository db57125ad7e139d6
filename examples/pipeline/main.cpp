// Trains a model in two pipeline stages: trireme launch --num_gpus 2 ./pipeline
#include <torch/nn.h>
#include <trireme/pipeline/pipeline_engine.h>
#include <trireme/trireme.h>

#include <exception>
#include <iostream>

int main() try {
  auto world = trireme::init();
  trireme::PipelineModuleOptions cut;
  cut.stages = world.size;  // every rank a stage; with fewer stages the others are data-parallel
  cut.schedule = "zb-h1";
  cut.seed_layers = true;  // the same weights however the model is cut
  cut.loss = [](const c10::IValue& output, const c10::IValue& label) {
    return torch::mse_loss(output.toTensor(), label.toTensor());
  };
  trireme::PipelineModule model(
      {trireme::layer<torch::nn::LinearImpl>(8, 64), trireme::layer_of([](const at::Tensor& x) { return x.relu(); }),
       trireme::layer<torch::nn::LinearImpl>(64, 64), trireme::layer_of([](const at::Tensor& x) { return x.relu(); }),
       trireme::layer<torch::nn::LinearImpl>(64, 1)},
      cut);
  auto engine = trireme::initialize(world, model, {.config = "ds_config.json"});
  auto generator = at::detail::createCPUGenerator(1);
  const auto batches = [&]() -> std::optional<trireme::MicroBatch> {
    const at::Tensor input = torch::randn({16, 8}, generator);
    return trireme::MicroBatch{input, input.sum(1, /*keepdim=*/true)};
  };
  for (int step = 1; step <= 200; ++step) {
    const at::Tensor loss = engine.train_batch(batches);
    if (world.rank == 0 && step % 50 == 0) std::cout << "step " << step << " loss " << loss.item<double>() << "\n";
  }
  engine.save_checkpoint("checkpoints");
} catch (const std::exception& error) {
  std::cerr << "pipeline: " << error.what() << "\n";
  return 1;
}
