#include "ownership/ownership_pass.h"

#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "ownership/cut_tensors.h"
#include "ownership/shadow.h"
#include "trireme/activations/call_arguments.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/base/error.h"
#include "trireme/base/mix64.h"

namespace trireme::ownership {
namespace {

std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(values, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Puts `tensor` in place of the tensor number `item` of `value`.
void replace(c10::IValue& value, size_t item, const at::Tensor& tensor) {
  if (value.isTensor()) {
    value = tensor;
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list = value.toTensorList().copy();
    list.set(item, tensor);
    value = std::move(list);
  } else {
    c10::List<std::optional<at::Tensor>> list = value.toOptionalTensorList().copy();
    size_t next = 0;
    for (size_t i = 0; i < list.size(); ++i)
      if (list.get(i).has_value() && next++ == item) list.set(i, tensor);
    value = std::move(list);
  }
}

at::Tensor with_base(const at::Tensor& tensor) { return tensor.is_view() ? at::Tensor(tensor._base()) : tensor; }

/// The tensor of which others may have used what is written.
at::Tensor written_as_a_whole(const OperatorCall& call, const HomedArgument& one, const Transfers& transfers) {
  if (PartTensor::of(*one.tensor) == nullptr) return with_base(*one.tensor);
  if (needs_gradient(*one.tensor) && transfers.away(*one.tensor) != nullptr)
    throw Error(
        ErrorCode::kUnsupported,
        str("smp: ", call.op.schema().name(), " writes a tensor that ranks along \"tensor\" have parts of, after ",
            "another stage has used it, which is not there yet; clone() it before it is written"));
  return *one.tensor;
}

bool is_mask(at::ScalarType dtype) { return dtype == at::kBool || dtype == at::kByte; }

bool is_written(const OperatorCall& call, const HomedArgument& one) {
  return one.argument < 64 && (call.traits.written >> one.argument & 1);
}

/// Arguments of a view beside the viewed one give sizes or dtypes, which every stage knows. A view is no use of its
/// argument either: what is made of it is, wherever.
bool is_needed(const OperatorFacts& facts, const HomedArgument& one) {
  return facts.view_of < 0 || static_cast<int>(one.argument) == facts.view_of;
}

/// Whether an operator that may draw random numbers does.
bool draws(const OperatorCall& call, const OperatorFacts& facts) {
  if (facts.draws_unless < 0) return true;
  const c10::IValue& by = call.arguments()[facts.draws_unless];
  return !(by.isBool() && !by.toBool()) && !(by.isDouble() && by.toDouble() == 0);
}

/// The key of a call that a stage runs: each stage tells sizes by itself.
Key key_on(int stage, const OperatorFacts& facts, const OperatorCall& call, const HomedArguments& homed,
           bool& is_complete, const CutTensors* cut) {
  uint64_t hash = mix64(facts.hash + static_cast<uint64_t>(stage + 1));
  // A part is one on its own stage alone.
  if (cut != nullptr)
    for (const HomedArgument& one : homed) hash = mix64(hash << 1 | static_cast<uint64_t>(one.home.stage == stage));
  return key_of(hash, call.arguments(), is_complete, cut);
}

/// Whether the call writes its argument number `i`. Statistics of a norm that is not trained it does not.
bool writes(const OperatorCall& call, const OperatorFacts& facts, size_t i) {
  return i < 64 && (facts.written >> i & 1) != 0 && ((facts.statistics >> i & 1) == 0 || draws(call, facts));
}

/// Whether a tensor ends with the micro-batch, as far as is known: of those that every stage has, what a region that is
/// open has made.
bool is_made_in(const MicroBatch& micro_batch, const at::Tensor& tensor, const Home* home) {
  if (home != nullptr) return home->born >> 32 == static_cast<uint64_t>(micro_batch.number + 1);
  return std::ranges::any_of(micro_batch.regions, [&](const auto& region) {
    return region->is_open && std::ranges::any_of(region->made, [&](const auto& made) {
             return made._unsafe_get_target() == storage_of(tensor);
           });
  });
}

/// A tensor that a region writes and that its micro-batch has not made is written twice, on each stage that runs it
/// again. `has_home`: the operator.
void note_region_writes(MicroBatch& now, Homes& homes, const OperatorCall& call, const OperatorFacts& facts,
                        bool has_home) {
  for (size_t i = 0; i < call.arguments().size(); ++i) {
    if (!writes(call, facts, i)) continue;
    for_each_tensor(call.arguments()[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || is_made_in(now, tensor, homes.find(tensor))) return;
      if (!has_home)
        throw StateError(str("smp: torch.utils.checkpoint: ", facts.name,
                             " writes a tensor that every stage has and that was made outside of the function, which "
                             "runs again on some stages alone, so that they would differ; write it outside of that "
                             "function, or register it as a buffer of its module (persistent=True)"));
      now.write_twice(facts);
    });
  }
}

/// The work of a call, by the sizes of its arguments, which every stage has.
double cost_of_call(const OperatorCall& call, OperatorRows& rows) {
  constexpr double kPerElement = 10;  // multiply-adds in the time in which an element is read or written
  double cost = 0;
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
    if (tensor.defined()) cost += kPerElement * static_cast<double>(tensor.numel());
  });
  const OperatorRow* const row = cost_of(call.op) == OperatorCost::kCheap ? nullptr : rows(call.op);
  if (row != nullptr && row->row != nullptr && row->makes_activations)
    cost = std::max(cost, row->row(RowCall(call.op, call.arguments())).multiply_adds());
  return cost;
}

