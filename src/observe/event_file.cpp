// TensorBoard's event file: records (length, its checksum, bytes, their checksum), each a protocol buffer `Event`.
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "observe/append_file.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/utf8.h"
#include "trireme/observe/metrics.h"
#include "trireme/observe/monitors.h"

namespace trireme {
namespace {

// --- checksums -----------------------------------------------------------------------------------------------------

constexpr std::array<uint32_t, 256> crc32c_table() {
  constexpr uint32_t kReflectedPolynomial = 0x82f63b78;
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kReflectedPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}

/// CRC32C, rotated and shifted as the format has it, so that a checksum of bytes with checksums is not trivial.
uint32_t masked_crc(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = crc32c_table();
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint8_t>(byte)) & 0xff];
  return std::rotr(~crc, 15) + 0xa282ead8;
}

// --- bytes ---------------------------------------------------------------------------------------------------------

/// Least significant byte first.
template <class Unsigned>
void put_fixed(std::string& out, Unsigned value) {
  for (size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

/// A protocol buffer, field by field.
class Message {
 public:
  void put_int(uint32_t field, int64_t value) {
    put_key(field, 0);
    put_varint(static_cast<uint64_t>(value));
  }
  void put_double(uint32_t field, double value) {
    put_key(field, 1);
    put_fixed(bytes_, std::bit_cast<uint64_t>(value));
  }
  void put_float(uint32_t field, float value) {
    put_key(field, 5);
    put_fixed(bytes_, std::bit_cast<uint32_t>(value));
  }
  void put_bytes(uint32_t field, std::string_view value) {
    put_key(field, 2);
    put_varint(value.size());
    bytes_ += value;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void put_key(uint32_t field, uint32_t kind) { put_varint(field << 3 | kind); }
  void put_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>((value & 0x7f) | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

// --- events --------------------------------------------------------------------------------------------------------

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

Message event_now() {
  Message event;
  event.put_double(1, seconds_since_1970());  // wall_time
  return event;
}

std::string version_event() {
  Message event = event_now();
  event.put_bytes(3, "brain.Event:2");  // file_version
  return event.bytes();
}

std::string scalar_event(const MonitorEvent& scalar) {
  Message value;
  // Texts of protocol buffers are UTF-8.
  value.put_bytes(1, is_utf8(scalar.name) ? scalar.name : excerpt(scalar.name, scalar.name.size()));  // tag
  value.put_float(2, static_cast<float>(scalar.value));                                               // simple_value
  Message summary;
  summary.put_bytes(1, value.bytes());
  Message event = event_now();
  event.put_int(2, scalar.x);  // step
  event.put_bytes(5, summary.bytes());
  return event.bytes();
}

std::string record_of(std::string_view bytes) {
  std::string record;
  put_fixed(record, uint64_t{bytes.size()});
  put_fixed(record, masked_crc(record));
  record += bytes;
  put_fixed(record, masked_crc(bytes));
  return record;
}

/// As TensorBoard looks for it, and another one for every file.
std::string event_file_name() {
  static std::atomic<int> files{0};
  std::string host = host_name();
  for (char& letter : host)
    if (letter == '/') letter = '_';
  return str("events.out.tfevents.", static_cast<int64_t>(seconds_since_1970()), ".", host.empty() ? "host" : host, ".",
             ::getpid(), ".", files++);
}

std::filesystem::path made(const std::filesystem::path& folder) {
  if (!folder.empty()) posix_file_system().create_directories(folder);
  return folder;
}

class EventFile {
 public:
  explicit EventFile(const std::filesystem::path& folder)
      : file_(made(folder) / event_file_name(), AppendFile::Open::kNew) {
    file_.append(record_of(version_event()));
  }
  void write(std::span<const MonitorEvent> events) {
    std::string records;
    for (const MonitorEvent& event : events) records += record_of(scalar_event(event));
    file_.append(records);
  }

 private:
  AppendFile file_;
};

}  // namespace

EventSink make_event_file(const std::filesystem::path& folder) {
  // Shared, since functions can be copied.
  return [file = std::make_shared<EventFile>(folder)](std::span<const MonitorEvent> events) { file->write(events); };
}

}  // namespace trireme
