// Ranks as threads of the test's own process: quick, and a failure shows up in the test that caused it.
#pragma once

#include <chrono>
#include <functional>

#include "trireme/comm/group.h"

namespace trireme {

/// A body's view of its rank. Lives as long as the body runs.
class Rank {
 public:
  Rank(int id, Group& world) : id_(id), world_(world) {}
  int id() const { return id_; }
  int size() const { return world_.size(); }
  Group& world() const { return world_; }

 private:
  const int id_;
  Group& world_;
};

enum class RankBackend {
  kThreads,  ///< ranks share the heap
  kShm,      ///< every rank maps the memory files itself, at its own address, as processes do
  kC10d,     ///< no shared memory: a process group of c10d among the threads
};

struct RunOptions {
  RankBackend backend = RankBackend::kThreads;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

/// Runs `body` on `size` ranks, one thread each, and returns when all have ended.
///
/// Ordering  a rank that throws aborts its group first, so that its peers end too.
/// Throws    what the first failing rank threw, as Error with the rank in the message (code kept for trireme's errors);
///           a CommError that merely follows from another rank's failure is reported only when there is nothing else.
void run_ranks(int size, const std::function<void(Rank&)>& body, const RunOptions& options = {});

}  // namespace trireme
