#include <ATen/OpMathType.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "sequence/attention.h"
#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/intercept/program.h"
#include "trireme/sequence/refusals.h"

namespace trireme::sequence {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();  // the log of an empty sum

// B batch, H heads, Q this rank's queries, K a rank's keys, D head size.

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Ring final : torch::CustomClassHolder {
  Ring(std::shared_ptr<const Ranges> keys, AxisExchanges& axis, bool is_causal, at::Tensor mask,
       std::optional<double> scale)
      : keys(std::move(keys)),
        axis(axis.shared_from_this()),
        group(axis.group()),
        is_causal(is_causal),
        mask(std::move(mask)),
        scale(scale) {}

  int next() const { return (group.rank() + 1) % group.size(); }
  int previous() const { return (group.rank() + group.size() - 1) % group.size(); }
  /// The rank whose keys and values are here after `step` messages.
  int owner(int step) const { return (group.rank() - step + group.size()) % group.size(); }
  int64_t length(int rank) const { return keys->local(rank); }
  /// The keys of `rank` that this rank's queries see.
  struct Sight {
    bool any = true;
    bool is_causal = false;
    std::optional<at::Tensor> mask = std::nullopt;  ///< added to scores; none: all is seen
  };
  Sight sight(int rank) const {
    if (is_causal) return {.any = rank <= group.rank(), .is_causal = rank == group.rank()};
    if (!mask.defined()) return {};
    const at::Tensor block =
        mask.size(-1) == 1 ? mask : mask.narrow(-1, keys->of_rank(rank).front().begin, length(rank));
    if (block.isneginf().all().item<bool>()) return {.any = false};
    if (block.eq(0).all().item<bool>()) return {};
    return {.mask = block.expand({-1, -1, -1, length(rank)})};
  }

  const std::shared_ptr<const Ranges> keys;
  const std::shared_ptr<AxisExchanges> axis;
  Group& group;
  const bool is_causal;
  const at::Tensor mask;  ///< [B or 1, H or 1, Q, all keys or 1], added to scores; undefined: none
  const std::optional<double> scale;
};

// For counts.
constexpr const char* kInForward = "aten::scaled_dot_product_attention in forward";
constexpr const char* kInBackward = "aten::scaled_dot_product_attention in backward";

/// Tensors that go round: sent while this rank still reads them.
class Round {
 public:
  Round(const Ring& ring, at::Tensor own, const char* what) : ring_(ring), what_(what), here_(std::move(own)) {}
  ~Round() = default;
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;

  const at::Tensor& here() const { return here_; }
  void pass_on() {
    coming_ = at::empty_like(here_);
    received_ = ring_.group.recv(coming_, ring_.previous());
    sent_ = ring_.axis->counting(ExchangeWay::kRing, what_, [&] { return ring_.group.send(here_, ring_.next()); });
  }
  void receive() {
    received_.wait();
    sent_.wait();
    here_ = std::move(coming_);
  }

