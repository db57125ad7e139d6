#include "pager/gradients/home.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "pager/storage/kernels.h"

namespace trireme {

GradientHome::GradientHome(const MeshContext& context)
    : context_(context),
      leaving_(context),
      buffers_(context.device),
      places_(context.layout.units.size()),
      squares_(context.parameters.size()) {}

void GradientHome::keep(Room room, Group& group) {
  const auto stays = [&](int i) { return context_.has(i) && !context_.offload.owns(i); };
  const auto dtype = [&](int i) { return accumulation_dtype(context_.unit(i), context_.policy); };
  const auto numel = [&](int i) {
    return room == Room::kWholes ? context_.unit(i).numel() : context_.unit(i).shard_numel;
  };
  int64_t bytes = 0;
  for (int i = 0; i < context_.units(); ++i)
    if (stays(i)) bytes += bytes_in_slab(numel(i), dtype(i));
  buffers_ = FlatBuffers(context_, bytes, group);
  for (int i = 0; i < context_.units(); ++i) {
    if (!stays(i)) continue;
    const at::Tensor buffer = buffers_.zeros(numel(i), dtype(i));
    if (room == Room::kWholes)
      places_[i] = {.shard = context_.shard_of(i, buffer), .whole = buffer};
    else
      places_[i].shard = buffer;
  }
  registered_bytes_ += buffers_.registered_bytes();
}

void GradientHome::add_in_flight(int64_t bytes) {
  in_flight_bytes_ += bytes;
  peak_in_flight_bytes_ = std::max(peak_in_flight_bytes_, in_flight_bytes_);
}

void GradientHome::put(int unit, const at::Tensor& reduced, bool replaces) {
  if (context_.offload.owns(unit)) {
    add_up(unit, reduced);
    return leaving_.leave(unit, reduced, replaces);
  }
  const at::Tensor& to = sums(unit);
  if (!replaces)
    to.add_(reduced);
  else if (!reduced.is_same(to))
    to.copy_(reduced);
}

const at::Tensor& GradientHome::sums(int unit) {
  Place& place = places_[unit];
  if (!place.is_closed) return place.shard;
  if (!place.since.defined()) place.since = at::zeros_like(place.shard);
  return place.since;
}

void GradientHome::close(int unit) {
  if (!context_.has_replicas()) return;
  Place& place = places_[unit];
  const at::Tensor to = sums(unit);
  add_up(unit, to);
  if (place.is_closed) place.shard.add_(to);
  place.is_closed = true;
  place.since.reset();
}

void GradientHome::add_up(int unit, const at::Tensor& sums) const {
  if (!context_.has_replicas()) return;
  Group& replicas = *context_.ranks.replicas;
  if (context_.policy.stage == 0 || context_.unit(unit).pieces == 1) return replicas.all_reduce(sums).wait();
  const at::Tensor piece = context_.piece_of(unit, sums);
  const at::Tensor sum = at::empty_like(piece);
  replicas.reduce_scatter(sum, sums).wait();
  piece.copy_(sum);
}

at::Tensor GradientHome::owned(int unit) const {
  if (context_.offload.owns(unit)) return leaving_.on_host(unit);
  return context_.policy.stage == 0 ? places_[unit].whole : context_.piece_of(unit, places_[unit].shard);
}

void GradientHome::rewritten(int parameter) {
  squares_[parameter].reset();
  const int unit = context_.parameters[parameter].unit;
  if (!context_.offload.owns(unit)) return;
  leaving_.rewritten(unit);
  leaving_.finish();
}

// Over all ranks each element counts once.
void GradientHome::add_squares(int parameter, ExactSum& sum) const {
  const ManagedParameter& managed = context_.parameters[parameter];
  const int unit = managed.unit;
  const bool is_cut = context_.unit(unit).pieces > 1;
  if (!context_.ranks.counts_in_norm || (!is_cut && context_.ranks.replica() != 0)) return;
  // Replicas have added to what was noted.
  if (squares_[parameter] && !context_.has_replicas() && managed.is_all_counted()) return sum.add(*squares_[parameter]);
  const at::Tensor& sums = places_[unit].shard;
  const int64_t begin = context_.piece_begin(unit);
  const Overlap mine = overlap(managed, begin, begin + context_.unit(unit).piece_numel());
  for (const Overlap& counted : counted_within(managed, mine)) {
    const void* data = element(sums.data_ptr(), counted.begin - context_.shard_begin(unit), sums.element_size());
    if (context_.policy.deterministic)
      trireme::add_squares(data, sums.scalar_type(), counted.numel(), sum);
    else
      sum.add(sum_of_squares(data, sums.scalar_type(), counted.numel()));
  }
}

void GradientHome::clear() {
  std::fill(squares_.begin(), squares_.end(), std::nullopt);
  for (Place& place : places_) {
    place.is_closed = false;
    place.since.reset();
  }
}

void GradientHome::add_to(PagerMemory& memory) const {
  memory.registered_bytes += registered_bytes_;
  memory.in_flight_bytes += in_flight_bytes_;
  memory.peak_in_flight_bytes += peak_in_flight_bytes_;
  for (int i = 0; i < context_.units(); ++i) {
    const auto add = [&](const at::Tensor& kept, int64_t sharers) {
      memory.gradient_bytes += static_cast<int64_t>(kept.nbytes());
      memory.padding_bytes += context_.unit(i).padding() * kept.element_size() / sharers;
    };
    const auto& [shard, whole, is_closed, since] = places_[i];
    if (whole.defined()) add(whole, 1);
    if (shard.defined() && !(whole.defined() && shard.is_alias_of(whole))) add(shard, context_.unit(i).shards);
  }
}

}  // namespace trireme
