#include "trireme/checkpoint/async_save.h"

#include <chrono>
#include <exception>
#include <utility>

#include "checkpoint/save_job.h"
#include "checkpoint/snapshot.h"
#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/log.h"
#include "trireme/base/worker.h"
#include "trireme/comm/agreement.h"

namespace trireme {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string in_seconds(double seconds) { return formatted("{:.2f} s", seconds); }

}  // namespace

class AsyncSaver::Impl {
 public:
  explicit Impl(Group& group) : group_(group), background_(group.clone("checkpoint")) {}
  ~Impl() { worker_.join(); }

  void reserve(const StateTree& state) { allocate(prepare_save(group_, "reserve", state, {}).slices); }

  SavedCheckpoint save(const std::filesystem::path& directory, const std::string& tag, const StateTree& state,
                       const SaveOptions& options) {
    const auto start = Clock::now();
    finish();
    const double waited = seconds_since(start);
    SaveJob job = prepare_save(group_, tag, state, options);
    allocate(job.slices);
    snapshot_.take(job.slices);
    SavedCheckpoint started{.path = directory / job.tag, .tensor_bytes = job.tensor_bytes, .in_background = true};
    blocked_seconds_ = started.seconds = started.blocked_seconds = seconds_since(start);
    if (group_.rank() == 0)
      log(LogLevel::kInfo, str("save_checkpoint: '", job.tag, "' is being written in the background; training waited ",
                               in_seconds(blocked_seconds_), ", ", in_seconds(waited), " of it for the save before"));
    // std::function wants a copyable callable.
    auto shared = std::make_shared<SaveJob>(std::move(job));
    worker_.start_once([this, shared, directory, options] { write(directory, std::move(*shared), options); });
    return started;
  }

  std::optional<SavedCheckpoint> wait() {
    finish();
    return std::exchange(saved_, std::nullopt);
  }

  size_t snapshot_bytes() const { return snapshot_.bytes(); }

 private:
  // A rank without memory must not leave the others waiting for it in the background.
  void allocate(const std::vector<SliceBytes>& slices) {
    all_or_throw(group_, [&] { snapshot_.reserve(bytes_of(slices)); });
  }

  void finish() {
    worker_.join();
    if (auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  // In the worker's thread; what it leaves is read after join().
  void write(const std::filesystem::path& directory, SaveJob job, const SaveOptions& options) noexcept {
    const std::string tag = job.tag;
    try {
      saved_.reset();
      SavedCheckpoint saved = write_save(*background_, directory, std::move(job), options);
      saved.blocked_seconds = blocked_seconds_;
      if (group_.rank() == 0)
        log(LogLevel::kInfo, str("save_checkpoint: '", tag, "' is complete after ", in_seconds(saved.seconds)));
      saved_ = std::move(saved);
    } catch (const std::exception& error) {
      error_ = std::current_exception();
      if (group_.rank() == 0)
        log(LogLevel::kError, str("save_checkpoint: '", tag, "' failed in the background: ", error.what()));
    }
  }

  Group& group_;
  const std::unique_ptr<Group> background_;
  Snapshot snapshot_;
  double blocked_seconds_ = 0;
  // Written by the worker, read after join():
  std::optional<SavedCheckpoint> saved_;
  std::exception_ptr error_;
  Worker worker_;  // last: it uses the others
};

AsyncSaver::AsyncSaver(Group& group) : impl_(std::make_unique<Impl>(group)) {}
AsyncSaver::~AsyncSaver() = default;
void AsyncSaver::reserve(const StateTree& state) { impl_->reserve(state); }
SavedCheckpoint AsyncSaver::save(const std::filesystem::path& directory, const std::string& tag, const StateTree& state,
                                 const SaveOptions& options) {
  return impl_->save(directory, tag, state, options);
}
std::optional<SavedCheckpoint> AsyncSaver::wait() { return impl_->wait(); }
size_t AsyncSaver::snapshot_bytes() const { return impl_->snapshot_bytes(); }

}  // namespace trireme