 private:
  const Ring& ring_;
  const char* const what_;
  at::Tensor here_, coming_;
  Pending<void> received_, sent_;
};

/// Keys and values as one tensor of the longest rank's length: [2, B, key heads, longest, D].
at::Tensor packed(const at::Tensor& key, const at::Tensor& value, const Ranges& keys) {
  int64_t longest = 0;
  for (int rank = 0; rank < keys.ranks(); ++rank) longest = std::max(longest, keys.local(rank));
  at::Tensor both = at::zeros({2, key.size(0), key.size(1), longest, key.size(3)}, key.options());
  both.narrow(3, 0, key.size(2)).copy_(at::stack({key, value}));
  return both;
}

/// One head of keys for each head of queries.
at::Tensor widened(const at::Tensor& keys, int64_t heads) {
  const int64_t times = heads / keys.size(1);
  return times == 1 ? keys : keys.repeat_interleave(times, 1);
}

/// The sum over the heads that widened() has made of one.
at::Tensor narrowed(const at::Tensor& gradient, int64_t key_heads) {
  return gradient.unflatten(1, {key_heads, gradient.size(1) / key_heads}).sum(2);
}

struct RingFunction : torch::autograd::Function<RingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const c10::intrusive_ptr<Ring>& ring) {
    at::Tensor result, logsumexp_BHQ;
    Round round(*ring, packed(key, value, *ring->keys), kInForward);
    for (int step = 0; step < ring->group.size(); ++step) {
      const bool is_last = step + 1 == ring->group.size();
      const int owner = ring->owner(step);
      if (!is_last) round.pass_on();
      if (const auto sight = ring->sight(owner); sight.any) {
        const at::Tensor block = round.here().narrow(3, 0, ring->length(owner));
        auto [part, part_logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
            query, widened(block[0], query.size(1)), widened(block[1], query.size(1)), 0, sight.is_causal, sight.mask,
            ring->scale);
        if (sight.mask)  // of a query that sees no key of the block the operator says 0
          part_logsumexp = part_logsumexp.masked_fill(sight.mask->isneginf().all(-1), kNothing);
        join(result, logsumexp_BHQ, part, part_logsumexp);
      }
      if (!is_last) round.receive();
    }
    if (!result.defined()) {  // no query of this rank sees any key
      result = at::zeros({query.size(0), query.size(1), query.size(2), value.size(3)}, query.options());
      logsumexp_BHQ = at::zeros({query.size(0), query.size(1), query.size(2)},
                                query.options().dtype(at::toOpMathType(query.scalar_type())));
    }
    // Backward takes it from scores of -inf, too: those of a query that sees no key.
    logsumexp_BHQ = logsumexp_BHQ.masked_fill(logsumexp_BHQ.isneginf(), 0);
    result = result.to(query.scalar_type());
    context->save_for_backward({query, key, value, result, logsumexp_BHQ});
    context->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ProgramScope local(ProgramScope::Whose::kOurs);
    const auto ring = c10::static_intrusive_pointer_cast<Ring>(context->saved_data["ring"].toCapsule());
    const auto saved = context->get_saved_variables();
    const at::Tensor &query = saved[0], &key = saved[1], &value = saved[2], &result = saved[3], &logsumexp = saved[4];
    const at::Tensor gradient = gradients[0].contiguous();
    at::Tensor query_gradient = at::zeros_like(query, query.options().dtype(at::toOpMathType(query.scalar_type())));
    Round round(*ring, packed(key, value, *ring->keys), kInBackward);
    // The gradient of keys and values goes with them, and one message further: home.
    Round sums(*ring, at::zeros_like(round.here(), query_gradient.options()), kInBackward);
    for (int step = 0; step < ring->group.size(); ++step) {
      const bool is_last = step + 1 == ring->group.size();
      const int owner = ring->owner(step);
      if (!is_last) round.pass_on();
      if (const auto sight = ring->sight(owner); sight.any) {
        const at::Tensor block = round.here().narrow(3, 0, ring->length(owner));
        const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, widened(block[0], query.size(1)), widened(block[1], query.size(1)), result, logsumexp, 0,
            sight.is_causal, sight.mask, ring->scale);
        query_gradient.add_(of_query);
        at::Tensor sum = sums.here().narrow(3, 0, ring->length(owner));
        sum[0].add_(narrowed(of_key, key.size(1)));
        sum[1].add_(narrowed(of_value, key.size(1)));
      }
      if (ring->group.size() > 1) {
        sums.pass_on();
        sums.receive();
      }
      if (!is_last) round.receive();
    }
    const at::Tensor own = sums.here().narrow(3, 0, key.size(2)).to(key.scalar_type());
    return {query_gradient.to(query.scalar_type()), own[0], own[1], {}};
  }

 private:
  /// Softmax over two sets of keys, from those over each.
  static void join(at::Tensor& result, at::Tensor& logsumexp, const at::Tensor& part,
                   const at::Tensor& part_logsumexp) {
    const at::Tensor wide = part.to(at::toOpMathType(part.scalar_type()));
    if (!result.defined()) {
      result = wide;
      logsumexp = part_logsumexp;
      return;
    }
    const at::Tensor both = at::logaddexp(logsumexp, part_logsumexp);
    const auto share = [&](const at::Tensor& one) {  // of -inf, no key is seen: none
      return (one - both).exp().masked_fill(one.isneginf(), 0).unsqueeze(-1);
    };
    result = result * share(logsumexp) + wide * share(part_logsumexp);
    logsumexp = both;
  }
};

/// `mask` [.., all queries or 1, all keys or 1] as what is added to scores of this rank's queries.
at::Tensor added_mask(const at::Tensor& mask, const at::Tensor& query, Interval queries) {
  at::Tensor own = mask;
  while (own.dim() < 4) own = own.unsqueeze(0);
  if (own.size(2) != 1) own = own.narrow(2, queries.begin, queries.size());
  if (own.scalar_type() == at::kBool)
    own = at::zeros(own.sizes(), query.options().requires_grad(false)).masked_fill(own.logical_not(), kNothing);
  return own.expand({-1, -1, query.size(2), -1});
}

/// The operator reads heads and tokens by strides, in two orders, and no other: it writes past them.
at::Tensor in_order(const at::Tensor& tensor) {
  return tensor.is_contiguous() || tensor.dim() != 4 || tensor.transpose(1, 2).is_contiguous() ? tensor
                                                                                               : tensor.contiguous();
}

[[noreturn]] void refuse(const std::string& what) { throw StateError(filled(kRingRefusal, {what})); }

}  // namespace

void run_in_ring(OperatorCall& call, Next next, const Cut& queries, const Cut& keys, const at::Tensor& mask,
                 AxisExchanges& axis) {
  const auto arguments = call.arguments();
  const at::Tensor query = in_order(arguments[0].toTensor()), key = arguments[1].toTensor(),
                   value = arguments[2].toTensor();
  const bool is_causal = arguments[5].toBool();
  if (query.dim() != 4) refuse(str("query ", query.sizes(), " has no batch"));
  if (!query.is_cpu()) refuse(str("tensors on ", query.device()));
  if (mask.defined() && mask.requires_grad()) refuse("its mask asks for a gradient");
  if (mask.defined() && is_causal) refuse("it is causal and has a mask; pass a mask that is causal");
  if (arguments[4].toDouble() > 0) refuse("it has dropout");
  if (is_causal && !queries.has_same_ranges(keys)) refuse("it is causal, and queries and keys are cut differently");
  if (value.size(-1) != key.size(-1)) refuse("keys and values differ in size");
  const auto scale = arguments[6].isDouble() ? std::optional(arguments[6].toDouble()) : std::nullopt;
  const Interval own = queries.ranges->of_rank(axis.group().rank()).front();
  const at::Tensor result = next.run(call, [&] {
    const at::Tensor added = mask.defined() ? added_mask(mask, query, own) : at::Tensor();
    const auto ring = c10::make_intrusive<Ring>(keys.ranges, axis, is_causal, added, scale);
    return RingFunction::apply(query, key, value, ring);
  });
  torch::jit::drop(call.stack, call.traits.arguments);
  call.stack.emplace_back(result);
}

}  // namespace trireme::sequence
