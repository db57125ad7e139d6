#include "trireme/access/parameter_access.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/state_names.h"
#include "trireme/comm/parts.h"
#include "trireme/intercept.h"

namespace trireme {

ParameterAccess::ParameterAccess(Pager& pager, ShardedOptimizer* optimizer, std::function<double()> loss_scale,
                                 CutLayers layers)
    : pager_(pager),
      optimizer_(optimizer),
      loss_scale_(std::move(loss_scale)),
      layers_(std::move(layers)),
      states_(pager.parameters().size()) {
  pager_.set_companion(this);
  if (optimizer_ == nullptr) return;
  std::map<std::string, int> index;
  for (size_t i = 0; i < states_.size(); ++i) index[pager_.parameters()[i].name] = static_cast<int>(i);
  for (TensorSlice& slice : optimizer_->own_state()) {
    const StateName name = parse_state_name(slice.name);
    const std::string state = name.kind == StateKind::kMaster ? "master" : std::string(name.state);
    states_[index.at(std::string(name.parameter))][state] = {slice.begin, std::move(slice.data), slice.store};
  }
}

ParameterAccess::~ParameterAccess() { pager_.set_companion(nullptr); }

namespace {

ParameterAccess::Part with_data(ParameterAccess::Part part) {
  part.data = at::empty({part.store->numel()}, at::TensorOptions(part.store->dtype()));
  part.store->read({}, {static_cast<std::byte*>(part.data.data_ptr()), part.data.nbytes()});
  return part;
}

}  // namespace

ParameterAccess::Part ParameterAccess::part_of(int parameter, at::Tensor OwnedSlice::*flat) const {
  const int unit = pager_.layout().unit_of[parameter];
  for (const OwnedSlice& slice : pager_.owned()) {
    if (slice.unit != unit) continue;
    for (const ParameterRange& range : ranges_of(pager_.layout().units[unit], slice.begin, slice.weights.numel()))
      if (range.parameter == parameter) {
        SliceStore* const store = flat == &OwnedSlice::weights && slice.home != nullptr
                                      ? slice.home->store(range.slice_begin, range.numel)
                                      : nullptr;
        if (store != nullptr) return with_data({range.parameter_begin, {}, store});
        return {range.parameter_begin, (slice.*flat).narrow(0, range.slice_begin, range.numel)};
      }
  }
  return {0, at::empty({0})};
}

std::optional<ParameterAccess::Part> ParameterAccess::find_state(int parameter, const std::string& state) const {
  const auto found = states_[parameter].find(state);
  if (found == states_[parameter].end()) return std::nullopt;
  return found->second.store != nullptr ? with_data(found->second) : found->second;
}

void ParameterAccess::Part::write(const at::Tensor& values) const {
  at::Tensor(data).copy_(values);
  if (store != nullptr) store->write({}, {static_cast<const std::byte*>(data.const_data_ptr()), data.nbytes()});
}

ParameterAccess::Part ParameterAccess::value(int parameter) const {
  pager_.await_published();  // updates beside the program write what is looked at
  const std::optional<Part> master = find_state(parameter, "master");
  return master ? *master : part_of(parameter, &OwnedSlice::weights);
}

at::Tensor ParameterAccess::weight(int parameter) const {
  const at::Tensor own = pager_.whole(parameter);
  const WithoutInterception own_operators;
  const at::Tensor whole = join(parameter, own.detach());
  return whole.is_alias_of(own) ? whole.clone() : whole;
}

ParameterAccess::Part ParameterAccess::gradient(int parameter) const {
  return part_of(parameter, &OwnedSlice::gradients);
}

ParameterAccess::Part ParameterAccess::state(int parameter, const std::string& state) const {
  pager_.await_published();
  const std::optional<Part> found = find_state(parameter, state);
  return found ? *found : Part{0, at::empty({0})};
}

at::Tensor ParameterAccess::gather(int parameter, const Part& part) const {
  const Layout& layout = pager_.layout();
  const ParameterPlace& place = layout.placement(parameter);
  at::Tensor whole = at::empty({place.numel}, at::kFloat);
  if (part.data.numel() > 0) whole.narrow(0, part.begin, part.data.numel()).copy_(part.data);
  if (pager_.policy().stage == 0) return whole;
  const UnitLayout& unit = layout.units[layout.unit_of[parameter]];
  const ShardMesh& mesh = pager_.mesh_of(layout.unit_of[parameter]);
  // From each owner straight to its place: exact, and no more memory than the result.
  const auto spread = [&](Group& group, int rank, int64_t first, int64_t numel) {
    const int64_t begin = std::max(place.begin, first), end = std::min(place.end(), first + numel);
    if (begin < end) group.broadcast(whole.narrow(0, begin - place.begin, end - begin), rank).wait();
  };
  const int64_t mine = unit.shard_numel * mesh.shards.rank();
  if (unit.pieces > 1)
    for (int replica = 0; replica < mesh.replica_count(); ++replica)
      spread(*mesh.replicas, replica, mine + unit.piece_numel() * replica, unit.piece_numel());
  for (int rank = 0; rank < mesh.shards.size(); ++rank)
    spread(mesh.shards, rank, unit.shard_numel * rank, unit.shard_numel);
  return whole;
}

at::Tensor ParameterAccess::join(int parameter, const at::Tensor& own) const {
  const at::Tensor slice = own.view(spec(parameter).shape);
  return layers_.ranks != nullptr ? join_parts(*layers_.ranks, layers_.parts[parameter], slice) : slice;
}

at::Tensor ParameterAccess::cut(int parameter, const at::Tensor& full) const {
  return layers_.ranks != nullptr ? cut_part(full, spec(parameter).model_part()).view(-1) : full.flatten();
}

std::vector<int64_t> ParameterAccess::whole_shape(int parameter) const {
  return layers_.ranks != nullptr ? spec(parameter).model_part().shape : spec(parameter).shape;
}

bool ParameterAccess::on_any_slice(bool condition) const {
  if (layers_.ranks == nullptr) return condition;
  const at::Tensor any = at::full({1}, condition ? 1 : 0, at::kInt);
  layers_.ranks->all_reduce(any, ReduceOp::kMax).wait();
  return any.item<int>() != 0;
}

void ParameterAccess::settle() {
  const std::vector<bool> written = pager_.settle_writes();
  if (optimizer_ != nullptr) optimizer_->refresh_masters(written);
}

void ParameterAccess::set_value(int parameter, const at::Tensor& weight, const at::Tensor& full) {
  const at::NoGradGuard no_grad;
  // As a user would: an operator that writes the whole weight on every rank, and of which slices take their elements.
  // The master then knows more digits.
  at::Tensor(weight).copy_(full);
  settle();
  const at::Tensor value = cut(parameter, full);
  if (const std::optional<Part> master = find_state(parameter, "master"))
    master->write(value.narrow(0, master->begin, master->data.numel()));
}

}  // namespace trireme
