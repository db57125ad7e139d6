#include "trireme/pipeline/values.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <cstring>
#include <string_view>

#include "trireme/base/error.h"

namespace trireme {
namespace {

/// First byte of each value in a structure; what follows it is of fixed length, or begins with one.
enum class Tag : char {
  kNone = '0',
  kTensor = 't',
  kFalse = 'f',
  kTrue = 'T',
  kInt = 'i',
  kDouble = 'd',
  kText = 's',
  kTuple = '(',
  kTensors = '<',  ///< a list of tensors, as C++ functions declare it
  kList = '[',
  kDict = '{',
};

class Flattener {
 public:
  explicit Flattener(FlatValue& flat) : flat_(flat) {}

  void add(const c10::IValue& value) {
    if (value.isNone()) {
      put(Tag::kNone);
    } else if (value.isTensor()) {
      put(Tag::kTensor);
      flat_.tensors.push_back(value.toTensor());
    } else if (value.isBool()) {
      put(value.toBool() ? Tag::kTrue : Tag::kFalse);
    } else if (value.isInt()) {
      put(Tag::kInt, value.toInt());
    } else if (value.isDouble()) {
      put(Tag::kDouble, value.toDouble());
    } else if (value.isString()) {
      const std::string_view text = value.toStringView();
      put(Tag::kText, static_cast<int64_t>(text.size()));
      flat_.structure.append(text);
    } else if (value.isTuple()) {
      const auto& elements = value.toTupleRef().elements();
      put(Tag::kTuple, static_cast<int64_t>(elements.size()));
      for (const c10::IValue& element : elements) add(element);
    } else if (value.isList()) {
      const c10::ArrayRef<c10::IValue> elements = value.toListRef();
      put(value.isTensorList() ? Tag::kTensors : Tag::kList, static_cast<int64_t>(elements.size()));
      for (const c10::IValue& element : elements) add(element);
    } else if (value.isGenericDict()) {
      const auto dict = value.toGenericDict();
      put(Tag::kDict, static_cast<int64_t>(dict.size()));
      for (const auto& entry : dict) {
        add(entry.key());
        add(entry.value());
      }
    } else {
      throw ShapeError(str("a value between layers is a ", value.tagKind(),
                           "; hand on tensors, None, numbers, texts, and tuples, lists or dictionaries of these"));
    }
  }

 private:
  void put(Tag tag) { flat_.structure += static_cast<char>(tag); }
  template <class Number>
  void put(Tag tag, Number number) {
    put(tag);
    flat_.structure.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  FlatValue& flat_;
};

class Builder {
 public:
  explicit Builder(const FlatValue& flat) : flat_(flat) {}

  c10::IValue next() {
    switch (static_cast<Tag>(flat_.structure.at(at_++))) {
      case Tag::kNone:
        return {};
      case Tag::kTensor:
        if (used_ == flat_.tensors.size())
          throw ShapeError(str("a value between layers has more tensors than the ", used_, " that came"));
        return flat_.tensors[used_++];
      case Tag::kFalse:
        return false;
      case Tag::kTrue:
        return true;
      case Tag::kInt:
        return number<int64_t>();
      case Tag::kDouble:
        return number<double>();
      case Tag::kText: {
        const auto size = static_cast<size_t>(number<int64_t>());
        at_ += size;
        return flat_.structure.substr(at_ - size, size);
      }
      case Tag::kTuple:
        return c10::ivalue::Tuple::create(several());
      case Tag::kTensors: {
        c10::List<at::Tensor> list;
        for (const c10::IValue& element : several()) list.push_back(element.toTensor());
        return list;
      }
      case Tag::kList: {
        c10::impl::GenericList list(c10::AnyType::get());
        for (c10::IValue& element : several()) list.push_back(std::move(element));
        return list;
      }
      case Tag::kDict: {
        c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
        for (int64_t count = number<int64_t>(); count > 0; --count) {
          c10::IValue key = next();
          dict.insert(std::move(key), next());
        }
        return dict;
      }
    }
    throw ShapeError("a value between layers came damaged");
  }

  bool has_used_all() const { return used_ == flat_.tensors.size(); }

 private:
  template <class Number>
  Number number() {
    Number value;
    std::memcpy(&value, flat_.structure.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  std::vector<c10::IValue> several() {
    std::vector<c10::IValue> elements(static_cast<size_t>(number<int64_t>()));
    for (c10::IValue& element : elements) element = next();
    return elements;
  }

  const FlatValue& flat_;
  size_t at_ = 0;
  size_t used_ = 0;
};

}  // namespace

FlatValue flatten(const c10::IValue& value) {
  FlatValue flat;
  Flattener(flat).add(value);
  return flat;
}

c10::IValue unflatten(const FlatValue& flat) {
  Builder builder(flat);
  c10::IValue value = builder.next();
  if (!builder.has_used_all())
    throw ShapeError(str("a value between layers has fewer tensors than the ", flat.tensors.size(), " that came"));
  return value;
}

}  // namespace trireme
