#include "ownership/sizes.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

#include <bit>
#include <cstring>

#include "trireme/base/error.h"
#include "trireme/base/mix64.h"

namespace trireme::ownership {
namespace {

/// Mixes values of a call into a key.
class KeyMaker {
 public:
  void add(uint64_t value) {
    key_.first = mix64(key_.first ^ value);
    key_.second = std::rotl(key_.second, 23) * 0x9e3779b97f4a7c15 + value;
  }
  void add(c10::ArrayRef<int64_t> values) {
    add(values.size());
    for (const int64_t value : values) add(static_cast<uint64_t>(value));
  }
  void add(const std::string& text) {
    add(text.size());
    for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
      add(word);
    }
  }
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return add(~uint64_t{0});
    add(static_cast<uint64_t>(tensor.dim()) << 32 | static_cast<uint64_t>(tensor.scalar_type()) << 3 |
        static_cast<uint64_t>(tensor.is_conj()) << 2 | static_cast<uint64_t>(tensor.is_neg()) << 1 |
        static_cast<uint64_t>(tensor.requires_grad()));
    for (const int64_t size : tensor.sizes()) add(static_cast<uint64_t>(size));
    if (tensor.layout() != at::kStrided) return add(uint64_t{0x73706172});
    for (const int64_t stride : tensor.strides()) add(static_cast<uint64_t>(stride));
  }
  template <class Values>
  void add_each(const Values& values) {
    add(values.size());
    for (const auto& value : values) add(value);
  }
  /// False: a kind of value that cannot be part of a key.
  bool add(const c10::IValue& value) {
    add(kinds_++);
    if (value.isTensor()) return add(value.toTensor()), true;
    if (value.isNone()) return add(uint64_t{0x6e6f6e65}), true;
    if (value.isInt()) return add(static_cast<uint64_t>(value.toInt())), true;
    if (value.isDouble()) return add(std::bit_cast<uint64_t>(value.toDouble())), true;
    if (value.isBool()) return add(static_cast<uint64_t>(value.toBool())), true;
    if (value.isIntList()) return add(c10::ArrayRef<int64_t>(value.toIntVector())), true;
    if (value.isString()) return add(value.toStringRef()), true;
    if (value.isDevice()) return add(static_cast<uint64_t>(value.toDevice().type())), true;
    if (value.isComplexDouble()) {
      add(std::bit_cast<uint64_t>(value.toComplexDouble().real()));
      return add(std::bit_cast<uint64_t>(value.toComplexDouble().imag())), true;
    }
    if (value.isGenerator()) return true;
    if (value.isTensorList()) {
      const auto list = value.toTensorList();
      add(list.size());
      for (const at::Tensor& tensor : list) add(tensor);
      return true;
    }
    if (!value.isList()) return false;
    const auto list = value.toListRef();
    add(list.size());
    for (const c10::IValue& item : list)
      if (!add(item)) return false;
    return true;
  }
  const Key& key() const { return key_; }

 private:
  Key key_;
  uint64_t kinds_ = 0;
};

/// The number of the tensor among `arguments` that `result` is, or whose memory it shares.
void relate(ToldTensor& told, const at::Tensor& result, c10::ArrayRef<c10::IValue> arguments) {
  int place = 0;
  for_each_tensor(arguments, [&](const at::Tensor& argument) {
    if (argument.defined() && told.is_argument < 0) {
      if (argument.is_same(result))
        told.is_argument = place;
      else if (told.shares_with < 0 && argument.has_storage() && argument.is_alias_of(result))
        told.shares_with = place;
    }
    ++place;
  });
  if (told.is_argument >= 0) told.shares_with = -1;
}

bool is_alike(const ToldTensor& told, const at::Tensor& result, c10::ArrayRef<c10::IValue> arguments) {
  if (result.defined() != told.is_defined) return false;
  if (!told.is_defined) return true;
  if (result.scalar_type() != told.dtype || result.requires_grad() != told.requires_grad ||
      result.sizes() != at::IntArrayRef(told.sizes) || result.strides() != at::IntArrayRef(told.strides) ||
      result.is_conj() != told.is_conjugated || result.is_neg() != told.is_negated)
    return false;
  ToldTensor now;
  relate(now, result, arguments);
  return now.is_argument == told.is_argument && now.shares_with == told.shares_with;
}

/// Numbers as bytes, in order.
struct Writer {
  std::string bytes;
  void operator()(int64_t value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void operator()(const std::vector<int64_t>& values) {
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
  std::vector<int64_t> list() {
    std::vector<int64_t> values;
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
                  " a gradient");
  return text.empty() ? "nothing" : text;
}

Key key_of(uint64_t operator_hash, c10::ArrayRef<c10::IValue> arguments, bool& is_complete) {
  KeyMaker maker;
  maker.add(operator_hash);
  maker.add(static_cast<uint64_t>(at::GradMode::is_enabled()) << 32 |
            static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())));
  for (const c10::DeviceType type : {c10::kCPU, c10::kCUDA})
    if (at::autocast::is_autocast_enabled(type))
      maker.add(static_cast<uint64_t>(type) << 16 |
                static_cast<uint64_t>(at::autocast::get_autocast_dtype(type)) << 1 |
                static_cast<uint64_t>(at::autocast::is_autocast_cache_enabled()));
  is_complete = true;
  for (const c10::IValue& argument : arguments) is_complete = maker.add(argument) && is_complete;
  return maker.key();
}

ToldCall told_of(const std::string& op, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results) {
  ToldCall told;
  for (const c10::IValue& result : results) {
    ToldCall::Return& of_result = told.returns.emplace_back();
    of_result.is_list = result.isTensorList();
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      ToldTensor& one = of_result.tensors.emplace_back();
      one.is_defined = tensor.defined();
      if (!tensor.defined()) return;
      if (!tensor.has_storage() || tensor.layout() != at::kStrided)
        throw Error(ErrorCode::kUnsupported,
                    str("smp: ", op, " has a result of layout ", tensor.layout(),
                        ", which other stages cannot have without its numbers; compute it outside of the step, or "
                        "make it dense where it is made"));
      one = {.sizes = tensor.sizes().vec(),
             .strides = tensor.strides().vec(),
             .dtype = tensor.scalar_type(),
             .requires_grad = tensor.requires_grad(),
             .is_conjugated = tensor.is_conj(),
             .is_negated = tensor.is_neg()};
      relate(one, tensor, arguments);
    });
  }
  return told;
}

bool holds(const ToldCall& told, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results) {
  if (told.returns.size() != results.size()) return false;
  bool is_right = true;
  for (size_t i = 0; i < results.size() && is_right; ++i) {
    const ToldCall::Return& expected = told.returns[i];
    size_t next = 0;
    for_each_tensor(results[i], [&](const at::Tensor& tensor) {
      is_right = is_right && next < expected.tensors.size() && is_alike(expected.tensors[next], tensor, arguments);
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
      write(tensor.is_defined | tensor.requires_grad << 1 | tensor.is_conjugated << 2 | tensor.is_negated << 3);
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
      tensor.is_argument = static_cast<int>(read());
      tensor.shares_with = static_cast<int>(read());
    }
  }
  return told;
}

}  // namespace trireme::ownership
