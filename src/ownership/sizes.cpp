#include "ownership/sizes.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

#include <bit>
#include <cstring>
#include <tuple>

#include "ownership/cut_tensors.h"
#include "ownership/homes.h"
#include "trireme/base/error.h"
#include "trireme/base/mix64.h"

namespace trireme::ownership {
namespace {

/// Mixes values of a call into a key.
class KeyMaker {
 public:
  explicit KeyMaker(const CutTensors* cut) : cut_(cut) {}
  void add(uint64_t value) {
    first_ = (first_ ^ value) * 0xd6e8feb86659fd93;
    first_ ^= first_ >> 32;
    second_ = std::rotl(second_, 23) * 0x9e3779b97f4a7c15 + value;
  }
  /// False: a kind of value that cannot be part of a key.
  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add(value.toTensor()), true;
    if (value.isNone()) return add(of(Kind::kNone, int64_t{0})), true;
    if (value.isInt()) return add(of(Kind::kInt, value.toInt())), true;
    if (value.isDouble()) return add(of(Kind::kDouble, value.toDouble())), true;
    if (value.isBool()) return add(of(Kind::kBool, static_cast<int64_t>(value.toBool()))), true;
    if (value.isString()) return add(value.toStringRef()), true;
    if (value.isDevice()) return add(of(Kind::kDevice, static_cast<int64_t>(value.toDevice().type()))), true;
    if (value.isComplexDouble()) {
      add(of(Kind::kComplex, value.toComplexDouble().real()));
      return add(std::bit_cast<uint64_t>(value.toComplexDouble().imag())), true;
    }
    if (value.isGenerator()) return true;
    if (!value.isList()) return false;
    const auto list = value.toListRef();
    add(of(Kind::kList, static_cast<int64_t>(list.size())));
    bool is_complete = true;
    for (const c10::IValue& item : list) is_complete = add(item) && is_complete;
    return is_complete;
  }
  Key key() const { return {mix64(first_), second_}; }

 private:
  /// 1 and 1.0 and true give results of other dtypes.
  enum class Kind : uint64_t { kNone = 1, kInt, kDouble, kBool, kDevice, kComplex, kList, kString, kUndefined };
  template <class Value>
  static uint64_t of(Kind kind, Value value) {
    return std::bit_cast<uint64_t>(value) ^ static_cast<uint64_t>(kind) << 58;
  }
  void add(const std::string& text) {
    add(of(Kind::kString, static_cast<int64_t>(text.size())));
    for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
      add(word);
    }
  }
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return add(of(Kind::kUndefined, int64_t{0}));
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    const c10::DispatchKeySet keys = impl.key_set();
    const bool is_strided = impl.layout() == at::kStrided;
    const at::IntArrayRef sizes = impl.sizes();
    add(static_cast<uint64_t>(sizes.size()) << 32 |
        static_cast<uint64_t>(c10::typeMetaToScalarType(impl.dtype())) << 4 | static_cast<uint64_t>(is_strided) << 3 |
        static_cast<uint64_t>(keys.has(c10::DispatchKey::Conjugate)) << 2 |
        static_cast<uint64_t>(keys.has(c10::DispatchKey::Negative)) << 1 | static_cast<uint64_t>(impl.requires_grad()));
    if (cut_ != nullptr && is_strided) return add_geometry(tensor);
    if (!is_strided) {
      for (const int64_t size : sizes) add(static_cast<uint64_t>(size));
      return;
    }
    const at::IntArrayRef strides = impl.strides();
    for (size_t dim = 0; dim < sizes.size(); ++dim)
      add(static_cast<uint64_t>(sizes[dim]) ^ std::rotl(static_cast<uint64_t>(strides[dim]), 32));
  }
  void add_geometry(const at::Tensor& tensor) {
    const CutTensors::Geometry geometry = cut_->geometry_of(tensor);
    for (const int64_t size : geometry.sizes) add(static_cast<uint64_t>(size));
    if (const auto maker = cut_->maker_of(tensor)) return add(*maker);
    for (const int64_t stride : geometry.strides) add(static_cast<uint64_t>(stride));
  }

  const CutTensors* const cut_;
  uint64_t first_ = 0, second_ = 0;
};