/// Tensors that are older than the micro-batch, in the turn in which the operator has all that it needs. Parameters
/// that are read are the same for all of them.
void touch_lasting(MicroBatch& now, const OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed) {
  if (facts.view_of >= 0 || now.replay) return;
  const auto own = static_cast<uint64_t>(now.number + 1);
  for (const HomedArgument& one : homed)
    if (one.home.born >> 32 != own && (!one.home.is_parameter || facts.written != 0))
      now.touch(facts, one, writes(call, facts, one.argument));
}

/// A view on another stage than its own, not by next(call): the owner of a storage is asked for its bytes there. Where
/// ranks share layers, a part may have the strides for a view that the whole has not: that one begins where the viewed
/// tensor does.
void make_view(OperatorCall& call, const ToldCall& told, bool is_cut) {
  if (!is_cut || told.returns.size() != 1 || told.returns[0].is_list)
    return call.op.redispatchBoxed(call.keys, &call.stack);
  torch::jit::Stack tried = call.arguments().vec();
  const ToldTensor& one = told.returns[0].tensors[0];
  at::Tensor view;
  try {
    call.op.redispatchBoxed(call.keys, &tried);
    view = tried.back().toTensor();
  } catch (const c10::Error&) {
    const at::Tensor viewed = tensors_of(call.arguments()).at(one.shares_with);
    view = viewed.as_strided(one.sizes, c10::contiguous_strides(one.sizes), viewed.storage_offset());
  }
  torch::jit::drop(call.stack, call.traits.arguments);
  call.stack.emplace_back(std::move(view));
}

/// A copy's new elements go back to the part, which may be of an earlier piece.
void refuse_written_copies(const CutTensors& cut, const OperatorFacts& facts, c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    if ((facts.written >> i & 1) == 0) continue;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !cut.is_copy(tensor)) return;
      throw Error(
          ErrorCode::kUnsupported,
          str("smp: ", facts.name, " writes into a view of a tensor that ranks along \"tensor\" have parts of, ",
              "at places that other ranks have too, which is not there yet over stages; write by torch.where(), ",
              "or into a whole tensor"));
    });
  }
}

}  // namespace

void OwnershipPass::run(OperatorCall& call, Next next) {
  if (current_ == nullptr) {
    if (is_backward_ && (call.traits.random || at::GradMode::is_enabled())) check_second_run(call);
    return next(call);
  }
  if (!current_->replay && torch::autograd::get_current_graph_task_id() != -1)
    throw StateError(
        "smp: a backward pass was started inside of a step function; call model.backward(loss), which runs when the "
        "forward pass has ended (torch.autograd.grad() and create_graph are not there yet)");
  MicroBatch& now = *current_;
  const OperatorFacts& facts = facts_of(call);
  if (call.traits.random) seed(call, facts);
  if (stages_ == 1) return next(call);
  ++now.place.position;
  const HomedArguments homed = homes_.arguments_of(call);
  // A call of a second run, which a stage does alone, must not become one that it has told of.
  if (now.replay && !is_compared(facts.name)) {
    const bool is_remote = !homed.empty() && homed.front().home.stage != stage_;
    return is_remote ? call.op.redispatchBoxed(call.keys, &call.stack) : next(call);
  }
  std::optional<Home> home =
      home_of(facts, homed, entered_.empty() ? std::nullopt : std::optional(entered_.back()), cut());
  if (home && forced_) home->stage = *forced_;
  if (facts.written != 0 && now.is_in_region()) note_region_writes(now, homes_, call, facts, home.has_value());
  if (!home) return run_replicated(call, facts, homed, next);
  if (facts.view_of < 0) now.visit(facts, home->stage);
  if (home->stage == stage_)
    run_own(call, facts, homed, *home, next);
  else
    run_remote(call, facts, homed, *home, next);
}

