// Runs on Parquet, and without what reads it.
#include <gtest/gtest.h>

#include "tests/cli/train_runs.h"

namespace trireme::cli {
namespace {

constexpr const char* kWriter = R"py(
import json, sys
try:
    import pyarrow as pa
    from pyarrow import parquet
except ImportError:
    sys.exit(77)
texts = [f"line {i * 7919 % 1000} of the story" for i in range(3000)]
parquet.write_table(pa.table({"story": texts}), sys.argv[1] + ".parquet", row_group_size=500)
with open(sys.argv[1] + ".jsonl", "w") as lines:
    lines.writelines(json.dumps({"story": text}) + "\n" for text in texts)
)py";

class ParquetRuns : public TrainProgram {
 protected:
  std::vector<std::string> start(const std::string& out, const std::string& data) const {
    return with(train(out, {"--text-key", "story", "--steps", "3"}), "--data", folder_ / data);
  }
};

TEST_F(ParquetRuns, TrainAsOnTheSameRowsOfJsonLines) {
  const auto script = folder_.write("write.py", kWriter);
  const std::string python =
      contents_of(std::filesystem::path(program_path()).parent_path() / "../share/trireme/python");
  const auto written = run_program(
      {python.empty() ? "/usr/bin/python3" : python.substr(0, python.find('\n')), script, folder_ / "rows"});
  if (written.exit_code == 77) GTEST_SKIP() << "pyarrow is not there, so there is no Parquet file to read";
  ASSERT_EQ(written.exit_code, 0) << written.err;
  for (const std::string ending : {"parquet", "jsonl"}) {
    const auto done = run_program(start(ending, "rows." + ending));
    ASSERT_EQ(done.exit_code, 0) << done.err;
  }
  EXPECT_EQ(losses_of("parquet").size(), 3u);
  EXPECT_EQ(losses_of("parquet"), losses_of("jsonl"));
}

TEST_F(ParquetRuns, WithoutPyarrowAreRefusedBeforeAnythingIsWritten) {
  folder_.write("rows.parquet", "PAR1" + std::string(100, '\0') + "PAR1");
  const auto done =
      run_program(start("refused", "rows.parquet"), {{"TRIREME_PYTHON", "/no/python"}, {"PATH", "/none"}});
  EXPECT_EQ(done.exit_code, 2) << done.err;
  for (const char* part : {"/no/python -m pip install pyarrow", "rows.parquet", "JSON lines"})
    EXPECT_NE(done.err.find(part), std::string::npos) << done.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "refused"));
}

}  // namespace
}  // namespace trireme::cli
