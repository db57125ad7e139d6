// Faults of a step function over stages are told on every stage, by name, and at once.
#include <ATen/ops/mse_loss.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/pipeline/step_engine.h"

namespace trireme::testing {
namespace step_faults {

using namespace std::chrono_literals;
namespace nn = torch::nn;
using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Net : nn::Module {
  nn::Linear first{register_module("first", nn::Linear(6, 8))}, second{register_module("second", nn::Linear(8, 6))};
};

int stage_of(const std::string& name) { return name.starts_with("second") ? 1 : 0; }

/// A stage of two with its engine, and the parts of a program that go wrong on one of them.
struct Stage {
  explicit Stage(Group& world, int data = 1)
      : id(world.rank() / data),
        engine(world, Topology({{"pipe", 2}, {"data", data}}), net, stage_of, {}, {.config = [&] {
                 Config config;
                 config.batch = {.train_batch_size = 12 * data,
                                 .train_micro_batch_size_per_gpu = 3,
                                 .gradient_accumulation_steps = 4};
                 config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 0.01};
                 return config;
               }()}) {}
  using Between = std::function<Tensor(const Tensor& x)>;

  Tensor x() const { return at::full({3, 6}, 0.5); }
  /// The loss with `of_first` of what stage 0 has computed, and `of_second` of what stage 1 has.
  Tensor loss(const Between& of_first, const Between& of_second) {
    return at::mse_loss(of_second(net.second(of_first(net.first(x())))), x());
  }
  Tensor loss() { return loss(as_it_is, as_it_is); }
  static Tensor as_it_is(const Tensor& tensor) { return tensor; }

  void step(const std::function<Tensor()>& forward, int micro_batches = 4) {
    (void)engine.step(micro_batches, [&](int) {
      const Tensor loss = forward();
      engine.backward(loss);
      return Tensors{loss};
    });
  }

  Net net;
  const int id;
  StepEngine engine;
};

/// Runs `body` on two stages, each of which must throw in it within a second. Their texts.
template <class Thrown = std::exception>
std::vector<std::string> errors_of(const std::function<void(Stage&)>& body, int good_steps = 0) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](Rank& rank) {
    manual_seed(1);
    Stage stage(rank.world());
    for (int i = 0; i < good_steps; ++i) stage.step([&] { return stage.loss(); });
    const auto begun = std::chrono::steady_clock::now();
    texts[rank.id()] = error_of<Thrown>([&] { body(stage); });
    EXPECT_LT(std::chrono::steady_clock::now() - begun, 20s);  // not by the group's timeout, a minute
    rank.world().barrier();
    stage.engine.destroy();
  });
  return texts;
}

// --- programs that differ by stage -----------------------------------------------------------------------------------

struct Difference {
  const char* name;
  /// A forward pass that differs between stages.
  Tensor (*loss)(Stage& stage);
  std::vector<std::string> parts;  ///< of the text on every stage
};

const std::string kOther = "every stage has to run the same operators: look for what differs by rank";

const Difference kDifferences[] = {
    {"ABranchOverAnOperatorOfTheFirstStage",
     [](Stage& s) { return s.loss([&](const Tensor& x) { return s.id == 0 ? x.relu() : x; }, s.as_it_is); },
     {"aten::relu", "aten::t"}},
    {"ABranchOverAnOperatorOfTheSecondStage",
     [](Stage& s) { return s.loss(s.as_it_is, [&](const Tensor& x) { return s.id == 0 ? x.relu() : x; }); },
     {"aten::relu", "aten::mse_loss"}},
    {"ABranchOverAnOperatorThatEveryStageRuns",
     [](Stage& s) {
       if (s.id == 1) (void)s.x().relu();
       return s.loss();
     },
     {"stage 1 ran aten::relu"}},
    {"ABranchThatReadsAValue",
     [](Stage& s) {
       return s.loss([&](const Tensor& x) { return s.id == 0 ? x * x.sum().item<double>() : x; }, s.as_it_is);
     },
     {"aten::sum", "aten::t"}},
    {"AnOperatorMoreAtTheEnd",
     [](Stage& s) {
       const Tensor loss = s.loss();
       return s.id == 0 ? loss * 1 : loss;
     },
     {"aten::mul.Scalar"}},
    {"AnotherRateOfDropout",
     [](Stage& s) {
       return s.loss([&](const Tensor& x) { return at::dropout(x, s.id == 0 ? 0.1 : 0.2, true); }, s.as_it_is);
     },
     {"aten::dropout", "with other arguments"}},
    {"ANumberThatOneStageDraws",
     [](Stage& s) { return s.loss(s.as_it_is, [&](const Tensor& x) { return x * (0.5 + s.id); }); },
     {"aten::mul.Scalar", "with other arguments"}},
    {"AnotherSize",
     [](Stage& s) {
       const Tensor loss = s.loss();
       (void)at::ones({2 + s.id}).relu();
       return loss;
     },
     {"aten::ones", "with other arguments"}},
    {"NoGradientsWithinOneStage",
     [](Stage& s) {
       const at::AutoGradMode mode(s.id == 0);
       return s.loss().detach().requires_grad_();
     },
     {"aten::full", "with other arguments, or with gradients"}},
};