/// A forward pass draws by the seeds of its operators, and other stages take part in it: a backward pass, in which a
/// part of it runs again, has neither.
void OwnershipPass::check_second_run(const OperatorCall& call) {
  if (call.traits.random && draws(call, facts_of(call)))
    throw StateError(str("smp: ", call.op.schema().name(), " draws random numbers in a backward pass: ", kNoSecondRun));
  for (const HomedArgument& one : homes_.arguments_of(call))
    if (one.home.stage != stage_)
      throw StateError(str("smp: ", call.op.schema().name(), " of a backward pass needs stage ", one.home.stage, ": ",
                           kNoSecondRun));
}

/// By the operator's number among those that may draw. To seed a generator costs more than most operators: not where
/// nothing is drawn.
void OwnershipPass::seed(OperatorCall& call, const OperatorFacts& facts) {
  const auto number = static_cast<uint64_t>(++current_->place.randoms);
  if (draws(call, facts)) call.seed = mix64(mix64(current_->seed ^ static_cast<uint64_t>(current_->number)) ^ number);
}

const OperatorFacts& OwnershipPass::facts_of(const OperatorCall& call) {
  if (const auto found = facts_.find(call.op); found != facts_.end()) return *found->second;
  return *facts_.emplace(call.op, std::make_unique<OperatorFacts>(ownership::facts_of(call))).first->second;
}

bool OwnershipPass::tells_each(const OperatorFacts& facts, const OperatorCall& call) const {
  if (facts.tells_each) return true;
  if (!facts.tells_by_index) return false;
  bool has_mask = false;
  for_each_tensor(call.arguments().slice(1), [&](const at::Tensor& index) {
    has_mask = has_mask || (index.defined() && is_mask(index.scalar_type()));
  });
  return has_mask;
}

// --- operators of nobody -------------------------------------------------------------------------------------------

void OwnershipPass::run_replicated(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed,
                                   const Next& next) {
  ++counters_.replicated;
  // A number that the program reads may decide what it does.
  const bool gives_numbers = facts.gives_values && !facts.reads_nothing;
  if (facts.written != 0 || gives_numbers || tells_each(facts, call)) current_->must_run();
  bool is_complete = true;
  current_->note(facts, key_of(facts.hash, call.arguments(), is_complete, cut()), -1);
  // A view by the sizes of a tensor that has a home.
  if (!homed.empty()) return call.op.redispatchBoxed(call.keys, &call.stack);
  if (!current_->is_in_region() && current_->calls.empty()) return next(call);
  std::vector<const c10::StorageImpl*> given;
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) { given.push_back(storage_of(tensor)); });
  next(call);
  for_each_tensor(call.results(), [&](const at::Tensor& tensor) {
    const c10::StorageImpl* const storage = storage_of(tensor);
    if (storage == nullptr || std::ranges::count(given, storage) != 0) return;
    note_made(*current_, {c10::IValue(tensor)});
    for (const auto& region : current_->regions)
      if (region->is_open) region->made.push_back(tensor.storage().getWeakStorageImpl());
  });
}

// --- operators of this stage ---------------------------------------------------------------------------------------

