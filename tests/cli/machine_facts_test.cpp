// Facts of a machine as text and JSON, and what of them hinders.
#include "cli/machine_facts.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "trireme/base/version.h"

namespace trireme::cli {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

MachineFacts good_machine() {
  return {.versions = {{"trireme", "1.2.3"}, {"nccl", ""}},
          .gpus = {.gpus = {{"NVIDIA H200", 150'000'000'000}}, .problem = ""},
          .memory_bytes = 64 * kGiB,
          .free_memory_bytes = 32 * kGiB,
          .cores = 8,
          .shm = ShmFacts{32 * kGiB, 32 * kGiB},
          .open_files = {1024, std::nullopt},
          .locked_bytes = {65536, 65536},
          .variables = {{"OMP_NUM_THREADS", "2"}}};
}

TEST(MachineFacts, AreRowsOfText) {
  EXPECT_EQ(text_of(good_machine()),
            "trireme     1.2.3\n"
            "nccl        not found\n"
            "\n"
            "cuda:0      NVIDIA H200, 150.0 GB\n"
            "memory      68.7 GB, 34.4 GB free\n"
            "cores       8\n"
            "/dev/shm    34.4 GB, 34.4 GB free\n"
            "ulimit -n   open files: 1024, at most unlimited\n"
            "ulimit -l   locked memory: 65.5 kB, at most 65.5 kB\n"
            "\n"
            "OMP_NUM_THREADS=2\n");
}

TEST(MachineFacts, SayWhatHindersWithItsFix) {
  EXPECT_TRUE(hindrances(good_machine()).empty());
  auto poor = good_machine();
  poor.shm = ShmFacts{64 << 20, 60 << 20};
  poor.has_infiniband = true;
  poor.open_files = {256, 4096};
  const auto said = hindrances(poor);
  ASSERT_EQ(said.size(), 3u);
  EXPECT_TRUE(said[0].starts_with("/dev/shm has 62.9 MB free of 67.1 MB")) << said[0];
  EXPECT_NE(said[0].find("--shm-size=8g"), std::string::npos) << said[0];
  EXPECT_TRUE(said[1].starts_with("at most 65.5 kB may be locked in memory")) << said[1];
  EXPECT_NE(said[1].find("ulimit -l unlimited"), std::string::npos) << said[1];
  EXPECT_TRUE(said[2].ends_with("ulimit -n 4096")) << said[2];
  EXPECT_NE(text_of(poor).find("\nwarning: /dev/shm has"), std::string::npos);
  EXPECT_EQ(json_of(poor)["hindrances"].size(), 3u);
  poor.shm.reset();
  EXPECT_TRUE(hindrances(poor)[0].starts_with("/dev/shm is not there")) << hindrances(poor)[0];
}

TEST(MachineFacts, OfThisMachineAreWhole) {
  const auto done = run_program({"env", "--json"}, {{"TRIREME_TOKEN", "hush"}, {"TRIREME_LOG_LEVEL", "DEBUG"}});
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const Json json = Json::parse(done.out);
  EXPECT_EQ(json["versions"]["trireme"], kVersion);
  EXPECT_TRUE(json["versions"]["torch"].is_string());
  EXPECT_NE(json["versions"]["python"].get<std::string>().find("3."), std::string::npos) << done.out;
  EXPECT_EQ(static_cast<int>(json["gpus"].size()), count_gpus());
  EXPECT_GT(json["memory_bytes"], json["free_memory_bytes"]);
  EXPECT_GE(json["cores"], 1);
  EXPECT_EQ(json["variables"]["TRIREME_LOG_LEVEL"], "DEBUG");
  EXPECT_EQ(done.out.find("hush"), std::string::npos) << done.out;
  const auto text = run_program({"env"});
  EXPECT_NE(text.out.find("\nmemory "), std::string::npos) << text.err;
}

TEST(FirstLine, IsEmptyOfAProgramThatIsNotThere) {
  EXPECT_EQ(first_line_of({"sh", "-c", "echo one; echo two"}), "one");
  EXPECT_EQ(first_line_of({"no-such-program-here"}), "");
}

}  // namespace
}  // namespace trireme::cli
