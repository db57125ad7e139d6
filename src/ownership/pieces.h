// The graph of one micro-batch on one stage, cut where values leave the stage and come to it, so that no node of
// autograd ever waits: backward of a *piece* starts when all gradients that it needs are there.
//
// A stage that receives after it has sent begins a new piece. So in a piece all receives come before all sends, and the
// pieces of all stages have an order in which each waits for later ones only. What an operator uses of an earlier piece
// is replaced by a tensor of the same memory, whose gradient is caught and becomes a root of the earlier piece.
//
// The sums of gradients have the order of one process. Each send and each crossing puts a node of its own on the graph
// when it happens, and autograd adds up what comes to a tensor in the reverse order in which nodes were made. A stage's
// uses of a tensor hand their gradient to the stage that used it before: a sum of sums would have other bits. One case
// is left where the last bits may differ: a view is used after its memory was written, while other uses of its base are
// in another piece or on another stage.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "trireme/base/torch/nodes.h"

namespace trireme::ownership {

/// A transfer of a micro-batch between this stage and another, in one direction: what its gradient is filed under.
struct TransferId {
  int stage = 0;       ///< the other one
  int64_t number = 0;  ///< in the micro-batch, from that sender to that receiver
  auto operator<=>(const TransferId&) const = default;
};

/// Whether autograd records a use of `tensor`.
bool needs_gradient(const at::Tensor& tensor);

/// Knows no messages and no homes. It keeps edges of the graph and caught gradients, never a tensor of the forward.
///
/// Ordering  one micro-batch's forward to its end, in one thread; then its pieces, the last one first: put() what
///           wanted() names, backward from roots(), take_gradients().
class Pieces {
 public:
  Pieces();

  // --- while the forward runs ---

  /// `tensor` is used by another stage, whose gradient comes as `id`; none where autograd is off or `tensor` needs
  /// none.
  void sent(const at::Tensor& tensor, TransferId id);
  /// Something has left this stage without a gradient: the next receive begins a piece.
  void note_sent() { pieces_.back().has_sent = true; }
  /// Before anything is received: begins a piece where this one has sent something.
  void begin_receive();
  /// A tensor with the memory of `data`, whose gradient goes back as `id`. Several may share `data`.
  at::Tensor received(const at::Tensor& data, TransferId id);
  /// `own` was used by other stages and is used here again: the gradient of its uses from here on goes as `id` to the
  /// stage that used it last, as if it came from there. Without it these uses are a summand of their own.
  void received_back(const at::Tensor& own, TransferId id);
  /// The tensor that an operator uses for `argument`: the same, or where that is of an earlier piece and needs a
  /// gradient, a stand-in with its memory. After everything that the operator receives.
  at::Tensor cross(const at::Tensor& argument);
  /// cross() where it is needed, also of a part, of which the stand-in is one, too.
  at::Tensor part_here(const at::Tensor& argument);
  /// Whether cross() would give `argument` itself, at once where there is one piece; else false says nothing.
  bool is_here(const at::Tensor& argument);
  /// An operator's result shares memory with a stand-in. The program gets `view` instead, which the operator makes of
  /// the program's own tensor, so that writes into it reach that one; its gradient goes where that of `of_stand_in`
  /// goes, the result for the stand-in. A result that *is* a stand-in is the program's argument.
  void made_view(const at::Tensor& view, const at::Tensor& of_stand_in);
  /// The operator that runs next writes `written`: takes the memory's history over into this piece, so that the
  /// operator runs on the program's own tensor. After cross() of all that it reads.
  ///
  /// Throws    Error (kUnsupported): `written` shares memory with a stand-in, and made_view() does not know it.
  void begin_write(const at::Tensor& written);
  /// Backward starts at `root`, too, with `gradient`.
  ///
  /// Throws    StateError: `root` has no graph.
  void root(const at::Tensor& root, const at::Tensor& gradient);

  // --- afterwards ---

  int count() const { return static_cast<int>(pieces_.size()); }
  /// The gradients that `piece` waits for, those of the latest uses first.
  std::vector<TransferId> wanted(int piece) const;
  /// Undefined: the receiver has none.
  void put(TransferId id, at::Tensor gradient);
  struct Roots {
    torch::autograd::edge_list edges;
    std::vector<at::Tensor> gradients;
  };
  /// Those that have a gradient. Once for each piece: its graph is not kept afterwards.
  Roots roots(int piece);
  /// After backward, the gradients of what `piece` received; undefined: there is none.
  std::vector<std::pair<TransferId, at::Tensor>> take_gradients(int piece);

 private:
  /// Where a gradient of a root is: given, to come from another stage, or caught in a later piece.
  using Source = std::variant<at::Tensor, TransferId, NodePtr>;
  struct Root {
    torch::autograd::Edge edge;
    Source source;
  };
  struct Received {
    TransferId id;
    NodePtr catcher;
  };
  struct Piece {
    uint64_t begin = 0;  ///< the first sequence number of its nodes
    bool has_sent = false;
    std::vector<Root> roots = {};
    std::vector<Received> received = {};
  };
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  /// The latest crossing of a tensor, while it has the history that it had then. Held weakly, its address stays its
  /// own.
  struct Crossing {
    WeakTensor tensor;
    const torch::autograd::Node* history;
    int piece;
    torch::autograd::Edge edge;  ///< to which the gradient of its uses goes
  };
  struct FirstUse {
    WeakTensor leaf;
    int piece;
  };

  int last() const { return count() - 1; }
  void begin_piece();
  int piece_of(const at::Tensor& tensor);
  int first_use_of(const at::TensorBase& leaf);
  int piece_of_node(const torch::autograd::Node& node) const;
  const Crossing* crossing_of(const at::Tensor& tensor) const;
  void crosses_to(const at::Tensor& tensor, NodePtr catcher);
  void add_root(const at::Tensor& tensor, Source source);
  std::optional<torch::autograd::Edge> crossed(const at::Tensor& tensor);
  at::Tensor gradient_of(const Source& source);
  void require_next(int piece) const;

  std::vector<Piece> pieces_;
  std::unordered_map<const c10::TensorImpl*, Crossing> crossings_;
  std::unordered_map<const c10::TensorImpl*, FirstUse> first_uses_;  ///< of leaves: they have no node that tells
  std::map<TransferId, at::Tensor> gradients_;
  int left_ = 0;  ///< pieces whose gradients have not been taken; counted once backward has begun
};

}  // namespace trireme::ownership
