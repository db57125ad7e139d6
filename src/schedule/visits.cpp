// The schedule of programs that come back to stages.
#include <algorithm>
#include <limits>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/schedule/schedule.h"

namespace trireme::pipeline {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kBackwardTimes = 2;  // of the forward

/// Goes through time: the stage that can begin first begins what it prefers.
class Visiting {
 public:
  Visiting(const std::vector<int>& stage_of_visit, int stages, const VisitsOptions& options)
      : stage_of_(stage_of_visit),
        options_(options),
        forward_(stage_of_visit.size()),
        backward_(options.has_backward ? stage_of_visit.size() : 0),
        free_at_(stages),
        lists_(stages) {}

  std::vector<std::vector<Computation>> run() {
    const size_t all = (forward_.size() + backward_.size()) * static_cast<size_t>(options_.micro_batches);
    for (size_t done = 0; done < all; ++done) {
      std::optional<Candidate> first;
      for (int stage = 0; stage < stages(); ++stage)
        if (const auto next = next_of(stage); next && (!first || next->begin < first->begin)) first = next;
      TRIREME_CHECK(first, "visits wait for each other");
      begin(*first);
    }
    return std::move(lists_);
  }

 private:
  struct Candidate {
    int visit;
    bool is_forward;
    int micro_batch;
    double begin;
  };

  int stages() const { return static_cast<int>(lists_.size()); }
  int visits() const { return static_cast<int>(forward_.size()); }
  double time_of(int visit) const { return options_.times.empty() ? 1 : options_.times.at(visit); }

  /// When the inputs of a computation are there; never, as long as they have not been computed.
  static double ended(const std::vector<double>& ends, int micro_batch) {
    return micro_batch < static_cast<int>(ends.size()) ? ends[micro_batch] : kNever;
  }
  double forward_ready(int visit) const {
    const auto micro_batch = static_cast<int>(forward_[visit].size());
    if (micro_batch == options_.micro_batches) return kNever;
    return visit == 0 ? 0 : ended(forward_[visit - 1], micro_batch);
  }
  double backward_ready(int visit) const {
    const auto micro_batch = static_cast<int>(backward_[visit].size());
    if (micro_batch == options_.micro_batches) return kNever;
    return visit + 1 == visits() ? ended(forward_[visit], micro_batch) : ended(backward_[visit + 1], micro_batch);
  }

  /// Whether the stage may begin another micro-batch.
  bool may_open(int stage) const {
    const auto first = std::ranges::find(stage_of_, stage) - stage_of_.begin();
    return !options_.has_backward ||
           static_cast<int>(forward_[first].size() - backward_[first].size()) < options_.active;
  }
  bool is_first_of(int visit) const {
    return std::ranges::find(stage_of_, stage_of_[visit]) - stage_of_.begin() == visit;
  }
  bool has_all_forwards(int stage) const {
    for (int visit = 0; visit < visits(); ++visit)
      if (stage_of_[visit] == stage && static_cast<int>(forward_[visit].size()) < options_.micro_batches) return false;
    return true;
  }

  std::optional<Candidate> next_of(int stage) const {
    std::optional<Candidate> best;
    const auto offer = [&](int visit, bool is_forward, double ready, size_t micro_batch) {
      if (ready == kNever) return;
      const Candidate one{visit, is_forward, static_cast<int>(micro_batch), std::max(ready, free_at_[stage])};
      if (!best || is_before(one, *best)) best = one;
    };
    for (int visit = 0; visit < visits(); ++visit) {
      if (stage_of_[visit] != stage) continue;
      if (!is_first_of(visit) || may_open(stage)) offer(visit, true, forward_ready(visit), forward_[visit].size());
      if (options_.has_backward && (!options_.forwards_first || has_all_forwards(stage)))
        offer(visit, false, backward_ready(visit), backward_[visit].size());
    }
    return best;
  }

  static bool is_before(const Candidate& one, const Candidate& other) {
    if (one.begin != other.begin) return one.begin < other.begin;
    if (one.is_forward != other.is_forward) return !one.is_forward;
    return one.micro_batch < other.micro_batch;
  }

  void begin(const Candidate& next) {
    const int stage = stage_of_[next.visit];
    const double end = next.begin + time_of(next.visit) * (next.is_forward ? 1 : kBackwardTimes);
    free_at_[stage] = end;
    (next.is_forward ? forward_ : backward_)[next.visit].push_back(end);
    const auto chunk = static_cast<int>(std::count(stage_of_.begin(), stage_of_.begin() + next.visit, stage));
    lists_[stage].push_back({next.is_forward ? Kind::kForward : Kind::kBackward, chunk, next.micro_batch});
  }

  const std::vector<int>& stage_of_;
  const VisitsOptions& options_;
  std::vector<std::vector<double>> forward_, backward_;  // by visit and micro-batch: when it has ended
  std::vector<double> free_at_;
  std::vector<std::vector<Computation>> lists_;
};

}  // namespace

Schedule visits_schedule(const std::vector<int>& stage_of_visit, const VisitsOptions& options) {
  const auto at_least_1 = [](const char* name, int value) {
    if (value < 1) throw ConfigError(str("schedule 'visits': ", name, "=", value, "; use 1 or more"));
  };
  at_least_1("micro_batches", options.micro_batches);
  at_least_1("active", options.active);
  at_least_1("visits", static_cast<int>(stage_of_visit.size()));
  if (!options.times.empty() && options.times.size() != stage_of_visit.size())
    throw ConfigError(str("schedule 'visits': ", options.times.size(), " times of ", stage_of_visit.size(), " visits"));
  const int stages = std::ranges::max(stage_of_visit) + 1;
  for (int stage = 0; stage < stages; ++stage)
    if (std::ranges::count(stage_of_visit, stage) == 0)
      throw ConfigError(str("schedule 'visits': no visit to stage ", stage, " of ", stages));
  return assemble("visits", options.micro_batches, stage_of_visit, Visiting(stage_of_visit, stages, options).run());
}

}  // namespace trireme::pipeline
