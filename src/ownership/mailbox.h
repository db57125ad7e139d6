// Messages of the stages of a step function: values, sizes, gradients, and those that tell that they do not run the
// same program.
//
// The main idea: stages run the same operators, so that both sides of a message know its name. A message goes with its
// name, and one that is not the awaited one is an error that names both operators. Where no message comes at all, the
// stage that waits says so after a while, and a stage that is past that operator knows that it will never send it.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ownership/post.h"
#include "ownership/sizes.h"
#include "ownership/waiting.h"
#include "trireme/comm/group.h"
#include "trireme/ownership/ownership.h"

namespace trireme::ownership {

/// A message that somebody waits for.
struct Wait {
  int stage;
  MessageName name;
  ownership::Key key;              ///< of sizes
  std::function<bool()> has_come;  ///< which reading what comes changes
};

/// The operators of a micro-batch by their order: name, which outlives the trace, and digest.
using OperatorTrace = std::vector<std::pair<const std::string*, uint64_t>>;

/// Messages of one stage with all others. Values, numbers, sizes of calls and ends, the *forward lane* of a
/// micro-batch, are taken in the order in which they were sent; gradients, outputs and sizes of keys in any order.
///
/// Requires  forward passes begin with ascending numbers. In each of them a stage that is at an operator has sent what
///           other stages need for the ones before it, and what the one needs that it waits for.
/// Throws    (every method that receives) CommError: kDiverged, naming what both stages are at: a message is not the
///           awaited one, is damaged, or will never come, or two stages ran other operators in a micro-batch; kTimeout.
///           The group is aborted with the text, so that every stage throws it.
class Mailbox final : private Post::Reader {
 public:
  /// `stages` has no other user, and outlives this. `device`: of values, gradients and outputs; names and numbers go
  /// over the hosts.
  Mailbox(Group& stages, c10::Device device);
  ~Mailbox() override;

  /// Starts sending `elements`, contiguous, which nobody may write before flush(). An undefined one is a name alone.
  void send(int stage, const MessageName& name, const at::Tensor& elements);
  void send_bytes(int stage, const MessageName& name, const std::string& bytes);
  /// Sizes that hold for every call with this key, to all other stages; once on a stage.
  void send_told(int64_t micro_batch, const ownership::Key& key, const std::string& op, const std::string& bytes);
  std::string take_told(int stage, const ownership::Key& key, const MessageName& name);
  /// Waits for the next message of the forward lane, which has to be this one, and for its elements in `buffer`,
  /// contiguous, of the sizes and dtype that were sent.
  void take(int stage, const MessageName& name, const at::Tensor& buffer);
  std::string take_bytes(int stage, const MessageName& name);

  /// The gradient of the value `number` of a micro-batch that `stage` sent, of any strides; undefined: there is none.
  /// Throws    Error(kUnsupported): it is sparse.
  void send_gradient(int stage, int64_t micro_batch, int64_t number, const at::Tensor& gradient);
  /// Waits for the gradient, of `sizes` and `dtype`, of the value `number` that went to `stage`: with the strides that
  /// it has there. Undefined: there is none.
  at::Tensor take_gradient(int stage, int64_t micro_batch, int64_t number, at::IntArrayRef sizes, at::ScalarType dtype);
  /// Returned tensor `number` of a micro-batch.
  void send_output(int stage, int64_t micro_batch, int64_t number, const at::Tensor& output);
  void take_output(int stage, int64_t micro_batch, int64_t number, const at::Tensor& buffer);

  /// A forward pass begins, in which `trace` grows, or is left (null). Errors name the first operator that differs.
  void follow(int64_t micro_batch, const OperatorTrace* trace);
  /// Ends the forward of a micro-batch towards `stage`, and compares as soon as the other's end is there: `digest` is
  /// that of all operators, `trace` says by which they were made. To call for every other stage, with the same.
  void send_end(int stage, int64_t micro_batch, uint64_t digest, const OperatorTrace& trace);

