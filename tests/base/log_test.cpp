#include "trireme/base/log.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme {
namespace {

TEST(Log, SendsMessagesToTheSinkAndGivesTheFormerOneBack) {
  std::string seen;
  const LogSink former = set_log_sink([&](LogLevel level, const std::string& message) {
    seen += (level == LogLevel::kWarning ? "warning " : "other ") + message + ";";
  });
  log(LogLevel::kWarning, "a");
  log(LogLevel::kInfo, "b");
  set_log_sink(former);
  EXPECT_EQ(seen, "warning a;other b;");
}

TEST(Error, CheckNamesTheConditionAndItsOperands) {
  const int got = 3;
  try {
    TRIREME_CHECK(got == 4, "got ", got);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_NE(std::string(error.what()).find("got == 4 is false. got 3"), std::string::npos) << error.what();
  }
}

TEST(Error, CarriesItsCode) {
  EXPECT_EQ(ConfigError("x", ErrorCode::kBatchSize).code(), ErrorCode::kBatchSize);
  EXPECT_STREQ(name_of(ErrorCode::kUnsupported), "UnsupportedError");
}

}  // namespace
}  // namespace trireme
