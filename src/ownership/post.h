// How messages between stages travel: a header of a fixed size, then the elements. Which one is due is the mailbox's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/group.h"

namespace trireme::ownership {

enum class MessageKind : uint8_t {
  kValue,       ///< an argument's elements
  kScalar,      ///< the number that a tensor is
  kTold,        ///< sizes of results, of one call
  kEnd,         ///< of a micro-batch's forward
  kOutput,      ///< a tensor that the program returns
  kGradient,    ///< of a value
  kNoGradient,  ///< in its place
  kStrides,     ///< of the gradient that follows, where it is not contiguous
  kTrace,       ///< the operators of a micro-batch, where two stages ran other ones
  kToldOnce,    ///< sizes of the results of every call that has a key
  kWaiting,     ///< the name of a message that the sender waits for, or that it waits no longer
  kStalled,     ///< all stages wait for each other
  kFinished,    ///< the sender has taken all that came of a step
};
inline constexpr size_t kMessageKinds = 13;

/// The header, which goes before the elements. Unused bytes are 0.
struct Header {
  uint64_t mark = kMark;
  int64_t micro_batch = 0, number = 0, position = 0;
  int64_t bytes = 0;    ///< of the elements
  uint64_t digest = 0;  ///< of an end
  MessageKind kind = MessageKind::kValue;
  MessageKind awaited = MessageKind::kValue;  ///< by kWaiting
  uint8_t is_on_device = 0;
  uint8_t unused = 0;
  int32_t awaited_from = -1;  ///< by kWaiting, the stage; -1: none any more
  char op[96] = {};
  char shape[96] = {};  ///< of the elements
  uint64_t checksum = 0;

  static constexpr uint64_t kMark = 0x3178656c69616d74;  // "tmailex1"

  void set_op(const std::string& name);
  bool has_op(const std::string& name) const;
  /// Whether the elements have the dtype and the sizes of this shape_text().
  bool fits(const std::string& text) const;
  uint64_t own_checksum() const;
};

/// "Float [2, 3]".
std::string shape_text(at::ScalarType dtype, at::IntArrayRef sizes);
std::string shape_text(const at::Tensor& tensor);

/// `elements`, contiguous, as a group takes them of any dtype.
at::Tensor as_bytes(const at::Tensor& elements);

/// A header and the bytes of its elements.
struct Letter {
  Header header;
  at::Tensor elements;
};

/// Headers and elements on their way, in the order of each pair and direction. From the first message of a step to its
/// end one receive is posted for every other stage; between two steps none is, which a backend might count as late.
class Post {
 public:
  /// The reader of what comes.
  class Reader {
   public:
    virtual ~Reader() = default;
    /// Where the elements are to be received, in bytes; undefined: in new memory.
    virtual at::Tensor room(int stage, const Header& header) = 0;
    /// May wait by wait_until(), in which it is called again.
    virtual void read(int stage, Letter letter) = 0;
  };
  /// `stages` has no other user. Both outlive this. `device`: of elements that are not on the host.
  Post(Group& stages, c10::Device device, Reader& reader);

  int stage() const { return stages_.rank(); }
  int size() const { return stages_.size(); }
  std::chrono::milliseconds timeout() const { return stages_.timeout(); }

  /// Starts sending. Nobody may write `elements` before they have left.
  void send(int stage, Header header, const at::Tensor& elements);
  /// A header alone, to every other stage.
  void send_to_all(const Header& header);
  /// Reads what has come. Does not wait.
  void look();
  /// Reads what comes until `is_over`; whether it was not at once.
  bool wait_until(const std::function<bool()>& is_over);
  /// Whether all that was sent has left.
  bool has_left();

  /// A step is open from its first message on.
  void begin_step();
  bool is_open() const { return is_open_; }
  /// Tells the other stages that this one will take no more of the step.
  void send_finished();
  bool has_finished(int stage) const { return lanes_[static_cast<size_t>(stage)].finished >= steps_; }
  void end_step() { is_open_ = false; }

  /// Ends the group on every stage, with `text`, and throws it.
  [[noreturn]] void refuse(const std::string& text, ErrorCode code = ErrorCode::kDiverged);
  void abort(const std::string& text) noexcept;

 private:
  struct Lane {
    int64_t finished = 0;    // steps
    at::Tensor header = {};  // that is received next
    std::optional<Pending<void>> arrives = {};
  };
  void look(int stage);
  void read(int stage, const at::Tensor& bytes);

  Group& stages_;
  const c10::Device device_;
  Reader& reader_;
  std::deque<Lane> lanes_;                                    // by stage; this one's is not used
  int64_t steps_ = 0;                                         // that were begun
  bool is_open_ = false;                                      // the last of them
  std::deque<std::pair<Pending<void>, at::Tensor>> leaving_;  // with what they send
};

}  // namespace trireme::ownership
