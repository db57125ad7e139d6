// A store of c10d where the ranks of one job exchange small texts, with errors that name what went wrong.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/call.h"
#include "comm/meeting/launch_variables.h"

namespace trireme::comm {

class MeetingPoint {
 public:
  /// Where the launcher says. Throws IoError: an address that cannot be used.
  static MeetingPoint open(const LaunchVariables& launch, std::chrono::milliseconds timeout);
  /// In a store of the program's own.
  static MeetingPoint in(c10::intrusive_ptr<c10d::Store> store, const Place& place, std::chrono::milliseconds timeout);

  /// Gives `text` to every rank and returns everybody's, in rank order. Throws CommError: a rank did not come.
  std::vector<std::string> exchange(const std::string& key, const std::string& text);
  /// Rank 0 stays until every rank has come here.
  void farewell() noexcept;

 private:
  MeetingPoint(const Place& place, std::string where, std::chrono::milliseconds timeout, std::string advice)
      : place_(place), where_(std::move(where)), timeout_(timeout), advice_(std::move(advice)) {}
  /// "rank 1 of 2 has waited 10 s at host:29500 for rank 0, …"
  std::string text_of_wait(int peer) const;
  /// A process may join several times; each time has keys of its own.
  void enter(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix);

  Place place_;
  std::string where_;
  std::chrono::milliseconds timeout_;
  std::string advice_;  // of the launch variables; follows a text that says who did not come
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace trireme::comm
