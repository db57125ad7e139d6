// What the stages of a step function send each other: values, sizes, gradients, and what tells that they do not run the
// same program.
//
// The main idea: stages run the same operators, so that both sides of a message know its name. A message goes with its
// name, the *header*, and one that is not the awaited one is an error that names both operators. Where no message comes
// at all, the stage that waits says so after a while, and a stage that is past that operator knows that it will never
// send it.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/comm/group.h"

namespace trireme::ownership {

enum class MessageKind : uint8_t {
  kValue,       ///< an argument's elements
  kScalar,      ///< the number that a tensor is
  kTold,        ///< sizes of results
  kEnd,         ///< of a micro-batch's forward
  kOutput,      ///< a tensor that the program returns
  kGradient,    ///< of a value
  kNoGradient,  ///< in its place
  kTrace,       ///< the operators of a micro-batch, where two stages ran other ones
  kWaiting,     ///< the name of a message that the sender waits for
  kFinished,    ///< the sender has taken all that came of a step
};
inline constexpr size_t kMessageKinds = 10;

/// What both sides know of a message without it.
struct MessageName {
  int64_t micro_batch;  ///< of the run
  int64_t number;       ///< within the micro-batch, sender and receiver; ascends. A gradient's: its value's
  MessageKind kind;
  int64_t position;  ///< of the operator in the micro-batch, from 0 on
  std::string op;    ///< "aten::add.Tensor"; errors have its beginning
};

/// The operators of a micro-batch by their order: name, which outlives the trace, and digest.
using OperatorTrace = std::vector<std::pair<const std::string*, uint64_t>>;

/// Messages of one stage with all others. Values, numbers, sizes and ends of micro-batches, the *forward lane*, are
/// taken in the order in which they were sent; gradients and outputs in any order.
///
/// Requires  micro-batches run their forward one after the other, with ascending numbers. A stage that is at an
///           operator has sent what other stages need for the ones before it.
/// Throws    (every method that receives) CommError: kDiverged, naming what both stages are at: a message is not the
///           awaited one, is damaged, or will never come, or two stages ran other operators in a micro-batch; kTimeout.
///           The group is aborted with the text, so that every stage throws it.
class Mailbox {
 public:
  /// `stages` has no other user, and outlives this. `device`: of values, gradients and outputs; names and numbers go
  /// over the hosts.
  Mailbox(Group& stages, c10::Device device);
  ~Mailbox();

  /// Starts sending `elements`, contiguous, which nobody may write before flush(). An undefined one is a name alone.
  void send(int stage, const MessageName& name, const at::Tensor& elements);
  void send_bytes(int stage, const MessageName& name, const std::string& bytes);
  /// Waits for the next message of the forward lane, which has to be this one, and for its elements in `buffer`,
  /// contiguous, of the sizes and dtype that were sent.
  void take(int stage, const MessageName& name, const at::Tensor& buffer);
  std::string take_bytes(int stage, const MessageName& name);

  /// The gradient of the value `number` of a micro-batch that `stage` sent; undefined: there is none.
  void send_gradient(int stage, int64_t micro_batch, int64_t number, const at::Tensor& gradient);
  /// Waits for the gradient of the value `number` that went to `stage`. False: there is none, and `buffer` is as it
  /// was.
  bool take_gradient(int stage, int64_t micro_batch, int64_t number, const at::Tensor& buffer);
  /// Returned tensor `number` of a micro-batch.
  void send_output(int stage, int64_t micro_batch, int64_t number, const at::Tensor& output);
  void take_output(int stage, int64_t micro_batch, int64_t number, const at::Tensor& buffer);

  /// Ends the forward of a micro-batch towards `stage`, and compares as soon as the other's end is there: `digest` is
  /// that of all operators, `trace` says by which they were made. To call for every other stage, with the same.
  void send_end(int stage, int64_t micro_batch, uint64_t digest, const OperatorTrace& trace);

  /// Reads what has come, so that senders go on. Does not wait.
  void progress();
  /// Waits until all that was sent has left.
  void flush();
  /// Ends a step: waits until every stage has ended what this one has ended, compares, and waits until all of them are
  /// there. To call on every stage, after gradients and outputs were taken. Between two steps nothing is received.
  void finish();
  /// Forgets what came and was not taken, after an error.
  void clear();
  /// Every other stage throws `text` in its next wait.
  void abort(const std::string& text) noexcept;

  /// Sent by this stage, without those by which stages find out that they have diverged, or are done.
  int64_t messages() const { return messages_; }
  int64_t bytes() const { return bytes_; }  ///< of what they bring, beside their names
  /// Of those that this stage has taken, the ones that were not there yet.
  int64_t waits(MessageKind kind) const { return waits_[static_cast<size_t>(kind)]; }

 private:
  struct Header;
  struct Letter;
  struct Lane;
  struct Wanted;
  struct Record;
  using Key = std::tuple<MessageKind, int64_t, int64_t>;  // what is taken in any order: kind, micro-batch, number

  Lane& lane(int stage);
  void begin();
  void post(int stage, const Header& header, const at::Tensor& elements);
  void send_named(int stage, const MessageName& name, const at::Tensor& elements, uint64_t digest);
  at::Tensor receive_next(int stage, const MessageName& name, const at::Tensor& buffer);
  MessageKind receive_any(int stage, const MessageName& name, const at::Tensor& buffer);

  bool is_expected(const Lane& lane) const;
  bool has_left();
  void look(Lane& lane, bool is_awaited);
  void read(Lane& lane, const at::Tensor& header);
  at::Tensor payload(Lane& lane, const Header& header);
  void meet_end(Lane& lane, const Header& end);
  void compare_traces(Lane& lane, int64_t micro_batch);
  void check_waiting(const MessageName& name, int stage);
  void await(int stage, const MessageName& name, const std::function<bool()>& is_there);
  bool wait_until(int stage, const std::function<bool()>& is_over);

  std::string text_of(const MessageName& name) const;
  std::string waits_for(int stage, const MessageName& name, int from) const;
  [[noreturn]] void refuse(const std::string& text, ErrorCode code = ErrorCode::kDiverged);

  Group& stages_;
  const c10::Device device_;
  const int rank_;
  std::deque<Lane> lanes_;             // by stage; this one's is not used
  std::map<int64_t, Record> records_;  // by micro-batch: this stage's, while not every other one was compared with it
  int64_t ended_ = -1;                 // the greatest micro-batch
  int64_t steps_ = 0;                  // that were begun
  bool is_open_ = false;               // the last of them
  Wanted* wanted_ = nullptr;           // what a take waits for, to be received where it belongs
  std::deque<std::pair<Pending<void>, at::Tensor>> leaving_;  // with what they send
  int64_t messages_ = 0, bytes_ = 0;
  std::array<int64_t, kMessageKinds> waits_ = {};
};

}  // namespace trireme::ownership
