#include "ownership/pieces.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "trireme/activations/part_tensor.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"

namespace trireme::ownership {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::impl::gradient_edge;

/// The end of a piece's graph: keeps the gradient that comes to it. A leaf would keep the memory of the forward, too.
struct Catcher : Node {
  variable_list apply(variable_list&& gradients) override {
    if (gradient.defined())
      throw Error(ErrorCode::kInternal, "ownership: backward went through one piece of a micro-batch twice");
    gradient = std::move(gradients.at(0));
    return {};
  }
  at::Tensor gradient;
};

/// The history of what stands for a tensor in a later piece than its own.
struct StandIn final : Catcher {};

const at::TensorBase& base_of(const at::Tensor& tensor) {
  return tensor.is_view() ? tensor._base() : static_cast<const at::TensorBase&>(tensor);
}

/// The tensor whose history tells the piece: the base of a view, where that needs a gradient.
const at::TensorBase& of_history(const at::Tensor& tensor) {
  const at::TensorBase& base = base_of(tensor);
  return base.requires_grad() ? base : tensor;
}

/// A view of memory that was written since: its node is made anew when it is asked for. Not before an operator does
/// that, as autograd adds up gradients by when nodes were made.
bool is_stale(const at::Tensor& tensor) {
  return tensor.is_view() &&
         torch::autograd::impl::get_view_autograd_meta(tensor)->get_attr_version() != tensor._version();
}

/// A node, made now, by which a gradient of `tensor` goes on to `to`.
Edge hand_on(const at::Tensor& tensor, Edge to) {
  const NodePtr node = make_node<Identity>();
  node->add_next_edge(std::move(to));
  return {node, node->add_input_metadata(tensor)};
}

at::Tensor take_caught(const NodePtr& catcher) {
  return std::exchange(static_cast<Catcher&>(*catcher).gradient, at::Tensor());
}

}  // namespace

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() && at::GradMode::is_enabled();
}

Pieces::Pieces() { begin_piece(); }

void Pieces::begin_piece() { pieces_.push_back({.begin = at::sequence_number::peek()}); }

// --- forward ---

void Pieces::begin_receive() {
  if (pieces_.back().has_sent) begin_piece();
}

void Pieces::sent(const at::Tensor& tensor, TransferId id) {
  note_sent();
  if (!needs_gradient(tensor)) return;
  add_root(tensor, id);
}

at::Tensor Pieces::received(const at::Tensor& data, TransferId id) {
  begin_receive();
  const WithoutInterception own_operators;
  const NodePtr catcher = make_node<Catcher>();
  pieces_.back().received.push_back({id, catcher});
  return with_history(data, catcher);
}

void Pieces::received_back(const at::Tensor& own, TransferId id) {
  begin_receive();
  if (!needs_gradient(own)) return;
  const NodePtr catcher = make_node<StandIn>();
  pieces_.back().received.push_back({id, catcher});
  crosses_to(own, catcher);
}

bool Pieces::is_here(const at::Tensor& argument) {
  if (!needs_gradient(argument)) return true;
  if (count() > 1 || !crossings_.empty()) return false;
  const at::TensorBase& whose = of_history(argument);
  if (whose.is_leaf()) first_use_of(whose);
  return true;
}

at::Tensor Pieces::cross(const at::Tensor& argument) {
  if (!needs_gradient(argument)) return argument;
  std::optional<Edge> edge = crossed(argument);
  if (!edge) return argument;
  const WithoutInterception own_operators;
  at::Tensor stand_in = argument.detach();
  torch::autograd::impl::set_gradient_edge(stand_in, std::move(*edge));
  return stand_in;
}

at::Tensor Pieces::part_here(const at::Tensor& argument) {
  const PartTensor* const part = PartTensor::of(argument);
  const at::Tensor local = local_of(argument);
  if (is_here(local)) return argument;
  at::Tensor crossed = cross(local);
  if (part == nullptr) return crossed;
  return crossed.is_same(local) ? argument : PartTensor::wrap(std::move(crossed), part->known());
}

void Pieces::made_view(const at::Tensor& view, const at::Tensor& of_stand_in) {
  if (needs_gradient(view))
    torch::autograd::impl::set_gradient_edge(local_of(view), gradient_edge(local_of(of_stand_in)));
}

void Pieces::begin_write(const at::Tensor& written) {
  if (!needs_gradient(written)) return;
  const at::Tensor base(base_of(local_of(written)));
  if (base.is_leaf()) return;  // it has no history, or libtorch refuses the write
  if (dynamic_cast<const StandIn*>(base.grad_fn().get()) != nullptr)
    throw Error(ErrorCode::kUnsupported,
                str("ownership: an operator writes a tensor of sizes ", written.sizes(),
                    " that shares the memory of another operator's argument, although that operator's schema ",
                    "does not say so; clone() the tensor before it is written, or say it in the schema"));
  // Views of it make their nodes anew when the operator has written.
  if (std::optional<Edge> edge = crossed(base))
    torch::autograd::impl::set_gradient_edge(base, hand_on(base, std::move(*edge)));
}

void Pieces::root(const at::Tensor& root, const at::Tensor& gradient) {
  if (!root.requires_grad())
    throw StateError(str("backward: the tensor of sizes ", root.sizes(), " that it starts at has no graph, as it was ",
                         "computed without gradients or from detached tensors"));
  add_root(root, gradient);
}

