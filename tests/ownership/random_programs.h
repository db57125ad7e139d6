// Random programs over stages: what a user may write between a model's inputs and its loss, statement by statement.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/ownership/stages.h"

namespace trireme::testing {

/// Facts of a program, known once it ran in one process.
struct ProgramNotes {
  std::string text;                  ///< its statements
  bool may_round_otherwise = false;  ///< see Pieces: a view is used after its memory was written
};

/// The parameters and buffers of one stage.
struct StagePart : torch::nn::Module {
  static constexpr int64_t kRows = 4, kWidth = 8, kWords = 10;

  explicit StagePart(at::Generator& generator) {
    const auto add = [&](const std::string& name, at::IntArrayRef sizes) {
      return register_parameter(name, at::randn(sizes, generator, at::kDouble) * 0.4);
    };
    weight = add("weight", {kWidth, kWidth});
    wide = add("wide", {kWidth, 2 * kWidth});
    bias = add("bias", {kWidth});
    scale = add("scale", {kWidth});
    words = add("words", {kWords, kWidth});
    mean = register_buffer("mean", at::zeros({kWidth}, at::kDouble));
    variance = register_buffer("variance", at::ones({kWidth}, at::kDouble));
    sums = register_buffer("sums", at::zeros({kWidth}, at::kDouble));
  }
  at::Tensor weight, wide, bias, scale, words, mean, variance, sums;
};

struct RandomNet : torch::nn::Module {
  RandomNet(int stages, uint64_t seed) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    for (int i = 0; i < stages; ++i)
      parts.push_back(register_module("s" + std::to_string(i), std::make_shared<StagePart>(generator)));
  }
  std::vector<std::shared_ptr<StagePart>> parts;
  at::Tensor kept = at::zeros({StagePart::kWidth}, at::kDouble);  ///< no buffer: every stage has it
};

/// Runs a random program once. Its choices follow from the seed and from what the program reads, so that all stages
/// make the same.
class RandomProgram {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<Tensor>;

  RandomProgram(RandomNet& net, uint64_t seed, const OwnedProgram::Backward& backward, ProgramNotes* notes)
      : net_(net), random_(seed), backward_(backward), notes_(notes), comes_back_(below(2) == 0) {}

  Tensors run(const Tensors& inputs, int statements) {
    words_ = inputs.at(1);
    keep("x", inputs.at(0));
    part();
    linear();
    for (int i = 0; i < statements; ++i) statement();
    return losses();
  }

 private:
  struct Kept {
    std::string name;
    Tensor tensor;
    int64_t version;
  };

  size_t below(size_t count) { return random_() % count; }
  bool one_in(size_t count) { return below(count) == 0; }
  void say(const std::string& text) {
    if (notes_ != nullptr) notes_->text += text + "\n";
  }
  /// A tensor of the program from now on.
  void keep(const std::string& text, const Tensor& tensor) {
    const std::string name = str("t", values_.size());
    say(str(name, " = ", text));
    values_.push_back({name, tensor, tensor._version()});
  }
  /// A tensor of [rows, width]; `text` gets its name.
  Tensor use(size_t place, std::string& text) {
    const Kept& kept = values_[place];
    text = kept.name;
    if (notes_ != nullptr && kept.tensor.is_view() && kept.tensor._version() != kept.version)
      notes_->may_round_otherwise = true;
    return kept.tensor;
  }
  Tensor any(std::string& text) { return use(below(values_.size()), text); }
  /// The tensor that a statement begins with: in a program that does not come back, the newest.
  Tensor first(std::string& text) {
    if (comes_back_) return any(text);
    return use(values_.size() - 1, text);
  }
  /// A stage's parameters; in a program that does not come back, of the same stage or a later one.
  StagePart& part() {
    const size_t count = net_.parts.size();
    if (comes_back_)
      stage_ = below(count);
    else if (stage_ + 1 < count && one_in(4))
      ++stage_;
    return *net_.parts[stage_];
  }

  void linear() {
    std::string x;
    const Tensor from = first(x);
    StagePart& p = part();
    keep(str("tanh(linear(", x, ", s", stage_, "))"), at::tanh(at::linear(from, p.weight, p.bias)));
  }

