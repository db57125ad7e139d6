// The manual's page of keys comes from the tables.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/config/config_test_support.h"
#include "trireme/base/file.h"
#include "trireme/config/dialects.h"
#include "trireme/config/source.h"

namespace trireme {
namespace {

std::string page() {
  const auto root = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
  return posix_file_system().read(root / "docs/config.md");
}

TEST(ConfigPage, HoldsEveryKeyAsTheTableHasIt) {
  EXPECT_NE(page().find(keys_page()), std::string::npos) << "put what `trireme config keys` prints into docs/config.md";
}

TEST(ConfigPage, HoldsTheTableOfDialects) {
  EXPECT_NE(page().find(dialect_map()), std::string::npos)
      << "put what `trireme config map` prints into docs/config.md";
}

void expect_on_page(const Json& json, const std::string& path) {
  for (const auto& item : json.items()) {
    if (item.key() == "params") continue;  // the keys of one type
    if (item.value().is_object())
      expect_on_page(item.value(), path + item.key() + ".");
    else
      EXPECT_NE(
          keys_page().find(
              "`" + (path + item.key()).substr(path.find('.') == std::string::npos ? 0 : path.find('.') + 1) + "`"),
          std::string::npos)
          << path << item.key();
  }
}

TEST(ConfigPage, NamesWhateverIsWritten) { expect_on_page(to_json(default_config(1)), ""); }

}  // namespace
}  // namespace trireme
