// Trains an unmodified model whose modules are on two stages: trireme launch --num_gpus 2 ./smp
#include <torch/nn.h>
#include <trireme/smp.h>
#include <trireme/trireme.h>

#include <exception>
#include <iostream>

struct Net : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(8, 64))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(64, 64))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(64, 1))};
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = first(x).relu();
    return head(second(hidden).relu() + hidden);
  }
};

int main() try {
  auto world = trireme::init();
  torch::manual_seed(1);
  Net net;
  trireme::smp::Partition partition;  // of what is not set, stage 0
  if (world.size > 1) partition.set_partition("second", 1);
  if (world.size > 1) partition.set_partition("head", 1);
  trireme::smp::DistributedModel model(world, net, partition, {.config = "ds_config.json"});
  auto generator = at::detail::createCPUGenerator(1);
  for (int step = 1; step <= 200; ++step) {
    const at::Tensor input = torch::randn({64, 8}, generator);  // all micro-batches; the same on every stage
    const auto outputs =
        model.step({input, input.sum(1, /*keepdim=*/true)}, [&](const std::vector<at::Tensor>& of_micro_batch) {
          const at::Tensor loss = torch::mse_loss(net.forward(of_micro_batch[0]), of_micro_batch[1]);
          model.backward(loss);
          return std::vector{loss};
        });
    model.update();
    const at::Tensor loss = outputs[0].reduce_mean();
    if (world.rank == 0 && step % 50 == 0) std::cout << "step " << step << " loss " << loss.item<double>() << "\n";
  }
  model.save_checkpoint("checkpoints");
} catch (const std::exception& error) {
  std::cerr << "smp: " << error.what() << "\n";
  return 1;
}
