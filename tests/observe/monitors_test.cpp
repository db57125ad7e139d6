#include "trireme/observe/monitors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string_view>
#include <vector>

#include "tests/observe/fixture.h"
#include "tests/support/captured_log.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using observe_test::Folder;
using observe_test::text_of;
using Events = std::vector<MonitorEvent>;

// --- a reader of its own: CRC32C bit by bit, and protocol buffers without a schema ---------------------------------

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  for (const char byte : bytes)
    for (int bit = 0; bit < 8; ++bit) {
      const uint32_t in = (crc ^ (static_cast<uint8_t>(byte) >> bit)) & 1;
      crc = in ? (crc >> 1) ^ 0x82f63b78 : crc >> 1;
    }
  return ~crc;
}

uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

template <class T>
T fixed(std::string_view bytes) {
  T value{};
  std::memcpy(&value, bytes.substr(0, sizeof value).data(), sizeof value);
  return value;
}

struct Field {
  uint64_t number = 0;
  std::string bytes;
};

/// {field: its value}; each field stands once.
std::map<int, Field> fields_of(std::string_view message) {
  std::map<int, Field> fields;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<uint8_t>(message.at(0));
      message.remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
  };
  const auto take = [&](size_t bytes) {
    const std::string taken(message.substr(0, bytes));
    EXPECT_EQ(taken.size(), bytes);
    message.remove_prefix(taken.size());
    return taken;
  };
  while (!message.empty()) {
    const uint64_t key = varint();
    Field field;
    switch (key & 7) {
      case 0:
        field.number = varint();
        break;
      case 1:
        field.bytes = take(8);
        break;
      case 2:
        field.bytes = take(varint());
        break;
      case 5:
        field.bytes = take(4);
        break;
      default:
        ADD_FAILURE() << "wire type " << (key & 7);
    }
    EXPECT_TRUE(fields.emplace(static_cast<int>(key >> 3), field).second) << "field " << (key >> 3) << " twice";
  }
  return fields;
}

std::vector<std::string> records_of(std::string_view file) {
  std::vector<std::string> records;
  while (!file.empty()) {
    const auto length = fixed<uint64_t>(file);
    EXPECT_EQ(fixed<uint32_t>(file.substr(8)), masked(crc32c(file.substr(0, 8))));
    const std::string_view bytes = file.substr(12, length);
    EXPECT_EQ(bytes.size(), length);
    EXPECT_EQ(fixed<uint32_t>(file.substr(12 + length)), masked(crc32c(bytes)));
    records.emplace_back(bytes);
    file.remove_prefix(12 + length + 4);
  }
  return records;
}

struct Point {
  std::string name;
  float value = 0;
  int64_t x = 0;
  bool operator==(const Point&) const = default;
};

/// The scalars of an event file, whose first event must be the version.
std::vector<Point> points_of(const std::filesystem::path& path) {
  std::vector<Point> points;
  const std::vector<std::string> records = records_of(text_of(path));
  EXPECT_FALSE(records.empty());
  for (size_t i = 0; i < records.size(); ++i) {
    const std::map<int, Field> event = fields_of(records[i]);
    EXPECT_GT(fixed<double>(event.at(1).bytes), 1.7e9);  // seconds since 1970
    if (i == 0) {
      EXPECT_EQ(event.at(3).bytes, "brain.Event:2");
      continue;
    }
    const std::map<int, Field> value = fields_of(fields_of(event.at(5).bytes).at(1).bytes);
    points.push_back({value.at(1).bytes, fixed<float>(value.at(2).bytes), std::bit_cast<int64_t>(event.at(2).number)});
  }
  return points;
}

std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  return files;
}

/// While it lasts, files of this process can have `bytes` at most, as on a disk that is full then.
class FullAt {
 public:
  explicit FullAt(size_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullAt() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

// --- event files ---------------------------------------------------------------------------------------------------

TEST(EventFile, OfTensorBoardHasEveryEventWithItsChecksums) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);  // the reader's own, by the polynomial's check value
  const Folder folder;
  make_event_file(folder / "runs" / "a")(
      Events{{"Train/Samples/train_loss", 0.1, 8}, {"Train/Samples/lr", 1e-30, 1'000'000'000'000}, {"ü", -2, -1}});
  const auto files = files_in(folder / "runs" / "a");
  ASSERT_EQ(files.size(), 1u);
  EXPECT_TRUE(files[0].filename().string().starts_with("events.out.tfevents.")) << files[0];
  EXPECT_EQ(points_of(files[0]), (std::vector<Point>{{"Train/Samples/train_loss", 0.1f, 8},
                                                     {"Train/Samples/lr", 1e-30f, 1'000'000'000'000},
                                                     {"ü", -2, -1}}));
}

TEST(EventFile, HasNumbersThatAreNotFiniteAndNamesThatAreNoUtf8) {
  const Folder folder;
  const double infinity = std::numeric_limits<double>::infinity();
  make_event_file(folder.path())(Events{{"a\xff", infinity, 1}, {"", -infinity, 2}, {"n", std::nan(""), 3}});
  const std::vector<Point> points = points_of(files_in(folder.path()).at(0));
  ASSERT_EQ(points.size(), 3u);
  EXPECT_EQ(points[0].name, "a?");
  EXPECT_EQ(points[0].value, std::numeric_limits<float>::infinity());
  EXPECT_EQ(points[1].value, -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(points[2].value));
}

