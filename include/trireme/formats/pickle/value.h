// The contents of a pickle, as plain data: nothing in it was imported or called.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme::pickle {

/// The kind of a value.
enum class Kind {
  kNone,
  kBool,
  kInt,
  kBigInt,  ///< beyond int64: text holds its little-endian two's complement
  kFloat,
  kString,  ///< UTF-8
  kBytes,
  kList,
  kTuple,
  kDict,
  kSet,
  kClass,    ///< a class or function itself, by its name
  kStorage,  ///< a tensor's memory
  kTensor,
  kObject,  ///< an instance: its class, what it was made of, its state
};

/// As messages say it: "a string", "a tensor", …
const char* kind_name(Kind kind);

/// A tensor, or (without shape and strides) the storage it lies in: a record of the archive.
struct TensorPlace {
  std::string storage;  ///< the record is "data/STORAGE"
  at::ScalarType dtype = at::kFloat;
  int64_t storage_numel = 0;
  int64_t begin = 0;  ///< first element within the storage
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;

  int64_t numel() const;  ///< of a tensor that a reader has checked
  bool is_contiguous() const;
};

/// Belongs to a Document. A reader's values may share parts and may even contain themselves.
struct Value {
  Kind kind = Kind::kNone;
  bool flag = false;    ///< kBool; kObject: made by calling the class on `items` (REDUCE) instead of by its __new__
  int64_t integer = 0;  ///< kInt
  double real = 0;      ///< kFloat
  std::string text;  ///< kString, kBytes, kBigInt; kClass, kObject: "module.name"; dicts and tuples: that of a subclass
  std::vector<Value*> items;           ///< kList, kTuple, kSet; kDict: key, value, key, value, …; kObject: arguments
  Value* state = nullptr;              ///< kObject: nullptr: none
  std::unique_ptr<TensorPlace> place;  ///< kStorage, kTensor

  bool is(Kind wanted) const { return kind == wanted; }
  /// The value of `key`, of the last one if a dict has it twice; nullptr: not a dict, or no such key.
  const Value* find(std::string_view key) const;
  /// Attribute of an object whose state is a dict.
  const Value* attribute(std::string_view name) const { return state ? state->find(name) : nullptr; }
};

/// Owns values, all in one container, so that shared and deeply nested ones are freed safely.
class Document {
 public:
  using Pairs = std::vector<std::pair<std::string, Value*>>;

  Value& add(Kind kind) { return values_.emplace_back(Value{.kind = kind, .text = {}, .items = {}, .place = nullptr}); }

  Value* none() { return &add(Kind::kNone); }
  Value* boolean(bool value);
  Value* integer(int64_t value);
  Value* real(double value);
  Value* string(std::string text);
  Value* list(std::vector<Value*> items);
  Value* tuple(std::vector<Value*> items);
  /// `ordered`: a collections.OrderedDict.
  Value* dict(const Pairs& pairs, bool ordered = false);
  Value* size(const std::vector<int64_t>& shape);  ///< a torch.Size
  Value* dtype(at::ScalarType dtype);
  /// A contiguous tensor that fills its storage.
  Value* tensor(std::string storage, at::ScalarType dtype, std::vector<int64_t> shape);
  /// CLASS(*arguments).
  Value* call(std::string name, std::vector<Value*> arguments);
  /// An instance of a plain class, with these attributes.
  Value* instance(std::string name, const Pairs& attributes);

  void set_root(Value* root) { root_ = root; }
  size_t values() const { return values_.size(); }
  const Value& root() const { return *root_; }

 private:
  std::deque<Value> values_;
  Value* root_ = nullptr;
};

}  // namespace trireme::pickle
