#include "trireme/ownership/ownership.h"

#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <utility>

#include "ownership/mailbox.h"
#include "ownership/numbers.h"
#include "ownership/ownership_pass.h"
#include "ownership/shadow.h"
#include "ownership/wire.h"
#include "trireme/base/error.h"
#include "trireme/base/mix64.h"
#include "trireme/comm/device_group.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {
const std::string kBackward = "backward()";  // in the trace of a micro-batch
}

class Ownership::Impl {
 public:
  Impl(Group& stages, c10::Device device)
      : device_(device),
        group_(stages.clone(stages.name() + "/ownership")),
        mailbox_(group_for(*group_, device, devices_), device),
        pass_(group_->rank(), group_->size(), device, mailbox_),
        scope_(InterceptScope::Watch::kWrites, &pass_) {}

  ownership::OwnershipPass& pass() { return pass_; }
  int stage() const { return group_->rank(); }
  int stages() const { return group_->size(); }

  void own(const at::Tensor& tensor, int stage, const std::string& name) {
    if (stage < 0 || stage >= stages())
      throw ConfigError(str("'", name, "' on stage ", stage, ": there are stages 0 to ", stages() - 1));
    if (pass_.cut() != nullptr) pass_.cut()->note_owned(tensor, name);
    if (const Home* const home = pass_.homes().find(tensor)) {
      if (home->stage == stage) return;
      throw ConfigError(str("'", name, "' on stage ", stage, ": it is on stage ", home->stage, " already"));
    }
    const Home home{.stage = stage, .is_parameter = tensor.requires_grad()};
    if (stage == this->stage())
      pass_.homes().set(tensor.storage(), home);
    else
      ownership::make_remote(tensor, home, name);
  }

  std::optional<Home> home_of(const at::Tensor& tensor) {
    const Home* const home = pass_.homes().find(tensor);
    return home != nullptr ? std::optional(*home) : std::nullopt;
  }

  std::shared_ptr<MicroBatch> begin(int64_t number, uint64_t seed, ForwardOrder order, bool measures) {
    auto made = std::make_shared<MicroBatch>();
    made->number = number;
    made->number_in_step = number - first_;
    last_ = number;
    made->seed = seed;
    made->order = order;
    made->measures = measures;
    made->turns = ownership::Turns(stages());
    made->sent.assign(stages(), 0);
    made->received.assign(stages(), 0);
    return made;
  }

  void enter(MicroBatch& micro_batch) {
    micro_batch.of_all = &lasting_;
    micro_batch.own_stage = stage();
    if (pass_.running().micro_batch != nullptr)
      throw StateError("Ownership::Scope: another micro-batch's forward pass runs");
    pass_.exchange({.micro_batch = &micro_batch});
    if (pass_.cut() != nullptr) pass_.cut()->begin_forward();
    mailbox_.follow(micro_batch.number, &micro_batch.trace);
  }
  void leave(const MicroBatch& micro_batch) noexcept {
    pass_.exchange({});
    mailbox_.follow(micro_batch.number, nullptr);
  }
  ownership::Mailbox& mailbox() { return mailbox_; }

  std::shared_ptr<Region> begin_region() {
    MicroBatch& now = current("begin_region");
    std::erase_if(now.regions, [](const auto& region) { return !region->is_open; });
    auto region = std::make_shared<Region>(Region{.micro_batch = now.number,
                                                  .number_in_step = now.number_in_step,
                                                  .seed = now.seed,
                                                  .place = now.place,
                                                  .entered = pass_.running().entered,
                                                  .is_second = now.replay.has_value()});
    if (!region->is_second) now.regions.push_back(region);
    return region;
  }

  ownership::OwnershipPass::Running begin_replay(const std::shared_ptr<Region>& region, MicroBatch& again) {
    if (region->is_open || region->is_second)
      throw StateError(str("smp: torch.utils.checkpoint: what ", region->is_open ? "has not ended" : "runs again",
                           " cannot run again yet"));
    again.number = region->micro_batch;
    again.seed = region->seed;
    again.place = region->place;
    again.replay.emplace(region);
    return pass_.exchange({.micro_batch = &again, .entered = region->entered});
  }

