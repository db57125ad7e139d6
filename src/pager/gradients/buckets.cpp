#include "pager/gradients/buckets.h"

#include <algorithm>

#include "trireme/comm/call_scopes.h"

namespace trireme {

void Buckets::begin(int unit, const at::Tensor& buffer) {
  sums_[unit] = buffer;
  is_reused_[unit] = buffer.defined();
  arrived_[unit] = 0;
  for (const ParameterPlace& placement : context_.unit(unit).parameters) seen_[placement.index] = 0;
}

at::Tensor& Buckets::sums_in(int unit) {
  at::Tensor& sums = sums_[unit];
  if (!sums.defined()) {
    sums = context_.zeros(unit, context_.unit(unit).numel());
    home_.add_in_flight(static_cast<int64_t>(sums.nbytes()));
  }
  return sums;
}

void Buckets::add(int parameter, const at::Tensor& gradient) {
  const ManagedParameter& managed = context_.parameters[parameter];
  const at::Tensor target = sums_in(managed.unit).narrow(0, managed.begin, managed.numel);
  if (seen_[parameter]) {
    target.add_(gradient);
    return;
  }
  target.copy_(gradient);
  seen_[parameter] = 1;
  ++arrived_[managed.unit];
}

at::Tensor Buckets::sum_of(int parameter) const {
  const ManagedParameter& managed = context_.parameters[parameter];
  return seen_[parameter] ? sums_[managed.unit].narrow(0, managed.begin, managed.numel) : at::Tensor();
}

bool Buckets::are_empty() const {
  return std::all_of(arrived_.begin(), arrived_.end(), [](int arrived) { return arrived == 0; });
}

std::vector<uint8_t> Buckets::filled_somewhere() const {
  const SubjectScope subject("the end of a backward pass");
  std::vector<uint8_t> filled;
  for (const int arrived : arrived_) filled.push_back(arrived > 0);
  context_.agree(filled, &context_.ranks.shards);
  return filled;
}

at::Tensor Buckets::take(int unit) {
  const at::Tensor sums = sums_in(unit);
  if (is_reused_[unit] && arrived_[unit] == 0) {
    sums.zero_();
  } else if (is_reused_[unit]) {
    for (const ParameterPlace& placement : context_.unit(unit).parameters)
      if (!seen_[placement.index]) sums.narrow(0, placement.begin, placement.numel).zero_();
  }
  begin(unit);
  return sums;
}

}  // namespace trireme
