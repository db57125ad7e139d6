// An Engine over a Python module.
#pragma once

#include <memory>

#include "python/world.h"
#include "trireme/engine/engine.h"

namespace trireme::python {

/// Keeps what an Engine needs to outlive it.
class ModuleEngine final : public Engine {
 public:
  ModuleEngine(std::shared_ptr<WorldHandle> world, std::shared_ptr<torch::nn::Module> mirror,
               const InitializeOptions& options)
      : Engine(group_of(*world), *mirror, options), world_(std::move(world)), mirror_(std::move(mirror)) {}

  using Engine::begin_forward;
  using Engine::explain_forward;
  using Engine::look_at;
  bool is_forked() const { return world_->is_forked(); }

 private:
  const std::shared_ptr<WorldHandle> world_;
  const std::shared_ptr<torch::nn::Module> mirror_;
};

}  // namespace trireme::python