  void backward(const at::Tensor& root, const at::Tensor& gradient, const Scale& scale) {
    MicroBatch& now = current("backward");
    now.must_run();
    if (now.replay || !now.regions.empty()) refuse_root_in_region(now);
    if (!root.requires_grad())
      throw StateError(
          "backward: the tensor needs no gradient; it has to come from the model's parameters, and not "
          "from under torch.no_grad()");
    const Home* const home = pass_.homes().find(root);
    if (gradient.defined() ? gradient.sizes() != root.sizes() : root.numel() != 1)
      throw ShapeError(str("backward: a tensor of sizes ", root.sizes(), " needs a gradient of these sizes, got ",
                           gradient.defined() ? str(gradient.sizes()) : "none"));
    now.has_root = true;
    const uint64_t hash = hash_of(root);
    now.digest = mix64(now.digest ^ hash);
    now.trace.emplace_back(&kBackward, hash);
    if (home != nullptr && home->stage != stage()) return;
    const ChainFrom later_passes(kBehindOwnership, RandomStream::kModel);
    const at::Tensor whole = pass_.whole(root);
    const at::Tensor from = scale ? scale(whole) : whole;
    now.pieces.root(from, gradient.defined() ? gradient.to(from.scalar_type()) : at::ones_like(from));
  }

  at::Tensor move(const at::Tensor& tensor, int stage) { return pass_.move(tensor, stage); }

  void end_forward(const std::vector<at::Tensor>& results) {
    MicroBatch& now = current("end_forward");
    for (const at::Tensor& result : results) now.digest = mix64(now.digest ^ hash_of(result));
    now.digest = mix64(now.digest ^ results.size());
    for (const at::Tensor& result : results) now.outputs.push_back(sent_or_expected(now, result));
    now.transfers.clear();
    for (int other = 0; other < stages(); ++other)
      if (other != stage()) mailbox_.send_end(other, now.number, now.digest, now.trace);
  }

  /// Where ranks share layers, nothing is open, and nothing stands.
  ModuleCalls::Begun begin_call(uint64_t key, int stage, const std::vector<at::Tensor>& inputs) {
    MicroBatch* const now = pass_.running().micro_batch;
    if (now == nullptr || pass_.cut() != nullptr) return {};
    return pass_.calls().begin(*now, pass_.homes(), key, stage, inputs);
  }
  int64_t end_call(const std::vector<at::Tensor>& results) {
    return pass_.calls().end(current("end_call"), pass_.homes(), results);
  }
  void drop_call() { pass_.calls().drop(current("drop_call")); }

  int pieces(const MicroBatch& micro_batch) const { return micro_batch.pieces.count(); }

  Roots receive_gradients(MicroBatch& micro_batch, int piece) {
    const WithoutInterception own_operators;
    for (const ownership::TransferId& id : micro_batch.pieces.wanted(piece)) {
      const auto [sizes, dtype] = micro_batch.gradient_sizes.extract(id).mapped();
      micro_batch.pieces.put(id, mailbox_.take_gradient(id.stage, micro_batch.number, id.number, sizes, dtype));
    }
    ownership::Pieces::Roots roots = micro_batch.pieces.roots(piece);
    pass_.set_backward(true);
    return {std::move(roots.edges), std::move(roots.gradients)};
  }

  void send_gradients(MicroBatch& micro_batch, int piece) {
    const WithoutInterception own_operators;
    pass_.set_backward(false);
    for (const auto& [id, gradient] : micro_batch.pieces.take_gradients(piece)) {
      const auto part = micro_batch.gradients_of_parts.extract(id);
      const bool is_part = !part.empty() && gradient.defined();
      mailbox_.send_gradient(id.stage, micro_batch.number, id.number, is_part ? part.mapped()(gradient) : gradient);
    }
  }

  std::vector<at::Tensor> outputs(MicroBatch& micro_batch) {
    const WithoutInterception own_operators;
    std::vector<at::Tensor> tensors;
    for (MicroBatch::Output& output : micro_batch.outputs) {
      if (output.stage >= 0) {
        const ownership::Room room = ownership::make_room(output.tensor, pass_.cut() != nullptr);
        mailbox_.take_output(output.stage, micro_batch.number, output.number, room.buffer);
        output.tensor = ownership::filled(room);
        output.stage = -1;
      }
      tensors.push_back(output.tensor);
    }
    return tensors;
  }

