#include "ownership/region.h"

#include "trireme/base/error.h"

namespace trireme::ownership {
bool is_compared(const std::string& name) { return name != "aten::detach"; }

void Replay::refuse(const std::string& op, const std::string& before) const {
  throw StateError(str("smp: torch.utils.checkpoint: the function ran ", op, " in the backward pass of micro-batch ",
                       region_->number_in_step, " as its operator ", operators_, " where it had ", before,
                       " in the forward pass; let it do the same both times: what it reads besides its arguments must ",
                       "not have changed"));
}

void Replay::follow(const OperatorFacts& facts, uint64_t of_call) {
  if (!is_compared(facts.name)) return;
  const OperatorTrace& before = region_->operators;
  if (operators_ == before.size()) refuse(facts.name, "ended");
  const auto& [name, digest] = before[operators_];
  if (digest == of_call) return void(++operators_);
  refuse(facts.name,
         *name == facts.name ? "run it with arguments of other sizes, strides or stages" : str("run ", *name));
}

template <class Kind>
const Kind& Replay::next(const OperatorFacts& facts) {
  const Kind* const found =
      received_ < region_->received.size() ? std::get_if<Kind>(&region_->received[received_++]) : nullptr;
  if (found == nullptr)
    throw Error(ErrorCode::kInternal, str("ownership: ", facts.name, " of a region that runs again needs what other ",
                                          "stages have, which its first run did not receive there"));
  return *found;
}

at::Tensor Replay::value(const OperatorFacts& facts) {
  const auto& [data, needs_gradient] = next<Region::Value>(facts);
  at::Tensor tensor = data.detach();
  tensor.set_requires_grad(needs_gradient);
  return tensor;
}

ToldCall Replay::told(const OperatorFacts& facts) { return next<ToldCall>(facts); }

Region::Numbers Replay::numbers(const OperatorFacts& facts) { return next<Region::Numbers>(facts); }

}  // namespace trireme::ownership
