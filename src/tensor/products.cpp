// Matrix products, lookups, attention and cross entropy.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "tensor/exchanges.h"
#include "tensor/tensor_pass.h"
#include "trireme/base/error.h"

namespace trireme::tensor {

/// One of the two matrices of a product, and what becomes of the dim in which it is cut.
struct TensorPass::Factor {
  enum class Role : uint8_t {
    kWhole,
    kSum,      ///< the product sums over it
    kColumns,  ///< it is the last dim of the product, by the right factor
    kOthers,   ///< rows of the left factor, or batches
  };
  size_t index;
  at::Tensor tensor;
  const CutArgument* found = nullptr;
  bool is_weight = false;  ///< of linear(): [columns, sum]
  Role role = Role::kWhole;
  int64_t place = 0;  ///< of its dim that is cut, counted from the right in the product
  bool has_entered = false;

  int64_t sum_dim(bool is_left) const {
    return is_left || is_weight || tensor.dim() == 1 ? tensor.dim() - 1 : tensor.dim() - 2;
  }
};

namespace {

enum : size_t { kQuery, kKey, kValue, kMask, kDropout, kIsCausal, kScale, kEnableGqa };

const CutArgument* find_in(const CutArguments& found, size_t index) {
  const auto known =
      std::find_if(found.begin(), found.end(), [&](const CutArgument& one) { return one.index == index; });
  return known != found.end() ? &*known : nullptr;
}

/// Rows of a product of `left` [.., n] and a matrix whose sum over ranks is worth starting before the product is whole;
/// 0: none. From shapes alone, which are alike on all ranks but for n.
int64_t piece_rows_of(const at::Tensor& left, const at::Tensor& right, bool is_weight) {
  constexpr int64_t kPieces = 4, kFewestBytes = 256 << 10;
  if (right.dim() != 2 || left.dim() < 2 || left.size(-1) == 0) return 0;
  const int64_t rows = left.numel() / left.size(-1);
  const int64_t row_bytes = right.size(is_weight ? 0 : 1) * left.element_size();
  const int64_t pieces = std::min(kPieces, rows * row_bytes / kFewestBytes);
  return pieces < 2 ? 0 : (rows + pieces - 1) / pieces;
}

}  // namespace

void TensorPass::run_product(OperatorCall& call, Next next, const CutArguments& found) {
  const std::string& name = call.op.schema().name();
  const size_t first = left_factor_index(call.op);
  const auto factor = [&](size_t index) {
    return Factor{.index = index, .tensor = call.arguments()[index].toTensor(), .found = find_in(found, index)};
  };
  Factor left = factor(first), right = factor(first + 1);
  right.is_weight = name == "aten::linear";
  const bool has_vector = left.tensor.dim() < 2 || right.tensor.dim() < 2;
  if (has_vector && !(right.is_weight && right.tensor.dim() == 2)) return run_whole(call, next, found);
  if (first == 1) {
    const auto is_one = [&](const char* key) { return value_of(call, key).toScalar().toDouble() == 1; };
    if (!is_one("beta") || !is_one("alpha")) return run_whole(call, next, found);
  }
  const auto look = [&](Factor& one, bool is_left) {
    if (one.found == nullptr) return;
    const int64_t dim = one.found->cut.dim;
    const int64_t columns = one.is_weight ? 0 : one.tensor.dim() - 1;
    one.place = one.tensor.dim() - dim;
    one.role = dim == one.sum_dim(is_left)  ? Factor::Role::kSum
               : !is_left && dim == columns ? Factor::Role::kColumns
                                            : Factor::Role::kOthers;
    if (one.role == Factor::Role::kColumns) one.place = 1;
  };
  look(left, true);
  look(right, false);
  using Role = Factor::Role;
  if (left.role == Role::kWhole && right.role == Role::kWhole) return run_whole(call, next, found);  // a bias is cut
  // One of two dims that are cut stays so.
  const auto make_whole = [&](Factor& one) {
    one.tensor = next.run(call, [&] { return whole(*one.found); });
    argument(call, one.index) = one.tensor;
    one.found = nullptr;
    one.role = Role::kWhole;
  };
  if (left.role == Role::kOthers && right.role == Role::kColumns) {
    left.tensor = next.run(call, [&] { return enter_whole(*left.found); });
    argument(call, left.index) = left.tensor;
    left.found = nullptr;
    left.role = Role::kWhole;
    left.has_entered = true;
  }
  if (left.role != right.role && left.role != Role::kWhole && right.role != Role::kWhole) {
    if (left.role == Role::kSum && right.role == Role::kOthers)
      make_whole(right);
    else
      make_whole(left);
  }
  if (left.role == Role::kOthers && right.role == Role::kOthers && left.place != right.place) make_whole(left);
  // The term that is added, by its own argument.
  const size_t term_index = right.is_weight ? 2 : 0;
  const bool has_term = first == 1 || (right.is_weight && call.arguments()[2].isTensor());
  if (left.role == Role::kSum || right.role == Role::kSum) {
    if (const CutArgument* const cut_term = has_term ? find_in(found, term_index) : nullptr)
      argument(call, term_index) = next.run(call, [&] { return whole(*cut_term); });
    run_sum(call, next, left, right);
  } else if (right.role == Role::kColumns) {
    run_columns(call, next, left, right);
  } else {
    run_batches(call, next, left, right);
  }
  if (right.found != nullptr && right.found->gathers_output && right.role == Role::kColumns) {
    const at::Tensor result = call.results()[0].toTensor();
    const auto known = table_.find(result);
    call.stack.back() = next.run(call, [&] { return gathered(result, known->cut, exchanges_, name_of(call)); });
  }
}

/// Labels tell what becomes of a dim that is cut: it stays in the result, or is summed over.
void TensorPass::run_einsum(OperatorCall& call, Next next, const CutArguments& found) {
  std::string equation = call.arguments()[0].toStringRef();
  equation.erase(std::remove(equation.begin(), equation.end(), ' '), equation.end());
  const std::vector<at::Tensor> tensors = call.arguments()[1].toTensorVector();
  const size_t arrow = equation.find("->");
  std::vector<std::string> labels = {""};
  for (const char letter : equation.substr(0, arrow))
    letter == ',' ? (void)labels.emplace_back() : labels.back().push_back(letter);
  bool is_plain = arrow != equation.npos && equation.find('.') == equation.npos && labels.size() == tensors.size();
  for (size_t i = 0; is_plain && i < tensors.size(); ++i)
    is_plain = static_cast<int64_t>(labels[i].size()) == tensors[i].dim();
  if (!is_plain) return run_whole(call, next, found);
  const auto index_of = [&](const at::Tensor& tensor) {
    return static_cast<size_t>(
        std::find_if(tensors.begin(), tensors.end(), [&](const at::Tensor& one) { return one.is_same(tensor); }) -
        tensors.begin());
  };
  const CutArgument lead = found[0];
  const char label = labels[index_of(lead.tensor)][static_cast<size_t>(lead.cut.dim)];
  const std::string output = equation.substr(arrow + 2);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (std::count(labels[i].begin(), labels[i].end(), label) > 1) return run_whole(call, next, found);
    const size_t at = labels[i].find(label);
    const auto known =
        std::find_if(found.begin(), found.end(), [&](const CutArgument& one) { return one.tensor.is_same(tensor); });
    const bool is_cut = known != found.end();
    if (at != std::string::npos) {
      const int64_t size = is_cut && known->cut.dim == static_cast<int64_t>(at) ? known->cut.whole()
                                                                                : tensor.size(static_cast<int64_t>(at));
      if (size != lead.cut.whole()) return run_whole(call, next, found);  // of size 1, which broadcasts
    }
    parts.push_back(next.run(call, [&] {
      const Cut cut = at != std::string::npos ? cut_along(lead.cut, static_cast<int64_t>(at)) : Cut{};
      if (is_cut && cut.ranges && known->cut.dim == cut.dim) return recut(*known, cut);
      const at::Tensor all = is_cut ? whole(*known) : tensor;
      return cut.ranges ? take(all, cut) : enter(all);
    }));
  }
  argument(call, 1) = c10::List<at::Tensor>(parts);
  next(call);
  const at::Tensor result = call.results()[0].toTensor();
  const size_t stays = output.find(label);
  if (stays != std::string::npos) return add_cut(result, cut_along(lead.cut, static_cast<int64_t>(stays)));
  call.stack.back() = next.run(call, [&] { return summed(result, exchanges_, name_of(call)); });
}

