// Activations and gradients between the stages of a pipeline.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/pipeline/values.h"

namespace trireme {

/// Tensors on the way from one stage to another.
struct Message {
  FlatValue value = {};
  std::vector<bool> requires_grad = {};  ///< by tensor
  std::vector<bool> is_missing = {};     ///< by tensor: its values mean nothing; empty: none
  std::vector<std::string> cuts = {};    ///< by tensor: how it is cut, as SentTensor has it; empty: none is
};

/// Messages with the other stages, in the order of each pair and direction. Each is a preamble that tells which message
/// it is and the shapes, followed by the tensors. Nothing is read or allocated by a preamble that is not the expected
/// one.
///
/// A kind of message (the activations of one part, say) has one shape unless shapes are dynamic, so that the tensors of
/// the next one can be received ahead of their time, beside computations.
class Messages {
 public:
  /// `stages` has one rank per stage and outlives this. `device`: of the tensors.
  Messages(Group& stages, c10::Device device, bool dynamic_shapes);

  /// Kinds of messages, each of which has shapes of its own: an evaluation's need no gradients.
  static int activation_of(int part, bool is_trained) { return 3 * part + (is_trained ? 0 : 1); }
  static int gradient_of(int part) { return 3 * part + 2; }
  /// The name of a message.
  struct Key {
    int kind;
    int micro_batch;
    bool operator==(const Key&) const = default;
  };
  /// Starts sending.
  /// Throws    ShapeError: other shapes than the kind's messages before, where they are not dynamic.
  void send(int to, const Key& key, const Message& message);
  struct Expected {
    Key key;
    std::string subject;  ///< of its messages, in errors
  };
  /// Says which are the next messages from `from`, so that they can be received ahead.
  void expect(int from, const std::vector<Expected>& messages);
  /// The next message from `from`, the first of the expected ones.
  /// Throws    CommError(kDiverged): another message came, or one that is damaged.
  Message receive(int from);
  /// Waits until all that was sent has left.
  void flush();
  /// The next message of each kind may have any shape.
  void forget_shapes();

 private:
  struct Incoming {
    at::Tensor preamble;
    Pending<void> preamble_arrives;
    std::optional<Message> ahead;         // the tensors that are received before the preamble is read
    std::vector<Pending<void>> arrivals;  // of `ahead`
  };
  struct Lane {
    std::deque<Expected> expected;
    std::optional<Incoming> next;
  };
  void look_ahead(int from);
  static std::string name_of(int64_t kind);

  Group& stages_;
  const c10::Device device_;
  const bool dynamic_shapes_;
  std::map<std::pair<int, int>, std::string> sent_, received_;  // by peer and kind: the description of the last message
  std::map<int, Lane> lanes_;                                   // by sender
  std::deque<std::pair<Pending<void>, at::Tensor>> leaving_;    // with what they send
};

}  // namespace trireme
