#include "trireme/operators/row.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {

uint8_t Row::add(int64_t size, FactorKind kind) {
  factors.push_back({size, kind});
  return static_cast<uint8_t>(factors.size() - 1);
}

DimFactors Row::dim(int64_t size, FactorKind kind) {
  if (size == 1) return {};
  return {add(size, kind)};
}

int64_t Row::size_of(const DimFactors& dim) const {
  int64_t size = 1;
  for (const uint8_t factor : dim) size *= factors[factor].size;
  return size;
}

std::vector<int64_t> Row::sizes_of(const TensorFactors& tensor) const {
  std::vector<int64_t> sizes;
  for (const DimFactors& dim : tensor) sizes.push_back(size_of(dim));
  return sizes;
}

double Row::multiply_adds() const {
  double made = 1;
  for (size_t i = 0; i < factors.size(); ++i)
    if ((windowed >> i & 1) == 0) made *= static_cast<double>(factors[i].size);
  return made;
}

const std::vector<Piece>* Row::pieces_of(uint8_t factor) const {
  for (const PiecedFactor& one : pieces)
    if (one.factor == factor) return &one.pieces;
  return nullptr;
}

RowCall::RowCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                 std::optional<std::vector<std::vector<int64_t>>> sizes)
    : op_(op), arguments_(arguments) {
  const c10::FunctionSchema& schema = op.schema();
  name_ = schema.name();
  if (const size_t colons = name_.find("::"); colons != std::string_view::npos) name_.remove_prefix(colons + 2);
  overload_ = schema.overload_name();
  const auto add = [&](const at::Tensor& tensor) {
    defined_.push_back(tensor.defined());
    floating_.push_back(tensor.defined() && tensor.is_floating_point());
    itemsizes_.push_back(tensor.defined() ? static_cast<int64_t>(tensor.itemsize()) : 0);
    sizes_.push_back(tensor.defined() ? tensor.sizes().vec() : std::vector<int64_t>());
  };
  for (const c10::IValue& argument : arguments) {
    first_.push_back(static_cast<int>(sizes_.size()));
    if (argument.isTensor()) {
      add(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) add(tensor);
    } else if (argument.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector())
        add(tensor.value_or(at::Tensor()));
    } else {
      first_.back() = -1;
    }
  }
  if (!sizes) return;
  if (sizes->size() != sizes_.size())
    throw Error(ErrorCode::kInternal, str("operators: ", sizes->size(), " sizes for ", sizes_.size(), " tensors"));
  sizes_ = *std::move(sizes);
}

RowCall RowCall::kept() const {
  auto own = std::make_shared<std::vector<c10::IValue>>(arguments_.vec());
  for (c10::IValue& argument : *own)
    if (argument.isTensor() || argument.isTensorList() || argument.isOptionalTensorList()) argument = at::Tensor();
  RowCall made = *this;
  made.own_ = std::move(own);
  made.arguments_ = *made.own_;
  return made;
}

int RowCall::index_of(const char* name) const { return op_.schema().argumentIndexWithName(name).value_or(-1); }

std::optional<size_t> RowCall::tensor_of(const char* name) const {
  const int index = index_of(name);
  if (index < 0 || first_[index] < 0) return std::nullopt;
  return static_cast<size_t>(first_[index]);
}

const c10::IValue& RowCall::value(const char* name) const {
  static const c10::IValue none;
  const int index = index_of(name);
  return index < 0 ? none : arguments_[index];
}

int64_t RowCall::integer(const char* name, int64_t otherwise) const {
  const c10::IValue& found = value(name);
  return found.isInt() ? found.toInt() : otherwise;
}

bool RowCall::flag(const char* name, bool otherwise) const {
  const c10::IValue& found = value(name);
  return found.isBool() ? found.toBool() : otherwise;
}

std::vector<int64_t> RowCall::integers(const char* name) const {
  const c10::IValue& found = value(name);
  if (found.isInt()) return {found.toInt()};
  return found.isIntList() ? found.toIntVector() : std::vector<int64_t>();
}

std::vector<int64_t> RowCall::dims_named(const char* name, int64_t dims) const {
  std::vector<int64_t> named = integers(name);
  for (int64_t& dim : named) dim = wrapped(dim, dims);
  for (int64_t dim = 0; integers(name).empty() && dim < dims; ++dim) named.push_back(dim);
  std::ranges::sort(named);
  return named;
}

LocalRow::LocalRow(const Row& of) : row(&of), pieces(of.pieces) {
  for (const Factor& factor : of.factors) {
    sizes.push_back(factor.size);
    owned.push_back({{0, factor.size}});
  }
}

int64_t LocalRow::size_of(const DimFactors& dim) const {
  int64_t size = 1;
  for (const uint8_t factor : dim) size *= sizes[factor];
  return size;
}

std::vector<int64_t> LocalRow::sizes_of(const TensorFactors& tensor) const {
  std::vector<int64_t> found;
  for (const DimFactors& dim : tensor) found.push_back(size_of(dim));
  return found;
}

at::Tensor LocalRow::positions(uint8_t factor) const {
  std::vector<at::Tensor> ranges{at::arange(0, at::kLong)};
  for (const Interval& one : owned[factor]) ranges.push_back(at::arange(one.begin, one.end, at::kLong));
  return at::cat(ranges);
}

std::pair<at::Tensor, at::Tensor> LocalRow::find(uint8_t factor, const at::Tensor& places) const {
  const int64_t size = row->factors[factor].size;
  constexpr size_t kFew = 8;
  if (owned[factor].size() <= kFew) {
    const at::Tensor from_front = at::where(places < 0, places + size, places);
    const at::Tensor is_any = from_front.ge(0).logical_and(from_front.lt(size));
    if (is_any.is_cpu() && !is_any.all().item<bool>())
      throw ShapeError(str("a place is outside of a dim of ", size, " elements"));
    at::Tensor here = at::zeros_like(places), is_here = at::zeros_like(places, places.options().dtype(at::kBool));
    int64_t before = 0;
    for (const Interval& one : owned[factor]) {
      const at::Tensor inside = from_front.ge(one.begin).logical_and(from_front.lt(one.end));
      here = at::where(inside, from_front - (one.begin - before), here);
      is_here = is_here.logical_or(inside);
      before += one.size();
    }
    return {here, is_here};
  }
  const at::Tensor back = at::full({size}, -1, at::kLong);
  back.index_put_({positions(factor)}, at::arange(sizes[factor], at::kLong));
  const at::Tensor here = back.to(places.device()).index({at::where(places < 0, places + size, places)});
  return {here.clamp_min(0), here >= 0};
}

}  // namespace trireme