  void statement() {
    std::string a, b;
    switch (below(24)) {
      case 0:
      case 1:
      case 2:
        return linear();
      case 3: {
        const Tensor x = first(a), y = any(b);
        switch (below(4)) {
          case 0:
            return keep(str(a, " + ", b), x + y);
          case 1:
            return keep(str(a, " * ", b), x * y);
          case 2:
            return keep(str("maximum(", a, ", ", b, ")"), at::maximum(x, y));
          default:
            return keep(str("where(", b, " > 0, ", a, ", ", b, ")"), at::where(y > 0, x, y));
        }
      }
      case 4: {
        const Tensor x = first(a), y = any(b);
        StagePart& p = part();
        return keep(str("linear(cat(", a, ", ", b, "), wide of s", stage_, ")"),
                    at::linear(at::cat({x, y}, 1), p.wide));
      }
      case 5:
        return keep(str("dropout(", a, ")"), at::dropout(first(a), 0.3, true));
      case 6: {
        const Tensor x = first(a);
        const double read = x.mean().item<double>();
        if (read > 0) return keep(str(a, " * 1.5 as its mean is positive"), x * 1.5);
        return keep(str(a, " - 0.1 as its mean is not positive"), x - 0.1);
      }
      case 7:
        return reshape();
      case 8: {
        const Tensor x = first(a), y = any(b);
        return keep(str(a, " + ", b, ".detach()"), x + y.detach());
      }
      case 9:
        return write_buffer();
      case 10:
      case 11:
      case 12:
        return write();
      case 13:
        return by_mask();
      case 14:
        return tie();
      case 15: {
        const Tensor x = first(a);
        StagePart& p = part();
        if (one_in(2))
          return keep(str("batch_norm(", a, ", s", stage_, ")"),
                      at::batch_norm(x, p.scale, p.bias, p.mean, p.variance, true, 0.1, 1e-5, false));
        return keep(str("batch_norm(", a, ", statistics of s", stage_, ")"),
                    at::batch_norm(x, {}, {}, p.mean, p.variance, true, 0.1, 1e-5, false));
      }
      case 16: {
        const Tensor x = first(a);
        StagePart& p = part();
        return keep(str(a, " + embedding of s", stage_), x + at::embedding(p.words, words_));
      }
      case 17:
        return broadcast();
      case 18:
        return list();
      case 19: {
        const at::NoGradGuard no_gradients;
        say("no_grad:");
        if (one_in(2)) return linear();
        const Tensor x = first(a);
        StagePart& p = *net_.parts[stage_];
        say(str("sums of s", stage_, " += ", a));
        if (comes_back_ || x.dim() == 2) p.sums.mul_(0.9).add_(x.mean(0), 0.1);
        return keep(str(a, " + sums of s", stage_), x + p.sums);
      }
      case 20: {
        const Tensor x = first(a);
        StagePart& p = part();
        return keep(str("layer_norm(", a, ", s", stage_, ")"), at::layer_norm(x, {StagePart::kWidth}, p.scale, p.bias));
      }
      case 21:
        return several_results();
      case 22: {
        const Tensor x = first(a);
        net_.kept.add_(x.detach().mean(0), 0.1);
        return keep(str("kept += ", a, "; ", a, " + kept"), x + net_.kept);
      }
      default: {
        const Tensor x = first(a), y = any(b);
        return keep(
            str("attention of ", a, " and ", b),
            at::scaled_dot_product_attention(x.view({1, 2, 2, 8}), y.reshape({1, 2, 2, 8}), x.view({1, 2, 2, 8}))
                .reshape({4, 8}));
      }
    }
  }

  void reshape() {
    std::string a;
    const Tensor x = first(a);
    switch (below(5)) {
      case 0:
        return keep(str(a, ".t().reshape()"), x.t().reshape({4, 8}));
      case 1:
        return keep(str(a, ".view().transpose().reshape()"), x.view({4, 2, 4}).transpose(1, 2).reshape({4, 8}));
      case 2:
        return keep(str(a, ".view().view()"), x.view({2, 16}).view({4, 8}));
      case 3:
        return keep(str(a, ".unsqueeze().squeeze()"), x.unsqueeze(1).squeeze(1));
      default:
        return keep(str(a, ".flip()[half], itself"),
                    at::cat({x.slice(0, 2), x.slice(0, 0, 2).flip(1)}, 0).contiguous());
    }
  }

  /// Values of a stage into a tensor that every stage made.
  void write_buffer() {
    std::string a, b;
    const Tensor buffer = at::zeros({4, 10}, at::kDouble), x = first(a);
    const Tensor view = buffer.slice(1, 1, 9);
    Tensor(view).copy_(x);
    if (one_in(2)) {
      const Tensor y = any(b);
      buffer.slice(1, 0, 8).add_(y);
      return keep(str("buffer[1:9] = ", a, ", buffer[0:8] += ", b), buffer.slice(1, 2) + 0);
    }
    if (one_in(2)) return keep(str("buffer[1:9] = ", a), view);
    return keep(str("buffer.index_add_(", a, ")"),
                Tensor(at::zeros({4, 8}, at::kDouble)).index_add_(0, at::arange(4).flip(0), x));
  }

