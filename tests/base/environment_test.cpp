// The list of the environment's variables is the page's, and nothing reads one beside it.
#include "trireme/base/environment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = fs::path(__FILE__).parent_path() / "../..";

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Environment, IsReadByListedNamesAlone) {
  ASSERT_EQ(setenv("TRIREME_COLUMNS", "", 1), 0);
  EXPECT_EQ(environment("TRIREME_COLUMNS"), "");
  ASSERT_EQ(unsetenv("TRIREME_COLUMNS"), 0);
  EXPECT_EQ(environment("TRIREME_COLUMNS"), std::nullopt);
  EXPECT_SAYS(testing::error_of<Error>([] { (void)environment("TRIREME_COLUMN"); }),
              "TRIREME_COLUMN is not in the list");
}

TEST(Environment, HasAPage) {
  const fs::path path = kRoot / "docs/environment.md";
  const std::string page = text_of(path), tables = environment_page();
  if (std::getenv("TRIREME_UPDATE_DOCS") != nullptr) {
    std::ofstream(path, std::ios::binary) << page.substr(0, page.find("\n## ")) << tables;
    return;
  }
  EXPECT_EQ(page.substr(std::min(page.find("\n## "), page.size())), tables)
      << "TRIREME_UPDATE_DOCS=1 base_test writes docs/environment.md anew";
}

/// Offences of one file, as "PATH: what".
std::vector<std::string> reads_beside_the_list(const fs::path& path) {
  static const std::regex beside(
      R"(\bgetenv\(|os\.getenv|os\.environ\.get\(|os\.environ\[[^\]]+\](?! *=[^=])| in os\.environ\b)");
  const std::string text = text_of(path);
  std::vector<std::string> found;
  for (std::sregex_iterator match(text.begin(), text.end(), beside), end; match != end; ++match)
    found.push_back(str(fs::relative(path, kRoot).string(), ": ", match->str()));
  return found;
}

TEST(Environment, IsReadInOnePlace) {
  std::vector<std::string> found;
  size_t files = 0;
  for (const char* folder : {"src", "include", "python"})
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      const std::string kind = entry.path().extension().string();
      if (kind != ".cpp" && kind != ".h" && kind != ".py") continue;
      ++files;
      for (const std::string& one : reads_beside_the_list(entry.path())) found.push_back(one);
    }
  EXPECT_GT(files, 700u);
  std::sort(found.begin(), found.end());
  // Two run without the package and its library.
  EXPECT_EQ(found, (std::vector<std::string>{"python/_trireme_program.py: os.environ.get(",
                                             "src/base/environment.cpp: getenv(",
                                             "src/checkpoint/zero_to_fp32.py: os.environ.get("}));
}

}  // namespace
}  // namespace trireme
