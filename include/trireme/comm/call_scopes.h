// Scopes that name the call which a thread's collectives belong to, and their subject, in errors and in the flight
// record.
#pragma once

#include <optional>
#include <string_view>

#include "trireme/base/notices.h"

namespace trireme {

/// While one lives, the collectives of this thread are named as a part of `name` in errors and in the flight record:
/// "all_reduce #12 (…) in save_checkpoint". Where scopes are nested, the outermost one counts, and is told as a Notice.
/// A name has at most 23 characters. `of` as Notice::of.
class [[nodiscard]] CallerScope {
 public:
  explicit CallerScope(const char* name, const void* of = nullptr) noexcept;
  ~CallerScope();
  CallerScope(const CallerScope&) = delete;
  CallerScope& operator=(const CallerScope&) = delete;

  /// The name that counts on this thread now; `otherwise` outside of every scope.
  static const char* current(const char* otherwise) noexcept;

 private:
  const char* outer_;
  std::optional<NoticeScope> notice_;  // of the outermost scope
};

/// While one lives, the collectives of this thread are about `subject`, e.g. a unit of the model: "all_gather #12 (…)
/// of layers.3". Ranks that call the same operation about different subjects have diverged, as with different sizes.
/// Where scopes are nested, the innermost one counts; of a text longer than 47 characters, its end.
class [[nodiscard]] SubjectScope {
 public:
  explicit SubjectScope(std::string_view subject) noexcept;
  ~SubjectScope();
  SubjectScope(const SubjectScope&) = delete;
  SubjectScope& operator=(const SubjectScope&) = delete;

 private:
  std::string_view outer_;
};

}  // namespace trireme
