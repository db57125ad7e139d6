// Which operators of a program sent how much to other ranks along an axis.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

/// The ways of an exchange.
enum class ExchangeWay : uint8_t {
  kSum,      ///< all-reduce: every rank gets the sum, or the greatest
  kGather,   ///< all-gather: every rank gets the whole
  kScatter,  ///< reduce-scatter: each rank gets its part of the sum
  kRecut,    ///< all-to-all: each rank gets its part by another cut
  kRing,     ///< each rank hands on to the next one
};

const char* word_of(ExchangeWay way);

/// The exchanges of one operator in one way, as this rank made them.
struct ExchangeRow {
  std::string axis;  ///< "sequence", "tensor"
  std::string what;  ///< the operator, the parameter where one is known, and the direction
  ExchangeWay way = ExchangeWay::kSum;
  int64_t exchanges = 0;   ///< collectives, or messages to the next rank
  int64_t bytes_sent = 0;  ///< by this rank, as Group counts them

  bool operator==(const ExchangeRow&) const = default;
};

/// `rows`, most bytes first.
std::vector<ExchangeRow> by_bytes(std::vector<ExchangeRow> rows);
/// A table of by_bytes(`rows`), with a line for all of them.
std::string text_of(const std::vector<ExchangeRow>& rows);

}  // namespace trireme