void OwnershipPass::run_own(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed,
                            const Home& home, const Next& next) {
  ++counters_.own;
  current_->must_run();
  bool is_complete = true;
  const Key key = key_on(stage_, facts, call, homed, is_complete, cut());
  const CutTensors::Makers makers = cut_ ? cut_->makers_of(call.arguments()) : CutTensors::Makers();
  current_->note(facts, key, stage_);
  const bool tells = !is_complete || tells_each(facts, call);
  const ToldCall* const known = tells ? nullptr : told_.find(key);
  const bool uses = facts.view_of < 0 || !is_view(call, facts, known, next);
  const Replacements replaced = bring(call, facts, homed, uses, next);
  if (current_->measures) current_->turns.spend(stage_, cost_of_call(call, rows_));
  const ArgumentTensors tensors(call.arguments(), cut());
  const bool may_follow = current_->transfers.has_any() && at::GradMode::is_enabled();
  std::vector<c10::IValue> arguments;
  if (!replaced.empty() || facts.written != 0 || may_follow) arguments = call.arguments().vec();

  const bool reads_sizes_of_others = facts.view_of >= 0 && std::ranges::any_of(homed, [&](const HomedArgument& one) {
                                       return one.home.stage != stage_;
                                     });
  if (facts.is_numbers) argument(call, 0) = next.run(call, [&] { return whole(call.arguments()[0].toTensor()); });
  if (reads_sizes_of_others)
    call.op.redispatchBoxed(call.keys, &call.stack);
  else
    next(call);
  if (facts.reads_nothing) return;
  if (facts.gives_values) return exchange_.tell_values(facts, call.results());

  ToldCall told_now;
  const ToldCall* told = known;
  if (known != nullptr) {
    if (!holds(*told, tensors, torch::jit::last(call.stack, facts.results), cut()))
      throw StateError(str("smp: ", facts.name, " had results ",
                           told_of(facts.name, tensors, call.results(), cut()).text(), " where the same call had ",
                           told->text(), " before: their sizes depend on values, and the operator does not say so"));
  } else {
    told_now = told_of(facts.name, tensors, call.results(), cut());
    refuse_mixed(facts, told_now);
    exchange_.tell(facts, tells ? nullptr : &key, told_now);
    told = tells ? &told_now : &told_.add(key, std::move(told_now));
  }
  if (facts.view_of >= 0 && !told->is_view()) current_->visit(facts, stage_);
  if (told->is_view()) {
    const std::vector<at::Tensor> views_of = originals_of(arguments, replaced);
    if (!replaced.empty()) view_originals(next, call, *told, replaced, std::move(arguments));
    if (cut_) cut_->note_results(tensors_of(call.results()), key, *told, makers);
    if (may_follow) follow(call, *told, views_of, {});
    return;
  }
  if (cut_ && facts.always_views) cut_->note_copies(tensors_of(call.results()));
  if (cut_ && facts.written != 0) refuse_written_copies(*cut_, facts, arguments);
  give_back(call, replaced);
  note_results(torch::jit::last(call.stack, facts.results), *told, home);
  if (cut_) cut_->note_results(tensors_of(call.results()), key, *told, makers);
  take_written(facts, call.op, arguments, home);
}

/// Whether the operator uses its arguments as they are: nothing has come from other stages or gone there, and they are
/// of this one and of its first piece.
bool OwnershipPass::are_here(const OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed) {
  if (current_->transfers.has_any()) return false;
  const bool has_gradients = at::GradMode::is_enabled();
  return std::ranges::all_of(homed, [&](const HomedArgument& one) {
    return one.home.stage == stage_ &&
           (!has_gradients || !is_needed(facts, one) ||
            (current_->pieces.is_here(local_of(*one.tensor)) && (cut_ || !Casts::has(call, *one.tensor))));
  });
}

/// Puts what the operator needs in place of its arguments: tensors of other stages come here, and what is of an earlier
/// piece has a stand-in in this one.
OwnershipPass::Replacements OwnershipPass::bring(OperatorCall& call, const OperatorFacts& facts,
                                                 const HomedArguments& homed, bool uses, const Next& next) {
  if (facts.written == 0 && are_here(call, facts, homed))
    return touch_lasting(*current_, call, facts, homed), Replacements();
  Pieces& pieces = current_->pieces;
  c10::SmallVector<at::Tensor, 4> used(homed.size());  // undefined: the argument as it is
  for (size_t i = 0; uses && i < homed.size(); ++i) {
    const HomedArgument& one = homed[i];
    if (!is_needed(facts, one)) continue;
    if (is_written(call, one))
      exchange_.use(call, facts, written_as_a_whole(call, one, current_->transfers), one.home.stage, stage_, next);
    else
      used[i] = exchange_.use(call, facts, *one.tensor, one.home.stage, stage_, next);
  }
  touch_lasting(*current_, call, facts, homed);
  Replacements replaced;
  for (size_t i = 0; i < homed.size(); ++i) {
    const HomedArgument& one = homed[i];
    if (!is_needed(facts, one) || is_written(call, one)) continue;
    const at::Tensor given = used[i].defined() ? used[i] : *one.tensor;
    // A cast of a slice would not be known as one.
    if (at::Tensor cast = cut_ ? at::Tensor() : current_->casts.of(call, given, pieces, next); cast.defined())
      used[i] = std::move(cast);
    const at::Tensor& here = used[i].defined() ? used[i] : *one.tensor;
    const at::Tensor in_piece = pieces.part_here(here);
    at::Tensor crossed = in_piece.is_same(here) ? used[i] : in_piece;
    if (!crossed.defined() || crossed.is_same(*one.tensor)) continue;
    replaced.push_back({.argument = one.argument,
                        .item = one.item,
                        .original = *one.tensor,
                        .used = std::move(crossed),
                        .is_received = one.home.stage != stage_});
  }
  if (facts.written != 0 && !current_->replay)
    for (const HomedArgument& one : homed)
      if (is_written(call, one)) pieces.begin_write(*one.tensor);
  for (const Replaced& one : replaced)
    replace(call.stack[call.stack.size() - call.traits.arguments + one.argument], one.item, one.used);
  return replaced;
}

