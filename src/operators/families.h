// Families of operators: functions that make the row of a call, and functions that give its plain arguments the meaning
// that they have on one rank.
//
// A row is made of what the call says (names of the schema, plain arguments), so overloads of one name share a
// function. A localising function reads the local row alone and leaves a call as it is where nothing is cut.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/operators/row.h"

namespace trireme::rows {

// each.cpp: element by element.
Row each(const RowCall& call);          ///< with broadcasting from the right
Row of_first(const RowCall& call);      ///< other arguments give their dtype, device or sizes alone (to.other)
Row channel_wise(const RowCall& call);  ///< the second argument goes along dim 1 (prelu)
Row find(const RowCall& call);          ///< each is looked for in all of another argument (isin, searchsorted)
Row loss_of_each(const RowCall& call);  ///< as `reduction` says: each, a mean, a sum

// views.cpp: the same elements under other sizes, or in another order, or several times.
Row view(const RowCall& call);
void localise_view(const RowCall& call, const LocalRow& local, LocalCall& here);
Row moved(const RowCall& call);
Row squeezed(const RowCall& call);  ///< dims of size 1 go or come
void localise_squeezed(const RowCall& call, const LocalRow& local, LocalCall& here);
Row expanded(const RowCall& call);
void localise_expanded(const RowCall& call, const LocalRow& local, LocalCall& here);
Row repeated(const RowCall& call);
void localise_repeated(const RowCall& call, const LocalRow& local, LocalCall& here);
Row interleaved(const RowCall& call);
void localise_interleaved(const RowCall& call, const LocalRow& local, LocalCall& here);
Row stacked(const RowCall& call);
Row of_bits(const RowCall& call);   ///< another dtype for the same memory
Row of_pairs(const RowCall& call);  ///< a complex number as its two parts (view_as_real), and back

// pieces.cpp: dims that are made of pieces of others.
Row slice(const RowCall& call);  ///< narrow and select, too
void localise_slice(const RowCall& call, const LocalRow& local, LocalCall& here);
Row split(const RowCall& call);
void localise_split(const RowCall& call, const LocalRow& local, LocalCall& here);
Row cat(const RowCall& call);
Row roll(const RowCall& call);
void localise_roll(const RowCall& call, const LocalRow& local, LocalCall& here);
Row flip(const RowCall& call);
Row pad(const RowCall& call);
void localise_pad(const RowCall& call, const LocalRow& local, LocalCall& here);

// over_dims.cpp: along dims, which go, stay with size 1, or stay.
Row reduction(const RowCall& call);
Row scan(const RowCall& call);
Row resized(const RowCall& call);  ///< a dim that is mixed and gets another size (topk, glu, diff, unfold)

// products.cpp: a product is its equation.
Row product(const RowCall& call);
Row linear(const RowCall& call);  ///< a term is added: linear, bilinear
Row added_product(const RowCall& call);
void localise_added_product(const RowCall& call, const LocalRow& local, LocalCall& here);
Row einsum(const RowCall& call);
Row tensordot(const RowCall& call);

// features.cpp: norms and convolutions, whose channels are groups of channels.
Row layer_norm(const RowCall& call);  ///< rms_norm, too
Row group_norm(const RowCall& call);
void localise_group_norm(const RowCall& call, const LocalRow& local, LocalCall& here);
Row batch_norm(const RowCall& call);  ///< instance_norm, too
Row convolution(const RowCall& call);
void localise_convolution(const RowCall& call, const LocalRow& local, LocalCall& here);

// places.cpp: elements of a dim that another argument names.
Row embedding(const RowCall& call);
void localise_embedding(const RowCall& call, const LocalRow& local, LocalCall& here);
Row one_hot(const RowCall& call);
void localise_one_hot(const RowCall& call, const LocalRow& local, LocalCall& here);
Row gather(const RowCall& call);
void localise_gather(const RowCall& call, const LocalRow& local, LocalCall& here);
Row index_select(const RowCall& call);
void localise_index_select(const RowCall& call, const LocalRow& local, LocalCall& here);
Row index(const RowCall& call);  ///< by whole numbers; what masks take is not known by sizes
void localise_index(const RowCall& call, const LocalRow& local, LocalCall& here);
Row index_write(const RowCall& call);  ///< index_add, index_copy, index_fill
void localise_index_write(const RowCall& call, const LocalRow& local, LocalCall& here);
Row scatter(const RowCall& call);
void localise_scatter(const RowCall& call, const LocalRow& local, LocalCall& here);

// positions.cpp: what must know the whole's indices of a rank's elements.
Row triangle(const RowCall& call);
void localise_triangle(const RowCall& call, const LocalRow& local, LocalCall& here);
Row attention(const RowCall& call);
void localise_attention(const RowCall& call, const LocalRow& local, LocalCall& here);

// each.cpp: what families share.
/// The call's name without the "_" of one that writes its first argument.
std::string_view plain_name(const RowCall& call);
bool writes_in_place(const RowCall& call);
/// A factor for each dim, none for those of size 1.
TensorFactors dims_of(Row& row, at::IntArrayRef sizes, FactorKind kind = FactorKind::kEach);
/// The sizes of `a` and `b`, broadcast.
std::vector<int64_t> broadcast(at::IntArrayRef a, at::IntArrayRef b);
/// The dims of an argument of `sizes` that is broadcast to `result`, counted from the right.
TensorFactors from_the_right(const Row& row, const TensorFactors& result, at::IntArrayRef sizes);
/// `outer` and `inner` as one dim.
DimFactors nested(const DimFactors& outer, const DimFactors& inner);
/// As many results of these dims as the schema has.
void set_results(Row& row, const RowCall& call, const TensorFactors& dims);
bool is_any_cut(const LocalRow& local);
/// The elements along a dim, here and in the whole; no factor: 1.
bool is_dim_cut(const LocalRow& local, const DimFactors& dim);
void set_integers(const RowCall& call, LocalCall& here, const char* name, std::vector<int64_t> values);
const at::Tensor& tensor_in(const std::vector<c10::IValue>& arguments, const RowCall& call, const char* name);

}  // namespace trireme::rows
