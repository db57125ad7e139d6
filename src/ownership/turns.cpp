#include "ownership/turns.h"

#include <algorithm>

namespace trireme::ownership {

Turns::Turns(int stages) : stages_(stages) {
  for (int stage = 0; stage < stages; ++stage) {
    stages_[stage].turn = stage;
    turns_.push_back({stage});
  }
}

bool Turns::message(int from, int to) {
  stages_[from].has_sent = true;
  Stage& receiver = stages_[to];
  const bool is_another = receiver.has_sent;
  if (is_another) {
    ++receiver.count;
    receiver.has_sent = false;
    receiver.turn = static_cast<int>(turns_.size());
    turns_.push_back({to});
  }
  turns_[receiver.turn].received_last = ++messages_;
  return is_another;
}

// A turn sends after all that it has received.
std::vector<Turns::Turn> Turns::in_order() const {
  std::vector<Turn> turns = turns_;
  std::ranges::stable_sort(turns, {}, &Turn::received_last);
  return turns;
}

std::vector<int> Turns::order() const {
  std::vector<int> stages;
  for (const Turn& turn : in_order()) stages.push_back(turn.stage);
  return stages;
}

std::vector<double> Turns::costs() const {
  std::vector<double> costs;
  for (const Turn& turn : in_order()) costs.push_back(turn.cost);
  return costs;
}

}  // namespace trireme::ownership
