// save_16bit_model(): the module's weights and buffers in one file that others read.
#include <ATen/ops/equal.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using namespace testing;

class Export : public ::testing::TestWithParam<Stage> {};

TEST_P(Export, IsTheModulesStateWithTiedWeightsOnce) {
  for (const int ranks : {1, 2}) {
    const TemporaryFolder folder;
    run_ranks(ranks, [&](Rank& rank) {
      auto model = make_tied_net();
      model.module->register_buffer("table", at::arange(5, at::kLong));
      Engine engine(rank.world(), *model.module, {.config = with_stage(sgd_config(ranks), GetParam())});
      engine.backward(model.loss({rank.id(), 0}));
      engine.step();
      {
        const torch::NoGradGuard no_grad;
        model.module->named_parameters()["twice.bias"].fill_(0.5);  // not yet taken by a step
      }
      EXPECT_TRUE(engine.save_16bit_model(folder.path() / "all"));
      EXPECT_TRUE(engine.save_16bit_model(folder.path() / "some", {.exclude_frozen_parameters = true}));
      engine.destroy();
      const NamedTensors saved = read_safetensors(folder.path() / "all");
      const auto parameters = model.module->named_parameters();
      EXPECT_EQ(saved.size(), parameters.size());  // without "projection", which is "embedding.weight"; with "table"
      for (const auto& item : parameters) {
        if (item.key() == "projection" || item.key() == "embedding.weight") continue;
        ASSERT_TRUE(saved.contains(item.key())) << item.key();
        EXPECT_EQ(saved.at(item.key()).scalar_type(), GetParam().dtype);
        EXPECT_TRUE(at::equal(saved.at(item.key()), item.value())) << item.key();
      }
      EXPECT_NE(saved.contains("projection"), saved.contains("embedding.weight"));
      EXPECT_TRUE(at::equal(saved.at("table"), at::arange(5, at::kLong)));
      const NamedTensors some = read_safetensors(folder.path() / "some");
      EXPECT_EQ(some.size(), saved.size() - 2);
      EXPECT_FALSE(some.contains("frozen.weight"));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Export, ::testing::ValuesIn(all_stages()), name_of_stage);

/// The Python whose torch this program is linked to: PREFIX/lib/pythonX/site-packages/torch/lib/libtorch_cpu.so.
std::filesystem::path python() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&at::_ops::equal::call), &info);
  std::filesystem::path prefix = info.dli_fname;
  for (int i = 0; i < 6; ++i) prefix = prefix.parent_path();
  return prefix / "bin" / "python3";
}

TEST(ExportForPython, IsReadByTorchLoadWithoutRunningCode) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    auto model = make_tied_net();
    const Stage stage{"", 3, GatherPolicy::kCopy, at::kBFloat16};
    Engine engine(rank.world(), *model.module, {.config = with_stage(sgd_config(2), stage)});
    engine.save_16bit_model(folder.path(), {.name = "pytorch_model.bin"});
    engine.save_16bit_model(folder.path());
  });
  std::ofstream(folder.path() / "check.py") << R"(
import json, struct, sys, torch
folder = sys.argv[1]
weights = torch.load(folder + "/pytorch_model.bin", weights_only=True)
assert type(weights) is dict and len(weights) == 10, sorted(weights)
assert weights["projection"].data_ptr() == weights["embedding.weight"].data_ptr()
raw = open(folder + "/model.safetensors", "rb").read()
length = struct.unpack("<Q", raw[:8])[0]
header = json.loads(raw[8:8 + length])
tied = header.pop("__metadata__")
assert tied.pop("format") == "pt" and sorted(*tied.items()) == ["embedding.weight", "projection"], tied
for name, entry in header.items():
    begin, end = entry["data_offsets"]
    saved = torch.frombuffer(bytearray(raw[8 + length + begin:8 + length + end]), dtype=torch.bfloat16)
    assert entry["dtype"] == "BF16" and weights[name].dtype == torch.bfloat16
    assert torch.equal(saved.view(entry["shape"]), weights[name]), name
)";
  const std::string command =
      python().string() + " " + (folder.path() / "check.py").string() + " " + folder.path().string();
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

TEST(ExportErrors, NameTheFileAndTheFix) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net);
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.save_16bit_model(""); }), "the directory is empty");
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.save_16bit_model("/nowhere", {.name = "weights.npz"}); }),
                "'weights.npz' names no format; use a name that ends in .safetensors");
    EXPECT_SAYS(error_of<IoError>([&] { engine.save_16bit_model("/proc/trireme"); }), "/proc/trireme");
  });
}

}  // namespace
}  // namespace trireme
