// Rows as text: "[a b c] [d c] + [d] -> [a b d], c sum".
#pragma once

#include <map>
#include <string>

#include "trireme/base/error.h"
#include "trireme/operators/row.h"

namespace trireme::testing {

/// Letters of factors in the order of their first use, "1" for a dim that has none, "(a b)" for one of several.
struct RowText {
  const Row& row;
  std::map<uint8_t, char> letters;

  char letter(uint8_t factor) {
    return letters.try_emplace(factor, static_cast<char>('a' + letters.size())).first->second;
  }
  std::string of(const DimFactors& dim) {
    if (dim.empty()) return "1";
    std::string text;
    for (const uint8_t factor : dim) text += std::string(text.empty() ? "" : " ") + letter(factor);
    return dim.size() == 1 ? text : "(" + text + ")";
  }
  std::string of(const TensorFactors& tensor) {
    std::string text;
    for (const DimFactors& dim : tensor) text += (text.empty() ? "" : " ") + of(dim);
    return "[" + text + "]";
  }
  std::string of(const Piece& piece) {
    const std::string whole = piece.argument == Piece::kConstant ? "constant" : std::string(1, letter(piece.factor));
    return str(whole, "(", piece.begin, ", ", piece.end, ")", piece.is_reversed ? " reversed" : "");
  }
  std::string all() {
    static constexpr const char* kNames[] = {"each",    "whole",   "places",  "sum", "mean",
                                             "maximum", "minimum", "product", "any", "all"};
    std::string text;
    for (size_t i = 0; i < row.arguments.size(); ++i)
      text += (i == 0 ? "" : static_cast<int>(i) == row.term ? " + " : " ") + of(row.arguments[i]);
    text += " ->";
    for (const TensorFactors& result : row.results) text += " " + of(result);
    for (const auto& [factor, own] : std::map(letters))
      if (row.factors[factor].kind != FactorKind::kEach)
        text += str(", ", own, " ", kNames[static_cast<int>(row.factors[factor].kind)]);
    for (const PiecedFactor& made : row.pieces) {
      text += str(", ", letter(made.factor), " =");
      for (const Piece& piece : made.pieces) text += " " + of(piece);
    }
    return text;
  }
};

}  // namespace trireme::testing
