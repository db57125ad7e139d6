#include "ownership/module_calls.h"

#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

#include "ownership/micro_batch.h"
#include "ownership/shadow.h"
#include "trireme/base/mix64.h"

namespace trireme::ownership {
namespace {

// The first call has to be told sizes, and in the first step nothing stands.
constexpr int kTries = 4;

uint64_t born_at(const MicroBatch& now, int64_t position) {
  return static_cast<uint64_t>(now.number + 1) << 32 | static_cast<uint64_t>(position);
}

/// Whether the older tensors of a call are as they were: all live, none has left its stage, and what needed a gradient
/// still does. `locked` gets them.
bool are_as_before(const MicroBatch& now, const std::vector<OlderTensor>& older, std::vector<at::Tensor>& locked) {
  for (const OlderTensor& one : older) {
    const auto tensor = at::Tensor(one.tensor.lock());
    if (!tensor.defined() || tensor.requires_grad() != one.requires_grad || now.transfers.has(tensor)) return false;
    locked.push_back(tensor);
  }
  return true;
}

/// Whether tensors that the call has made live on, which later ones would not make.
bool has_left_something(const OpenCall& call, const std::vector<at::Tensor>& results) {
  return std::ranges::any_of(call.made, [&](const auto& storage) {
    return !storage.expired() && std::ranges::none_of(results, [&](const at::Tensor& result) {
      return storage_of(result) == storage._unsafe_get_target();
    });
  });
}

}  // namespace

void OpenCall::uses(const at::Tensor& tensor, const Home& home, bool is_written) {
  if (!stands || is_own(home)) return;
  const bool is_input =
      std::ranges::any_of(inputs, [&](const at::Tensor& input) { return storage_of(input) == storage_of(tensor); });
  stands = !is_written && (is_input || home.born == 0);
  const auto is_this = [&](const OlderTensor& other) {
    return other.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  };
  if (stands && !is_input && home.is_parameter && std::ranges::none_of(older, is_this))
    older.push_back(
        {.tensor = decltype(OlderTensor::tensor)(tensor.getIntrusivePtr()), .requires_grad = tensor.requires_grad()});
}

/// Nothing: a call with such inputs neither stands nor is stood for.
std::optional<uint64_t> SeenCalls::key_of_call(MicroBatch& now, Homes& homes, uint64_t key, int stage,
                                               const std::vector<at::Tensor>& inputs) const {
  bool is_complete = true;
  uint64_t hash = key_of(key, {c10::IValue(c10::List<at::Tensor>(inputs))}, is_complete).first;
  if (!is_complete) return std::nullopt;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const c10::StorageImpl* const storage = storage_of(inputs[i]);
    if (storage == nullptr) return std::nullopt;
    const Home* const home = homes.find(inputs[i]);
    if (home != nullptr && (home->stage != stage || now.transfers.has(inputs[i]))) return std::nullopt;
    size_t first = 0;  // inputs that share memory do so in every call
    while (storage_of(inputs[first]) != storage) ++first;
    hash = mix64(hash ^ (first << 2 | static_cast<uint64_t>(home != nullptr) << 1 |
                         static_cast<uint64_t>(home != nullptr && home->is_parameter)));
  }
  return hash;
}

SeenCalls::Begun SeenCalls::begin(MicroBatch& now, Homes& homes, uint64_t key, int stage,
                                  const std::vector<at::Tensor>& inputs) {
  if (now.replay) return {};
  const std::optional<uint64_t> of_call = key_of_call(now, homes, key, stage, inputs);
  if (!of_call) return {};
  std::unique_ptr<Seen>& seen = seen_[*of_call];
  if (!seen) seen = std::make_unique<Seen>();
  if (seen->number >= 0 && !now.measures) {
    std::vector<at::Tensor> older;
    if (are_as_before(now, seen->older, older)) {
      for (size_t i = 0; i < older.size(); ++i)
        if (seen->older[i].touched_by != nullptr)
          now.touch(*seen->older[i].touched_by, {.tensor = &older[i], .home = *homes.find(older[i])}, false);
      return {.seen = seen->number, .results = repeat(now, homes, *seen, stage, inputs)};
    }
    *seen = Seen();
  }
  if (seen->number >= 0 || seen->tries >= kTries) return {};
  ++seen->tries;
  now.calls.push_back({.key = *of_call,
                       .stage = stage,
                       .inputs = inputs,
                       .trace_begin = now.trace.size(),
                       .place = now.place,
                       .begin = born_at(now, now.place.position)});
  return {.is_open = true};
}

