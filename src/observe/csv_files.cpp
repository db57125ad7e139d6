// A CSV file for each name of an event: "step" and the last part of the name, then a line for each event.
#include <unistd.h>

#include <charconv>
#include <cmath>
#include <string>
#include <string_view>

#include "observe/append_file.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/observe/monitors.h"

namespace trireme {
namespace {

constexpr std::string_view kEndOfLine = "\r\n";  // RFC 4180

std::string field_of(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char letter : text) quoted.append(letter == '"' ? 2 : 1, letter);
  return quoted + "\"";
}

/// The shortest text that reads as `value`, which shows that it is no integer.
std::string number_of(double value) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  std::string number(text, end);
  return number.find_first_of(".e") == std::string::npos ? number + ".0" : number;
}

std::string file_name_of(std::string name) {
  for (char& letter : name)
    if (letter == '/' || letter == ' ' || letter == '\0') letter = '_';
  return name + ".csv";
}

class CsvFiles {
 public:
  explicit CsvFiles(std::filesystem::path folder) : folder_(std::move(folder)) {
    FileSystem& files = posix_file_system();
    if (!folder_.empty()) files.create_directories(folder_);
    const std::filesystem::path probe = folder_ / str(".is_writable.", ::getpid());
    AppendFile(probe).append("\n");
    files.remove_all(probe);
  }

  /// Files are opened for each call: a program may have more names than a process may have open files.
  void write(std::span<const MonitorEvent> events) const {
    for (const MonitorEvent& event : events) {
      AppendFile file(folder_ / file_name_of(event.name));
      std::string lines;
      if (file.bytes() == 0) {
        const size_t slash = event.name.rfind('/');
        lines =
            str("step,", field_of(slash == std::string::npos ? event.name : event.name.substr(slash + 1)), kEndOfLine);
      }
      file.append(str(lines, event.x, ",", number_of(event.value), kEndOfLine));
    }
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace

EventSink make_csv_files(const std::filesystem::path& folder) {
  return [files = CsvFiles(folder)](std::span<const MonitorEvent> events) { files.write(events); };
}

}  // namespace trireme