/// Facts of a tensor that are told, its relation to arguments aside.
ToldTensor told_tensor(const at::Tensor& tensor, const CutTensors* cut) {
  ToldTensor one{.sizes = at::DimVector(tensor.sizes()),
                 .strides = at::DimVector(tensor.strides()),
                 .dtype = tensor.scalar_type(),
                 .requires_grad = tensor.requires_grad(),
                 .is_conjugated = tensor.is_conj(),
                 .is_negated = tensor.is_neg()};
  if (cut != nullptr) {
    const CutTensors::Geometry whole = cut->geometry_of(tensor);
    one.sizes = at::DimVector(whole.sizes);
    one.strides = at::DimVector(whole.strides);
    one.cut = cut->cut_of(tensor);
  }
  return one;
}

bool is_alike(const ToldTensor& told, const at::Tensor& result, const ArgumentTensors& arguments,
              const CutTensors* cut) {
  if (result.defined() != told.is_defined) return false;
  if (!told.is_defined) return true;
  if (cut != nullptr) {  // strides of parts are made up
    ToldTensor now = told_tensor(result, cut);
    std::tie(now.is_argument, now.shares_with) = arguments.relation_of(result);
    now.is_all = told.is_all;
    now.strides = told.strides;
    return now == told;
  }
  if (result.scalar_type() != told.dtype || result.requires_grad() != told.requires_grad ||
      result.sizes() != at::IntArrayRef(told.sizes) || result.strides() != at::IntArrayRef(told.strides) ||
      result.is_conj() != told.is_conjugated || result.is_neg() != told.is_negated)
    return false;
  return arguments.relation_of(result) == std::pair(told.is_argument, told.shares_with);
}

/// Numbers as bytes, in order.
struct Writer {
  std::string bytes;
  void operator()(int64_t value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void operator()(const at::DimVector& values) {
    (*this)(static_cast<int64_t>(values.size()));
    for (const int64_t value : values) (*this)(value);
  }
};
struct Reader {
  const std::string& bytes;
  size_t place = 0;
  int64_t operator()() {
    int64_t value = 0;
    if (place + sizeof value > bytes.size())
      throw CommError(ErrorCode::kDiverged, "smp: sizes of an operator's results were told in part");
    std::memcpy(&value, bytes.data() + place, sizeof value);
    place += sizeof value;
    return value;
  }
  at::DimVector list() {
    at::DimVector values;
    for (int64_t left = (*this)(); left > 0; --left) values.push_back((*this)());
    return values;
  }
};

}  // namespace

bool ToldCall::is_view() const {
  bool has_view = false;
  for (const Return& result : returns)
    for (const ToldTensor& tensor : result.tensors) {
      if (tensor.shares_with < 0) return false;
      has_view = true;
    }
  return has_view;
}

std::string ToldCall::text() const {
  std::string text;
  for (const Return& result : returns)
    for (const ToldTensor& tensor : result.tensors)
      text += str(text.empty() ? "" : ", ", at::IntArrayRef(tensor.sizes), " of strides ",
                  at::IntArrayRef(tensor.strides), " in ", tensor.dtype, tensor.requires_grad ? " with" : " without",
                  " a gradient", tensor.cut != 0 ? ", cut over ranks" : "", tensor.shares_with >= 0 ? ", a view" : "",
                  tensor.is_argument >= 0 ? ", an argument" : "");
  return text.empty() ? "nothing" : text;
}

Key key_of(uint64_t operator_hash, c10::ArrayRef<c10::IValue> arguments, bool& is_complete, const CutTensors* cut) {
  KeyMaker maker(cut);
  maker.add(operator_hash);
  maker.add(static_cast<uint64_t>(at::GradMode::is_enabled()) << 32 |
            static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())));
  const bool has_autocast = !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset);
  for (const c10::DeviceType type : {c10::kCPU, c10::kCUDA})
    if (has_autocast && at::autocast::is_autocast_enabled(type))
      maker.add(static_cast<uint64_t>(type) << 16 | static_cast<uint64_t>(at::autocast::get_autocast_dtype(type)) << 1 |
                static_cast<uint64_t>(at::autocast::is_autocast_cache_enabled()));
  is_complete = true;
  for (const c10::IValue& argument : arguments) is_complete = maker.add(argument) && is_complete;
  return maker.key();
}

ArgumentTensors::ArgumentTensors(c10::ArrayRef<c10::IValue> arguments, const CutTensors* cut) : cut_(cut) {
  const auto add = [&](const at::Tensor& tensor) {
    tensors_.emplace_back(tensor.defined() ? tensor.unsafeGetTensorImpl() : nullptr, storage_of(tensor));
    if (tensor.defined() && tensor.use_count() == 1) kept_.push_back(tensor);
    if (cut != nullptr) places_.push_back(tensor.defined() ? cut->place_of(tensor) : 0);
  };
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor())
      add(argument.toTensor());
    else if (argument.isList())
      for_each_tensor(argument, add);
  }
}