std::vector<at::Tensor> SeenCalls::repeat(MicroBatch& now, Homes& homes, const Seen& seen, int stage,
                                          const std::vector<at::Tensor>& inputs) {
  // It is a part of the calls around it.
  for (OpenCall& call : now.calls) {
    for (const at::Tensor& input : inputs)
      if (const Home* const home = homes.find(input)) call.uses(input, *home, false);
    for (const OlderTensor& one : seen.older)
      if (one.touched_by == nullptr) call.older.push_back(one);
  }
  if (seen.visitor != nullptr) now.visit(*seen.visitor, stage);
  std::vector<at::Tensor> results;
  NodePtr stub;
  for (const Result& one : seen.results) {
    if (one.input >= 0) {
      results.push_back(inputs[one.input]);
      continue;
    }
    const Home home{stage, one.is_parameter, born_at(now, now.place.position) + one.born};
    at::Tensor shadow = make_shadow(one.told, device_, home);
    if (one.told.requires_grad) {
      if (!stub) stub = make_stub(inputs);
      torch::autograd::set_history(shadow, stub);
    }
    results.push_back(std::move(shadow));
  }
  for (const at::Tensor& result : results) note_made(now, {c10::IValue(result)});
  for (const auto& [name, of_call] : seen.operators) now.note(*name, of_call);
  now.place.position += seen.steps.position;
  now.place.randoms += seen.steps.randoms;
  ++spared_;
  return results;
}

/// Nothing: what the call returned cannot be made without it.
std::optional<std::vector<SeenCalls::Result>> SeenCalls::results_of(const OpenCall& call, const MicroBatch& now,
                                                                    Homes& homes,
                                                                    const std::vector<at::Tensor>& results) {
  std::vector<Result> all;
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor& tensor = results[i];
    const auto is_this = [&](const at::Tensor& other) { return other.is_same(tensor); };
    if (const auto input = std::ranges::find_if(call.inputs, is_this); input != call.inputs.end()) {
      all.push_back({.input = static_cast<int>(input - call.inputs.begin())});
      continue;
    }
    if (!tensor.defined() || storage_of(tensor) == nullptr || tensor.is_view() || tensor.storage_offset() != 0)
      return std::nullopt;
    const Home* const home = homes.find(tensor);
    const auto shares = [&](const at::Tensor& other) { return storage_of(other) == storage_of(tensor); };
    if (home == nullptr || home->stage != call.stage || !call.is_own(*home) || now.transfers.has(tensor) ||
        std::count_if(results.begin(), results.end(), shares) != 1)
      return std::nullopt;
    all.push_back({.told = {.sizes = at::DimVector(tensor.sizes()),
                            .strides = at::DimVector(tensor.strides()),
                            .dtype = tensor.scalar_type(),
                            .requires_grad = tensor.requires_grad(),
                            .is_conjugated = tensor.is_conj(),
                            .is_negated = tensor.is_neg()},
                   .is_parameter = home->is_parameter,
                   .born = home->born - call.begin});
  }
  return all;
}

int64_t SeenCalls::end(MicroBatch& now, Homes& homes, const std::vector<at::Tensor>& results) {
  OpenCall call = std::move(now.calls.back());
  now.calls.pop_back();
  if (!call.stands || has_left_something(call, results)) return -1;
  auto made = results_of(call, now, homes, results);
  if (!made) return -1;
  Seen& seen = *seen_.at(call.key);
  seen.number = count_++;
  seen.operators.assign(now.trace.begin() + static_cast<std::ptrdiff_t>(call.trace_begin), now.trace.end());
  seen.steps = {now.place.position - call.place.position, now.place.randoms - call.place.randoms};
  seen.older = std::move(call.older);
  seen.results = std::move(*made);
  seen.visitor = call.visitor;
  return seen.number;
}

void SeenCalls::drop(MicroBatch& now) { now.calls.pop_back(); }

void look_at(MicroBatch& now, const OperatorFacts& facts, const HomedArguments& homed, const Home& home) {
  for (OpenCall& call : now.calls) {
    if (home.stage != call.stage || (facts.written != 0 && homed.has_others)) call.stands = false;
    for (const HomedArgument& one : homed)
      call.uses(*one.tensor, one.home, one.argument < 64 && (facts.written >> one.argument & 1));
  }
}

void note_made(MicroBatch& now, c10::ArrayRef<c10::IValue> results, const std::vector<at::Tensor>& arguments) {
  for (const c10::IValue& result : results)
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      const auto shares = [&](const at::Tensor& argument) { return storage_of(argument) == storage_of(tensor); };
      if (storage_of(tensor) == nullptr || std::ranges::any_of(arguments, shares)) return;
      for (OpenCall& call : now.calls)
        if (call.stands) call.made.push_back(tensor.storage().getWeakStorageImpl());
    });
}

}  // namespace trireme::ownership