/// The sum of the ranks' products, of so many rows at a time.
at::Tensor TensorPass::sum_by_pieces(const at::Tensor& left, const at::Tensor& right, bool is_weight, int64_t rows,
                                     const OperatorCall& call) {
  const auto device = left.device().type();
  // Factors get their dtype where autograd sees it; autocast keeps the copies of weights, with their gradients.
  const auto cast = [&](const at::Tensor& factor) {
    if (!at::autocast::is_autocast_enabled(device)) return factor;
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), factor, device);
  };
  std::vector<int64_t> sizes = left.sizes().vec();
  sizes.back() = right.size(is_weight ? 0 : 1);
  const at::Tensor product =
      summed_product(cast(left).reshape({-1, left.size(-1)}), cast(right), is_weight, rows, exchanges_, name_of(call));
  return product.view(sizes);
}

/// Each rank's product is a part of the sum. A term is added once, to the sum.
void TensorPass::run_sum(OperatorCall& call, Next next, Factor& left, Factor& right) {
  const CutArgument& lead = left.role == Factor::Role::kSum ? *left.found : *right.found;
  const auto fit = [&](Factor& one, bool is_left) {
    const int64_t dim = one.sum_dim(is_left);
    if (one.role == Factor::Role::kSum) return recut(*one.found, cut_along(lead.cut, dim));
    if (one.tensor.size(dim) != lead.cut.whole())
      refuse(call, lead.tensor, str("multiplies ", one.tensor.sizes(), ", which is not cut, with a part"),
             str("make it of the whole's size, ", lead.cut.whole(), " in dim ", dim));
    return take(one.tensor, cut_along(lead.cut, dim));
  };
  const Sum made = next.run(call, [&] {
    const at::Tensor a = fit(left, true), b = fit(right, false);
    Sum made;
    if (const int64_t rows = overlaps_sums_ ? piece_rows_of(a, b, right.is_weight) : 0)
      made.tensor = sum_by_pieces(a, b, right.is_weight, rows, call);
    else
      made = sum(right.is_weight ? at::linear(a, b) : at::matmul(a, b), call);
    const size_t term = right.is_weight ? 2 : 0;
    const bool has_term = right.is_weight ? call.arguments()[2].isTensor() : left.index == 1;
    if (!has_term) return made;
    // Autocast has chosen the sum's dtype.
    at::Tensor added = call.arguments()[term].toTensor().to(made.tensor.scalar_type());
    if (made.cut) {
      const CutArgument lead{.index = term, .tensor = made.tensor, .cut = *made.cut};
      added = beside(call, added, lead.from_right(), lead);
    }
    made.tensor = made.tensor + added;
    return made;
  });
  give(call, {made.tensor});
  if (made.cut) add_cut(made.tensor, *made.cut);
}

