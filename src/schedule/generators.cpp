// The schedules that are published, each from its description.
#include <algorithm>
#include <array>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/schedule/schedule.h"

namespace trireme::pipeline {
namespace {

using Computations = std::vector<std::vector<Computation>>;

void check_sizes(const char* name, int stages, int micro_batches, int at_least = 1) {
  if (stages < 1) throw ConfigError(str("schedule '", name, "': stages=", stages, "; use 1 or more"));
  if (micro_batches < at_least)
    throw ConfigError(str("schedule '", name, "': micro_batches=", micro_batches, "; with ", stages,
                          " stages it needs ", at_least, " or more"));
}

/// The next micro-batch of each kind and chunk, for orders that say only how many of each come when.
class Order {
 public:
  explicit Order(int micro_batches) : micro_batches_(micro_batches) {}

  /// Nothing where all micro-batches are done.
  void add(Kind kind, int chunk = 0) {
    int& next = next_[static_cast<size_t>(kind)][chunk];
    if (next < micro_batches_) list_.push_back({kind, chunk, next++});
  }
  void forward(int chunk = 0) { add(Kind::kForward, chunk); }
  void backward(int chunk = 0) { add(Kind::kBackward, chunk); }
  void backward_input(int chunk = 0) { add(Kind::kBackwardInput, chunk); }
  void backward_weight(int chunk = 0) { add(Kind::kBackwardWeight, chunk); }
  int count(Kind kind, int chunk = 0) const { return next_[static_cast<size_t>(kind)][chunk]; }
  void push(const Computation& computation) { list_.push_back(computation); }
  std::vector<Computation> take() { return std::move(list_); }

 private:
  const int micro_batches_;
  std::array<std::array<int, 2>, static_cast<size_t>(Kind::kStep) + 1> next_{};
  std::vector<Computation> list_;
};

/// The computation of stage `stage` at step `step` of DeepSpeed's 1F1B.
struct Turn {
  bool is_forward;
  int micro_batch;  ///< may be none: below 0 or beyond the last one
};
Turn turn_of(int step, int stage, int stages) {
  const bool is_even_stage = stage % 2 == 0;
  const bool is_forward = step % 2 == stage % 2;
  const int half = step / 2;  // rounded down
  if (is_forward) return {true, half - stage / 2};
  return {false, is_even_stage ? half - stages + 1 + stage / 2 : half - stages + (stage + 1) / 2};
}

}  // namespace

Schedule one_f_one_b(int stages, int micro_batches) {
  check_sizes("1f1b", stages, micro_batches);
  Schedule schedule{.name = "1f1b", .stages = stages, .micro_batches = micro_batches, .streams = {}, .buffers = {}};
  const auto is_valid = [&](int micro_batch) { return micro_batch >= 0 && micro_batch < micro_batches; };
  for (int stage = 0; stage < stages; ++stage) {
    const int buffers = std::max(2, std::min(stages - stage, micro_batches));
    schedule.buffers.push_back({buffers});
    auto& stream = schedule.streams.emplace_back();
    int before = -1;  // the micro-batch of the step before
    for (int index = 0; index < 2 * (micro_batches + stages - 1); ++index) {
      const auto [is_forward, micro_batch] = turn_of(index, stage, stages);
      Step& step = stream.emplace_back();
      const auto add = [&](Kind kind, int of, int peer = -1) {
        step.push_back({.kind = kind, .micro_batch = of, .buffer = of % buffers, .peer = peer});
      };
      // In this order, so that of two neighbours one sends what the other receives.
      if (is_forward) {
        if (is_valid(before) && stage > 0) add(Kind::kSendGradient, before, stage - 1);
        if (is_valid(micro_batch) && stage > 0) add(Kind::kReceiveActivation, micro_batch, stage - 1);
      } else {
        if (is_valid(micro_batch) && stage < stages - 1) add(Kind::kReceiveGradient, micro_batch, stage + 1);
        if (is_valid(before) && stage < stages - 1) add(Kind::kSendActivation, before, stage + 1);
      }
      if (is_valid(micro_batch)) {
        if (is_forward && (stage == 0 || stage == stages - 1)) add(Kind::kLoadMicroBatch, micro_batch);
        add(is_forward ? Kind::kForward : Kind::kBackward, micro_batch);
      }
      before = micro_batch;
    }
    for (const Kind kind : {Kind::kReduceTiedGradients, Kind::kReduceGradients, Kind::kStep})
      stream.back().push_back({.kind = kind});
  }
  return schedule;
}

Schedule inference(int stages, int micro_batches) {
  check_sizes("inference", stages, micro_batches);
  Schedule schedule{
      .name = "inference", .stages = stages, .micro_batches = micro_batches, .streams = {}, .buffers = {}};
  for (int stage = 0; stage < stages; ++stage) {
    schedule.buffers.push_back({2});
    auto& stream = schedule.streams.emplace_back();
    for (int index = 0; index < micro_batches + stages - 1; ++index) {
      const int micro_batch = index - stage, before = micro_batch - 1;
      // The buffers alternate by step, so that neighbours use different ones at a time.
      const int receives = (index + stage) % 2, sends = 1 - receives;
      const auto is_valid = [&](int candidate) { return candidate >= 0 && candidate < micro_batches; };
      Step& step = stream.emplace_back();
      const auto add = [&](Kind kind, int of, int buffer, int peer = -1) {
        step.push_back({.kind = kind, .micro_batch = of, .buffer = buffer, .peer = peer});
      };
      if (is_valid(micro_batch) && (stage == 0 || stage == stages - 1))
        add(Kind::kLoadMicroBatch, micro_batch, receives);
      const auto send = [&] {
        if (is_valid(before) && stage < stages - 1) add(Kind::kSendActivation, before, sends, stage + 1);
      };
      const auto receive = [&] {
        if (is_valid(micro_batch) && stage > 0) add(Kind::kReceiveActivation, micro_batch, receives, stage - 1);
      };
      if (stage % 2 == 0) {
        send();
        receive();
      } else {
        receive();
        send();
      }
      if (is_valid(micro_batch)) add(Kind::kForward, micro_batch, receives);
    }
  }
  return schedule;
}

Schedule data_parallel(int micro_batches) {
  check_sizes("data-parallel", 1, micro_batches);
  Schedule schedule{
      .name = "data-parallel", .stages = 1, .micro_batches = micro_batches, .streams = {{}}, .buffers = {{1}}};
  for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
    Step& step = schedule.streams[0].emplace_back();
    for (const Kind kind : {Kind::kLoadMicroBatch, Kind::kForward, Kind::kBackward})
      step.push_back({.kind = kind, .micro_batch = micro_batch, .buffer = 0});
  }
  for (const Kind kind : {Kind::kReduceGradients, Kind::kStep}) schedule.streams[0].back().push_back({.kind = kind});
  return schedule;
}