bool ArgumentTensors::is_all_of(int number, const at::Tensor& result) const {
  return cut_ != nullptr && number >= 0 && places_[number] == cut_->place_of(result);
}

std::pair<int, int> ArgumentTensors::relation_of(const at::Tensor& result) const {
  const c10::TensorImpl* const tensor = result.unsafeGetTensorImpl();
  const c10::StorageImpl* const storage = storage_of(result);
  int shares_with = -1;
  for (size_t place = 0; place < tensors_.size(); ++place) {
    if (tensors_[place].first == tensor) return {static_cast<int>(place), -1};
    if (shares_with < 0 && tensors_[place].second == storage && storage != nullptr)
      shares_with = static_cast<int>(place);
  }
  return {-1, shares_with};
}

ToldCall told_of(const std::string& op, const ArgumentTensors& arguments, c10::ArrayRef<c10::IValue> results,
                 const CutTensors* cut) {
  ToldCall told;
  for (const c10::IValue& result : results) {
    ToldCall::Return& of_result = told.returns.emplace_back();
    of_result.is_list = result.isTensorList();
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      ToldTensor& one = of_result.tensors.emplace_back();
      one.is_defined = tensor.defined();
      if (!tensor.defined()) return;
      if (storage_of(tensor) == nullptr || tensor.layout() != at::kStrided)
        throw Error(ErrorCode::kUnsupported,
                    str("smp: ", op, " has a result of layout ", tensor.layout(),
                        ", which other stages cannot have without its numbers; compute it outside of the step, or "
                        "make it dense where it is made"));
      one = told_tensor(tensor, cut);
      std::tie(one.is_argument, one.shares_with) = arguments.relation_of(tensor);
      one.is_all = arguments.is_all_of(one.shares_with, tensor);
    });
  }
  return told;
}

bool holds(const ToldCall& told, const ArgumentTensors& arguments, c10::ArrayRef<c10::IValue> results,
           const CutTensors* cut) {
  if (told.returns.size() != results.size()) return false;
  bool is_right = true;
  for (size_t i = 0; i < results.size() && is_right; ++i) {
    const ToldCall::Return& expected = told.returns[i];
    size_t next = 0;
    for_each_tensor(results[i], [&](const at::Tensor& tensor) {
      is_right = is_right && next < expected.tensors.size() && is_alike(expected.tensors[next], tensor, arguments, cut);
      ++next;
    });
    is_right = is_right && next == expected.tensors.size();
  }
  return is_right;
}

std::string bytes_of(const ToldCall& told) {
  Writer write;
  write(static_cast<int64_t>(told.returns.size()));
  for (const ToldCall::Return& result : told.returns) {
    write(result.is_list);
    write(static_cast<int64_t>(result.tensors.size()));
    for (const ToldTensor& tensor : result.tensors) {
      write(tensor.sizes);
      write(tensor.strides);
      write(static_cast<int64_t>(tensor.dtype));
      write(tensor.is_defined | tensor.requires_grad << 1 | tensor.is_conjugated << 2 | tensor.is_negated << 3 |
            tensor.is_all << 4);
      write(static_cast<int64_t>(tensor.cut));
      write(tensor.is_argument);
      write(tensor.shares_with);
    }
  }
  return std::move(write.bytes);
}

ToldCall told_from(const std::string& bytes) {
  Reader read{bytes};
  ToldCall told;
  for (int64_t returns = read(); returns > 0; --returns) {
    ToldCall::Return& result = told.returns.emplace_back();
    result.is_list = read() != 0;
    for (int64_t tensors = read(); tensors > 0; --tensors) {
      ToldTensor& tensor = result.tensors.emplace_back();
      tensor.sizes = read.list();
      tensor.strides = read.list();
      tensor.dtype = static_cast<at::ScalarType>(read());
      const int64_t flags = read();
      tensor.is_defined = flags & 1;
      tensor.requires_grad = flags & 2;
      tensor.is_conjugated = flags & 4;
      tensor.is_negated = flags & 8;
      tensor.is_all = flags & 16;
      tensor.cut = static_cast<uint64_t>(read());
      tensor.is_argument = static_cast<int>(read());
      tensor.shares_with = static_cast<int>(read());
    }
  }
  return told;
}

}  // namespace trireme::ownership