/// This rank's columns of the product.
void TensorPass::run_columns(OperatorCall& call, Next next, Factor& left, Factor& right) {
  const CutArgument lead = *right.found;
  if (!left.has_entered) replace(call, next, left.index, [&] { return enter(left.tensor); });
  const size_t term = right.is_weight ? 2 : 0;
  const bool has_term = right.is_weight ? call.arguments()[2].isTensor() : left.index == 1;
  if (has_term) {
    const at::Tensor given = call.arguments()[term].toTensor();
    const auto known = table_.find(given);
    // The columns are the last dim of the product, and of the term.
    const CutArgument columns{.index = term, .tensor = given, .cut = cut_along(lead.cut, given.dim() - 1)};
    if (given.defined())
      replace(call, next, term, [&] {
        if (!known || known->is_copy) return beside(call, given, 1, columns);
        const CutArgument own{.index = term, .tensor = given, .cut = known->cut};
        return own.from_right() == 1 ? recut(own, columns.cut) : take(whole(own), columns.cut);
      });
  }
  next(call);
  add_results(call, lead.cut, [&](const at::Tensor& result) { return result.dim() - 1; });
}

/// This rank's rows or batches of the product.
void TensorPass::run_batches(OperatorCall& call, Next next, Factor& left, Factor& right) {
  const bool is_of_left = left.found != nullptr;
  const CutArgument lead = is_of_left ? *left.found : *right.found;
  const int64_t place = lead.from_right();
  Factor& other = is_of_left ? right : left;
  // A matrix dim of the other factor that stands at the same place is no batch.
  const bool has_batch = !other.is_weight && other.tensor.dim() >= place && place > 2;
  if (other.found != nullptr)
    replace(call, next, other.index, [&] { return recut(*other.found, cut_along(lead.cut, other.found->cut.dim)); });
  else
    replace(call, next, other.index,
            [&] { return has_batch ? beside(call, other.tensor, place, lead) : enter(other.tensor); });
  const size_t term = right.is_weight ? 2 : 0;
  const bool has_term = right.is_weight ? call.arguments()[2].isTensor() : left.index == 1;
  if (has_term) {
    const at::Tensor given = call.arguments()[term].toTensor();
    const auto known = table_.find(given);
    if (given.defined())
      replace(call, next, term, [&] {
        if (!known || known->is_copy) return beside(call, given, place, lead);
        const CutArgument own{.index = term, .tensor = given, .cut = known->cut};
        return own.from_right() == place ? recut(own, cut_along(lead.cut, own.cut.dim))
                                         : beside(call, whole(own), place, lead);
      });
  }
  next(call);
  add_results(call, lead.cut, [&](const at::Tensor& result) { return result.dim() - place; });
}