int Pieces::piece_of_node(const Node& node) const {
  const auto after = std::ranges::upper_bound(pieces_, node.sequence_nr(), {}, &Piece::begin);
  return std::max(0, static_cast<int>(after - pieces_.begin()) - 1);  // 0: it was made before the micro-batch
}

/// The piece in which the history of `tensor` was made. A leaf is of the piece that first uses it. A view is made of
/// its base or of a stand-in, whose nodes tell.
int Pieces::piece_of(const at::Tensor& tensor) {
  const at::TensorBase& whose = of_history(tensor);
  const Node* const history = whose.grad_fn().get();
  if (tensor.is_view() && !is_stale(tensor))
    for (const Node* node = tensor.grad_fn().get(); node != nullptr && node != history;
         node = node->num_outputs() > 0 ? node->next_edge(0).function.get() : nullptr)
      if (dynamic_cast<const StandIn*>(node) != nullptr) return piece_of_node(*node);
  if (history != nullptr) return piece_of_node(*history);
  return first_use_of(whose);
}

int Pieces::first_use_of(const at::TensorBase& leaf) {
  auto use = first_uses_.find(leaf.unsafeGetTensorImpl());
  if (use == first_uses_.end())
    use = first_uses_.emplace(leaf.unsafeGetTensorImpl(), FirstUse{WeakTensor(leaf.getIntrusivePtr()), last()}).first;
  return use->second.piece;
}

const Pieces::Crossing* Pieces::crossing_of(const at::Tensor& tensor) const {
  const auto crossing = crossings_.find(tensor.unsafeGetTensorImpl());
  const bool is_found = crossing != crossings_.end() && !is_stale(tensor);
  return is_found && crossing->second.history == tensor.grad_fn().get() ? &crossing->second : nullptr;
}

/// From now on the gradient of `tensor` goes to `catcher`, of the last piece.
void Pieces::crosses_to(const at::Tensor& tensor, NodePtr catcher) {
  const uint32_t input = catcher->add_input_metadata(tensor);
  crossings_.insert_or_assign(tensor.unsafeGetTensorImpl(), Crossing{.tensor = WeakTensor(tensor.getIntrusivePtr()),
                                                                     .history = tensor.grad_fn().get(),
                                                                     .piece = last(),
                                                                     .edge = Edge(std::move(catcher), input)});
}

/// `source` is a gradient of `tensor`. It goes to the latest piece that has used it, where it comes before what that
/// one adds.
void Pieces::add_root(const at::Tensor& tensor, Source source) {
  const Crossing* crossing = crossing_of(tensor);
  const int piece = crossing != nullptr ? crossing->piece : piece_of(tensor);
  Edge to = crossing != nullptr ? crossing->edge : gradient_edge(tensor);
  pieces_[piece].roots.push_back({hand_on(tensor, std::move(to)), std::move(source)});
}

/// Where the gradient of `tensor` goes in the last piece; nothing: to its own history, which is of that piece.
std::optional<Edge> Pieces::crossed(const at::Tensor& tensor) {
  const Crossing* crossing = crossing_of(tensor);
  if (crossing == nullptr && piece_of(tensor) == last()) return std::nullopt;
  if (crossing == nullptr || crossing->piece < last()) {
    const NodePtr catcher = make_node<StandIn>();
    add_root(tensor, catcher);
    crosses_to(tensor, catcher);
    crossing = crossing_of(tensor);
  }
  return crossing->edge;
}

// --- backward ---

std::vector<TransferId> Pieces::wanted(int piece) const {
  std::vector<TransferId> ids;
  const std::vector<Root>& roots = pieces_.at(piece).roots;
  for (auto root = roots.rbegin(); root != roots.rend(); ++root)
    if (const auto* id = std::get_if<TransferId>(&root->source)) ids.push_back(*id);
  return ids;
}

void Pieces::put(TransferId id, at::Tensor gradient) { gradients_.insert_or_assign(id, std::move(gradient)); }

at::Tensor Pieces::gradient_of(const Source& source) {
  if (const auto* given = std::get_if<at::Tensor>(&source)) return *given;
  if (const auto* catcher = std::get_if<NodePtr>(&source)) return take_caught(*catcher);
  const auto& id = std::get<TransferId>(source);
  const auto found = gradients_.extract(id);
  if (found.empty())
    throw Error(ErrorCode::kInternal,
                str("ownership: the gradient of transfer ", id.number, " to stage ", id.stage, " is missing"));
  return std::move(found.mapped());
}

Pieces::Roots Pieces::roots(int piece) {
  if (left_ == 0) left_ = count();
  require_next(piece);
  crossings_.clear();
  first_uses_.clear();
  Roots roots;
  for (Root& root : std::exchange(pieces_[piece].roots, {})) {
    at::Tensor gradient = gradient_of(root.source);
    if (!gradient.defined()) continue;
    roots.edges.push_back(std::move(root.edge));
    roots.gradients.push_back(std::move(gradient));
  }
  return roots;
}

std::vector<std::pair<TransferId, at::Tensor>> Pieces::take_gradients(int piece) {
  require_next(piece);
  --left_;
  std::vector<std::pair<TransferId, at::Tensor>> gradients;
  for (const Received& received : std::exchange(pieces_[piece].received, {}))
    gradients.emplace_back(received.id, take_caught(received.catcher));
  return gradients;
}

void Pieces::require_next(int piece) const {
  if (piece != left_ - 1)
    throw Error(ErrorCode::kInternal,
                str("ownership: piece ", piece, " of ", count(), " runs where piece ", left_ - 1, " is next"));
}

}  // namespace trireme::ownership
