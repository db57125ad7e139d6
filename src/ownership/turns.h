// The turns that stages take in the forward pass of a micro-batch.
#pragma once

#include <cstdint>
#include <vector>

namespace trireme::ownership {

/// A turn is what a stage computes without waiting in between: a stage that receives after it has sent begins another
/// one. So in a turn all receives come before all sends, and the turns of all stages have an order in which each needs
/// earlier ones only. Every stage knows those of all stages, as it sees the operators of all.
class Turns {
 public:
  explicit Turns(int stages);

  /// Something goes from one stage to another. Returns whether `to` begins another turn by it.
  bool message(int from, int to);
  /// A stage computes so much, in any one unit, in the turn that it is in.
  void spend(int stage, double cost) { turns_[stages_[stage].turn].cost += cost; }
  /// The number of the turn that a stage is in, from 0 on.
  int number(int stage) const { return stages_[stage].count - 1; }
  int count(int stage) const { return stages_[stage].count; }
  /// The stages of all turns, each after those that it needs. A stage's first turn is there in any case.
  std::vector<int> order() const;
  /// The costs of turns, in the same order.
  std::vector<double> costs() const;

 private:
  struct Stage {
    int count = 1;
    bool has_sent = false;
    int turn = 0;  ///< its latest one
  };
  struct Turn {
    int stage;
    int64_t received_last = 0;  ///< by the count of all messages; 0: nothing
    double cost = 0;
  };
  std::vector<Turn> in_order() const;

  std::vector<Stage> stages_;
  std::vector<Turn> turns_;
  int64_t messages_ = 0;
};

}  // namespace trireme::ownership