Schedule gpipe(int stages, int micro_batches) {
  check_sizes("gpipe", stages, micro_batches);
  Order order(micro_batches);
  for (int i = 0; i < micro_batches; ++i) order.forward();
  for (int i = 0; i < micro_batches; ++i) order.backward();
  return assemble("gpipe", stages, micro_batches, 1, PartOrder::kLoop, Computations(stages, order.take()));
}

Schedule interleaved(int stages, int micro_batches, int chunks) {
  check_sizes("interleaved", stages, micro_batches);
  if (chunks < 1) throw ConfigError(str("schedule 'interleaved': chunks=", chunks, "; use 1 or more"));
  if (micro_batches % stages != 0)
    throw ConfigError(str("schedule 'interleaved': micro_batches=", micro_batches, " is no multiple of ", stages,
                          " stages; use ", (micro_batches / stages + 1) * stages));
  const int total = micro_batches * chunks;
  // Rounds of `stages` micro-batches, each through one chunk after the other.
  const auto turn = [&](int index, bool is_forward) {
    const int chunk = index / stages % chunks;
    return Computation{is_forward ? Kind::kForward : Kind::kBackward, is_forward ? chunk : chunks - 1 - chunk,
                       index / (stages * chunks) * stages + index % stages};
  };
  Computations computations;
  for (int stage = 0; stage < stages; ++stage) {
    const bool is_all = micro_batches == stages;
    const int warm_up = std::min(total, is_all ? total : 2 * (stages - stage - 1) + (chunks - 1) * stages);
    std::vector<Computation>& list = computations.emplace_back();
    for (int i = 0; i < warm_up; ++i) list.push_back(turn(i, true));
    for (int i = 0; i < total; ++i) {
      if (warm_up + i < total) list.push_back(turn(warm_up + i, true));
      list.push_back(turn(i, false));
    }
  }
  return assemble("interleaved", stages, micro_batches, chunks, PartOrder::kLoop, computations);
}

Schedule zero_bubble_h1(int stages, int micro_batches) {
  check_sizes("zb-h1", stages, micro_batches);
  Computations computations;
  for (int stage = 0; stage < stages; ++stage) {
    Order order(micro_batches);
    for (int i = 0; i < stages - stage - 1; ++i) order.forward();
    while (order.count(Kind::kBackwardInput) < micro_batches) {
      order.forward();
      order.backward_input();
      // Stage s keeps s weight gradients for later: as many activations as 1F1B's first stage has.
      if (order.count(Kind::kBackwardInput) - order.count(Kind::kBackwardWeight) > stage) order.backward_weight();
    }
    for (int i = 0; i <= stage; ++i) order.backward_weight();
    computations.push_back(order.take());
  }
  return assemble("zb-h1", stages, micro_batches, 1, PartOrder::kLoop, computations);
}

