#include "tests/support/run_ranks.h"

#include <c10/core/GeneratorImpl.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <typeinfo>
#include <vector>

#include "tests/support/process_groups.h"
#include "trireme/base/error.h"
#include "trireme/comm/c10d.h"
#include "trireme/comm/threads.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

/// State that is this rank's alone although libtorch keeps it once per process. Constructed and destroyed in the rank's
/// thread.
class RankScope {
 public:
  // Every rank draws the same numbers until it is seeded otherwise (manual_seed), as processes do.
  RankScope() { RankContext::of_this_thread().streams().use_own_generator(c10::default_rng_seed_val); }

 private:
  InterceptScope scope_{InterceptScope::Watch::kWrites};
};

struct Failure {
  int rank = -1;
  bool is_consequence = true;  ///< a CommError: another rank's failure, unless nobody has a better one
  std::exception_ptr error;
};

class Failures {
 public:
  void add(const Failure& failure) {
    std::lock_guard lock(mutex_);
    if (!first_.error || (first_.is_consequence && !failure.is_consequence)) first_ = failure;
  }
  const Failure& first() const { return first_; }

 private:
  std::mutex mutex_;
  Failure first_;  // guarded by mutex_ until the threads have ended
};

void run_one(Group& group, const std::function<void(Rank&)>& body, Failures& failures) {
  try {
    RankScope scope;
    Rank rank(group.rank(), group);
    body(rank);
  } catch (const CommError& error) {
    failures.add({group.rank(), true, std::current_exception()});
    group.abort(error.what());
  } catch (const std::exception& error) {
    failures.add({group.rank(), false, std::current_exception()});
    group.abort(error.what());
  } catch (...) {
    failures.add({group.rank(), false, std::current_exception()});
    group.abort("an exception that is no std::exception");
  }
}

[[noreturn]] void rethrow_with_rank(const Failure& failure) {
  const std::string prefix = str("rank ", failure.rank, ": ");
  try {
    std::rethrow_exception(failure.error);
  } catch (const CommError& error) {
    throw CommError(error.code(), prefix + error.what());
  } catch (const ConfigError& error) {
    throw ConfigError(prefix + error.what(), error.code());
  } catch (const ShapeError& error) {
    throw ShapeError(prefix + error.what());
  } catch (const StateError& error) {
    throw StateError(prefix + error.what());
  } catch (const Error& error) {
    throw Error(error.code(), prefix + error.what());
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kInternal, str(prefix, typeid(error).name(), ": ", error.what()));
  }
}

std::vector<std::unique_ptr<Group>> make_groups(int size, const RunOptions& options) {
  if (options.backend == RankBackend::kC10d) {
    std::vector<std::unique_ptr<Group>> groups;
    for (const auto& process_group : make_process_groups(size).groups)
      groups.push_back(make_c10d_group(process_group, {.name = "world", .timeout = options.timeout}));
    return groups;
  }
  const auto memory =
      options.backend == RankBackend::kThreads ? ThreadGroupOptions::Memory::kHeap : ThreadGroupOptions::Memory::kFiles;
  return make_thread_groups(size, {.name = "world", .timeout = options.timeout, .memory = memory});
}

}  // namespace

void run_ranks(int size, const std::function<void(Rank&)>& body, const RunOptions& options) {
  auto groups = make_groups(size, options);
  Failures failures;
  std::vector<std::thread> threads;
  for (auto& group : groups)
    threads.emplace_back([&body, &failures, group = std::move(group)] { run_one(*group, body, failures); });
  for (std::thread& thread : threads) thread.join();
  if (failures.first().error) rethrow_with_rank(failures.first());
}

}  // namespace trireme