/// Rows of tokens that this rank has, 0 for others, added up; or this rank's elements of every token's vector.
void TensorPass::run_lookup(OperatorCall& call, Next next, const CutArguments& found) {
  const CutArgument one = found[0];
  const bool is_embedding = call.op.schema().name() == "aten::embedding";
  if (!is_embedding || found.size() > 1 || one.index != 0 || call.arguments()[3].toBool() ||
      call.arguments()[4].toBool())
    return run_whole(call, next, found);
  const at::Tensor indices = call.arguments()[1].toTensor();
  if (one.cut.dim == 1) {
    next(call);
    const at::Tensor result = call.results()[0].toTensor();
    const Cut cut = cut_along(one.cut, result.dim() - 1);
    if (one.gathers_output)
      call.stack.back() = next.run(call, [&] { return gathered(result, cut, exchanges_, name_of(call)); });
    else
      add_cut(result, cut);
    return;
  }
  if (one.cut.outer != 1 || one.cut.ranges->overlaps()) return run_whole(call, next, found);
  const int64_t padding = call.arguments()[2].toInt();
  const Sum made = next.run(call, [&] {
    at::Tensor places = at::zeros({}, indices.options()).expand_as(indices), is_here;
    int64_t before = 0;
    for (const Interval& part : one.cut.ranges->of_rank(group_.rank())) {
      const at::Tensor inside = indices.ge(part.begin).logical_and(indices.lt(part.end));
      places = at::where(inside, indices - (part.begin - before), places);
      is_here = is_here.defined() ? is_here.logical_or(inside) : inside;
      before += part.size();
    }
    const at::Tensor is_token = indices.ge(0).logical_and(indices.lt(one.cut.ranges->whole()));
    if (is_token.is_cpu() && !is_token.all().item<bool>())
      throw ShapeError(str("aten::embedding: an index is outside of the table of ", one.cut.ranges->whole(), " rows"));
    const int64_t own_padding = padding < 0 ? -1 : one.cut.ranges->find(group_.rank(), padding).value_or(-1);
    const at::Tensor rows = at::embedding(one.tensor, places, own_padding);
    return sum(rows.masked_fill(is_here.logical_not().unsqueeze(-1), 0), call);
  });
  give(call, {made.tensor});
  if (made.cut) add_cut(made.tensor, *made.cut);
}

// --- attention ---

/// The heads of keys or values that this rank's queries attend with; `is_by_query`: one for each query head.
at::Tensor TensorPass::heads_for(const OperatorCall& call, const at::Tensor& keys, const CutArgument* known,
                                 const CutArgument& query, bool& is_by_query) {
  is_by_query = true;
  const int64_t place = query.from_right();
  if (keys.dim() < place) return enter(keys);
  const int64_t dim = keys.dim() - place;
  const int64_t heads = known != nullptr ? known->cut.whole() : keys.size(dim);
  if (heads == 1 && known == nullptr && query.cut.whole() != 1 && place != 3) return enter(keys);
  if (heads == query.cut.whole())
    return known != nullptr ? recut(*known, cut_along(query.cut, dim)) : take(keys, cut_along(query.cut, dim));
  const int64_t group = query.cut.whole() / heads;
  if (query.cut.outer != 1 || query.cut.whole() % heads != 0 || (known != nullptr && known->cut.outer != 1))
    refuse(call, query.tensor, str("attends with ", keys.sizes(), ", whose heads do not fit a part"),
           "let heads be a dim of their own");
  if (known != nullptr && known->cut.ranges->times(group) == *query.cut.ranges) {
    is_by_query = false;
    return keys;
  }
  const CutArgument whole_keys{.index = 0, .tensor = keys, .cut = known != nullptr ? known->cut : Cut{}};
  // Whether every rank has the heads that it needs is the same on all ranks.
  bool has_all = known != nullptr;
  for (int rank = 0; has_all && rank < group_.size(); ++rank)
    for (const Interval& part : query.cut.ranges->of_rank(rank))
      for (int64_t head = part.begin; has_all && head < part.end; ++head)
        has_all = known->cut.ranges->find(rank, head / group).has_value();
  const at::Tensor all = known == nullptr ? enter(keys) : has_all ? keys : enter(whole(whole_keys));
  std::vector<int64_t> places;
  for (const Interval& part : query.cut.ranges->of_rank(group_.rank()))
    for (int64_t head = part.begin; head < part.end; ++head)
      places.push_back(has_all ? *known->cut.ranges->find(group_.rank(), head / group) : head / group);
  return all.index_select(dim, at::tensor(places, at::TensorOptions().dtype(at::kLong).device(keys.device())));
}

