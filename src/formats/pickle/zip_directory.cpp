// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.12 to 4.3.16 and 4.5.3.
#include "formats/pickle/zip_directory.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme::pickle {
namespace {

constexpr size_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56, kEntryBytes = 46;
constexpr size_t kMostCommentBytes = 0xFFFF;
constexpr uint64_t kIn64 = 0xFFFFFFFF;  ///< the number stands in the 64-bit record

uint64_t number(std::string_view bytes, size_t at, size_t count) {
  uint64_t value = 0;
  for (size_t i = count; i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

struct Directory {
  uint64_t entries;
  uint64_t begin;
  uint64_t bytes;
};

class Check {
 public:
  Check(ReadableFile& file, size_t begin, size_t bytes, const std::string& origin)
      : file_(file), begin_(begin), bytes_(bytes), origin_(origin) {}

  void run() {
    const std::optional<Directory> directory = find();
    if (!directory) return;
    if (directory->begin > bytes_ || directory->bytes > bytes_ - directory->begin)
      fail("its directory should be beyond its end: it is truncated");
    const std::string text = read(directory->begin, directory->bytes);
    size_t at = 0;
    for (uint64_t i = 0; i < directory->entries; ++i) at = check_entry(text, at);
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw CheckpointError(str(origin_, ": damaged, or not written by torch.save() of PyTorch 1.6 or newer: ", problem));
  }

  std::string read(size_t at, size_t count) {
    std::string text(count, '\0');
    file_.read(begin_ + at, text.data(), count);
    return text;
  }

  std::optional<Directory> find() {
    const size_t tail = std::min(bytes_, kEndBytes + kMostCommentBytes);
    if (tail < kEndBytes) return std::nullopt;
    const std::string text = read(bytes_ - tail, tail);
    const size_t end = std::string_view(text).substr(0, tail - kEndBytes + 4).rfind("PK\5\6");
    if (end == std::string_view::npos) return std::nullopt;
    Directory found{number(text, end + 10, 2), number(text, end + 16, 4), number(text, end + 12, 4)};
    const size_t locator = bytes_ - tail + end;
    if (locator < kLocatorBytes) return found;
    const std::string place = read(locator - kLocatorBytes, kLocatorBytes);
    if (!place.starts_with("PK\6\7")) return found;
    const uint64_t end64 = number(place, 8, 8);
    if (end64 > bytes_ || bytes_ - end64 < kEnd64Bytes) fail("its 64-bit directory should be beyond its end");
    const std::string wide = read(end64, kEnd64Bytes);
    if (!wide.starts_with("PK\6\6")) return found;
    return Directory{number(wide, 32, 8), number(wide, 48, 8), number(wide, 40, 8)};
  }

  /// Returns where the next entry begins.
  size_t check_entry(std::string_view text, size_t at) const {
    if (text.size() - at < kEntryBytes || !text.substr(at).starts_with("PK\1\2")) fail("its directory is cut off");
    const std::string_view entry = text.substr(at);
    const size_t name_bytes = number(entry, 28, 2), extra_bytes = number(entry, 30, 2);
    const size_t entry_bytes = kEntryBytes + name_bytes + extra_bytes + number(entry, 32, 2);
    if (entry.size() < entry_bytes) fail("its directory is cut off");
    const std::string record = "record " + excerpt(entry.substr(kEntryBytes, name_bytes), 100);
    if (number(entry, 10, 2) != 0)
      throw CheckpointError(
          str(origin_, ": ", record, " is compressed; load the file with torch.load() and save it again"));
    uint64_t size = number(entry, 24, 4), stored = number(entry, 20, 4);
    const std::string_view extra = entry.substr(kEntryBytes + name_bytes, extra_bytes);
    for (size_t i = 0; i + 4 <= extra.size(); i += 4 + number(extra, i + 2, 2)) {
      if (number(extra, i, 2) != 1) continue;
      const std::string_view wide = extra.substr(i + 4, number(extra, i + 2, 2));
      size_t next = 0;
      for (uint64_t* value : {&size, &stored}) {
        if (*value != kIn64 || next + 8 > wide.size()) continue;
        *value = number(wide, next, 8);
        next += 8;
      }
    }
    if (size != stored || size > bytes_)
      fail(str(record, " should have ", size, " bytes, ", stored, " of them stored, in a file of ", bytes_));
    return at + entry_bytes;
  }

  ReadableFile& file_;
  const size_t begin_;
  const size_t bytes_;
  const std::string& origin_;
};

}  // namespace

void check_zip_directory(ReadableFile& file, size_t begin, size_t bytes, const std::string& origin) {
  Check(file, begin, bytes, origin).run();
}

}  // namespace trireme::pickle
