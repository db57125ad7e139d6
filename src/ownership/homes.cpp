#include "ownership/homes.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "ownership/cut_tensors.h"
#include "ownership/shadow.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/base/error.h"
#include "trireme/base/mix64.h"
#include "trireme/intercept/transforms.h"

namespace trireme::ownership {
namespace {

uint64_t hash_of(std::string_view name) {
  uint64_t hash = 0;
  for (const char character : name) hash = mix64(hash ^ static_cast<unsigned char>(character));
  return hash;
}

bool is_tensor_type(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.type();
  if (type->kind() == c10::TypeKind::TensorType) return true;
  if (type->kind() == c10::TypeKind::OptionalType)
    return type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::TensorType;
  return type->kind() == c10::TypeKind::ListType &&
         type->expectRef<c10::ListType>().getElementType()->isSubtypeOf(*c10::TensorType::get());
}

/// A view by the schema: a result has the alias set of this argument, which is not written.
int viewed_argument(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) continue;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && !alias->isWrite() && is_tensor_type(schema.arguments()[i])) return static_cast<int>(i);
    }
  }
  return -1;
}

/// The tensor behind a view's that is not there for its sizes alone (narrow, tensor_split), in which its range is as
/// values; -1: none.
int range_of_view(const c10::FunctionSchema& schema, int viewed) {
  for (size_t i = viewed < 0 ? schema.arguments().size() : viewed + 1; i < schema.arguments().size(); ++i)
    if (is_tensor_type(schema.arguments()[i]) && schema.arguments()[i].name() != "other") return static_cast<int>(i);
  return -1;
}

bool is_last_born(const Home& home, const Home& other) {
  return home.born != other.born ? home.born > other.born : home.stage > other.stage;
}

}  // namespace

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const c10::StorageImpl* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return storage != nullptr || PartTensor::of(tensor) == nullptr
             ? storage
             : local_of(tensor).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

OperatorFacts facts_of(const OperatorCall& call) {
  const c10::FunctionSchema& schema = call.op.schema();
  OperatorFacts facts;
  facts.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  facts.hash = hash_of(facts.name);
  facts.is_numbers = facts.name == "trireme::numbers";
  facts.written = call.traits.written;
  facts.results = schema.returns().size();
  for (size_t i = 0; i < schema.arguments().size() && i < 64; ++i) {
    const std::string& argument = schema.arguments()[i].name();
    if (argument == "running_mean" || argument == "running_var") facts.statistics |= uint64_t{1} << i;
    if (argument == "dropout_p" || argument == "train" || argument == "training")
      facts.draws_unless = static_cast<int>(i);
  }
  facts.written |= facts.statistics;
  facts.gives_values = !schema.returns().empty() && std::ranges::none_of(schema.returns(), is_tensor_type);
  facts.view_of = viewed_argument(schema);
  static constexpr std::array<std::string_view, 6> kMayCopy{"aten::reshape", "aten::reshape_as", "aten::contiguous",
                                                            "aten::flatten", "aten::ravel",      "aten::to"};
  facts.always_views = facts.view_of >= 0 && std::ranges::find(kMayCopy, schema.name()) == kMayCopy.end();
  facts.range_from = range_of_view(schema, facts.view_of);
  facts.tells_each = result_sizes_of(call.op) == ResultSizes::kByValues;
  facts.tells_by_index = result_sizes_of(call.op) == ResultSizes::kByMasks;
  if (const OperatorRule* const rule = rule_of(call.op)) {
    facts.is_each = rule->role == OperatorRole::kEach;
    facts.reads_nothing = rule->role == OperatorRole::kNone;
  }
  return facts;
}

const Home* Homes::find(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = const_cast<c10::StorageImpl*>(storage_of(tensor));
  if (storage == nullptr) return refuse_transformed(tensor), nullptr;
  if (const Home* const home = remote_home(*storage)) return home;
  const auto& found = table_[place_of(storage)];
  return found ? &found->home : nullptr;
}

void Homes::refuse_transformed(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const at::Tensor& inner = under_transforms(tensor);
  const Home* const home = inner.is_same(tensor) ? nullptr : find(inner);
  if (home != nullptr)
    throw Error(ErrorCode::kUnsupported,
                str("smp: a transform of torch.func (vmap, grad, jvp) of a tensor of stage ", home->stage,
                    " is not there yet; compute it without the transform, or outside of the step function"));
}

void Homes::set(const c10::Storage& storage, const Home& home) {
  drop_dead(/*looks=*/3);
  auto& entry = table_[place_of(storage.unsafeGetStorageImpl())];
  if (entry) {
    entry->home = home;
    return;
  }
  entry.emplace(storage.getWeakStorageImpl(), home);
  if (++size_ * 2 > table_.size()) grow();
}

