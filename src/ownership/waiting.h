// Which stages wait for what, as far as this one has been told: by it stages find out that nobody goes on.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ownership/post.h"
#include "ownership/sizes.h"

namespace trireme::ownership {

/// The name of a message, which both sides know without it.
struct MessageName {
  int64_t micro_batch;  ///< of the run
  int64_t number;       ///< within the micro-batch, sender and receiver; ascends. A gradient's: its value's
  MessageKind kind;
  int64_t position;  ///< of the operator in the micro-batch, from 0 on
  std::string op;    ///< "aten::add.Tensor"; errors have its beginning
};
MessageName message_of(const Header& header);

/// Values, numbers, sizes of calls and ends: what is taken in the order in which it was sent.
inline bool is_forward(MessageKind kind) { return kind <= MessageKind::kEnd; }

/// The key of what is taken in any order: kind, micro-batch and number; a gradient that there is not, as one.
using AsideKey = std::tuple<MessageKind, int64_t, int64_t>;
AsideKey aside_key(const MessageName& name);
using SizesKey = std::pair<uint64_t, uint64_t>;

class Waiting {
 public:
  explicit Waiting(Post& post) : post_(post), stages_(static_cast<size_t>(post.size())) {}

  // Messages of this stage, since the begin of a step:
  void sent(int stage, const MessageName& name);
  void told(const SizesKey& key) { told_.insert(key); }

  /// Tells the other stages that this one waits, or that it waits no longer.
  void tell(int from, const MessageName& name, const Key& key);
  void tell_end();
  /// A message of `stage` has come: it waits no longer, but for what a note says.
  void heard(int stage, const Header& header);

  /// Messages that other stages wait for and this one has not sent.
  std::vector<std::pair<int, MessageName>> wanted() const;
  /// Whether every other stage has said that it waits, and not for what this one has sent, or has finished its step.
  bool do_all_wait() const;
  void end_step();

 private:
  struct Stage {
    std::optional<Header> waits = {};
    std::map<int64_t, int64_t> sent = {};  ///< by micro-batch: the number of the last forward message to it
    std::set<AsideKey> sent_aside = {};
  };
  bool is_under_way(const Stage& to, const Header& wanted) const;
  bool waits_for_this(const Stage& stage) const {
    return stage.waits && stage.waits->awaited_from == post_.stage() && !is_under_way(stage, *stage.waits);
  }

  Post& post_;
  std::vector<Stage> stages_;
  std::set<SizesKey> told_;  ///< by this stage, once for the run
};

}  // namespace trireme::ownership
