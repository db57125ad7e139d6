#include "trireme/observe/timeline.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "observe/operator_notices.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"
#include "trireme/base/json.h"
#include "trireme/base/log.h"
#include "trireme/base/worker.h"

namespace trireme {
namespace {

using Clock = Notice::Clock;
using Kind = Notice::Kind;

constexpr int kStepTrack = 1;
constexpr int kFirstThreadTrack = 2;
constexpr int kFirstGroupTrack = 1000;
// Where a process's own clock has its zero in the system's: the name of a metadata event.
constexpr const char* kClockEvent = "trireme_clock";

std::string file_name(int rank) { return str("rank-", rank, ".json"); }

/// The rank of "rank-12.json"; nothing for other files.
std::optional<int> rank_of(const std::string& name) {
  constexpr std::string_view kPrefix = "rank-";
  constexpr std::string_view kSuffix = ".json";
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  const std::string digits = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  constexpr size_t kMostDigits = 9;
  if (digits.empty() || digits.size() > kMostDigits ||
      !std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; }))
    return std::nullopt;
  return std::stoi(digits);
}

std::string json_text(std::string_view text) {
  const auto is_plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
  if (std::ranges::all_of(text, is_plain)) return str('"', text, '"');  // nearly all, and there are many
  return Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

struct Event {
  const std::string* name;  ///< as JSON, in Names; nullptr: a step's
  int64_t number;           ///< of a step
  const char* category;
  int track;
  Clock::time_point begin, end;
  std::string arguments;  ///< of JSON, without the braces; empty: none
};

const char* category_of(Kind kind) {
  switch (kind) {
    case Kind::kCall:
      return "method";
    case Kind::kCollective:
      return "communication";
    case Kind::kWait:
      return "wait";
    case Kind::kStage:
      return "stage";
    case Kind::kOperator:
      return "operator";
    case Kind::kWindow:
      return "step";
  }
  return "";
}

std::string name_of(const Notice& notice) {
  std::string name(notice.kind == Kind::kWait ? "wait for " : "");
  name += notice.name;
  if (!notice.subject.empty()) (name += ' ') += notice.subject;
  return name;
}

std::string arguments_of(const Notice& notice) {
  if (notice.group.empty()) return "";
  std::string text = formatted("\"group\":{},\"ranks\":{},\"bytes\":{},\"call\":{}", json_text(notice.group),
                               notice.group_size, notice.bytes, notice.number);
  if (!notice.caller.empty()) text += formatted(",\"in\":{}", json_text(notice.caller));
  return text;
}

/// Names of events, each made and kept once: a step repeats those of the step before.
class Names {
 public:
  /// The text as JSON. It stays where it is.
  const std::string* of(std::string_view text) {
    const auto found = texts_.find(text);
    return &(found != texts_.end() ? found : texts_.emplace(text, json_text(text)).first)->second;
  }

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::unordered_map<std::string, std::string, Hash, std::equal_to<>> texts_;
};

/// The tracks of one rank's file. Calls of a group that overlap get tracks beside each other.
class Tracks {
 public:
  int of_thread(std::thread::id thread) {
    const auto [found, is_new] = threads_.try_emplace(thread, kFirstThreadTrack + static_cast<int>(threads_.size()));
    if (is_new) named_.emplace_back(found->second, threads_.size() == 1 ? "program" : str("thread ", threads_.size()));
    return found->second;
  }
  int of_group(std::string_view group, Clock::time_point begin, Clock::time_point end) {
    std::vector<Lane>& lanes = groups_[std::string(group)];
    auto lane = std::ranges::find_if(lanes, [begin](const Lane& lane) { return lane.end <= begin; });
    if (lane == lanes.end()) {
      lane = lanes.insert(lane, {kFirstGroupTrack + next_group_++, {}});
      named_.emplace_back(lane->track, str("group ", group));
    }
    lane->end = end;
    return lane->track;
  }
  /// Those that are new since the last call, with their names.
  std::vector<std::pair<int, std::string>> take_named() { return std::exchange(named_, {}); }

 private:
  struct Lane {
    int track;
    Clock::time_point end;
  };
  std::map<std::thread::id, int> threads_;
  std::map<std::string, std::vector<Lane>> groups_;
  int next_group_ = 0;
  std::vector<std::pair<int, std::string>> named_ = {{kStepTrack, "steps"}};
};

}  // namespace

class Timeline::Impl {
 public:
  Impl(int rank, const TimelineOptions& options)
      : rank_(rank), options_(options), folder_(options.output_path), path_(folder_ / file_name(rank)) {
    posix_file_system().create_directories(folder_);
    file_ = posix_file_system().create(path_);
    const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
    write(
        formatted("[\n{{\"name\":\"{}\",\"ph\":\"M\",\"pid\":{},\"args\":{{\"begin_ns\":{}}}}},\n"
                  "{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{},\"args\":{{\"name\":\"rank {}\"}}}},\n"
                  "{{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":{},\"args\":{{\"sort_index\":{}}}}}",
                  kClockEvent, rank_, std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch).count(), rank_,
                  rank_, rank_, rank_));
    tracks_.of_thread(std::this_thread::get_id());
    if (options_.start_step <= 1) begin_recording();
    worker_.start_once([this] { work(); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      hand_over();
      stopped_ = true;
      work_.notify_one();
    }
    worker_.join();
    write("\n]\n");
  }