void TensorPass::run_attention(OperatorCall& call, Next next, const CutArguments& found) {
  const CutArgument* const query = find_in(found, kQuery);
  if (query == nullptr || query->from_right() < 3) return run_whole(call, next, found);
  const int64_t place = query->from_right();
  for (const CutArgument& one : found)
    if (one.from_right() != place) return run_whole(call, next, found);
  bool key_by_query = true, value_by_query = true;
  const CutArgument lead = *query;
  const at::Tensor key = call.arguments()[kKey].toTensor(), value = call.arguments()[kValue].toTensor();
  at::Tensor keys, values;
  next.run(call, [&] {
    keys = heads_for(call, key, find_in(found, kKey), lead, key_by_query);
    values = heads_for(call, value, find_in(found, kValue), lead, value_by_query);
  });
  if (key_by_query != value_by_query) return run_whole(call, next, found);
  argument(call, kKey) = keys;
  argument(call, kValue) = values;
  if (key_by_query) argument(call, kEnableGqa) = false;
  if (call.arguments()[kMask].isTensor() && call.arguments()[kMask].toTensor().defined()) {
    const at::Tensor mask = call.arguments()[kMask].toTensor();
    const CutArgument* const known = find_in(found, kMask);
    replace(call, next, kMask, [&] {
      return known != nullptr ? recut(*known, cut_along(lead.cut, known->cut.dim)) : beside(call, mask, place, lead);
    });
  }
  if (call.arguments()[kDropout].toDouble() > 0) call.stream = RandomStream::kSlice;
  next(call);
  add_results(call, lead.cut, [&](const at::Tensor&) { return lead.cut.dim; });
}

/// Logits of which each rank has the columns of some classes stay so. Means leave ignored targets out.
void TensorPass::run_class_loss(OperatorCall& call, Next next, const CutArguments& found) {
  const CutArgument one = found[0];
  const bool is_entropy = call.op.schema().name() == "aten::cross_entropy_loss";
  if (!is_entropy || found.size() > 1 || one.index != 0 || one.tensor.dim() != 2 || one.cut.dim != 1 ||
      one.cut.outer != 1 || one.cut.ranges->overlaps() || call.arguments()[2].isTensor())
    return run_whole(call, next, found);
  const at::Tensor targets = call.arguments()[1].toTensor();
  if (!at::isIntegralType(targets.scalar_type(), /*includeBool=*/false)) return run_whole(call, next, found);
  const int64_t reduction = call.arguments()[3].toInt();
  const c10::SymInt ignored_index = call.arguments()[4].toSymInt();
  const int64_t ignored = ignored_index.guard_int(__FILE__, __LINE__);
  const double smoothing = call.arguments()[5].toDouble();
  const at::Tensor result = next.run(call, [&] {
    const at::Tensor is_ignored = targets.eq(ignored);
    const at::Tensor is_class = targets.ge(0).logical_and(targets.lt(one.cut.ranges->whole())).logical_or(is_ignored);
    if (is_class.is_cpu() && !is_class.all().item<bool>())
      throw ShapeError(str("aten::cross_entropy_loss: a target is none of ", one.cut.ranges->whole(), " classes, nor ",
                           ignored, ", which is ignored"));
    const bool widens = at::autocast::is_autocast_enabled(one.tensor.device().type());  // as autocast has losses
    const at::Tensor logits = widens ? one.tensor.to(at::kFloat) : one.tensor;
    const at::Tensor losses = cross_entropy(logits, targets, one.cut, ignored, smoothing, exchanges_);
    if (reduction == at::Reduction::None) return losses;
    const at::Tensor sum = losses.sum();
    return reduction == at::Reduction::Sum ? sum : sum / is_ignored.logical_not().sum().to(sum.scalar_type());
  });
  give(call, {result});
}

}  // namespace trireme::tensor