const c10::StorageImpl* Homes::at(size_t place) const {
  return table_[place] ? table_[place]->storage._unsafe_get_target() : nullptr;
}

size_t Homes::first_place_of(const c10::StorageImpl* storage) const {
  return (reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9e3779b97f4a7c15 >> 32 & (table_.size() - 1);
}

/// The place of its entry, or a free one for it.
size_t Homes::place_of(const c10::StorageImpl* storage) const {
  size_t place = first_place_of(storage);
  while (table_[place] && at(place) != storage) place = after(place);
  return place;
}

/// Each new home looks for dead storages at some places more, so that their memory is used again soon.
void Homes::drop_dead(int looks) {
  for (; looks > 0; --looks) {
    if (table_[hand_] && table_[hand_]->storage.expired())
      erase(hand_);
    else
      hand_ = after(hand_);
  }
}

void Homes::erase(size_t place) {
  --size_;
  for (size_t next = after(place); table_[next]; next = after(next)) {
    // Entries that follow come forward, unless its first place is behind the gap.
    const size_t mask = table_.size() - 1, first = first_place_of(at(next));
    if (((next - first) & mask) < ((next - place) & mask)) continue;
    table_[place] = std::move(table_[next]);
    place = next;
  }
  table_[place].reset();
}

void Homes::grow() {
  std::vector<std::optional<Entry>> old(table_.size() * 2);
  old.swap(table_);
  for (auto& entry : old)
    if (entry) table_[place_of(entry->storage._unsafe_get_target())] = std::move(entry);
}

HomedArguments Homes::arguments_of(const OperatorCall& call) {
  HomedArguments found;
  const auto arguments = call.arguments();
  const auto add = [&](size_t argument, size_t item, const at::Tensor& tensor) {
    if (const Home* const home = find(tensor))
      found.push_back({argument, item, &tensor, *home});
    else
      found.has_others = found.has_others || tensor.defined();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor()) {
      add(i, 0, arguments[i].toTensor());
    } else if (arguments[i].isList()) {
      size_t item = 0;
      for (const c10::IValue& value : arguments[i].toListRef()) {
        if (!value.isTensor() && !value.isNone()) break;
        if (value.isTensor()) add(i, item++, value.toTensor());
      }
    }
  }
  return found;
}

std::optional<Home> home_of(const OperatorFacts& facts, const HomedArguments& arguments, std::optional<int> entered,
                            const CutTensors* cut) {
  const HomedArgument* written = nullptr;
  const HomedArgument* parameter = nullptr;
  const HomedArgument* activation = nullptr;  // the last born
  const HomedArgument* viewed = nullptr;
  bool has_parameters_alone = !arguments.has_others;
  for (const HomedArgument& one : arguments) {
    if (one.argument < 64 && (facts.written >> one.argument & 1)) {
      if (written != nullptr && written->home.stage != one.home.stage)
        throw Error(ErrorCode::kUnsupported,
                    str("smp: ", facts.name, " writes tensors of stage ", written->home.stage, " and of stage ",
                        one.home.stage, " in one call; write them by a call each"));
      if (written == nullptr) written = &one;
    }
    if (facts.range_from >= 0 && one.argument >= static_cast<size_t>(facts.range_from) &&
        at::isIntegralType(one.tensor->scalar_type(), /*includeBool=*/false))
      throw Error(ErrorCode::kUnsupported, str("smp: ", facts.name, " cuts a view by the values of a tensor of stage ",
                                               one.home.stage, "; read them by tolist() or item() first"));
    if (static_cast<int>(one.argument) == facts.view_of && viewed == nullptr) viewed = &one;
    if (one.home.is_parameter) {
      if (parameter == nullptr) parameter = &one;
      continue;
    }
    has_parameters_alone = false;
    if (activation == nullptr || is_last_born(one.home, activation->home)) activation = &one;
  }
  const auto home_at = [&](const HomedArgument& one) {
    return std::optional<Home>({one.home.stage, has_parameters_alone && one.home.is_parameter, one.home.born});
  };
  const auto numel_of = [cut](const at::Tensor& tensor) {
    return cut != nullptr ? cut->numel_of(tensor) : tensor.numel();
  };
  if (written != nullptr) return written->home;
  if (facts.view_of >= 0) return viewed != nullptr ? std::optional(viewed->home) : std::nullopt;
  if (parameter != nullptr && activation != nullptr && facts.is_each &&
      numel_of(*activation->tensor) > numel_of(*parameter->tensor))
    return home_at(*activation);
  if (parameter != nullptr) return home_at(*parameter);
  if (activation != nullptr && entered) return Home{*entered, false, activation->home.born};
  if (activation != nullptr) return home_at(*activation);
  return std::nullopt;
}

}  // namespace trireme::ownership
