#include "pager/gradients/backward_gradients.h"

namespace trireme {
namespace {

class SummedGradients final : public BackwardGradients {
 public:
  SummedGradients(const StoreContext& context, int mesh)
      : BackwardGradients(context, mesh), kept_(context, kept_bytes(), *reductions_group_) {
    for (int i = 0; i < units(); ++i)
      if (has(i) && !leaving_.takes(i)) shards_[i] = kept_.zeros(unit(i).shard_numel, accumulation_dtype(i));
  }

  void clear() override {
    BackwardGradients::clear();
    replica_sums_.clear();
  }

  void add_to(PagerMemory& memory) const override {
    BackwardGradients::add_to(memory);
    memory.registered_bytes += kept_.registered_bytes();
  }

 private:
  int64_t kept_bytes() const {
    int64_t bytes = 0;
    for (int i = 0; i < units(); ++i)
      if (has(i) && !leaving_.takes(i)) bytes += bytes_in_slab(unit(i).shard_numel, accumulation_dtype(i));
    return bytes;
  }

  void start(Reduction& reduction) override {
    const int index = reduction.unit;
    if (is_alone_on_device()) {
      reduction.output = reduction.input;
      return;
    }
    if (leaving_.takes(index))
      reduction.output = zeros(index, unit(index).shard_numel);  // leaves beside the messages after the next
    else
      reduction.output = reduction.is_first ? shards_[index] : messages_.reduced(unit(index));
    reduction.pending = reductions_group_->reduce_scatter(reduction.output, reduction.input, ReduceOp::kSum);
  }

  void complete(Reduction& reduction) override {
    const int index = reduction.unit;
    multiply(reduction.output, scale_.after_reduce());
    if (leaving_.takes(index)) {
      replica_sums_.add_up(index, reduction.output);
      return leaving_.leave(index, reduction.output, reduction.is_first);
    }
    const at::Tensor& shard = replica_sums_.open(index, shards_[index]);
    if (!reduction.is_first)
      shard.add_(reduction.output);
    else if (!reduction.output.is_same(shard))
      shard.copy_(reduction.output);
  }

  void finish_shards() override {
    for (int i = 0; i < units(); ++i)
      if (has_shard_[i] && !leaving_.takes(i)) replica_sums_.close(i, shards_[i]);
  }

  FlatBuffers kept_;
};

}  // namespace

std::unique_ptr<GradientStore> make_summed_gradients(const StoreContext& context, int mesh) {
  return std::make_unique<SummedGradients>(context, mesh);
}

}  // namespace trireme