  void write() {
    std::string a, b;
    Tensor x = first(a);
    if (!one_in(4)) {
      x = x * 1;
      keep(a + " * 1", x);
      a = values_.back().name;
    }
    const Tensor y = any(b);
    switch (below(9)) {
      case 0:
        say(str(a, ".mul_(0.5)"));
        x.mul_(0.5);
        return;
      case 1:
        say(str(a, ".add_(", b, ")"));
        x.add_(y);
        return;
      case 2:
        say(str(a, ".relu_()"));
        x.relu_();
        return;
      case 3:
        say(str(a, ".masked_fill_(", b, " > 0)"));
        x.masked_fill_(y > 0, 0.25);
        return;
      case 4:
        say(str(a, "[:, :4] = ", b, "[:, 4:]"));
        x.slice(1, 0, 4).copy_(y.slice(1, 4));
        return;
      case 5:
        say(str(a, "[1] *= ", b, "[2]"));
        x.select(0, 1).mul_(y.select(0, 2));
        return;
      case 6:
        say(str(a, ".data.mul_(0.9)"));
        x.detach().mul_(0.9);
        return;
      case 7:
        say(str(a, ".index_put_(", b, ")"));
        x.index_put_({at::tensor({0, 2})}, y.slice(0, 0, 2));
        return;
      default: {
        say(str(a, " with a view of it, written, the view used"));
        const Tensor row = x.select(0, 1);
        x.mul_(0.75);
        if (notes_ != nullptr) notes_->may_round_otherwise = true;
        return keep(str(a, " + row 1 of it"), x + row);
      }
    }
  }

  void by_mask() {
    std::string a, b;
    const Tensor x = first(a), y = any(b);
    const Tensor mask = y > 0;
    switch (below(5)) {
      case 0:
        return keep(str(a, " + ", a, "[", b, " > 0].sum()"), x + x.index({mask}).sum());
      case 1:
        return keep(str(a, " * masked_select(", a, ", ", b, " > 0).tanh().sum()"),
                    x * at::masked_select(x, mask).tanh().sum());
      case 2: {
        const Tensor rows = mask.select(1, 0).nonzero().flatten();
        return keep(str(a, " + ", a, "[nonzero(", b, "[:, 0] > 0)]"), x + x.index_select(0, rows).sum(0));
      }
      case 3: {
        Tensor written = x * 1;
        written.index_put_({mask}, 0.5);
        return keep(str(a, "*1, [", b, " > 0] = 0.5"), written);
      }
      default: {
        const int64_t count = mask.sum().item<int64_t>();
        return keep(str(a, " / (1 + count of ", b, " > 0)"), x / (1.0 + static_cast<double>(count)));
      }
    }
  }

  void tie() {
    std::string a;
    const Tensor x = first(a);
    StagePart& p = part();
    switch (below(4)) {
      case 0:
        return keep(str(a, " @ weight of s", stage_, ".t() * 0.5"), at::matmul(x, p.weight.t() * 0.5));
      case 1:
        return keep(str("tanh(", a, " @ weight @ weight of s", stage_, ")"),
                    at::tanh(at::matmul(at::matmul(x, p.weight), p.weight)));
      case 2:
        return keep(str(a, " by the embedding of s", stage_, " and its transpose"),
                    at::matmul(at::matmul(x, p.words.t()), p.words));
      default:
        return keep(str(a, " * scale of s", stage_), x * p.scale);
    }
  }

  void broadcast() {
    std::string a, b;
    const Tensor x = first(a), y = any(b);
    switch (below(4)) {
      case 0:
        return keep(str(a, ".mean(0).expand + ", b), x.mean(0, true).expand({4, 8}) + y);
      case 1:
        return keep(str(a, ".mean(0).expand"), x.mean(0, true).expand({4, 8}));
      case 2:
        return keep(str(a, ".sum(1) * ", b), x.sum(1, true) * y);
      default:
        return keep(str("linear(", a, ".mean(0).expand)"), at::linear(x.mean(0, true).expand({4, 8}), part().weight));
    }
  }

  void list() {
    std::string a, b;
    const Tensor x = first(a);
    switch (below(4)) {
      case 0: {
        const Tensors halves = x.chunk(2, 1);
        return keep(str("cat of the halves of ", a), at::cat({halves[1], halves[0]}, 1));
      }
      case 1: {
        const Tensors parts = x.split(3, 1);
        return keep(str("cat of splits of ", a), at::cat({parts[2], parts[0], parts[1]}, 1));
      }
      case 2: {
        Tensors rows = x.unbind(0);
        std::swap(rows[0], rows[3]);
        return keep(str("stack of rows of ", a), at::stack(rows, 0));
      }
      default: {
        const Tensors halves = x.unsafe_chunk(2, 1);
        const Tensor y = any(b);
        return keep(str("products of the halves of ", a, ", ", b),
                    at::cat({halves[0] * halves[1], y.slice(1, 0, 4)}, 1));
      }
    }
  }

