#include "trireme/plan/mem_needs.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "trireme/base/error.h"

namespace trireme {
namespace {

// 2851 million parameters on one node of 8: the example of DeepSpeed's page on memory.
TEST(MemNeeds, OfZero2AreDeepSpeedsTableAndThisEnginesFigure) {
  EXPECT_EQ(estimate_zero2_model_states_mem_needs_all_cold(2'851'000'000, {.num_gpus_per_node = 8}),
            "Estimated memory needed for params, optim states and gradients for a:\n"
            "HW: Setup with 1 node, 8 GPUs per node.\n"
            "SW: Model with 2851M total params.\n"
            "  per CPU  |  per GPU |   Options\n"
            "  127.45GB |   5.31GB | offload_optimizer=cpu \n"
            "  127.45GB |  15.93GB | offload_optimizer=none\n"
            // (2 + (4 + 12) / 8) bytes per parameter
            "Trireme, stage 2, on each of 8 ranks, in host memory: 10.62GB\n");
}

TEST(MemNeeds, OfZero3AreDeepSpeedsTableAndThisEnginesFigure) {
  const ModelSize size{.total_params = 2'783'000'000, .largest_layer_params = 65'000'000};
  EXPECT_EQ(estimate_zero3_model_states_mem_needs_all_cold(size),
            "Estimated memory needed for params, optim states and gradients for a:\n"
            "HW: Setup with 1 node, 1 GPU per node.\n"
            "SW: Model with 2783M total params, 65M largest layer params.\n"
            "  per CPU  |  per GPU |   Options\n"
            "   69.98GB |   0.24GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1\n"
            "   69.98GB |   0.24GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0\n"
            "   62.20GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1\n"
            "   62.20GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0\n"
            "    0.36GB |  46.90GB | offload_param=none, offload_optimizer=none, zero_init=1\n"
            "   15.55GB |  46.90GB | offload_param=none, offload_optimizer=none, zero_init=0\n"
            // 18 bytes per parameter
            "Trireme, stage 3, on each of 1 ranks, in host memory: 46.65GB\n");
}

TEST(MemNeeds, CountATiedParameterOnceAndTheLargestModuleItself) {
  struct Net : torch::nn::Module {
    Net() {
      first = register_module("first", torch::nn::Linear(10, 20));
      register_parameter("tied", first->weight);
      register_parameter("own", at::zeros({5}));
    }
    torch::nn::Linear first{nullptr};
  };
  const Net net;
  EXPECT_EQ(size_of(net).total_params, 225);
  EXPECT_EQ(size_of(net).largest_layer_params, 220);
  EXPECT_EQ(estimate_zero2_model_states_mem_needs_all_live(net), estimate_zero2_model_states_mem_needs_all_cold(225));
  EXPECT_EQ(estimate_zero3_model_states_mem_needs_all_live(net),
            estimate_zero3_model_states_mem_needs_all_cold({.total_params = 225, .largest_layer_params = 220}));
}

TEST(MemNeeds, RefuseASetupThatCannotBe) {
  EXPECT_THROW(estimate_zero2_model_states_mem_needs_all_cold(-1), ConfigError);
  EXPECT_THROW(estimate_zero3_model_states_mem_needs_all_cold({}, {.num_nodes = 0}), ConfigError);
  EXPECT_THROW(estimate_zero3_model_states_mem_needs_all_cold({}, {.num_gpus_per_node = -3}), ConfigError);
  EXPECT_THROW(estimate_zero2_model_states_mem_needs_all_cold(1, {.additional_buffer_factor = 0}), ConfigError);
}

}  // namespace
}  // namespace trireme
