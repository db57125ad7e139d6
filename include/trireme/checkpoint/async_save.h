// Saves in the background: the caller waits only for the copy of its state.
#pragma once

#include <memory>
#include <optional>

#include "trireme/checkpoint/checkpoint.h"

namespace trireme {

/// Copies the state, then writes it in a thread of its own; one save at a time. Call from one thread.
class AsyncSaver {
 public:
  /// Collective: the saves of this saver agree through a group of their own, beside the caller's collectives.
  explicit AsyncSaver(Group& group);
  /// Local. Waits until the save in flight is complete or has failed, so that the end of a program loses none.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// Allocates the snapshot's memory for states such as `state` now, so that the first save need not. Collective.
  void reserve(const StateTree& state);

  /// As save_checkpoint(), but returns as soon as `state` is copied. A save in flight is waited for first. The result's
  /// seconds are those that this call took. Collective.
  ///
  /// Cost      memory for what this rank writes (1/N of the state of N ranks), kept until this is destroyed; one copy
  ///           of it.
  /// Throws    at once: what save_checkpoint() throws before it touches files, or what wait() would throw for the save
  ///           before.
  SavedCheckpoint save(const std::filesystem::path& directory, const std::string& tag, const StateTree& state,
                       const SaveOptions& options = {});

  /// Waits for the save in flight and returns what it wrote; nothing if no save has begun since the last wait(). Local,
  /// but the outcome is the same on every rank.
  ///
  /// Throws    once: the error of the save, as save_checkpoint(). Rank 0 logged it when it happened. Directory and
  ///           `latest` are as save_checkpoint() promises; the caller's state was never touched.
  std::optional<SavedCheckpoint> wait();

  /// Bytes of memory that the snapshot holds.
  size_t snapshot_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
