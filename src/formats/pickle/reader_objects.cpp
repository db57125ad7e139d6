// The operations of a pickle that name classes: what Python would import and call here becomes a value, or is refused.
#include <algorithm>

#include "formats/pickle/reader.h"
#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/formats/pickle/classes.h"

namespace trireme::pickle {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 62;

/// begin + the last element's distance + 1; -1: beyond kMostElements.
int64_t end_of(const TensorPlace& place) {
  int64_t last = place.begin;
  for (size_t dim = 0; dim < place.shape.size(); ++dim) {
    int64_t distance = 0;
    if (__builtin_mul_overflow(place.shape[dim] - 1, place.strides[dim], &distance) ||
        __builtin_add_overflow(last, distance, &last) || last > kMostElements)
      return -1;
  }
  return last + 1;
}

bool numel_fits(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  // A zero anywhere makes the tensor empty, but not the product of the others small.
  for (const int64_t extent : shape)
    if (__builtin_mul_overflow(product, std::max<int64_t>(extent, 1), &product) || product > kMostElements)
      return false;
  return true;
}

}  // namespace

Value* Reader::class_named(const std::string& name) {
  if (!find_class(name)) {
    fail(str("the class ", excerpt(name),
             " is not one that checkpoints of PyTorch and DeepSpeed need, and nothing here imports it; "
             "save the file again without it (most likely it stands in the client_state)"));
  }
  Value& value = document_.add(Kind::kClass);
  value.text = name;
  return &value;
}

Value* Reader::storage_of(const Value& id) {
  const auto& parts = id.items;
  const bool well_formed = id.is(Kind::kTuple) && parts.size() == 5 && parts[0]->is(Kind::kString) &&
                           parts[0]->text == "storage" && parts[1]->is(Kind::kClass) && parts[2]->is(Kind::kString) &&
                           parts[4]->is(Kind::kInt) && parts[4]->integer >= 0;
  require(well_formed, "a persistent id that is no storage of torch.save()");
  const auto storage = find_class(parts[1]->text);
  require(storage && storage->role == Role::kStorage, "a storage of a class that is none");
  require(parts[4]->integer <= kMostElements / 16, "a storage beyond what memory can be");
  charge(parts[2]->text.size());
  Value& value = document_.add(Kind::kStorage);
  value.place = std::make_unique<TensorPlace>();
  value.place->storage = parts[2]->text;
  value.place->dtype = *storage->dtype;
  value.place->storage_numel = parts[4]->integer;
  return &value;
}

std::vector<int64_t> Reader::extents(const Value& tuple, const char* what) {
  require(tuple.is(Kind::kTuple), what);
  charge(tuple.items.size());
  std::vector<int64_t> numbers;
  for (const Value* item : tuple.items) {
    require(item->is(Kind::kInt) && item->integer >= 0, what);
    numbers.push_back(item->integer);
  }
  return numbers;
}

Value* Reader::rebuild_tensor(const Value& arguments, bool names_dtype) {
  const auto& parts = arguments.items;
  require(parts.size() >= (names_dtype ? 7U : 4U) && parts[0]->is(Kind::kStorage) && parts[1]->is(Kind::kInt) &&
              parts[1]->integer >= 0,
          "a tensor without storage, offset, size and strides");
  charge(parts[0]->place->storage.size());
  auto place = std::make_unique<TensorPlace>(*parts[0]->place);
  if (names_dtype) {
    const auto entry = parts[6]->is(Kind::kClass) ? find_class(parts[6]->text) : std::nullopt;
    require(entry && entry->role == Role::kDtype, "a tensor of a dtype that is none");
    place->storage_numel = place->storage_numel * static_cast<int64_t>(c10::elementSize(place->dtype)) /
                           static_cast<int64_t>(c10::elementSize(*entry->dtype));
    place->dtype = *entry->dtype;
  }
  place->begin = parts[1]->integer;
  place->shape = extents(*parts[2], "a tensor's size is no tuple of numbers");
  place->strides = extents(*parts[3], "a tensor's strides are no tuple of numbers");
  require(place->shape.size() == place->strides.size(), "a tensor with other strides than dimensions");
  require(numel_fits(place->shape), "a tensor beyond what memory can be");
  if (place->numel() > 0) {
    const int64_t end = end_of(*place);
    if (end < 0 || end > place->storage_numel)
      fail(str("a tensor reaches beyond its storage ", place->storage, " of ", place->storage_numel, " elements"));
  }
  Value& value = document_.add(Kind::kTensor);
  value.place = std::move(place);
  return &value;
}

