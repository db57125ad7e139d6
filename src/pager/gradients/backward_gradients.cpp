#include "pager/gradients/backward_gradients.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "trireme/comm/call_scopes.h"

namespace trireme {
namespace {

constexpr size_t kReductionsInFlight = 2;  // one being reduced while the next is filled
constexpr std::chrono::milliseconds kPatience{20};

}  // namespace

BackwardGradients::BackwardGradients(const StoreContext& context, int mesh)
    : BucketedGradients(context, mesh, /*sums_stay=*/false),
      leaving_(context, mesh),
      shards_(units()),
      has_shard_(units()),
      next_(units() - 1) {}

void BackwardGradients::accept(int index, at::Tensor gradient) {
  touched_[index] = 1;
  const int to = parameter(index).unit;
  const bool is_late = to > next_ || !is_expected(to);
  add(is_late ? late_[to] : buckets_[to], index, gradient);
  if (is_late) return;
  while (next_ >= 0 && is_complete(next_)) send_next();
}

void BackwardGradients::end_backward() {
  while (next_ >= 0) send_next();
  next_ = units() - 1;
  expected_.clear();
  const std::vector<uint8_t> more = agree_on_late();
  for (int i = units() - 1; i >= 0; --i)
    if (more[i]) send(i, late_);
}

void BackwardGradients::finish() {
  if (is_backward_open_somewhere()) end_backward();
  while (!in_flight_.empty()) complete_oldest();
  finish_shards();
  leaving_.finish();
  agree(touched_, *reductions_group_);
}

void BackwardGradients::add_squares(int index, ExactSum& sum) const {
  const int in_unit = parameter(index).unit;
  add_squares_of(index, shards_[in_unit], shard_begin(in_unit), sum);
}

at::Tensor BackwardGradients::owned(int index) {
  return leaving_.takes(index) ? leaving_.on_host(index) : piece_of(index, shards_[index]);
}

void BackwardGradients::rewritten(int index) {
  const int changed = parameter(index).unit;
  if (!leaving_.takes(changed)) return;
  leaving_.rewritten(changed);
  leaving_.finish();
}

void BackwardGradients::clear() {
  std::fill(touched_.begin(), touched_.end(), 0);
  std::fill(has_shard_.begin(), has_shard_.end(), 0);
  buckets_.assign(buckets_.size(), {});
}

void BackwardGradients::add_to(PagerMemory& memory) const {
  BucketedGradients::add_to(memory);
  for (int i = 0; i < units(); ++i) add_kept(memory, i, shards_[i], unit(i).shards);
}

bool BackwardGradients::is_complete(int index) const {
  return !has(index) || !is_expected(index) ||
         buckets_[index].arrived == static_cast<int>(unit(index).parameters.size());
}

bool BackwardGradients::is_backward_open() const {
  const auto filled = [](const Bucket& bucket) { return bucket.arrived > 0; };
  return next_ < units() - 1 || std::any_of(buckets_.begin(), buckets_.end(), filled) ||
         std::any_of(late_.begin(), late_.end(), filled);
}

// A rank whose micro-batch reached no parameter must join in all the same. Asked in the mesh's own group: on other
// ranks reductions may be under way.
bool BackwardGradients::is_backward_open_somewhere() {
  const SubjectScope subject("the end of a window");
  std::vector<uint8_t> open{is_backward_open()};
  agree(open, group());
  return open.front() != 0;
}

void BackwardGradients::send_next() {
  const int index = next_--;
  if (is_expected(index)) send(index, buckets_);
}

// Starts the reduction of a unit's bucket; missing gradients count as zero.
void BackwardGradients::send(int index, std::vector<Bucket>& buckets) {
  if (!has(index)) return;
  Bucket& bucket = buckets[index];
  if (bucket.seen.empty()) open(bucket, index);
  make_way();
  const SubjectScope subject(unit(index).name);
  multiply(bucket.sum, scale_.before_reduce());
  Reduction reduction{index, !has_shard_[index], messages_.of(unit(index), bucket.sum), {}, {}};
  has_shard_[index] = 1;
  add_in_flight(static_cast<int64_t>(reduction.input.nbytes()) - static_cast<int64_t>(bucket.sum.nbytes()));
  bucket = Bucket{};
  start(reduction);
  count(reduction.input);
  in_flight_.push_back(std::move(reduction));
  if (is_alone_on_device()) complete_oldest();  // there is nobody to wait for
}

// Keeps reductions in flight to a few, to save memory. Waits for a peer only so long: one that got no gradient for a
// unit sends it no earlier than at the end of its own pass, and may need this rank in a gather before that. On a device
// it is the stream that waits, which holds up no call of this rank.
void BackwardGradients::make_way() {
  while (!is_host(device()) && in_flight_.size() >= kReductionsInFlight) complete_oldest();
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (in_flight_.size() >= kReductionsInFlight) {
    while (!in_flight_.front().pending.done()) {
      if (std::chrono::steady_clock::now() > end) return;
      std::this_thread::yield();
    }
    complete_oldest();
  }
}

void BackwardGradients::complete_oldest() {
  Reduction reduction = std::move(in_flight_.front());
  in_flight_.pop_front();
  reduction.pending.wait();
  add_in_flight(-static_cast<int64_t>(reduction.input.nbytes()));
  complete(reduction);
}

std::unique_ptr<GradientStore> make_backward_gradients(const StoreContext& context, int mesh) {
  return context.policy.deterministic ? make_ordered_gradients(context, mesh) : make_summed_gradients(context, mesh);
}

}  // namespace trireme
