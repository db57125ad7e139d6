#include <torch/nn.h>
#include <trireme/trireme.h>

#include <exception>
#include <iostream>

int main() try {
  auto world = trireme::init();    // ranks of `trireme launch`, torchrun, mpirun or srun
  torch::manual_seed(world.rank);  // of each rank's data; weights are rank 0's
  torch::nn::Sequential net{torch::nn::Linear(8, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1)};
  auto engine = trireme::initialize(world, net, {.config = "ds_config.json"});
  for (int step = 1; step <= 200; ++step) {
    auto input = torch::randn({16, 8});
    auto loss = torch::mse_loss(engine(input), input.sum(1, /*keepdim=*/true));
    engine.backward(loss);
    engine.step();
    if (world.rank == 0 && step % 50 == 0) {
      std::cout << "step " << step << " loss " << loss.item<double>() << "\n";
    }
  }
  engine.save_checkpoint("checkpoints");
} catch (const c10::Error& error) {  // libtorch's, whose what() has a stack trace of every rank
  std::cerr << "minimal: " << error.what_without_backtrace() << "\n";
  return 1;
} catch (const std::exception& error) {  // trireme::Error
  std::cerr << "minimal: " << error.what() << "\n";
  return 1;
}