  void several_results() {
    std::string a;
    const Tensor x = first(a);
    switch (below(4)) {
      case 0: {
        const auto [values, places] = x.max(0, true);
        return keep(str(a, " - its greatest, at their places"), x - values + places.to(at::kDouble) * 0.01);
      }
      case 1: {
        const auto [values, places] = x.topk(8, 1);
        return keep(str("gather of topk of ", a), values + x.gather(1, places));
      }
      case 2: {
        const auto [deviation, mean] = at::std_mean(x, at::IntArrayRef{1}, 1, true);
        return keep(str(a, " normalized"), (x - mean) / (deviation + 1));
      }
      default: {
        const auto [sorted, places] = x.sort(1);
        return keep(str("sort of ", a), sorted.cumsum(1) * 0.1);
      }
    }
  }

  Tensors losses() {
    std::string a, b;
    const Tensor last = first(a), other = any(b);
    Tensors results{(last * last).mean(), other};
    say(str("backward of ", a, ", returned: ", b, ", kept"));
    if (comes_back_) {
      std::string c;
      results[0] = results[0] + any(c).abs().mean();
      say("and of " + c);
    }
    if (results[0].requires_grad()) backward_(results[0]);
    if (one_in(3) && last.requires_grad()) {
      say("and of the mean of " + a);
      backward_(last.mean());
    }
    results.push_back(net_.kept.clone());
    return results;
  }

  RandomNet& net_;
  std::mt19937_64 random_;
  const OwnedProgram::Backward& backward_;
  ProgramNotes* const notes_;
  const bool comes_back_;
  size_t stage_ = 0;
  at::Tensor words_;
  std::vector<Kept> values_;
};

inline OwnedProgram random_program(int stages, int statements, uint64_t seed, ProgramNotes* notes = nullptr) {
  auto net = std::make_shared<RandomNet>(stages, seed);
  return {
      net, [](const std::string& name) { return name[1] - '0'; },
      [=](const std::vector<at::Tensor>& inputs, const OwnedProgram::Backward& backward) {
        if (notes != nullptr) notes->text.clear();
        return RandomProgram(*net, seed, backward, notes).run(inputs, statements);
      },
      [=](int m) {
        at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed * 100 + m);
        const at::Tensor x = at::randn({StagePart::kRows, StagePart::kWidth}, generator, at::kDouble);
        return std::vector<at::Tensor>{x, at::randint(0, StagePart::kWords, {StagePart::kRows}, generator, at::kLong)};
      }};
}

/// The result of comparing a number of programs.
struct RandomPrograms {
  int sequential_alone = 0, rounded = 0;
};

/// Compares `count` programs over 2 to 4 stages with one process, from `seed` on. Those that libtorch refuses, as they
/// write what backward needs, are left out.
inline RandomPrograms compare_random_programs(uint64_t seed, int count) {
  const char* const length = std::getenv("PROGRAM_STATEMENTS");  // to find where a program goes wrong
  RandomPrograms found;
  for (; count > 0 && !::testing::Test::HasFailure(); ++seed) {
    const int stages = 2 + static_cast<int>(seed % 3);
    const int statements = length != nullptr ? std::atoi(length) : 6 + static_cast<int>(seed % 20);
    constexpr int kMicroBatches = 3;
    ProgramNotes notes;
    StepResult one;
    try {
      one = run_over_stages([&] { return random_program(stages, statements, seed, &notes); }, 1, kMicroBatches,
                            "sequential");
    } catch (const std::exception&) {
      continue;
    }
    --count;
    SCOPED_TRACE(str("seed ", seed, ", ", stages, " stages, ", statements, " statements\n", notes.text));
    bool comes_back = false;
    for (const std::string schedule : {"sequential", "gpipe", "1f1b"}) {
      if (comes_back) break;
      StepResult staged;
      try {
        staged =
            run_over_stages([&] { return random_program(stages, statements, seed); }, stages, kMicroBatches, schedule);
      } catch (const std::exception& error) {
        ADD_FAILURE() << schedule << ": " << error.what();
        break;
      }
      comes_back = staged.comes_back;
      const std::string difference = first_difference(staged, one);
      if (notes.may_round_otherwise && !difference.empty()) {
        EXPECT_EQ(first_difference(staged, one, 1e-9), "") << schedule;
        ++found.rounded;
      } else {
        EXPECT_EQ(difference, "") << schedule;
      }
    }
    found.sequential_alone += comes_back;
  }
  return found;
}

}  // namespace trireme::testing
