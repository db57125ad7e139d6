#include "trireme/precision/scaled_passes.h"

#include <torch/csrc/autograd/engine.h>

namespace trireme {

namespace {

class PassEnd {
 public:
  explicit PassEnd(std::shared_ptr<bool> is_scaled) : is_scaled_(std::move(is_scaled)) {}
  ~PassEnd() { *is_scaled_ = false; }
  PassEnd(const PassEnd&) = delete;
  PassEnd& operator=(const PassEnd&) = delete;

 private:
  std::shared_ptr<bool> is_scaled_;
};

}  // namespace

at::Tensor ScaledPasses::mark(at::Tensor scaled) const {
  // Runs before anything else of the pass. The pass as a whole is meant: gradients that a nested one produces
  // (recomputation) belong to it.
  scaled.register_hook([is_scaled = is_scaled_](const at::Tensor&) {
    *is_scaled = true;
    // Autograd drops what it was to call at the end of a pass also where the pass throws.
    torch::autograd::Engine::get_default_engine().queue_callback([end = std::make_shared<PassEnd>(is_scaled)] {});
  });
  return scaled;
}

}  // namespace trireme