Value* Reader::reduce(const Value& callable, Value* arguments) {
  require(callable.is(Kind::kClass), "a call of what is no class");
  require(arguments->is(Kind::kTuple), "a call whose arguments are no tuple");
  const auto entry = find_class(callable.text);
  const auto& parts = arguments->items;
  const auto container = [&](Kind kind, const std::vector<Value*>& items) {
    charge(items.size());
    Value& value = document_.add(kind);
    value.items = items;
    return &value;
  };
  switch (entry->role) {
    case Role::kOrderedDict:
    case Role::kDefaultDict: {
      Value* dict = container(Kind::kDict, {});
      if (entry->role == Role::kOrderedDict) {
        dict->text = callable.text;
        require(parts.empty(), "an OrderedDict made of arguments, as Python 2 wrote it");
      }
      return dict;
    }
    case Role::kSize:
      require(parts.size() == 1 && parts[0]->is(Kind::kTuple), "a torch.Size of what is no tuple");
      {
        Value* size = container(Kind::kTuple, parts[0]->items);
        size->text = callable.text;
        return size;
      }
    case Role::kSet:
      require(parts.size() == 1 && (parts[0]->is(Kind::kList) || parts[0]->is(Kind::kTuple)),
              "a set of what is no list");
      return container(Kind::kSet, parts[0]->items);
    case Role::kBytes:
    case Role::kEncode: {
      const bool has_text = !parts.empty() && (parts[0]->is(Kind::kString) || parts[0]->is(Kind::kBytes));
      require(parts.empty() || has_text, "bytes of what is no text");
      charge(parts.empty() ? 0 : parts[0]->text.size());
      return text_value(Kind::kBytes, parts.empty() ? "" : parts[0]->text);
    }
    case Role::kRebuildTensor:
    case Role::kRebuildTensor3:
      return rebuild_tensor(*arguments, entry->role == Role::kRebuildTensor3);
    case Role::kRebuildParameter:
      require(!parts.empty() && parts[0]->is(Kind::kTensor), "a parameter of what is no tensor");
      return parts[0];
    case Role::kRebuildFromType:
      require(parts.size() >= 3 && parts[0]->is(Kind::kClass) && parts[0]->text != callable.text,
              "a tensor made of nothing");
      return reduce(*parts[0], parts[2]);
    case Role::kMember:
      require(parts.size() == 2 && parts[0]->is(Kind::kClass) && parts[1]->is(Kind::kString),
              "an enum's member of what is no class, or without a name");
      break;
    case Role::kObject:
    case Role::kStorage:
    case Role::kDtype:
      break;
  }
  Value* object = container(Kind::kObject, parts);
  object->text = callable.text;
  object->flag = true;
  return object;
}

bool Reader::run_object(uint8_t operation) {
  switch (operation) {
    case 'c': {  // GLOBAL
      const std::string module(line());
      return push(class_named(module + "." + std::string(line()))), true;
    }
    case 0x93: {  // STACK_GLOBAL
      const Value* name = pop();
      const Value* module = pop();
      require(name->is(Kind::kString) && module->is(Kind::kString), "a class without a name");
      charge(name->text.size() + module->text.size());
      return push(class_named(module->text + "." + name->text)), true;
    }
    case 'Q': {  // BINPERSID
      const Value* id = pop();
      return push(storage_of(*id)), true;
    }
    case 'R': {  // REDUCE
      Value* arguments = pop();
      const Value* callable = pop();
      return push(reduce(*callable, arguments)), true;
    }
    case 0x81:                       // NEWOBJ
    case 0x92: {                     // NEWOBJ_EX
      if (operation == 0x92) pop();  // keyword arguments: of use to nobody who reads
      const Value* arguments = pop();
      const Value* type = pop();
      require(type->is(Kind::kClass) && arguments->is(Kind::kTuple), "an object of what is no class");
      if (find_class(type->text)->role == Role::kOrderedDict) return push(reduce(*type, document_.tuple({}))), true;
      require(find_class(type->text)->role == Role::kObject, "an object of a class that has none");
      charge(arguments->items.size());
      Value& object = document_.add(Kind::kObject);
      object.text = type->text;
      object.items = arguments->items;
      return push(&object), true;
    }
    case 'b': {  // BUILD
      Value* state = pop();
      require(!top()->is(Kind::kNone) && !top()->is(Kind::kBool) && !top()->is(Kind::kTuple),
              "a state for what has none");
      top()->state = state;
      return true;
    }
    default:
      return false;
  }
}

}  // namespace trireme::pickle
