// The surroundings that a computation depends on besides its inputs: random streams and autocast.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <vector>

#include "trireme/intercept/random_streams.h"

namespace trireme::detail {

/// Taken on the host and the devices of `inputs`.
class Surroundings {
 public:
  Surroundings(const std::vector<at::Tensor>& inputs, bool with_streams);
  /// Puts them in force.
  void apply() const;

 private:
  struct StreamState {
    RandomStream stream;
    at::Device device;
    at::Tensor state;
  };
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  void add(at::Device device, bool with_streams);

  std::vector<at::Device> devices_;
  std::vector<StreamState> streams_;
  std::vector<Autocast> autocasts_;
  bool autocast_cache_;
};

/// Puts `then` in force, and at its end what was in force before. Between them autocast neither reads nor fills its
/// cache of cast weights: libtorch empties that at the end of a forward, so a cast that is made during backward would
/// still be there after the weights' update, and the next forward would compute with old weights.
class [[nodiscard]] SurroundingsScope {
 public:
  SurroundingsScope(const Surroundings& then, const std::vector<at::Tensor>& inputs, bool with_streams);
  ~SurroundingsScope() { before_.apply(); }
  SurroundingsScope(const SurroundingsScope&) = delete;
  SurroundingsScope& operator=(const SurroundingsScope&) = delete;

 private:
  Surroundings before_;
};

}  // namespace trireme::detail
