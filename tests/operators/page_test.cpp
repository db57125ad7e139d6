// docs/operators.md, which is printed from the table.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/support/operators/cases.h"
#include "tests/support/operators/quiet.h"
#include "tests/support/operators/row_text.h"

namespace trireme::testing {
namespace page_test {

constexpr const char* kHead =
    "# The meaning of operators\n\n"
    "Printed by `operators_test` from the table of rows (`src/operators/row_table.cpp`);\n"
    "`TRIREME_UPDATE_DOCS=1` before it writes this page anew. [Why rows](decisions/043-rows-of-factors.md). Slices "
    "of\n[tensor parallelism](tensor.md) run by it; parts of [sequences](sequence.md) have rules of their own so "
    "far.\n\n"
    "A dim is made of factors, outermost first: `(a b)` is a dim of two, `1` one of size 1 that is never cut. The "
    "rows\n"
    "are of calls at random. Where ranks cut a dim along a factor, each computes its part *apart*; they *join* what\n"
    "they have (a sum, a maximum), where no result has the factor; or the argument becomes *whole* on each of them\n"
    "first. By *places*, a rank takes the elements that it has, and ranks add up. `c = a(2, 4) a(0, 2)` is made of "
    "pieces of\nother factors: ranges move, and nothing is exchanged.\n";

struct Entry {
  std::string name, row;
  size_t factors = 0;
};

/// The row of the call with the most factors of some at random.
std::optional<Entry> entry_of(const NamedCase& one, const OperatorRow& operators) {
  std::mt19937_64 random(7);
  std::optional<Entry> best;
  for (int i = 0; i < 40; ++i) {
    const std::optional<OperatorCase> made = one.make(random, {});
    if (!made) continue;
    const size_t dot = made->op.find('.', made->op.find("::"));
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        made->op.substr(0, dot).c_str(), dot == std::string::npos ? "" : made->op.substr(dot + 1).c_str());
    const Row row = operators.row(RowCall(op, made->arguments));
    if (!best || row.factors.size() > best->factors) best = Entry{one.name, RowText{row, {}}.all(), row.factors.size()};
  }
  return best;
}

std::string page() {
  std::map<std::string, std::vector<Entry>> by_family;
  std::string each;
  for (const std::string_view name : names_with_rows()) {
    const size_t dot = name.find('.');
    for (const std::string& overload :
         {dot == name.npos ? std::string("Tensor") : std::string(name.substr(dot + 1)), std::string()}) {
      const auto op = c10::Dispatcher::singleton().findSchema({"aten::" + std::string(name.substr(0, dot)), overload});
      if (!op || row_of(*op) == nullptr || std::string_view(row_of(*op)->family) != "each") continue;
      const size_t line = each.rfind('\n') == each.npos ? 0 : each.rfind('\n') + 1;
      const bool is_full = each.size() - line + name.size() > 116;
      each += (each.empty() ? "`" : is_full ? "`\n`" : "` `") + std::string(name);
      break;
    }
  }
  for (const NamedCase& one : operator_cases()) {
    std::mt19937_64 random(7);
    std::optional<OperatorCase> made;
    for (int i = 0; i < 40 && !made; ++i) made = one.make(random, {});
    if (!made) continue;
    const size_t dot = made->op.find('.', made->op.find("::"));
    const auto op = c10::Dispatcher::singleton().findSchema(
        {made->op.substr(0, dot), dot == std::string::npos ? "" : made->op.substr(dot + 1)});
    const OperatorRow* const operators = op ? row_of(*op) : nullptr;
    if (operators == nullptr || std::string_view(operators->family) == "each") continue;
    if (auto entry = entry_of(one, *operators)) by_family[operators->family].push_back(std::move(*entry));
  }
  std::string text = kHead;
  text +=
      "\n## each\n\nElement by element, with broadcasting: what libtorch tags as `pointwise`, and\n\n" + each + "`\n";
  for (const auto& [family, entries] : by_family) {
    text += "\n## " + family + "\n\n| operator | row |\n|---|---|\n";
    for (const Entry& entry : entries) text += "| `" + entry.name + "` | `" + entry.row + "` |\n";
  }
  return text;
}

TEST(OperatorsPage, IsPrintedFromTheTable) {
  const QuietWarnings quiet;
  const auto path = std::filesystem::path(__FILE__).parent_path() / "../../docs/operators.md";
  const std::string made = page();
  if (std::getenv("TRIREME_UPDATE_DOCS") != nullptr) {
    std::ofstream(path, std::ios::binary) << made;
    return;
  }
  std::ifstream file(path, std::ios::binary);
  const std::string written{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(written == made) << "docs/operators.md is another; TRIREME_UPDATE_DOCS=1 writes it anew";
}

}  // namespace page_test
}  // namespace trireme::testing
