#include "tests/support/process_groups.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <tuple>

#include "trireme/base/error.h"

namespace trireme {
namespace {

using Manners = BackendManners;

/// One side of a transfer, until the other side comes.
struct Post {
  at::Tensor tensor;
  int from;
  int to;
  bool complete = false;
  bool aborted = false;
  std::string error = {};
};

class Hub {
 public:
  std::shared_ptr<Post> post(at::Tensor tensor, int from, int to, std::pair<int, bool> tag_and_way) {
    auto own = std::make_shared<Post>(Post{.tensor = std::move(tensor), .from = from, .to = to});
    const auto [tag, sends] = tag_and_way;
    std::lock_guard lock(mutex_);
    if (lost_.count(from) + lost_.count(to) > 0) throw std::runtime_error("Connection closed by peer\nand a stack");
    auto& others = posts_[{from, to, tag, !sends}];
    while (!others.empty() && others.front().expired()) others.pop_front();
    if (others.empty()) {
      posts_[{from, to, tag, sends}].push_back(own);
      return own;
    }
    const auto other = others.front().lock();
    others.pop_front();
    match(sends ? *own : *other, sends ? *other : *own);
    changed_.notify_all();
    return own;
  }

  void lose(int rank) {
    std::lock_guard lock(mutex_);
    lost_.insert(rank);
    for (auto& [key, posts] : posts_) {
      if (std::get<0>(key) != rank && std::get<1>(key) != rank) continue;
      for (const auto& each : posts)
        if (const auto post = each.lock()) fail(*post, "Connection closed by peer [10.0.0.7]");
      posts.clear();
    }
    changed_.notify_all();
  }

  bool wait(Post& post, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto done = [&post] { return post.complete || post.aborted; };
    if (timeout.count() == 0)
      changed_.wait(lock, done);
    else if (!changed_.wait_for(lock, timeout, done))
      throw std::runtime_error(str("Timed out waiting ", timeout.count(), "ms for operation to complete"));
    if (!post.error.empty()) throw std::runtime_error(post.error);
    return !post.aborted;
  }

  bool complete(const Post& post) {
    std::lock_guard lock(mutex_);
    return post.complete;
  }

  void abort(Post& post) {
    std::lock_guard lock(mutex_);
    post.aborted = true;
    changed_.notify_all();
  }

 private:
  using Key = std::tuple<int, int, int, bool>;  ///< from, to, tag, whether it sends

  static void fail(Post& post, const std::string& error) {
    post.error = error;
    post.complete = true;
  }
  static void match(Post& sent, Post& received) {
    if (sent.tensor.nbytes() != received.tensor.nbytes()) {
      const auto error = str(sent.tensor.nbytes(), " bytes do not fit ", received.tensor.nbytes());
      fail(sent, error);
      return fail(received, error);
    }
    std::memcpy(received.tensor.data_ptr(), sent.tensor.const_data_ptr(), sent.tensor.nbytes());
    sent.complete = received.complete = true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::deque<std::weak_ptr<Post>>> posts_;  // guarded by mutex_, as is what they hold
  std::set<int> lost_;                                    // guarded by mutex_
};

class ThreadWork final : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<Hub> hub, std::shared_ptr<Post> post, Manners manners)
      : hub_(std::move(hub)), post_(std::move(post)), manners_(manners) {}
  bool isCompleted() override { return manners_ == Manners::kMpi && hub_->complete(*post_); }
  bool isSuccess() const override { return post_->error.empty(); }
  std::exception_ptr exception() const override { return std::make_exception_ptr(std::runtime_error(post_->error)); }
  bool wait(std::chrono::milliseconds timeout) override {
    return hub_->wait(*post_, manners_ == Manners::kMpi ? kNoTimeout : timeout);
  }
  void abort() override {
    if (manners_ == Manners::kMpi) throw std::runtime_error("Work::abort not implemented.");
    hub_->abort(*post_);
  }

 private:
  const std::shared_ptr<Hub> hub_;
  const std::shared_ptr<Post> post_;
  const Manners manners_;
};

class ThreadBackend final : public c10d::Backend {
 public:
  ThreadBackend(std::shared_ptr<Hub> hub, std::pair<int, int> rank_and_size, Manners manners)
      : Backend(rank_and_size.first, rank_and_size.second), hub_(std::move(hub)), manners_(manners) {}
  const std::string getBackendName() const override { return manners_ == Manners::kMpi ? "mpi" : "gloo"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return work(hub_->post(tensors.at(0), getRank(), to, {tag, true}));
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return work(hub_->post(tensors.at(0), from, getRank(), {tag, false}));
  }

 private:
  c10::intrusive_ptr<c10d::Work> work(std::shared_ptr<Post> post) {
    return c10::make_intrusive<ThreadWork>(hub_, std::move(post), manners_);
  }
  const std::shared_ptr<Hub> hub_;
  const Manners manners_;
};

}  // namespace

ThreadProcessGroups make_process_groups(int size, BackendManners manners) {
  using Type = c10d::ProcessGroup::BackendType;
  const auto hub = std::make_shared<Hub>();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ThreadProcessGroups made{.groups = {}, .lose = [hub](int rank) { hub->lose(rank); }};
  for (int rank = 0; rank < size; ++rank) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
    const auto type = manners == Manners::kMpi ? Type::MPI : Type::GLOO;
    group->setBackend(c10::DeviceType::CPU, type,
                      c10::make_intrusive<ThreadBackend>(hub, std::pair(rank, size), manners));
    group->setDefaultBackend(type);
    made.groups.push_back(std::move(group));
  }
  return made;
}

c10::intrusive_ptr<c10d::ProcessGroup> make_gpu_process_group() {
  using Type = c10d::ProcessGroup::BackendType;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  group->setBackend(
      c10::DeviceType::CUDA, Type::NCCL,
      c10::make_intrusive<ThreadBackend>(std::make_shared<Hub>(), std::pair(0, 2), BackendManners::kGloo));
  group->setDefaultBackend(Type::NCCL);
  return group;
}

}  // namespace trireme
