// The model that a run trains: whole on every rank, or in pipeline stages.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cli/train_setup.h"
#include "trireme/comm/world.h"
#include "trireme/data/loader.h"
#include "trireme/engine/engine.h"

namespace trireme::cli {

/// A model and its engine. Every method is collective.
class TrainedModel {
 public:
  virtual ~TrainedModel() = default;
  virtual EngineBase& engine() = 0;
  virtual std::optional<LoadedState> load_checkpoint(const LoadCheckpointOptions& options) = 0;
  /// One step on the loader's next batches. Returns this rank's mean loss.
  virtual double step(DataLoader& loader) = 0;
  /// Mean loss over the first --eval-samples of the held-out data, each sample counted once: the same on every rank,
  /// and on any number of ranks up to rounding.
  virtual double validate() = 0;
  /// The text that the model writes behind the prompt; empty where it cannot.
  virtual std::string sample() = 0;
  /// Whether only `trireme generate` can write that text, from a checkpoint.
  virtual bool samples_later() const { return false; }
};

/// The device of this rank, with its random numbers seeded as `setup` says.
c10::Device seeded_device(const TrainSetup& setup, const World& world);
/// Options of the engine of `setup`, with the facts of heads where layers are cut.
InitializeOptions engine_options(const TrainSetup& setup);

/// The model of `setup`, in as many stages as its configuration says. Collective.
std::unique_ptr<TrainedModel> make_trained_model(const TrainSetup& setup, World& world);

/// The same where that is more than one; else null. Collective.
std::unique_ptr<TrainedModel> model_in_stages(const TrainSetup& setup, World& world);

}  // namespace trireme::cli
