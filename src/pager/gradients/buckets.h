// Gradients of this rank, summed in flat buffers: one for each unit of a mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "pager/gradients/home.h"
#include "pager/gradients/mesh_context.h"

namespace trireme {

class Buckets {
 public:
  /// Counts in `home` the buffers that it makes.
  Buckets(const MeshContext& context, GradientHome& home)
      : context_(context),
        home_(home),
        sums_(context.layout.units.size()),
        is_reused_(context.layout.units.size()),
        arrived_(context.layout.units.size()),
        seen_(context.parameters.size()) {}

  /// Nothing has arrived of `unit`. Its sums will be in `buffer` [numel], whatever that holds now, or in a new one.
  void begin(int unit, const at::Tensor& buffer = {});
  void add(int parameter, const at::Tensor& gradient);
  /// [numel] of `parameter`; undefined where no gradient of it has arrived.
  at::Tensor sum_of(int parameter) const;
  /// So many parameters of `unit` have a gradient here.
  int arrived(int unit) const { return arrived_[unit]; }
  bool are_empty() const;
  /// Units of which any rank has a gradient here. Collective, and asked in the mesh's own group, where a rank that is
  /// in another method is: two ranks that waited for each other in two groups would do so until the timeout.
  std::vector<uint8_t> filled_somewhere() const;
  /// The sums of `unit` [numel], with zeros for what is missing; nothing is here any more.
  at::Tensor take(int unit);

 private:
  at::Tensor& sums_in(int unit);

  const MeshContext& context_;
  GradientHome& home_;
  std::vector<at::Tensor> sums_;    // by unit, [numel]; undefined until the first gradient
  std::vector<uint8_t> is_reused_;  // by unit: what has not arrived still holds the last window's gradient
  std::vector<int> arrived_;        // by unit
  std::vector<uint8_t> seen_;       // by parameter
};

}  // namespace trireme
