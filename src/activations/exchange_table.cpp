#include "trireme/activations/exchange_table.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <tuple>
#include <utility>

namespace trireme {

const char* word_of(ExchangeWay way) {
  switch (way) {
    case ExchangeWay::kSum:
      return "sum";
    case ExchangeWay::kGather:
      return "gather";
    case ExchangeWay::kScatter:
      return "scatter";
    case ExchangeWay::kRecut:
      return "recut";
    case ExchangeWay::kRing:
      return "ring";
  }
  return "";
}

std::vector<ExchangeRow> by_bytes(std::vector<ExchangeRow> rows) {
  std::ranges::sort(rows, [](const ExchangeRow& one, const ExchangeRow& other) {
    return std::tuple(-one.bytes_sent, one.axis, one.what, one.way) <
           std::tuple(-other.bytes_sent, other.axis, other.what, other.way);
  });
  return rows;
}

std::string text_of(const std::vector<ExchangeRow>& rows) {
  std::ostringstream text;
  const auto line = [&text](const auto& bytes, const auto& exchanges, const char* way, const std::string& axis,
                            const std::string& what) {
    text << std::right << std::setw(14) << bytes << std::setw(11) << exchanges << "  " << std::left << std::setw(8)
         << way << std::setw(10) << axis << what << '\n';
  };
  line("bytes sent", "exchanges", "way", "axis", "operator");
  int64_t bytes = 0, exchanges = 0;
  for (const ExchangeRow& row : by_bytes(rows)) {
    line(row.bytes_sent, row.exchanges, word_of(row.way), row.axis, row.what);
    bytes += row.bytes_sent;
    exchanges += row.exchanges;
  }
  line(bytes, exchanges, "", "", "all");
  return std::move(text).str();
}

}  // namespace trireme
