// Products: letters of an equation are factors, and those that no result has are summed over.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/matmul.h>

#include <algorithm>
#include <map>
#include <string>

#include "operators/families.h"

namespace trireme::rows {
namespace {

/// One number for each dim; equal ones are one letter.
using Letters = std::vector<int>;

/// Letters of batches count from here, and those of an ellipsis: from the right.
constexpr int kBatch = 1000;

/// The first arguments by their letters. A dim of size 1 beside others of its letter is broadcast.
Row of_equation(const RowCall& call, const std::vector<Letters>& inputs, const Letters& output) {
  std::map<int, int64_t> sizes;
  std::map<int, bool> is_diagonal;
  for (size_t i = 0; i < inputs.size(); ++i)
    for (size_t d = 0; d < inputs[i].size(); ++d) {
      const int letter = inputs[i][d];
      int64_t& size = sizes.try_emplace(letter, 1).first->second;
      if (call.sizes(i)[d] != 1) size = call.sizes(i)[d];
      if (std::ranges::count(inputs[i], letter) > 1) is_diagonal[letter] = true;
    }
  Row row;
  std::map<int, DimFactors> factors;
  for (const auto& [letter, size] : sizes) {
    const bool is_kept = std::ranges::find(output, letter) != output.end();
    factors[letter] = row.dim(size, is_diagonal[letter] ? FactorKind::kWhole
                                    : is_kept           ? FactorKind::kEach
                                                        : FactorKind::kSum);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    TensorFactors dims;
    for (size_t d = 0; d < inputs[i].size(); ++d)
      dims.push_back(call.sizes(i)[d] == 1 ? DimFactors() : factors[inputs[i][d]]);
    row.arguments.push_back(dims);
  }
  TensorFactors result;
  for (const int letter : output) result.push_back(factors[letter]);
  row.results = {result};
  return row;
}

/// `count` letters of batches, then `more`.
Letters with_batches(int64_t count, const Letters& more) {
  Letters letters;
  for (int64_t i = count; i-- > 0;) letters.push_back(kBatch + static_cast<int>(i));
  letters.insert(letters.end(), more.begin(), more.end());
  return letters;
}

Letters letters_of(std::string_view text) { return {text.begin(), text.end()}; }

Row of_text(const RowCall& call, std::string_view text) {
  const size_t arrow = text.find('>');
  std::vector<Letters> inputs(1);
  for (const char letter : text.substr(0, arrow)) {
    if (letter == ',')
      inputs.emplace_back();
    else
      inputs.back().push_back(letter);
  }
  return of_equation(call, inputs, letters_of(text.substr(arrow + 1)));
}

Row matmul_row(const RowCall& call) {
  const int64_t a = call.dims(0), b = call.dims(1);
  const Letters left = a == 1 ? letters_of("k") : with_batches(a - 2, letters_of("mk"));
  const Letters right = b == 1 ? letters_of("k") : with_batches(b - 2, letters_of("kn"));
  Letters result = with_batches(std::max<int64_t>({a - 2, b - 2, 0}), {});
  if (a > 1) result.push_back('m');
  if (b > 1) result.push_back('n');
  return of_equation(call, {left, right}, result);
}

/// The argument behind the factors of a product that is added once.
void add_term(Row& row, const RowCall& call, const char* name) {
  const auto term = call.tensor_of(name);
  if (!term) return;
  row.arguments.resize(std::max(row.arguments.size(), *term + 1));
  if (!call.is_defined(*term)) return;
  row.arguments[*term] = from_the_right(row, row.results[0], call.sizes(*term));
  row.term = static_cast<int>(*term);
}

bool is_one(const c10::IValue& value) { return value.isNone() || (value.isScalar() && value.toScalar().equal(1)); }

/// The letters of einsum's equation; those of "..." are batches.
std::vector<Letters> letters_of_operands(const RowCall& call, std::string_view text) {
  std::vector<Letters> operands(1);
  std::string plain;
  for (const char letter : text)
    if (letter != ' ') plain += letter;
  for (size_t at = 0; at < plain.size(); ++at) {
    if (plain[at] == ',') {
      operands.emplace_back();
    } else if (plain[at] == '.') {
      at += 2;
      operands.back().push_back(0);
    } else {
      operands.back().push_back(plain[at]);
    }
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto dots = std::ranges::find(operands[i], 0);
    if (dots == operands[i].end()) continue;
    const int64_t count = call.dims(i) - static_cast<int64_t>(operands[i].size()) + 1;
    const Letters batches = with_batches(count, {});
    operands[i].insert(operands[i].erase(dots), batches.begin(), batches.end());
  }
  return operands;
}

/// The output of einsum: as the equation says, or what stands once, batches first.
Letters output_of(const std::vector<Letters>& operands, const std::string& equation) {
  std::map<int, int> counts;
  int64_t batches = 0;
  for (const Letters& letters : operands)
    for (const int letter : letters) {
      ++counts[letter];
      if (letter >= kBatch) batches = std::max<int64_t>(batches, letter - kBatch + 1);
    }
  const size_t arrow = equation.find("->");
  Letters output;
  if (arrow == std::string::npos) {
    output = with_batches(batches, {});
    for (const auto& [letter, count] : counts)
      if (letter < kBatch && count == 1) output.push_back(letter);
    return output;
  }
  for (size_t at = arrow + 2; at < equation.size(); ++at) {
    if (equation[at] == '.') {
      const Letters dots = with_batches(batches, {});
      output.insert(output.end(), dots.begin(), dots.end());
      at += 2;
    } else if (equation[at] != ' ') {
      output.push_back(equation[at]);
    }
  }
  return output;
}

}  // namespace

Row product(const RowCall& call) {
  const std::string_view name = call.name();
  if (name == "mm") return of_text(call, "mk,kn>mn");
  if (name == "bmm") return of_text(call, "bmk,bkn>bmn");
  if (name == "mv") return of_text(call, "mk,k>m");
  if (name == "dot" || name == "vdot") return of_text(call, "k,k>");
  if (name == "outer" || name == "ger") return of_text(call, "m,n>mn");
  if (name == "inner" && call.dims(0) > 0 && call.dims(1) > 0) {
    Letters left, right;
    for (int64_t i = 1; i < call.dims(0); ++i) left.push_back(kBatch + static_cast<int>(i));
    for (int64_t i = 1; i < call.dims(1); ++i) right.push_back(2 * kBatch + static_cast<int>(i));
    Letters result = left;
    result.insert(result.end(), right.begin(), right.end());
    left.push_back('k');
    right.push_back('k');
    return of_equation(call, {left, right}, result);
  }
  return name == "inner" ? each(call) : matmul_row(call);
}

Row linear(const RowCall& call) {
  Row row;
  const Letters before = with_batches(call.dims(0) - 1, {});
  const auto behind = [&](char letter) {
    Letters letters = before;
    letters.push_back(letter);
    return letters;
  };
  if (call.name() == "bilinear")
    row = of_equation(call, {behind('i'), behind('j'), letters_of("oij")}, behind('o'));
  else
    row = of_equation(call, {behind('k'), letters_of(call.dims(1) == 1 ? "k" : "nk")},
                      call.dims(1) == 1 ? before : behind('n'));
  row.arguments.resize(call.tensors());
  add_term(row, call, "bias");
  return row;
}

Row added_product(const RowCall& call) {
  const std::string_view name = plain_name(call);
  std::vector<Letters> inputs = name == "addmm"     ? std::vector{Letters(), letters_of("mk"), letters_of("kn")}
                                : name == "baddbmm" ? std::vector{Letters(), letters_of("bmk"), letters_of("bkn")}
                                                    : std::vector{Letters(), letters_of("mk"), letters_of("k")};
  Row row = of_equation(call, inputs, letters_of(name == "addmm" ? "mn" : name == "baddbmm" ? "bmn" : "m"));
  add_term(row, call, "self");
  // A term times beta cannot be added behind the sum as it is, nor one that is written.
  if (is_one(call.value("beta")) && !writes_in_place(call)) return row;
  row.term = -1;
  for (Factor& factor : row.factors)
    if (factor.kind == FactorKind::kSum) factor.kind = FactorKind::kWhole;
  return row;
}

void localise_added_product(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (local.row->term < 0 || !is_any_cut(local)) return;
  const int alpha = call.index_of("alpha");
  here.run = [alpha](const std::vector<c10::IValue>& arguments) -> std::vector<at::Tensor> {
    const at::Tensor product = at::matmul(arguments[1].toTensor(), arguments[2].toTensor());
    const at::Tensor result = is_one(arguments[alpha]) ? product : product * arguments[alpha].toScalar();
    const bool has_term = arguments[0].isTensor() && arguments[0].toTensor().defined();
    return {has_term ? result + arguments[0].toTensor() : result};
  };
}

Row einsum(const RowCall& call) {
  const std::string equation(call.value("equation").toStringRef());
  const std::vector<Letters> operands =
      letters_of_operands(call, std::string_view(equation).substr(0, equation.find("->")));
  return of_equation(call, operands, output_of(operands, equation));
}

Row tensordot(const RowCall& call) {
  const std::vector<int64_t> left = call.integers("dims_self"), right = call.integers("dims_other");
  Letters a, b, result;
  for (int d = 0; d < call.dims(0); ++d) a.push_back(kBatch + d);
  for (int d = 0; d < call.dims(1); ++d) b.push_back(2 * kBatch + d);
  for (size_t i = 0; i < left.size(); ++i)
    a[RowCall::wrapped(left[i], call.dims(0))] = b[RowCall::wrapped(right[i], call.dims(1))] = static_cast<int>(i);
  for (const Letters& letters : {a, b})
    std::ranges::copy_if(letters, std::back_inserter(result), [](int letter) { return letter >= kBatch; });
  return of_equation(call, {a, b}, result);
}

}  // namespace trireme::rows