class Differences : public ::testing::TestWithParam<std::tuple<Difference, int>> {};

TEST_P(Differences, AreToldOnEveryStageWithBothOperators) {
  const auto& [difference, good_steps] = GetParam();
  const auto texts =
      errors_of<CommError>([&](Stage& stage) { stage.step([&] { return difference.loss(stage); }); }, good_steps);
  for (const std::string& text : texts) {
    for (const std::string& part : difference.parts) EXPECT_SAYS(text, part);
    EXPECT_SAYS(text, kOther);
    EXPECT_SAYS(text, "micro-batch ");
  }
}

INSTANTIATE_TEST_SUITE_P(Each, Differences,
                         ::testing::Combine(::testing::ValuesIn(kDifferences), ::testing::Values(0, 2)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "InStep" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(StepFaults, AStageThatReturnsOtherTensors) {
  for (const std::string& text : errors_of<CommError>([](Stage& stage) {
         (void)stage.engine.step(2, [&](int) {
           const Tensor loss = stage.loss();
           stage.engine.backward(loss);
           return stage.id == 0 ? Tensors{loss, loss} : Tensors{loss};
         });
       }))
    EXPECT_SAYS(text, "ran the same operators and returned other tensors in micro-batch 0");
}

TEST(StepFaults, AStageThatDoesNotCallBackward) {
  for (const int without : {0, 1})
    for (const std::string& text : errors_of<CommError>([&](Stage& stage) {
           (void)stage.engine.step(2, [&](int) {
             const Tensor loss = stage.loss();
             if (stage.id != without) stage.engine.backward(loss);
             return Tensors{loss};
           });
         }))
      EXPECT_SAYS(text, str("stage ", 1 - without, " ran backward()"));
}

// --- errors of a program ---------------------------------------------------------------------------------------------

struct OwnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(StepFaults, AnExceptionOfOneStageEndsAll) {
  for (const int thrower : {0, 1})
    for (const bool is_late : {false, true}) {
      const auto texts = errors_of(
          [&](Stage& stage) {
            int micro_batch = 0;
            try {
              stage.step([&] {
                if (!is_late && stage.id == thrower && micro_batch == 2) throw OwnError("no such file: x.txt");
                const Tensor loss = stage.loss();
                if (is_late && stage.id == thrower && micro_batch == 2) throw OwnError("no such file: x.txt");
                ++micro_batch;
                return loss;
              });
            } catch (const OwnError&) {
              EXPECT_EQ(stage.id, thrower);
              throw;
            } catch (const CommError&) {
              EXPECT_NE(stage.id, thrower);
              throw;
            }
          },
          1);
      EXPECT_EQ(texts[thrower], "no such file: x.txt");
      EXPECT_SAYS(texts[1 - thrower],
                  str("step failed in stage ", thrower, ", forward, micro-batch 2: no such file: x.txt"));
    }
}

TEST(StepFaults, NothingRunsAfterAStepThatFailed) {
  const auto texts = errors_of<StateError>([](Stage& stage) {
    (void)error_of([&] { stage.step([&]() -> Tensor { throw OwnError("no such file"); }); });
    EXPECT_SAYS(error_of<StateError>([&] { stage.engine.update(); }), "this engine is spent");
    stage.step([&] { return stage.loss(); });
  });
  for (const std::string& text : texts) {
    EXPECT_SAYS(text, "this engine is spent; make a new one");
    EXPECT_SAYS(text, "no such file");
  }
}

TEST(StepFaults, BackwardOfATensorWithoutAGraph) {
  for (const auto& without_graph : std::vector<std::function<Tensor(Stage&)>>{
           [](Stage& stage) { return stage.x().sum(); },
           [](Stage& stage) { return stage.loss().detach(); },
       })
    for (const std::string& text :
         errors_of<Error>([&](Stage& stage) { stage.step([&] { return without_graph(stage); }); }))
      EXPECT_SAYS(text, "backward: the tensor needs no gradient; it has to come from the model's parameters");
}

TEST(StepFaults, BackwardOfATensorOfManyElements) {
  for (const std::string& text : errors_of<Error>(
           [&](Stage& stage) { stage.step([&] { return stage.net.second(stage.net.first(stage.x())); }); }))
    EXPECT_SAYS(text, "backward: a tensor of sizes [3, 6] needs a gradient of these sizes, got none");
}

TEST(StepFaults, BackwardOutsideOfAStep) {
  for (const std::string& text :
       errors_of<StateError>([](Stage& stage) { stage.engine.backward(stage.x().requires_grad_().sum()); }))
    EXPECT_SAYS(text, "backward: call it inside of a step function");
}

TEST(StepFaults, AGradientThatIsAskedForInsideOfAStep) {
  for (const bool is_of_first : {false, true}) {
    const auto texts = errors_of([&](Stage& stage) {
      stage.step([&] {
        const Tensor loss = stage.loss();
        return torch::autograd::grad({loss}, {(is_of_first ? stage.net.first : stage.net.second)->weight})[0].sum();
      });
    });
    // A stage without a way through the graph from one to the other has libtorch's own error.
    EXPECT_SAYS(texts[0], "smp: a backward pass was started inside of a step function");
    if (is_of_first) continue;
    EXPECT_SAYS(texts[1], "smp: a backward pass was started inside of a step function");
  }
}

// --- numbers that are not here
// -----------------------------------------------------------------------------------------

TEST(StepFaults, AWeightOfAnotherStageOutsideOfAStep) {
  const auto texts = errors_of([](Stage& stage) {
    const Tensor theirs = stage.id == 0 ? stage.net.second->weight : stage.net.first->weight;
    EXPECT_EQ(stage.engine.home_of(theirs)->stage, 1 - stage.id);
    (void)theirs.sum();
  });
  EXPECT_SAYS(texts[0], "'second.weight' is on stage 1: inside of a step function every stage may use it in operators");
  EXPECT_SAYS(texts[1], "'first.weight' is on stage 0: inside of a step function every stage may use it in operators");
}

TEST(StepFaults, TheDataOfATensorOfAnotherStage) {
  for (const bool is_inside : {false, true}) {
    const auto texts = errors_of([&](Stage& stage) {
      const auto read = [&] {
        (void)(stage.id == 0 ? stage.net.second : stage.net.first)->weight.const_data_ptr();
        return stage.loss();
      };
      if (is_inside) return stage.step(read);
      (void)read();
    });
    EXPECT_SAYS(texts[0], "'second.weight' is on stage 1: inside of a step function");
    EXPECT_SAYS(texts[1], "'first.weight' is on stage 0: inside of a step function");
  }
}

TEST(StepFaults, TheDataOfAResultOfAnotherStage) {
  const auto texts = errors_of([](Stage& stage) {
    stage.step([&] {
      const Tensor loss = stage.loss();
      (void)loss.const_data_ptr();
      return loss;
    });
  });
  for (const std::string& text : texts)
    EXPECT_SAYS(text, "this tensor was computed by stage 1, and its numbers are there alone: read it by an operator");
}

// --- calls that differ by stage
// ----------------------------------------------------------------------------------------

TEST(StepFaults, AnotherNumberOfMicroBatches) {
  for (const std::string& text :
       errors_of<ConfigError>([](Stage& stage) { stage.step([&] { return stage.loss(); }, stage.id == 0 ? 4 : 3); }))
    EXPECT_SAYS(text, "step: 4 micro-batches on stage 0 and 3 on stage 1");
}

TEST(StepFaults, GradientsThatAreOffOnOneStage) {
  for (const std::string& text : errors_of<ConfigError>([](Stage& stage) {
         const at::AutoGradMode mode(stage.id == 0);
         stage.step([&] { return stage.loss(); });
       }))
    EXPECT_SAYS(text, "step: gradients are on on stage 0 and off on stage 1");
}

TEST(StepFaults, AParameterThatIsFrozenOnOneStage) {
  for (const std::string& text : errors_of<StateError>([](Stage& stage) {
         stage.net.second->weight.requires_grad_(stage.id == 0);
         stage.step([&] { return stage.loss(); });
       }))
    EXPECT_SAYS(text, "step: 'second.weight' is trained on stage 0, and 'second.weight' is frozen on stage 1");
}

TEST(StepFaults, AParameterThatWasGivenOtherMemory) {
  const std::string said = "step: parameter 'second.weight' was given other memory (set_data, or .data = …) since";
  for (const int stage_that_does : {0, 1})
    for (const std::string& text : errors_of<StateError>([&](Stage& stage) {
           if (stage.id == stage_that_does) stage.net.second->weight.set_data(at::ones({6, 8}));
           stage.step([&] { return stage.loss(); });
         }))
      EXPECT_SAYS(text, said + " stage 1 owns it");
}

TEST(StepFaults, AParameterThatWasFrozenAtFirst) {
  run_ranks(2, [](Rank& rank) {
    Net net;
    net.second->weight.requires_grad_(false);
    Config config;
    config.batch = {.train_batch_size = 3, .train_micro_batch_size_per_gpu = 3, .gradient_accumulation_steps = 1};
    config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 0.01};
    StepEngine engine(rank.world(), Topology({{"pipe", 2}, {"data", 1}}), net, stage_of, {}, {.config = config});
    const auto step = [&](bool ends_trained) {
      (void)engine.step(1, [&](int) {
        const Tensor loss = net.second(net.first(at::ones({3, 6}))).square().mean();
        engine.backward(loss);
        if (ends_trained) net.second->weight.requires_grad_(true);
        return Tensors{loss};
      });
    };
    step(false);
    engine.update();
    step(true);
    const std::string said = "step: parameter 'second.weight' is trained and was frozen when the model was given to";
    EXPECT_SAYS(error_of<StateError>([&] { engine.update(); }), said);
    EXPECT_SAYS(error_of<StateError>([&] { step(false); }), said);
    net.second->weight.requires_grad_(false);
    engine.update();  // nothing was lost
    engine.destroy();
  });
}

TEST(StepFaults, AnUpdateWithoutGradientsLeavesTheEngineAlive) {
  for (const std::string& text : errors_of<StateError>([](Stage& stage) {
         const at::NoGradGuard no_grad;
         (void)stage.engine.step(1, [&](int) { return Tensors{stage.loss()}; });
         try {
           stage.engine.update();
         } catch (const StateError&) {
           const at::AutoGradMode with_gradients(true);
           stage.step([&] { return stage.loss(); });
           stage.engine.update();
           throw;
         }
       }))
    EXPECT_SAYS(text, "optimizer.step: no step since the last one called backward()");
}

TEST(StepFaults, DataRanksThatAddUpOtherNumbersOfMicroBatches) {
  run_ranks(4, [](Rank& rank) {
    Stage stage(rank.world(), 2);
    stage.step([&] { return stage.loss(); }, rank.id() % 2 == 0 ? 4 : 2);
    EXPECT_SAYS(error_of<StateError>([&] { stage.engine.update(); }),
                "optimizer.step: since the last one 4 micro-batches had a backward pass on rank 0 and 2 on rank 1");
    rank.world().barrier();
    stage.engine.destroy();
  });
}

TEST(StepFaults, AnotherPartitionOnOneRank) {
  run_ranks(2, [](Rank& rank) {
    Net net;
    EXPECT_SAYS(error_of<ConfigError>([&] {
                  StepEngine engine(rank.world(), Topology({{"pipe", 2}, {"data", 1}}), net,
                                    [&](const std::string& name) { return name == "first.bias" ? rank.id() : 0; });
                }),
                "stages of the model: the ranks differ: `'first.bias' on stage 0` on rank 0 and `'first.bias' on stage "
                "1` on rank 1");
    EXPECT_SAYS(error_of<ConfigError>([&] {
                  StepEngine engine(rank.world(), Topology({{"pipe", 2}, {"data", 1}}), net,
                                    [&](const std::string&) { return 2; });
                }),
                "'first.weight' on stage 2: there are stages 0 to 1");
  });
}

// --- a rank that dies
// --------------------------------------------------------------------------------------------------

int train(Group& world, const std::string& killed_in) {
  Stage stage(world);
  for (int number = 0;; ++number) {
    stage.step([&] {
      const bool dies = world.rank() == 1 && number == 2;
      if (dies && killed_in == "forward") ::raise(SIGKILL);
      const Tensor loss = stage.loss();
      if (dies && killed_in == "backward")
        stage.net.second->weight.register_hook([](const Tensor&) { ::raise(SIGKILL); });
      return loss;
    });
    if (world.rank() == 1 && number == 2 && killed_in == "update") ::raise(SIGKILL);
    stage.engine.update();
  }
}

TEST(StepFaults, AKilledStageIsNamed) {
  for (const std::string where : {"forward", "backward", "update"}) {
    const auto results = run_processes(2, train, {.argument = where});
    EXPECT_EQ(results[1].signal, SIGKILL);
    EXPECT_EQ(results[0].exit_code, 1);
    EXPECT_SAYS(results[0].error_text, "rank 1");
    EXPECT_SAYS(results[0].error_text, "died");
    EXPECT_LE(results[0].seconds - results[1].seconds, 5.0) << where;
  }
}

}  // namespace step_faults
}  // namespace trireme::testing
