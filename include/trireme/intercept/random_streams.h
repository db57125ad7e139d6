// Where a rank's operators draw random numbers from.
//
// A stream is a function of the rank's seed, which the engine may set anew for each micro-batch, and of the rank's
// place on the axes that cut activations. A pass chooses the stream of an operator (OperatorCall::stream).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

/// The stream that an operator draws from.
enum class RandomStream : uint8_t {
  kModel,       ///< for activations that ranks have whole: libtorch's default generator, or the rank's own
  kSlice,       ///< for activations that are cut over ranks: each rank draws its own numbers
  kInnerSlice,  ///< the same where a second axis cuts them, along which ranks draw otherwise; along the first one alike
  kEachSlice,   ///< where both do
};
/// The stream for activations that the axes of these numbers cut, a bit for each.
inline RandomStream stream_of_axes(uint8_t bits) { return static_cast<RandomStream>(bits); }

/// The streams of one rank, on every device.
class RandomStreams {
 public:
  /// The streams of the rank that this thread works for; if it works for none, libtorch's default generators.
  static RandomStreams& current();

  /// From now on kModel draws on the host from a generator of this rank alone, seeded with `seed`: for ranks that are
  /// threads.
  void use_own_generator(uint64_t seed);
  bool has_own_generator() const { return own_.defined(); }
  /// Sets this rank's place along the axis that cuts activations, 0 at first. kSlice restarts from kModel's seed.
  void set_slice(uint64_t place) { set_slices({place}); }
  /// The same by stream, from kSlice on.
  void set_slices(std::vector<uint64_t> places);

  /// Seeds the host's streams: the rank's own generator if it has one, else libtorch's default one.
  void seed(uint64_t seed);
  /// Seeds the streams of a device.
  void seed(c10::Device device, uint64_t seed);

  /// The seed by which an operator draws that is to draw by `seed` (OperatorCall::seed): on kSlice that of this place.
  uint64_t seed_in(RandomStream stream, uint64_t seed) const;
  /// The generator of a stream. kSlice's is made from kModel's seed by the first call.
  at::Generator generator(RandomStream stream, c10::Device device);

  /// The state of kModel, or of all streams of slices (kSlice); undefined while they have none.
  at::Tensor state(RandomStream stream, c10::Device device);
  /// Restores a state() of the same kind of device. Set kModel's first: with an undefined `state` kSlice restarts from
  /// kModel's seed.
  void set_state(RandomStream stream, c10::Device device, const at::Tensor& state);

 private:
  struct Slice {
    c10::Device device;
    RandomStream stream;
    at::Generator generator;
  };
  void forget_slice(c10::Device device);

  at::Generator own_;
  std::vector<uint64_t> places_ = {0};
  std::vector<Slice> slices_;  // by stream, ascending
};

/// A seed for stream number `index`, unrelated to those of its neighbours. Source: SplitMix64.
uint64_t stream_seed(uint64_t seed, uint64_t index);

/// Seeds the calling rank's streams on the host.
void manual_seed(uint64_t seed);
/// The same on `device`; nothing on the host.
void manual_seed_device(c10::Device device, uint64_t seed);
/// The seed of kModel on the host.
uint64_t generator_seed();

/// The states of all streams that are in use on the host and `device`, as text by name, for a checkpoint.
std::map<std::string, std::string> random_states(c10::Device device);
/// Restores random_states(). Of streams that `states` does not name, kModel stays as it is and kSlice restarts. Does
/// nothing if `states` is empty.
///
/// Throws    CheckpointError: a text that random_states() did not write.
void set_random_states(const std::map<std::string, std::string>& states, c10::Device device);

}  // namespace trireme