Schedule zero_bubble_v(int stages, int micro_batches) {
  check_sizes("zb-v", stages, micro_batches, 2 * stages);
  Computations computations;
  for (int stage = 0; stage < stages; ++stage) {
    Order order(micro_batches);
    const auto whole_backward = [&](int chunk) {
      order.backward_input(chunk);
      order.backward_weight(chunk);
    };
    const int to_turn = stages - stage;  // parts from this stage to the V's turn
    for (int i = 0; i < 2 * to_turn - 1; ++i) order.forward(0);
    for (int i = 0; i < stage; ++i) {
      order.forward(1);
      order.forward(0);
    }
    for (int i = 0; i < to_turn; ++i) {
      order.forward(1);
      whole_backward(1);
    }
    while (order.count(Kind::kForward, 1) < micro_batches) {
      order.forward(0);
      whole_backward(0);
      order.forward(1);
      whole_backward(1);
    }
    for (int i = 0; i < stage; ++i) {
      order.backward_input(0);
      order.backward_input(1);
    }
    for (int i = 0; i < to_turn; ++i) whole_backward(0);
    for (const int chunk : {1, 0})
      while (order.count(Kind::kBackwardWeight, chunk) < micro_batches) order.backward_weight(chunk);
    computations.push_back(order.take());
  }
  return assemble("zb-v", stages, micro_batches, 2, PartOrder::kV, computations);
}

Schedule dual_pipe_v(int stages, int micro_batches) {
  check_sizes("dualpipe-v", stages, micro_batches, 2 * stages);
  Computations computations;
  for (int stage = 0; stage < stages; ++stage) {
    Order order(micro_batches);
    std::vector<Computation> weights;  // gradients that wait, oldest first
    std::array<int, 2> done{};         // backwards of each chunk
    const auto backward = [&](int chunk, bool is_split) {
      const int micro_batch = done[chunk]++;
      order.push({is_split ? Kind::kBackwardInput : Kind::kBackward, chunk, micro_batch});
      if (is_split) weights.push_back({Kind::kBackwardWeight, chunk, micro_batch});
    };
    const auto weight = [&] {
      order.push(weights.front());
      weights.erase(weights.begin());
    };
    const int to_last = stages - stage - 1;
    for (int i = 0; i < 2 * to_last; ++i) order.forward(0);
    for (int i = 0; i <= stage; ++i) {
      order.forward(0);
      order.forward(1);
    }
    for (int i = 0; i < to_last; ++i) {
      backward(1, /*is_split=*/true);
      weight();
      order.forward(1);
    }
    for (int i = 0; i < micro_batches - 2 * stages + stage + 1; ++i) {
      order.forward(0);
      backward(1, false);
      order.forward(1);
      backward(0, false);
    }
    for (int i = 0; i < to_last; ++i) {
      backward(1, false);
      order.forward(1);
      backward(0, false);
    }
    // The second half of the last backwards is split, so that the stage before goes on early.
    for (int i = 0; i <= stage; ++i) {
      const int half = (stage + 1) / 2;
      backward(1, i > half || (i == half && stage % 2 == 1));
      backward(0, i >= half);
    }
    for (int i = 0; i < to_last; ++i) {
      weight();
      backward(0, /*is_split=*/true);
    }
    while (!weights.empty()) weight();
    computations.push_back(order.take());
  }
  return assemble("dualpipe-v", stages, micro_batches, 2, PartOrder::kV, computations);
}

namespace {

struct Generator {
  const char* name;
  Schedule (*generate)(int stages, int micro_batches, int chunks);
};
template <Schedule (*generate)(int, int)>
Schedule without_chunks(int stages, int micro_batches, int) {
  return generate(stages, micro_batches);
}
constexpr std::array kGenerators = {
    Generator{"1f1b", without_chunks<one_f_one_b>},
    Generator{"inference", without_chunks<inference>},
    Generator{"gpipe", without_chunks<gpipe>},
    Generator{"interleaved", interleaved},
    Generator{"zb-h1", without_chunks<zero_bubble_h1>},
    Generator{"zb-v", without_chunks<zero_bubble_v>},
    Generator{"dualpipe-v", without_chunks<dual_pipe_v>},
};

}  // namespace

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const Generator& generator : kGenerators) names.emplace_back(generator.name);
  return names;
}

Schedule make_schedule(const std::string& name, int stages, int micro_batches, int chunks) {
  for (const Generator& generator : kGenerators)
    if (name == generator.name) return generator.generate(stages, micro_batches, chunks);
  std::string names;
  for (const std::string& known : schedule_names()) names += (names.empty() ? "" : ", ") + known;
  throw ConfigError(str("schedule: '", name, "' is no schedule; use one of ", names));
}

}  // namespace trireme::pipeline