/// The program's own tensors in place of those that stood for them among the results.
void OwnershipPass::give_back(OperatorCall& call, const Replacements& replaced) {
  if (replaced.empty()) return;
  const size_t count = call.results().size();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& result = call.stack[call.stack.size() - count + i];
    size_t item = 0;
    std::vector<std::pair<size_t, at::Tensor>> originals;
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      for (const Replaced& one : replaced)
        if (one.used.is_same(tensor)) originals.emplace_back(item, one.original);
      ++item;
    });
    for (const auto& [place, original] : originals) replace(result, place, original);
  }
}

/// Whether an operator that may give a view does, where it matters before it ran: else what it computes is a use of a
/// tensor that another stage used last.
bool OwnershipPass::is_view(const OperatorCall& call, const OperatorFacts& facts, const ToldCall* known,
                            const Next& next) {
  if (known != nullptr) return known->is_view();
  const c10::IValue& viewed = call.arguments()[facts.view_of];
  if (!viewed.isTensor() || current_->transfers.away(viewed.toTensor()) == nullptr) return true;
  torch::jit::Stack tried = call.arguments().vec();
  const ArgumentTensors arguments(tried, cut());
  next.run(call, [&] { call.op.callBoxed(tried); });
  return told_of(facts.name, arguments, tried).is_view();
}

std::vector<at::Tensor> OwnershipPass::originals_of(c10::ArrayRef<c10::IValue> arguments,
                                                    const Replacements& replaced) {
  std::vector<at::Tensor> tensors = tensors_of(arguments);
  for (at::Tensor& tensor : tensors)
    for (const Replaced& one : replaced)
      if (one.used.is_same(tensor)) tensor = one.original;
  return tensors;
}

/// Views of what another stage used last follow: made here, too, where this is that stage. `stack`: the arguments, on
/// other stages than the home.
void OwnershipPass::follow(const OperatorCall& call, const ToldCall& told, const std::vector<at::Tensor>& views_of,
                           torch::jit::Stack stack) {
  Transfers& transfers = current_->transfers;
  const auto is_away = [&](const at::Tensor& tensor) { return tensor.defined() && transfers.away(tensor) != nullptr; };
  if (!at::GradMode::is_enabled() || std::ranges::none_of(views_of, is_away)) return;
  std::vector<at::Tensor> views_here;
  const auto is_held_here = [&](const at::Tensor& tensor) {
    const Transfers::Entry* const entry = tensor.defined() ? transfers.away(tensor) : nullptr;
    return entry != nullptr && entry->holder == stage_;
  };
  if (!stack.empty() && std::ranges::any_of(views_of, is_held_here)) {
    for (c10::IValue& argument : stack) {
      std::vector<std::pair<size_t, at::Tensor>> used;
      size_t item = 0;
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (is_held_here(tensor)) used.emplace_back(item, current_->pieces.cross(transfers.away(tensor)->used_as));
        ++item;
      });
      for (const auto& [place, tensor] : used) replace(argument, place, tensor);
    }
    call.op.redispatchBoxed(call.keys, &stack);
    views_here = tensors_of(stack);
  }
  const std::vector<at::Tensor> views = tensors_of(call.results());
  const WithoutInterception own_operators;
  size_t next = 0;
  for (const ToldCall::Return& result : told.returns)
    for (const ToldTensor& one : result.tensors) {
      const at::Tensor& view = views[next];
      const Transfers::Entry* const entry = transfers.away(views_of[one.shares_with]);
      if (entry != nullptr && needs_gradient(view))
        transfers.follow(view, Transfers::Entry(*entry), entry->holder == stage_ ? views_here[next] : at::Tensor());
      ++next;
    }
}

