// Random calls of products, norms, convolutions, places and positions.
#include <algorithm>
#include <numeric>

#include "tests/support/operators/draw.h"

namespace trireme::testing {
namespace {

using MadeCall = std::optional<OperatorCase>;

std::string operator_of(const std::string& op) {
  const std::string name = op.substr(6);
  return name.substr(0, name.find('.'));
}

Sizes with(Sizes sizes, std::initializer_list<int64_t> more) {
  sizes.insert(sizes.end(), more);
  return sizes;
}

MadeCall of_product(Draw& draw, const std::string& op, Sizes) {
  const std::string name = operator_of(op);
  const int64_t b = draw.size(), m = draw.size(), k = draw.size(), n = draw.size();
  const auto floats = [&](Sizes sizes) { return c10::IValue(draw.floats(sizes)); };
  if (name == "mm") return call_of(op, {{"self", floats({m, k})}, {"mat2", floats({k, n})}});
  if (name == "bmm") return call_of(op, {{"self", floats({b, m, k})}, {"mat2", floats({b, k, n})}});
  if (name == "mv") return call_of(op, {{"self", floats({m, k})}, {"vec", floats({k})}});
  if (name == "dot") return call_of(op, {{"self", floats({k})}, {"tensor", floats({k})}});
  if (name == "vdot") return call_of(op, {{"self", floats({k})}, {"other", floats({k})}});
  if (name == "outer" || name == "ger") return call_of(op, {{"self", floats({m})}, {"vec2", floats({n})}});
  if (name == "inner") return call_of(op, {{"self", floats({b, m, k})}, {"other", floats({n, k})}});
  const Sizes lead = draw.sizes(0, 2);
  const bool is_vector = draw.chance(0.2), is_second_vector = draw.chance(0.2);
  const Sizes left = is_vector ? Sizes{k} : with(lead, {m, k});
  const Sizes right =
      is_second_vector ? Sizes{k} : with(lead.empty() ? draw.sizes(0, 1) : draw.broadcast(lead), {k, n});
  return call_of(op, {{"self", floats(left)}, {"other", floats(right)}});
}

MadeCall of_terms(Draw& draw, const std::string& op, Sizes sizes) {
  const std::string name = operator_of(op);
  const int64_t b = draw.size(), m = draw.size(), k = draw.size(), n = draw.size();
  const auto floats = [&](Sizes own) { return c10::IValue(draw.floats(own)); };
  if (name == "linear") {
    if (sizes.empty()) sizes = with(draw.sizes(0, 2), {k});
    const bool is_vector = draw.chance(0.1);
    Given given{{"input", floats(sizes)}, {"weight", floats(is_vector ? Sizes{sizes.back()} : Sizes{n, sizes.back()})}};
    if (!is_vector && draw.chance(0.7)) given.push_back({"bias", floats({n})});
    return call_of(op, given);
  }
  if (name == "bilinear") {
    const Sizes lead = draw.sizes(1, 2);
    Given given{
        {"input1", floats(with(lead, {m}))}, {"input2", floats(with(lead, {k}))}, {"weight", floats({n, m, k})}};
    if (draw.chance(0.7)) given.push_back({"bias", floats({n})});
    return call_of(op, given);
  }
  const double alpha = draw.of<double>({1, 1, 2}), beta = draw.of<double>({1, 1, 1, 0.5});
  Given given{{"alpha", alpha}, {"beta", beta}};
  const auto add = [&](const char* first, Sizes left, const char* second, Sizes right, Sizes term) {
    given.insert(given.end(), {{"self", floats(draw.broadcast(term))}, {first, floats(left)}, {second, floats(right)}});
  };
  if (name == "addmm") add("mat1", {m, k}, "mat2", {k, n}, {m, n});
  if (name == "baddbmm") add("batch1", {b, m, k}, "batch2", {b, k, n}, {b, m, n});
  if (name == "addmv") add("mat", {m, k}, "vec", {k}, {m});
  return call_of(op, given);
}

MadeCall of_equations(Draw& draw, const std::string& op, Sizes) {
  const int64_t a = draw.size(), b = draw.size(), c = draw.size(), d = draw.size();
  const auto floats = [&](Sizes sizes) { return draw.floats(sizes); };
  if (operator_of(op) == "tensordot")
    return call_of(op, {{"self", floats({a, b, c})},
                        {"other", floats({c, d, a})},
                        {"dims_self", Sizes{2, 0}},
                        {"dims_other", Sizes{-3, 2}}});
  const std::vector<std::pair<std::string, std::vector<at::Tensor>>> equations = {
      {"abc,cd,db->ad", {floats({a, b, c}), floats({c, d}), floats({d, b})}},
      {"bhqd, bhkd -> bhqk", {floats({a, b, 3, d}), floats({a, b, c, d})}},
      {"ij,jk", {floats({a, b}), floats({b, c})}},
      {"...ij,...jk->...ik", {floats({d, a, b}), floats({1, b, c})}},
      {"...i,ij", {floats({d, c, a}), floats({a, b})}},
      {"iij->j", {floats({a, a, b})}},
  };
  const auto& [equation, tensors] = draw.of(equations);
  return call_of(op, {{"equation", equation}, {"tensors", tensors}});
}

MadeCall of_norm(Draw& draw, const std::string& op, Sizes sizes) {
  const std::string name = operator_of(op);
  if (name.find("group") == name.npos && name.find("layer") == name.npos && name.find("rms") == name.npos) {
    const int64_t channels = draw.size();
    const bool mixes = draw.chance(0.5);
    Given given{{"input", draw.floats(with({draw.size(), channels}, {draw.size(), draw.size()}))},
                {name == "batch_norm" ? "training" : "use_input_stats", mixes},
                {"momentum", 0.0},
                {"eps", 1e-5},
                {"cudnn_enabled", false}};
    for (const char* const vector : {"weight", "bias", "running_mean", "running_var"})
      if (vector[0] != 'r' || !mixes) given.push_back({vector, draw.floats({channels})});
    return call_of(op, given);
  }
  if (name.find("group") != name.npos) {
    const int64_t n = draw.size(), groups = draw.of<int64_t>({1, 2, 3, 6}),
                  channels = groups * draw.of<int64_t>({1, 2, 3});
    const Sizes spatial = draw.chance(0.3) ? Sizes{draw.size(), 2} : Sizes{draw.size()};
    Sizes own{n, channels};
    own.insert(own.end(), spatial.begin(), spatial.end());
    Given given{{"input", draw.floats(own)}};
    for (const char* const vector : {"weight", "bias"}) given.push_back({vector, draw.floats({channels})});
    if (name == "group_norm") given.push_back({"num_groups", groups});
    if (name != "group_norm")
      given.insert(given.end(), {{"N", n},
                                 {"C", channels},
                                 {"HxW", own[2] * (own.size() > 3 ? own[3] : 1)},
                                 {"group", groups},
                                 {"eps", 1e-5}});
    return call_of(op, given);
  }
  if (sizes.empty()) sizes = draw.sizes(2, 4);
  const Sizes features(sizes.end() - draw.between(1, std::min<int64_t>(2, sizes.size())), sizes.end());
  Given given{{"input", draw.floats(sizes)}, {"normalized_shape", features}};
  if (draw.chance(0.7)) given.push_back({"weight", draw.floats(features)});
  if (name.find("layer") != name.npos) given.insert(given.end(), {{"bias", draw.floats(features)}, {"eps", 1e-5}});
  return call_of(op, given);
}

MadeCall of_convolution(Draw& draw, const std::string& op, Sizes) {
  const std::string name = operator_of(op);
  const int64_t spatial = name == "convolution" ? 1 : name[name.size() - 2] - '0';
  const int64_t groups = draw.of<int64_t>({1, 1, 2, 3}), in = draw.of<int64_t>({1, 2, 4}),
                out = draw.of<int64_t>({1, 2, 3});
  const bool transposed = name.starts_with("conv_transpose") || (name == "convolution" && draw.chance(0.5));
  const bool is_text = op.ends_with(".padding");
  Sizes input{draw.size(), groups * in};
  Sizes weight = transposed ? Sizes{groups * in, out} : Sizes{groups * out, in};
  for (int64_t i = 0; i < spatial; ++i) {
    input.push_back(draw.of<int64_t>({5, 6}));
    weight.push_back(draw.of<int64_t>({1, 2, 3}));
  }
  if (draw.chance(0.3)) std::fill(weight.begin() + 2, weight.end(), 1);
  const int64_t stride = is_text ? 1 : draw.between(1, 2);
  Given given{{"input", draw.floats(input)},
              {"weight", draw.floats(weight)},
              {"groups", groups},
              {"stride", Sizes(spatial, stride)},
              {"dilation", Sizes(spatial, draw.between(1, 2))}};
  if (draw.chance(0.6)) given.push_back({"bias", draw.floats({groups * out})});
  if (is_text)
    given.push_back({"padding", draw.of<std::string>({"same", "valid"})});
  else
    given.push_back({"padding", Sizes(spatial, draw.between(0, 1))});
  if (name == "convolution") given.push_back({"transposed", transposed});
  if (name == "convolution" || transposed)
    given.push_back({"output_padding", Sizes(spatial, transposed && stride == 2 ? draw.between(0, 1) : 0)});
  return call_of(op, given);
}

MadeCall of_reads(Draw& draw, const std::string& op, Sizes sizes) {
  const std::string name = operator_of(op);
  if (name == "one_hot") return call_of(op, {{"self", draw.places(draw.sizes(1, 3), 4)}, {"num_classes", 6}});
  if (name == "embedding") {
    const int64_t rows = draw.size();
    return call_of(op, {{"weight", draw.floats({rows, draw.size()})},
                        {"indices", draw.places(draw.sizes(1, 2), rows)},
                        {"padding_idx", draw.of<int64_t>({-1, 0})}});
  }
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const int64_t dims = static_cast<int64_t>(sizes.size()), d = draw.below(dims), size = sizes[d];
  Given given{{"self", draw.floats(sizes)}, {"dim", draw.chance(0.3) ? d - dims : d}};
  if (name == "index_select") {
    const Sizes own = draw.chance(0.1) ? Sizes() : Sizes{draw.size()};
    given.push_back({"index", draw.places(own, size)});
    return call_of(op, given);
  }
  Sizes own = sizes;
  own[d] = draw.size();
  if (name == "gather") {
    for (int64_t i = 0; i < dims; ++i)
      if (i != d && draw.chance(0.2)) own[i] = draw.between(1, own[i]);
    given.push_back({"index", draw.places(own, size)});
  } else if (draw.chance(0.2)) {
    const int64_t all = given[0].second.toTensor().numel();
    given = {given[0], {"indices", draw.places({draw.size()}, all)}};
  } else {
    for (int64_t i = 0; i < dims; ++i)
      if (i != d && draw.chance(0.3)) own[i] = 1;
    given.push_back({"indices", draw.places(own, size)});
  }
  return call_of(op, given);
}

MadeCall of_writes(Draw& draw, const std::string& op, Sizes sizes) {
  const std::string name = operator_of(op);
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const int64_t dims = static_cast<int64_t>(sizes.size()), d = draw.below(dims), size = sizes[d];
  Given given{{"self", draw.floats(sizes)}, {"dim", draw.chance(0.3) ? d - dims : d}};
  Sizes own = sizes;
  own[d] = draw.between(1, size);
  if (name.starts_with("index")) {
    given.push_back({"index", draw.distinct_places({own[d]}, 0, size)});
    if (name != "index_fill") given.push_back({"source", draw.floats(own)});
    if (op.ends_with("Scalar")) given.push_back({"value", 0.25});
    if (op.ends_with("Tensor")) given.push_back({"value", draw.floats({})});
    return call_of(op, given);
  }
  for (int64_t i = 0; i < dims; ++i)
    if (i != d && draw.chance(0.2)) own[i] = draw.between(1, own[i]);
  const bool adds = name == "scatter_add" || op.ends_with("reduce") || name == "scatter_reduce";
  given.push_back({"index", adds ? draw.places(own, size) : draw.distinct_places(own, d, size)});
  if (name != "scatter_reduce" && op.find("value") != op.npos) {
    given.push_back({"value", 0.25});
  } else {
    for (int64_t& one : own)
      if (draw.chance(0.1)) one += 1;
    given.push_back({"src", draw.floats(own)});
  }
  if (name == "scatter_reduce")
    given.push_back({"reduce", draw.of<std::string>({"sum", "prod", "mean", "amax", "amin"})});
  if (name == "scatter" && op.ends_with("reduce"))
    given.push_back({"reduce", draw.of<std::string>({"add", "multiply"})});
  return call_of(op, given);
}

MadeCall of_positions(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(2, 4);
  if (sizes.size() < 2) return std::nullopt;
  return call_of(op, {{"self", draw.floats(sizes)}, {"diagonal", draw.between(-2, 2)}});
}

MadeCall of_attention(Draw& draw, const std::string& op, Sizes) {
  const int64_t b = draw.size(), keys = draw.of<int64_t>({1, 2, 3}), each = draw.of<int64_t>({1, 2, 3});
  const int64_t s = draw.size(), t = draw.size(), d = draw.size(), e = draw.size();
  const bool is_grouped = draw.chance(0.5);
  const int64_t heads = is_grouped ? keys * each : keys;
  Given given{{"query", draw.floats({b, heads, s, d})},
              {"key", draw.floats({b, keys, t, d})},
              {"value", draw.floats({b, keys, t, e})},
              {"enable_gqa", is_grouped}};
  const int64_t kind = draw.below(3);
  if (kind == 1) given.push_back({"is_causal", true});
  if (kind == 2) {
    const Sizes mask = draw.of<Sizes>({{s, t}, {b, 1, s, t}, {b, heads, s, t}, {b, 1, 1, t}});
    given.push_back({"attn_mask", draw.floats(mask)});
  }
  return call_of(op, given);
}

MadeCall of_sets(Draw& draw, const std::string& op, Sizes sizes) {
  const std::string name = operator_of(op);
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const at::Tensor x = draw.floats(sizes);
  if (name == "prelu") return call_of(op, {{"self", x}, {"weight", draw.floats({sizes.size() > 1 ? sizes[1] : 1})}});
  if (name == "dropout") return call_of(op, {{"input", x}, {"p", 0.5}, {"train", false}});
  if (name == "renorm") {
    if (sizes.size() < 2) return std::nullopt;
    return call_of(op,
                   {{"self", x}, {"p", 2}, {"dim", draw.below(static_cast<int64_t>(sizes.size()))}, {"maxnorm", 1.0}});
  }
  if (name.ends_with("cross")) {
    sizes.back() = 3;
    return call_of(op, {{"self", draw.floats(sizes)}, {"other", draw.floats(sizes)}, {"dim", -1}});
  }
  const at::Tensor places = draw.places(sizes, 4);
  if (name == "isin") return call_of(op, {{"elements", places}, {"test_elements", draw.places({3}, 4)}});
  const at::Tensor ends = std::get<0>(draw.floats({4}).sort());
  if (name == "bucketize") return call_of(op, {{"self", x}, {"boundaries", ends}});
  if (draw.chance(0.5)) return call_of(op, {{"sorted_sequence", ends}, {"self", x}});
  Sizes own = sizes;
  own.back() = 4;
  return call_of(op, {{"sorted_sequence", std::get<0>(draw.floats(own).sort())}, {"self", x}});
}

}  // namespace

std::vector<MakerOfNames> makers_of_products() {
  return {
      {of_product, "mm bmm mv dot vdot outer ger inner matmul linalg_matmul"},
      {of_terms, "linear bilinear addmm baddbmm addmv"},
      {of_equations, "einsum tensordot"},
      {of_norm,
       "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm batch_norm instance_norm"},
      {of_convolution,
       "conv1d conv2d conv3d conv1d.padding conv2d.padding convolution conv_transpose1d conv_transpose2d.input "
       "conv_transpose3d.input"},
      {of_reads, "one_hot embedding gather take_along_dim index_select"},
      {of_writes,
       "index_add index_copy index_fill.int_Scalar index_fill.int_Tensor scatter.src scatter.value scatter.reduce "
       "scatter.value_reduce scatter_add scatter_reduce.two"},
      {of_positions, "tril triu"},
      {of_attention, "scaled_dot_product_attention"},
      {of_sets, "prelu dropout renorm linalg_cross cross isin.Tensor_Tensor bucketize.Tensor searchsorted.Tensor"},
  };
}

}  // namespace trireme::testing
