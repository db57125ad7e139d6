// Buffers as the module has them now: made in forward, given another shape, different on ranks.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <string>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/captured_log.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using namespace testing;

/// Adds its inputs up in a buffer that the first forward makes.
struct LateBufferImpl : torch::nn::Module {
  LateBufferImpl() { w = register_parameter("w", torch::tensor({2.0f, 3.0f})); }
  at::Tensor forward(const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    if (!seen.defined()) seen = register_buffer("seen", at::zeros({2}));
    seen.add_(x);
    const torch::AutoGradMode with_grad(true);
    return (w * x).sum();
  }
  at::Tensor w, seen;
};
TORCH_MODULE(LateBuffer);

template <class Net>
void train_once(ModelEngine<Net>& engine, const at::Tensor& input) {
  engine.backward(engine(input));
  engine.step();
}

TEST(LateBuffers, AreMadeEqualSavedExportedAndLoaded) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    LateBuffer net, other_net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2)});
    train_once(engine, vec(1 + static_cast<float>(rank.id()), 0));
    train_once(engine, vec(1, static_cast<float>(rank.id())));
    EXPECT_EQ(values(net->seen), (Floats{2, 0}));  // rank 0's
    engine.save_checkpoint(folder.path() / "saved");
    engine.save_16bit_model(folder.path() / "model");
    EXPECT_EQ(values(read_safetensors(folder.path() / "model" / "model.safetensors").at("seen")), (Floats{2, 0}));

    auto other = initialize(rank.world(), other_net, {.config = sgd_config(2)});
    (void)other(vec(7, 7));
    other.load_checkpoint(folder.path() / "saved");
    EXPECT_EQ(values(other_net->seen), (Floats{2, 0}));
  });
}

TEST(LateBuffers, OfAnotherShapeThanAtInitializeAreTheOnesThatAreSaved) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    const at::Tensor buffer = net->register_buffer("table", at::zeros({2}));
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2)});
    at::Tensor(buffer).set_data(at::full({3}, rank.id() + 1.0f));
    train_once(engine, vec(1, 0));
    EXPECT_EQ(values(buffer), (Floats{1, 1, 1}));
    engine.save_16bit_model(folder.path());
    EXPECT_EQ(values(read_safetensors(folder.path() / "model.safetensors").at("table")), (Floats{1, 1, 1}));
  });
}

TEST(LateBuffers, ThatDifferInShapeStayEachRanksOwnWhichIsToldOnce) {
  const CapturedLog log;
  run_ranks(2, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2)});
    const at::Tensor same = net->register_buffer("same", at::full({2}, rank.id() + 1.0f));
    const at::Tensor odd = net->register_buffer("odd", at::full({2 + rank.id()}, rank.id() + 1.0f));
    for (int step = 0; step < 3; ++step) train_once(engine, vec(1, 0));
    EXPECT_EQ(values(same), (Floats{1, 1}));
    EXPECT_EQ(values(odd), rank.id() == 0 ? (Floats{1, 1}) : (Floats{2, 2, 2}));
  });
  EXPECT_SAYS(log.text(), "buffer 'odd' of shape [2] on rank 0 is missing on another rank");
  EXPECT_EQ(log.text().find("'same'"), std::string::npos);
  const std::string of_rank_1 = "buffer 'odd' of shape [3] on rank 1";
  EXPECT_EQ(log.text().find(of_rank_1), log.text().rfind(of_rank_1));
}

TEST(LateBuffers, ThatAreViewsOfParametersAreRefusedByName) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1)});
    net->register_buffer("view", net->w.detach());
    const TemporaryFolder folder;
    const std::string text = error_of<StateError>([&] { engine.save_checkpoint(folder.path()); });
    EXPECT_SAYS(text, "buffer 'view' is a view of a parameter");
    EXPECT_SAYS(text, "clone() it");
  });
}

}  // namespace
}  // namespace trireme