/// Results that are views: of the program's own tensors, as on other stages.
void OwnershipPass::view_originals(const Next& next, OperatorCall& call, const ToldCall& told,
                                   const Replacements& replaced, std::vector<c10::IValue> arguments) {
  const std::vector<at::Tensor> views_of_used = tensors_of(call.results()), used = tensors_of(arguments);
  torch::jit::drop(call.stack, call.results().size());
  for (const Replaced& one : replaced) replace(arguments[one.argument], one.item, one.original);
  for (c10::IValue& argument : arguments) call.stack.push_back(std::move(argument));
  if (cut_)
    next.run(call, [&] { call.op.callBoxed(&call.stack); });
  else
    call.op.redispatchBoxed(call.keys, &call.stack);
  const std::vector<at::Tensor> views = tensors_of(call.results());
  size_t place = 0;
  for (const ToldCall::Return& result : told.returns)
    for (const ToldTensor& one : result.tensors) {
      const auto is_source = [&](const Replaced& it) {
        return !it.is_received && it.used.is_same(used[one.shares_with]);
      };
      if (std::ranges::any_of(replaced, is_source)) current_->pieces.made_view(views[place], views_of_used[place]);
      ++place;
    }
}

/// New results are at home here.
void OwnershipPass::note_results(c10::ArrayRef<c10::IValue> results, const ToldCall& told, const Home& home) {
  for (size_t i = 0; i < results.size(); ++i) {
    size_t next = 0;
    for_each_tensor(results[i], [&](const at::Tensor& tensor) {
      const ToldTensor& one = told.returns[i].tensors[next++];
      if (one.is_defined && one.is_argument < 0 && one.shares_with < 0)
        homes_.set(local_of(tensor).storage(), born(home));
    });
  }
}

/// A tensor that every stage had and that values of one stage have been written into is that stage's.
void OwnershipPass::take_written(const OperatorFacts& facts, const c10::OperatorHandle& op,
                                 c10::ArrayRef<c10::IValue> arguments, const Home& home) {
  if (facts.written == 0) return;
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    if ((facts.written >> i & 1) == 0) continue;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || homes_.find(tensor) != nullptr) return;
      const at::Tensor local = local_of(tensor);
      if (StorageHandle::owner_of(*local.storage().unsafeGetStorageImpl()) != nullptr)
        throw Error(ErrorCode::kUnsupported, str("smp: ", op.schema().name(), " writes what stage ", home.stage,
                                                 " has computed into a parameter that no stage was given"));
      homes_.set(local.storage(), born(home));
      if (home.stage != stage_) make_remote(tensor, born(home), "");
    });
  }
}

Home OwnershipPass::born(const Home& home) const {
  return {home.stage, home.is_parameter,
          static_cast<uint64_t>(current_->number + 1) << 32 | static_cast<uint64_t>(current_->place.position)};
}

// --- operators of another stage ------------------------------------------------------------------------------------

