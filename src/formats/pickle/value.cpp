#include "trireme/formats/pickle/value.h"

#include "trireme/formats/pickle/classes.h"

namespace trireme::pickle {

const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {"None",      "a bool",   "an integer", "an integer beyond 64 bits",
                                    "a float",   "a string", "bytes",      "a list",
                                    "a tuple",   "a dict",   "a set",      "a class",
                                    "a storage", "a tensor", "an object"};
  return kNames[static_cast<int>(kind)];
}

int64_t TensorPlace::numel() const {
  int64_t product = 1;
  for (const int64_t extent : shape) product *= extent;
  return product;
}

bool TensorPlace::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    if (shape[dim] != 1 && strides[dim] != expected) return false;
    expected *= shape[dim];
  }
  return true;
}

const Value* Value::find(std::string_view key) const {
  if (kind != Kind::kDict) return nullptr;
  for (size_t i = items.size(); i >= 2; i -= 2)
    if (items[i - 2]->is(Kind::kString) && items[i - 2]->text == key) return items[i - 1];
  return nullptr;
}

Value* Document::boolean(bool value) {
  Value& made = add(Kind::kBool);
  made.flag = value;
  return &made;
}

Value* Document::integer(int64_t value) {
  Value& made = add(Kind::kInt);
  made.integer = value;
  return &made;
}

Value* Document::real(double value) {
  Value& made = add(Kind::kFloat);
  made.real = value;
  return &made;
}

Value* Document::string(std::string text) {
  Value& made = add(Kind::kString);
  made.text = std::move(text);
  return &made;
}

Value* Document::list(std::vector<Value*> items) {
  Value& made = add(Kind::kList);
  made.items = std::move(items);
  return &made;
}

Value* Document::tuple(std::vector<Value*> items) {
  Value& made = add(Kind::kTuple);
  made.items = std::move(items);
  return &made;
}

Value* Document::dict(const Pairs& pairs, bool ordered) {
  std::vector<Value*> items;
  for (const auto& [key, value] : pairs) {
    items.push_back(string(key));
    items.push_back(value);
  }
  Value& made = add(Kind::kDict);
  made.items = std::move(items);
  if (ordered) made.text = "collections.OrderedDict";
  return &made;
}

Value* Document::size(const std::vector<int64_t>& shape) {
  std::vector<Value*> extents;
  for (const int64_t extent : shape) extents.push_back(integer(extent));
  Value* made = tuple(std::move(extents));
  made->text = "torch.Size";
  return made;
}

Value* Document::dtype(at::ScalarType dtype) {
  Value& made = add(Kind::kClass);
  made.text = dtype_class(dtype);
  return &made;
}

Value* Document::tensor(std::string storage, at::ScalarType dtype, std::vector<int64_t> shape) {
  auto place = std::make_unique<TensorPlace>();
  place->storage = std::move(storage);
  place->dtype = dtype;
  place->shape = std::move(shape);
  place->storage_numel = place->numel();
  place->strides.resize(place->shape.size());
  int64_t stride = 1;
  for (size_t dim = place->shape.size(); dim-- > 0; stride *= std::max<int64_t>(place->shape[dim], 1))
    place->strides[dim] = stride;
  Value& made = add(Kind::kTensor);
  made.place = std::move(place);
  return &made;
}

Value* Document::call(std::string name, std::vector<Value*> arguments) {
  Value& made = add(Kind::kObject);
  made.flag = true;
  made.text = std::move(name);
  made.items = std::move(arguments);
  return &made;
}

Value* Document::instance(std::string name, const Pairs& attributes) {
  Value* state = dict(attributes);
  Value& made = add(Kind::kObject);
  made.text = std::move(name);
  made.state = state;
  return &made;
}

}  // namespace trireme::pickle
