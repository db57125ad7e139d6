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

enum class RandomStream : uint8_t {
  kModel,  ///< for activations that ranks have whole: libtorch's default generator, or the rank's own
  kSlice,  ///< for activations that are cut over ranks: each rank draws its own numbers
};

/// The streams of one rank, on every device.
class RandomStreams {
 public:
  /// Those of the rank that this thread works for; of a thread that works for none, libtorch's default generators.
  static RandomStreams& current();

  /// From now on kModel draws on the host from a generator of this rank alone, seeded with `seed`: for ranks that are
  /// threads.
  void use_own_generator(uint64_t seed);
  bool has_own_generator() const { return own_.defined(); }
  /// This rank's place along the axes that cut activations, 0 at first. kSlice begins anew, from kModel's seed.
  void set_slice(uint64_t place);

  /// Seeds the host's streams: those of the rank where it has its own generator, else libtorch's.
  void seed(uint64_t seed);
  /// Seeds the streams of a device.
  void seed(c10::Device device, uint64_t seed);

  /// kSlice's generator is made from kModel's seed when it is first asked for.
  at::Generator generator(RandomStream stream, c10::Device device);

  /// Undefined for kSlice while its generator is not made.
  at::Tensor state(RandomStream stream, c10::Device device);
  /// Goes on from a state() of the same kind of device. Set kModel's first: where `state` is undefined, kSlice begins
  /// anew from its seed.
  void set_state(RandomStream stream, c10::Device device, const at::Tensor& state);

 private:
  void forget_slice(c10::Device device);

  at::Generator own_;
  uint64_t place_ = 0;
  std::vector<std::pair<c10::Device, at::Generator>> slices_;
};

/// A seed for the stream of number `index`: neighbours have nothing in common. Source: SplitMix64.
uint64_t stream_seed(uint64_t seed, uint64_t index);

/// Seeds the calling rank's streams on the host.
void manual_seed(uint64_t seed);
/// The same on `device`; nothing on the host.
void manual_seed_device(c10::Device device, uint64_t seed);
/// The seed of kModel on the host.
uint64_t generator_seed();

/// The states of all streams that are in use on the host and `device`, as text by name, for a checkpoint.
std::map<std::string, std::string> random_states(c10::Device device);
/// Streams that `states` does not name: kModel stays as it is, kSlice begins anew. Nothing where it names none.
///
/// Throws    CheckpointError: a text that random_states() did not write.
void set_random_states(const std::map<std::string, std::string>& states, c10::Device device);

}  // namespace trireme