  void hear(const Notice& notice) noexcept {
    const std::lock_guard lock(mutex_);
    // The method in which the last window ended is told after it.
    const bool is_last = !is_recording_ && notice.begin < recorded_until_;
    if ((is_recording_ || is_last) && notice.begin >= recorded_from_) add(notice);
    if (is_last) hand_over();
    if (notice.kind == Kind::kWindow) end_step(notice);
  }

  int64_t recorded_steps() const {
    const std::lock_guard lock(mutex_);
    return recorded_steps_;
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  void begin_recording() {
    is_recording_ = true;
    step_begin_ = recorded_from_ = Clock::now();
    if (options_.operators) operators_.emplace();
  }

  void add(const Notice& notice) {
    const bool is_step = notice.kind == Kind::kWindow;
    const bool is_of_group = notice.kind == Kind::kCollective;
    const bool is_operator = notice.kind == Kind::kOperator;
    events_.push_back({.name = is_step       ? nullptr
                               : is_operator ? names_.of(notice.name)  // as nearly all
                                             : names_.of(name_of(notice)),
                       .number = notice.number,
                       .category = category_of(notice.kind),
                       .track = is_step       ? kStepTrack
                                : is_of_group ? tracks_.of_group(notice.group, notice.begin, notice.end)
                                              : tracks_.of_thread(std::this_thread::get_id()),
                       .begin = is_step ? step_begin_ : notice.begin,
                       .end = notice.end,
                       .arguments = arguments_of(notice)});
  }

  void end_step(const Notice& window) {
    if (is_recording_) {
      ++recorded_steps_;
      step_begin_ = window.end;
      hand_over();
      work_.notify_one();
    }
    const int64_t next = window.number + 1;
    const bool is_over = options_.steps > 0 && next >= options_.start_step + options_.steps;
    if (!is_recording_ && !is_over && next >= options_.start_step) begin_recording();
    if (!is_recording_ || !is_over) return;
    is_recording_ = false;
    recorded_until_ = window.end;
    operators_.reset();
    if (rank_ == 0) tells_of_end_ = true;
  }

  void hand_over() {
    for (auto& [track, name] : tracks_.take_named()) named_.emplace_back(track, std::move(name));
    std::ranges::move(events_, std::back_inserter(ready_));
    events_.clear();
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stopped_ || !ready_.empty() || tells_of_end_; });
      const auto events = std::exchange(ready_, {});
      const auto named = std::exchange(named_, {});
      const bool tells_of_end = std::exchange(tells_of_end_, false);
      const bool stops = stopped_;
      lock.unlock();
      write(text_of(named) + text_of(events));
      if (tells_of_end)
        log(LogLevel::kInfo, str("timeline: ", options_.steps, " steps are in ", options_.output_path,
                                 ", a file of each rank; `trireme timeline ", options_.output_path,
                                 "` joins them for https://ui.perfetto.dev"));
      if (stops) return;
      lock.lock();
    }
  }

  std::string text_of(const std::vector<std::pair<int, std::string>>& named) const {
    std::string text;
    for (const auto& [track, name] : named)
      text += formatted(
          ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":{}}}}},\n"
          "{{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":{},\"tid\":{},\"args\":{{\"sort_index\":{}}}}}",
          rank_, track, json_text(name), rank_, track, track);
    return text;
  }

  std::string text_of(const std::vector<Event>& events) const {
    constexpr size_t kBytesOfEvent = 128;
    std::string text;
    text.reserve(events.size() * kBytesOfEvent);
    const std::string rank = str("\",\"ph\":\"X\",\"pid\":", rank_, ",\"tid\":");
    for (const Event& event : events) {
      text += ",\n{\"name\":";
      text += event.name != nullptr ? *event.name : str("\"step ", event.number, '"');
      (text += ",\"cat\":\"") += event.category;
      text += rank;
      add_number(text, event.track);
      text += ",\"ts\":";
      add_microseconds(text, event.begin - zero_);
      text += ",\"dur\":";
      add_microseconds(text, event.end - event.begin);
      if (!event.arguments.empty()) ((text += ",\"args\":{") += event.arguments) += '}';
      text += '}';
    }
    return text;
  }

  static void add_microseconds(std::string& text, Clock::duration duration) {
    constexpr int64_t kNanosecondsOfOne = 1000;
    const int64_t ns = std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
    add_number(text, ns / kNanosecondsOfOne);
    const size_t point = text.size();
    add_number(text, kNanosecondsOfOne + ns % kNanosecondsOfOne);
    text[point] = '.';  // in place of the 1 of kNanosecondsOfOne
  }

  static void add_number(std::string& text, int64_t number) {
    std::array<char, std::numeric_limits<int64_t>::digits10 + 2> digits{};
    text.append(digits.data(), std::to_chars(digits.begin(), digits.end(), number).ptr);
  }

  /// A disk that is full ends the timeline, not the training.
  void write(const std::string& text) {
    if (!file_ || text.empty()) return;
    try {
      file_->write(text.data(), text.size());
    } catch (const std::exception& error) {
      log(LogLevel::kWarning, str("timeline: rank ", rank_, " records nothing more: ", error.what()));
      file_.reset();
    }
  }

  const int rank_;
  const TimelineOptions options_;
  const std::filesystem::path folder_, path_;
  const Clock::time_point zero_ = Clock::now();
  std::unique_ptr<WritableFile> file_;  // of the constructor, then of the worker

  mutable std::mutex mutex_;
  std::condition_variable work_;
  // Guarded by mutex_:
  bool is_recording_ = false;
  bool stopped_ = false;
  bool tells_of_end_ = false;
  int64_t recorded_steps_ = 0;
  Clock::time_point recorded_from_, recorded_until_, step_begin_;
  Tracks tracks_;
  Names names_;
  std::vector<Event> events_;  // of the step that runs
  std::vector<Event> ready_;   // to be written
  std::vector<std::pair<int, std::string>> named_;
  std::optional<OperatorNotices> operators_;
  Worker worker_;
};

