// A store of c10d where the ranks of one job exchange small texts, with errors that name what went wrong.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/call.h"
#include "comm/meeting/launch_variables.h"
#include "comm/meeting/seal.h"

namespace trireme::comm {

class MeetingPoint {
 public:
  /// Where the launcher says. Throws IoError: an address that cannot be used.
  static MeetingPoint open(const LaunchVariables& launch, const WaitLimits& limits);
  /// How long it waits for a peer, and what the peers know each other by (Seal).
  struct Terms {
    std::chrono::milliseconds timeout;
    std::string token;
  };
  /// In a store of the program's own.
  static MeetingPoint in(c10::intrusive_ptr<c10d::Store> store, const Place& place, const Terms& terms);

  /// Gives `text` to every rank and returns everybody's, in rank order. Throws CommError: a rank did not come.
  std::vector<std::string> exchange(const std::string& key, const std::string& text);
  /// Rank 0 stays until every rank has come here.
  void farewell() noexcept;
  /// The begin of this meeting's keys: nobody who does not see the store can guess it.
  const std::string& path() const { return path_; }

 private:
  using Clock = std::chrono::steady_clock;
  MeetingPoint(const Place& place, std::string where, Terms terms, std::string advice)
      : place_(place),
        where_(std::move(where)),
        terms_(std::move(terms)),
        seal_(terms_.token),
        advice_(std::move(advice)) {}
  /// "rank 1 of 2 has waited 10 s at host:29500 for rank 0, …"
  std::string text_of_wait(int peer) const;
  [[noreturn]] void refuse_to_wait_for(int peer, const std::exception& error) const;

  /// Agrees with the peers on a path that no other meeting has: a process may join several times.
  void enter(const std::string& path);
  std::string ask(Clock::time_point end);
  /// Rank 0: until every rank has come to `meeting`. `peer` says who has not.
  void answer(const std::string& meeting, std::atomic<int>& peer, Clock::time_point end);

  // Texts that a rank of this job has written; others are as if they were not there.
  void write(const std::string& key, const std::string& text);
  std::optional<std::string> look(const std::string& key);
  std::string read(const std::string& key, Clock::time_point end);

  Place place_;
  std::string where_;
  Terms terms_;
  Seal seal_;
  std::string advice_;  // of the launch variables; follows a text that says who did not come
  std::string path_;    // what keys begin with
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace trireme::comm