  void finish() {
    mailbox_.finish();
    lasting_.clear();
    first_ = last_ + 1;
  }
  void abort(const std::string& why) noexcept { mailbox_.abort(why); }

  OwnershipCounters counters() const {
    OwnershipCounters counters = pass_.counters();
    counters.messages = mailbox_.messages();
    counters.bytes = mailbox_.bytes();
    return counters;
  }

  void end_autocast() const {
    ownership::MicroBatch* const now = pass_.running().micro_batch;
    if (now == nullptr) return;
    now->must_run();
    now->casts.clear();
  }
  void changes_state(const std::string& what) const {
    MicroBatch& now = current("changes_state");
    now.must_run();
    if (now.order == ForwardOrder::kTurns)
      throw StateError(str("smp: the forward pass of micro-batch ", now.number_in_step, " changes ", what,
                           ", which none has done so far, so that micro-batches take turns, and others would use it; ",
                           "write \"pipeline\": \"sequential\" for a program that begins to do so later"));
    now.shown.carries_state = true;
  }

 private:
  static void refuse_root_in_region(const MicroBatch& now) {
    if (now.replay || now.is_in_region())
      throw StateError(
          "backward: a call inside of a function that torch.utils.checkpoint runs, and runs again in the backward "
          "pass; "
          "return the loss, and call model.backward(loss) in the step function");
  }

  MicroBatch& current(const char* call) const {
    if (pass_.running().micro_batch == nullptr) throw StateError(str(call, ": call it inside of a step function"));
    return *pass_.running().micro_batch;
  }

  /// Facts of a tensor that all stages know.
  uint64_t hash_of(const at::Tensor& tensor) {
    const Home* const home = pass_.homes().find(tensor);
    bool is_complete = true;
    return mix64(ownership::key_of(0, {c10::IValue(tensor)}, is_complete, pass_.cut()).first ^
                 static_cast<uint64_t>(home != nullptr ? home->stage + 1 : 0));
  }

  MicroBatch::Output sent_or_expected(MicroBatch& now, const at::Tensor& result) {
    if (!result.defined()) return {};
    const Home* const home = pass_.homes().find(result);
    if (home != nullptr && home->stage != stage()) {
      const WithoutInterception own_operators;
      return {.tensor = result.detach(), .stage = home->stage, .number = ++now.received[home->stage]};
    }
    const ChainFrom later_passes(kBehindOwnership, RandomStream::kModel);
    const at::Tensor whole = pass_.whole(result.detach());
    if (home != nullptr) {
      const at::Tensor elements = ownership::packed(whole, pass_.cut() != nullptr);
      for (int other = 0; other < stages(); ++other)
        if (other != stage()) mailbox_.send_output(other, now.number, ++now.sent[other], elements);
    }
    return {.tensor = whole.detach()};
  }

  const c10::Device device_;
  const std::unique_ptr<Group> group_;
  std::unique_ptr<Group> devices_;  ///< over the same ranks, where `group_` serves the host alone
  ownership::Mailbox mailbox_;
  ownership::OwnershipPass pass_;
  ownership::LastingUses lasting_;  ///< of the step
  const InterceptScope scope_;
  int64_t first_ = 0, last_ = -1;  ///< micro-batches of the step
};

Ownership::Ownership(Group& stages, c10::Device device) : impl_(std::make_unique<Impl>(stages, device)) {}
Ownership::~Ownership() = default;

int Ownership::stage() const { return impl_->stage(); }
int Ownership::stages() const { return impl_->stages(); }
void Ownership::set_cuts(CutActivations& cuts) { impl_->pass().set_cuts(cuts); }
void Ownership::own(const at::Tensor& tensor, int stage, const std::string& name) { impl_->own(tensor, stage, name); }
std::optional<Home> Ownership::home_of(const at::Tensor& tensor) const { return impl_->home_of(tensor); }
std::shared_ptr<Ownership::MicroBatch> Ownership::begin(int64_t number, uint64_t seed, ForwardOrder order,
                                                        bool measures) {
  return impl_->begin(number, seed, order, measures);
}
Ownership::Scope::Scope(Ownership& ownership, MicroBatch& micro_batch)
    : ownership_(ownership), micro_batch_(micro_batch) {
  ownership_.impl_->enter(micro_batch);
}
Ownership::Scope::~Scope() { ownership_.impl_->leave(micro_batch_); }
struct Ownership::Pause::State {
  ownership::OwnershipPass::Running before;
};
Ownership::Pause::Pause(Ownership& ownership)
    : ownership_(ownership), state_(std::make_unique<State>(State{ownership.impl_->pass().exchange({})})) {}