Timeline::Timeline(int rank, const TimelineOptions& options) : impl_(std::make_unique<Impl>(rank, options)) {}
Timeline::~Timeline() = default;
void Timeline::hear(const Notice& notice) noexcept { impl_->hear(notice); }
int64_t Timeline::recorded_steps() const { return impl_->recorded_steps(); }
const std::filesystem::path& Timeline::path() const { return impl_->path(); }

namespace {

struct RankTrace {
  std::vector<Json> events;
  int64_t begin_ns = 0;
};

RankTrace read_trace(const std::filesystem::path& path, int rank) {
  // A line for each event; the last one may be torn.
  RankTrace trace;
  bool has_clock = false;
  const auto refuse = [&](const std::string& why) {
    throw DataError(str(path.string(), ": ", why, "; take the file out of the folder, or the folder of one run"));
  };
  const std::string text = posix_file_system().read(path);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line(text.data() + begin, end - begin);
    begin = end + 1;
    if (line.ends_with(',')) line.remove_suffix(1);
    Json event = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!event.is_object()) continue;
    if (!event.contains("ph") || !event.contains("pid")) refuse("a line that is no event of a timeline");
    if (event["pid"] != rank) refuse(str("events of rank ", event["pid"].dump(), " in the file of rank ", rank));
    if (event.value("name", "") == kClockEvent) {
      has_clock = true;
      trace.begin_ns = event.at("args").at("begin_ns").get<int64_t>();
    } else {
      trace.events.push_back(std::move(event));
    }
  }
  if (!has_clock) refuse("no timeline in it: it is empty, or damaged");
  return trace;
}

}  // namespace

std::vector<int> join_timelines(const std::filesystem::path& folder, const std::filesystem::path& output) {
  FileSystem& files = posix_file_system();
  std::error_code error;
  // Renaming a file over a device would take the device away.
  if (std::filesystem::exists(output, error) && !std::filesystem::is_regular_file(output, error))
    throw IoError(str(output.string(), ": there is something else than a file; name another one"));
  const bool is_in_folder = std::filesystem::equivalent(
      output.has_parent_path() ? output.parent_path() : std::filesystem::path("."), folder, error);
  if (is_in_folder && rank_of(output.filename().string()))
    throw IoError(str(output.string(), ": the file of a rank, which is read; name another one"));
  std::map<int, RankTrace> traces;
  if (files.exists(folder))
    for (const std::string& name : files.list(folder))
      if (const auto rank = rank_of(name)) traces[*rank] = read_trace(folder / name, *rank);
  if (traces.empty())
    throw IoError(str(folder.string(),
                      ": no timeline there; a run with \"timeline\": {\"enabled\": true} in its "
                      "configuration writes rank-0.json and so on"));
  int64_t first_ns = traces.begin()->second.begin_ns;
  for (const auto& [rank, trace] : traces) first_ns = std::min(first_ns, trace.begin_ns);
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  const char* separator = "\n";
  std::vector<int> ranks;
  for (auto& [rank, trace] : traces) {
    ranks.push_back(rank);
    for (Json& event : trace.events) {
      if (event.contains("ts"))
        event["ts"] = event["ts"].get<double>() + static_cast<double>(trace.begin_ns - first_ns) / 1e3;
      text += separator + event.dump(-1, ' ', false, Json::error_handler_t::replace);
      separator = ",\n";
    }
  }
  write_file_atomically(files, output, text + "\n]}\n");
  return ranks;
}

}  // namespace trireme