  /// Forward passes take turns; null: they do not.
  void take_turns(ForwardTurns* turns) { turns_ = turns; }
  ForwardTurns* turns() const { return turns_; }
  /// Whether the message is there, after a look at what has come.
  bool has_come(const Wait& wait);
  /// Waits for it; where forward passes take turns, calls meanwhile() again and again. False: all stages wait for each
  /// other, which is told once in a step.
  bool await(const Wait& wait);
  bool has_stalled() const { return has_stalled_; }

  /// Reads what has come, so that senders go on. Does not wait.
  void progress() { post_.look(); }
  /// Waits until all that was sent has left.
  void flush();
  /// Ends a step: waits until every stage has ended what this one has ended, compares, and waits until all of them are
  /// there. To call on every stage, after gradients and outputs were taken. Between two steps nothing is received.
  void finish();
  /// Forgets what came and was not taken, after an error.
  void clear();
  /// Every other stage throws `text` in its next wait.
  void abort(const std::string& text) noexcept { post_.abort(text); }

  /// Sent by this stage, without those by which stages find out that they have diverged, or are done.
  int64_t messages() const { return messages_; }
  int64_t bytes() const { return bytes_; }  ///< of what they bring, beside their names
  /// Messages that this stage has taken and that were not there yet.
  int64_t waits(MessageKind kind) const { return waits_[static_cast<size_t>(kind)]; }

 private:
  /// Messages that came from another stage, and went there.
  struct Lane {
    int stage;
    std::map<int64_t, std::deque<Letter>> forward = {};  // by micro-batch
    std::map<AsideKey, Letter> aside = {};               // in any order
    std::map<SizesKey, std::string> told = {};           // of the step: several forward passes may need one
    int64_t compared = 0;                                // micro-batches whose ends have come and were compared
  };
  /// A micro-batch that this stage has ended.
  struct Record {
    uint64_t digest;
    OperatorTrace trace;
    int left;  ///< other stages that were not compared with it
  };

  Lane& lane(int stage);
  void send(int stage, const MessageName& name, uint64_t digest, const at::Tensor& elements);
  Letter receive(int stage, const MessageName& name, const at::Tensor& buffer);
  at::Tensor room(int stage, const Header& header) override;
  void read(int stage, Letter letter) override;
  void meet_end(Lane& lane, const Header& end);
  struct Trace;
  Trace trace_of(int64_t micro_batch) const;
  void send_trace(int stage, int64_t micro_batch, const std::string& text);
  [[noreturn]] void diverge(Lane& lane, int64_t micro_batch, const std::string& text);
  bool is_ended(int64_t micro_batch) const { return micro_batch <= ended_below_ || ended_.contains(micro_batch); }
  bool is_past(int64_t micro_batch, int64_t position, const MessageName& here) const;
  void check_waiting(const MessageName& name, int from);
  void take(const Wait& wait);
  template <class Call>
  auto named(const Wait& wait, const Call& call);
  bool watch_wait(const Wait& wait, std::chrono::steady_clock::duration waited, bool& has_told);

  Post post_;
  Waiting waiting_{post_};
  std::deque<Lane> lanes_;             // by stage; this one's is not used
  std::map<int64_t, Record> records_;  // by micro-batch: this stage's, while not every other one was compared with it
  int64_t ended_below_ = -1;           // all micro-batches up to this one have ended,
  std::set<int64_t> ended_;            // and these
  int64_t ends_ = 0;                   // how many
  int64_t first_ = 0;                  // the step's first one: errors count from it
  std::map<int64_t, const OperatorTrace*> followed_;  // by micro-batch whose forward pass has not ended
  ForwardTurns* turns_ = nullptr;
  bool has_stalled_ = false;  // in this step
  bool is_diverging_ = false;
  std::map<std::pair<int, AsideKey>, at::Tensor> wanted_;  // buffers of what is waited for, into which it comes
  int64_t messages_ = 0, bytes_ = 0;
  std::array<int64_t, kMessageKinds> waits_ = {};
};

}  // namespace trireme::ownership