TEST(EventFile, OfASecondStartIsAnotherOneInTheSameFolder) {
  const Folder folder;
  for (const int64_t x : {1, 2}) make_event_file(folder.path())(Events{{"a", 0, x}});
  EXPECT_EQ(files_in(folder.path()).size(), 2u);
}

TEST(EventFile, ThatMeetsAFullDiskIsWholeAndGoesOnLater) {
  const Folder folder;
  const auto file = make_event_file(folder.path());
  const auto path = files_in(folder.path()).at(0);
  file(Events{{"a", 1, 1}});
  {
    const FullAt full(std::filesystem::file_size(path) + 7);
    EXPECT_THROW(file(Events{{"a", 2, 2}}), IoError);
  }
  file(Events{{"a", 3, 3}});
  EXPECT_EQ(points_of(path), (std::vector<Point>{{"a", 1, 1}, {"a", 3, 3}}));
}

// --- CSV -----------------------------------------------------------------------------------------------------------

TEST(CsvFiles, HaveOneFileForEachNameWithItsLastPartAsTheHeader) {
  const Folder folder;
  make_csv_files(folder / "a")(Events{{"Train/Samples/train_loss", 0.1, 8},
                                      {"Train/Samples/lr", 1e-5, 8},
                                      {"eval loss", 2, 8},
                                      {"Train/Samples/train_loss", 1.0 / 3, 16},
                                      {"a,b\"c", std::numeric_limits<double>::infinity(), 1}});
  EXPECT_EQ(files_in(folder / "a").size(), 4u);
  EXPECT_EQ(text_of(folder / "a" / "Train_Samples_train_loss.csv"),
            "step,train_loss\r\n8,0.1\r\n16,0.3333333333333333\r\n");
  EXPECT_EQ(text_of(folder / "a" / "Train_Samples_lr.csv"), "step,lr\r\n8,1e-05\r\n");
  EXPECT_EQ(text_of(folder / "a" / "eval_loss.csv"), "step,eval loss\r\n8,2.0\r\n");
  EXPECT_EQ(text_of(folder / "a" / "a,b\"c.csv"), "step,\"a,b\"\"c\"\r\n1,inf\r\n");
}

TEST(CsvFiles, OfAResumedRunGoOnWithoutAnotherHeader) {
  const Folder folder;
  for (const int64_t x : {1, 2}) make_csv_files(folder.path())(Events{{"a", 0.5, x}});
  EXPECT_EQ(text_of(folder / "a.csv"), "step,a\r\n1,0.5\r\n2,0.5\r\n");
}

TEST(CsvFiles, ThatMeetAFullDiskHaveWholeLines) {
  const Folder folder;
  const auto files = make_csv_files(folder.path());
  files(Events{{"a", 1, 1}});
  {
    const FullAt full(std::filesystem::file_size(folder / "a.csv") + 3);
    EXPECT_THROW(files(Events{{"a", 2, 2}}), IoError);
  }
  files(Events{{"a", 3, 3}});
  EXPECT_EQ(text_of(folder / "a.csv"), "step,a\r\n1,1.0\r\n3,3.0\r\n");
}

// --- both ----------------------------------------------------------------------------------------------------------

TEST(Monitors, AreThoseThatAreSwitchedOn) {
  const Folder folder;
  EXPECT_TRUE(open_monitors({}).is_empty());
  const FileMonitorOptions on{.enabled = true, .output_path = folder.path().string(), .job_name = "job"};
  MonitorOptions options;
  options.tensorboard = options.csv_monitor = on;
  Monitors monitors = open_monitors(options);
  monitors.write(Events{{"a", 1, 2}});
  EXPECT_EQ(files_in(folder / "job").size(), 2u);
}

TEST(Monitors, OfAPathThatCannotBeWrittenAreRefusedByTheKey) {
  const Folder folder;
  const std::string file = (folder / "file").string();
  std::ofstream(file) << "a";
  for (const std::string key : {"tensorboard", "csv_monitor"}) {
    try {
      (void)open_monitor(key, {.output_path = file, .job_name = "job"});
      ADD_FAILURE() << key;
    } catch (const IoError& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("`" + key + ".output_path` is \"" + file + "\""))
          << error.what();
      EXPECT_NE(std::string(error.what()).find("; name a folder that rank 0 can write, or set `" + key + ".enabled`"),
                std::string::npos);
    }
  }
}

TEST(Monitors, WarnOnceOfAFullDiskAndGoOn) {
  const Folder folder;
  const FileMonitorOptions on{.output_path = folder.path().string(), .job_name = ""};
  Monitors monitors = open_monitor("csv_monitor", on);
  monitors.write(Events{{"a", 1, 1}});
  CapturedLog log;
  {
    const FullAt full(std::filesystem::file_size(folder / "a.csv"));
    monitors.write(Events{{"a", 2, 2}});
    monitors.write(Events{{"a", 3, 3}});
  }
  monitors.write(Events{{"a", 4, 4}});
  EXPECT_EQ(text_of(folder / "a.csv"), "step,a\r\n1,1.0\r\n4,4.0\r\n");
  const std::string text = log.text();
  EXPECT_EQ(text.find("csv_monitor: events are lost, and training goes on: "), text.rfind("csv_monitor: ")) << text;
  EXPECT_NE(text.find("csv_monitor: "), std::string::npos);
}

}  // namespace
}  // namespace trireme