Ownership::Pause::~Pause() { ownership_.impl_->pass().exchange(std::move(state_->before)); }
void Ownership::take_turns(ForwardTurns* turns) { impl_->mailbox().take_turns(turns); }
bool Ownership::has_come(const ownership::Wait& wait) { return impl_->mailbox().has_come(wait); }
bool Ownership::is_for_new_sizes(const ownership::Wait& wait) {
  return wait.name.kind == ownership::MessageKind::kToldOnce;
}
bool Ownership::await(const ownership::Wait& wait) { return impl_->mailbox().await(wait); }
bool Ownership::has_stalled() const { return impl_->mailbox().has_stalled(); }
void Ownership::backward(const at::Tensor& root, const at::Tensor& gradient, const Scale& scale) {
  impl_->backward(root, gradient, scale);
}
std::shared_ptr<Ownership::Region> Ownership::begin_region() { return impl_->begin_region(); }
void Ownership::end_region(Region& region) noexcept { region.is_open = false; }
struct Ownership::Replay::State {
  MicroBatch again;
  ownership::OwnershipPass::Running before;
};
Ownership::Replay::Replay(Ownership& ownership, const std::shared_ptr<Region>& region)
    : ownership_(ownership), state_(std::make_unique<State>()) {
  state_->before = ownership_.impl_->begin_replay(region, state_->again);
}
Ownership::Replay::~Replay() { ownership_.impl_->pass().exchange(std::move(state_->before)); }
bool Ownership::has_root(const MicroBatch& micro_batch) const { return micro_batch.has_root; }
void Ownership::enter(int stage) {
  if (stage < 0 || stage >= stages()) throw ConfigError(str("stage ", stage, ": there are 0 to ", stages() - 1));
  impl_->pass().enter(stage);
}
void Ownership::leave() { impl_->pass().leave(); }
Ownership::ModuleCalls::Begun Ownership::ModuleCalls::begin(uint64_t key, int stage,
                                                            const std::vector<at::Tensor>& inputs) {
  return impl_.begin_call(key, stage, inputs);
}
int64_t Ownership::ModuleCalls::end(const std::vector<at::Tensor>& results) { return impl_.end_call(results); }
void Ownership::ModuleCalls::drop() { impl_.drop_call(); }
at::Tensor Ownership::move(const at::Tensor& tensor, int stage) { return impl_->move(tensor, stage); }
at::Tensor Ownership::numbers_of(const at::Tensor& tensor) {
  return home_of(tensor) ? ownership::numbers_of(tensor) : tensor;
}
void Ownership::end_forward(const std::vector<at::Tensor>& results) { impl_->end_forward(results); }
int Ownership::pieces(const MicroBatch& micro_batch) const { return impl_->pieces(micro_batch); }
Ownership::Roots Ownership::receive_gradients(MicroBatch& micro_batch, int piece) {
  return impl_->receive_gradients(micro_batch, piece);
}
void Ownership::send_gradients(MicroBatch& micro_batch, int piece) { impl_->send_gradients(micro_batch, piece); }
std::vector<at::Tensor> Ownership::outputs(MicroBatch& micro_batch) { return impl_->outputs(micro_batch); }
ForwardFacts Ownership::facts(const MicroBatch& micro_batch) const {
  ForwardFacts facts = micro_batch.shown;
  facts.turns = micro_batch.turns.order();
  facts.costs = micro_batch.turns.costs();
  return facts;
}
void Ownership::changes_state(const std::string& what) { impl_->changes_state(what); }
void Ownership::end_autocast() { impl_->end_autocast(); }
void Ownership::finish() { impl_->finish(); }
void Ownership::abort(const std::string& why) noexcept { impl_->abort(why); }
OwnershipCounters Ownership::counters() const { return impl_->counters(); }

}  // namespace trireme
