// The stream of what a rank does and how long it takes. Groups, engines and stages tell it; logs, timers and timelines
// hear it. Nothing is measured while nobody listens.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

namespace trireme {

/// Something that a rank did. Texts live as long as the call that tells it.
struct Notice {
  enum class Kind : uint8_t {
    kCall,        ///< a method of an engine, e.g. "forward", "backward", "step"; the outermost one
    kCollective,  ///< a group's call, from its begin on this rank to its end; so with the time until peers came
    kWait,        ///< the time that a thread waited for a group's call
    kStage,       ///< an instruction of a schedule
    kOperator,    ///< an operator of libtorch's that no other one called, or a node of a backward pass
    kWindow,      ///< an accumulation window that ended now; `number`: optimizer steps so far
  };
  using Clock = std::chrono::steady_clock;

  Kind kind = Kind::kCall;
  std::string_view name = {};       ///< of the method, the operation, the instruction
  std::string_view operation = {};  ///< of a call that the program has named: what it does; empty: `name` says it
  std::string_view subject = {};    ///< what a group's call is about, e.g. a unit; empty: not said
  std::string_view caller = {};     ///< the method that a group's call is a part of; empty: none
  std::string_view group = {};      ///< of a group's call
  int group_size = 0;               ///< ranks of that group
  int64_t bytes = 0;                ///< of a group's call: of the whole tensor that is reduced, gathered or sent
  const void* of = nullptr;         ///< of a method: the Pager of its model; null: of no single one
  int64_t number = 0;               ///< of a window: see kWindow; of a group's call: its sequence number
  /// In the world; -1: that of the thread.
  int rank = -1;
  Clock::time_point begin = {};
  Clock::time_point end = {};

  std::chrono::duration<double> duration() const { return end - begin; }
};

class NoticeListener {
 public:
  virtual ~NoticeListener() = default;
  /// Called on the thread that tells, which may be any, several at a time; brief, since the rank waits for it.
  virtual void hear(const Notice& notice) noexcept = 0;
};

namespace notices {
extern std::atomic<int> listeners;
void begin_method() noexcept;
void end_method() noexcept;
}  // namespace notices

/// The end of this process's last method of an engine, while none runs; nothing: one runs, or none has ever.
std::optional<Notice::Clock::time_point> outside_since() noexcept;

/// Whether anybody listens: one load, for those who would have to measure.
inline bool has_listeners() noexcept { return notices::listeners.load(std::memory_order_relaxed) > 0; }

/// Tells the listeners of notice.rank; where that is -1, those that the calling thread's rank has.
void tell(const Notice& notice) noexcept;

/// While it lives, `listener` hears what rank `rank` of the world does, and what the calling thread does without
/// saying for which rank. Where all listeners of the process are of one rank, it hears every thread.
class [[nodiscard]] Listening {
 public:
  Listening(int rank, std::shared_ptr<NoticeListener> listener);
  ~Listening();
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;

 private:
  const std::shared_ptr<NoticeListener> listener_;
};

/// Tells what lies between its construction and its destruction, if somebody listened at its beginning.
class [[nodiscard]] NoticeScope {
 public:
  /// `of` as Notice::of.
  NoticeScope(Notice::Kind kind, std::string_view name, const void* of = nullptr) noexcept
      : kind_(kind), name_(name), of_(of) {
    if (kind_ == Notice::Kind::kCall) notices::begin_method();
    if (has_listeners()) begin_ = Notice::Clock::now();
  }
  ~NoticeScope() {
    if (begin_ != Notice::Clock::time_point{}) tell_end();
    if (kind_ == Notice::Kind::kCall) notices::end_method();
  }
  NoticeScope(const NoticeScope&) = delete;
  NoticeScope& operator=(const NoticeScope&) = delete;

 private:
  void tell_end() const noexcept;

  const Notice::Kind kind_;
  const std::string_view name_;
  const void* const of_;
  Notice::Clock::time_point begin_ = {};
};

}  // namespace trireme