void OwnershipPass::run_remote(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed,
                               const Home& home, const Next& next) {
  ++counters_.remote;
  if (!current_->calls.empty()) look_at(*current_, facts, homed, home);
  bool is_complete = true;
  const Key key = key_on(home.stage, facts, call, homed, is_complete, cut());
  const CutTensors::Makers makers = cut_ ? cut_->makers_of(call.arguments()) : CutTensors::Makers();
  current_->note(facts, key, home.stage);
  for (const HomedArgument& one : homed)
    if (facts.view_of < 0)
      exchange_.use(call, facts, is_written(call, one) ? with_base(*one.tensor) : *one.tensor, one.home.stage,
                    home.stage, next);
  touch_lasting(*current_, call, facts, homed);
  if (current_->measures) current_->turns.spend(home.stage, cost_of_call(call, rows_));
  if (facts.reads_nothing) return call.op.redispatchBoxed(call.keys, &call.stack);
  if (facts.gives_values) {
    std::vector<c10::IValue> values = exchange_.hear_values(facts, home.stage);
    torch::jit::drop(call.stack, call.traits.arguments);
    for (c10::IValue& value : values) call.stack.push_back(std::move(value));
    return;
  }
  const bool tells = !is_complete || tells_each(facts, call);
  ToldCall told_now;
  const ToldCall* told = tells ? nullptr : told_.find(key);
  if (told == nullptr) {
    told_now = exchange_.hear(facts, tells ? nullptr : &key, home.stage);
    refuse_mixed(facts, told_now);
    told = tells ? &told_now : &told_.add(key, std::move(told_now));
  }
  if (told->is_view()) {
    const bool may_follow = current_->transfers.has_any() && at::GradMode::is_enabled();
    torch::jit::Stack stack = may_follow ? call.arguments().vec() : torch::jit::Stack();
    const std::vector<at::Tensor> views_of = tensors_of(stack);
    make_view(call, *told, cut_.has_value());
    if (cut_) cut_->note_results(tensors_of(call.results()), key, *told, makers);
    if (may_follow) follow(call, *told, views_of, std::move(stack));
    return;
  }
  if (facts.view_of >= 0) {
    current_->visit(facts, home.stage);
    for (const HomedArgument& one : homed)
      if (is_needed(facts, one)) exchange_.use(call, facts, *one.tensor, one.home.stage, home.stage, next);
  }
  const std::vector<c10::IValue> arguments = call.arguments().vec();
  const std::vector<at::Tensor> tensors = tensors_of(arguments);
  torch::jit::drop(call.stack, call.traits.arguments);
  note_writes(facts, *told, arguments, tensors);
  take_written(facts, call.op, arguments, home);
  make_results(call, *told, tensors, born(home));
  if (!current_->calls.empty()) note_made(*current_, call.results(), tensors);
  if (cut_) cut_->note_results(tensors_of(call.results()), key, *told, makers);
}

/// Tensors that the program has written have another version, and need a gradient where they do on their stage.
void OwnershipPass::note_writes(const OperatorFacts& facts, const ToldCall& told, c10::ArrayRef<c10::IValue> arguments,
                                const std::vector<at::Tensor>& tensors) {
  if (facts.written == 0) return;
  std::vector<bool> needs(tensors.size());
  for (const ToldCall::Return& result : told.returns)
    for (const ToldTensor& one : result.tensors)
      if (one.is_argument >= 0) needs[one.is_argument] = one.requires_grad;
  size_t place = 0;
  for (size_t i = 0; i < arguments.size(); ++i)
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (i < 64 && (facts.written >> i & 1) && tensor.defined()) note_write(tensor, tensors, needs[place]);
      ++place;
    });
}

void OwnershipPass::make_results(OperatorCall& call, const ToldCall& told, const std::vector<at::Tensor>& arguments,
                                 const Home& home) {
  NodePtr stub;
  const auto make = [&](const ToldTensor& one) {
    if (!one.is_defined) return at::Tensor();
    if (one.is_argument >= 0) return arguments.at(one.is_argument);
    at::Tensor shadow = make_shadow(one, device_, home);
    if (one.requires_grad) {
      if (!stub) stub = make_stub(arguments);
      torch::autograd::set_history(shadow, stub);
    }
    return shadow;
  };
  for (const ToldCall::Return& result : told.returns) {
    if (!result.is_list) {
      call.stack.emplace_back(make(result.tensors.front()));
      continue;
    }
    c10::List<at::Tensor> list;
    for (const ToldTensor& one : result.tensors) list.push_back(make(one));
    call.stack.emplace_back(std::move(list));
  }
}

void OwnershipPass::refuse_mixed(const OperatorFacts& facts, const ToldCall& told) {
  if (told.is_view()) return;
  for (const ToldCall::Return& result : told.returns)
    for (const ToldTensor& one : result.tensors)
      if (one.shares_with >= 0)
        throw Error(ErrorCode::kUnsupported, str("smp: ", facts.name,
                                                 " gives views of its arguments and new tensors in one call, which is "
                                                 "not there yet for tensors of a stage"));
}

// --- from outside of an operator -----------------------------------------------------------------------------------

at::Tensor OwnershipPass::move(const at::Tensor& tensor, int stage) {
  const Home* const home = homes_.find(tensor);
  if (current_ == nullptr || home == nullptr || home->stage == stage) return tensor;
  struct Forced {
    std::optional<int>& stage;
    ~Forced() { stage.reset(); }
  } forced{forced_};
  forced_ = stage;
  return tensor.clone();
}

}  // namespace trireme::ownership
