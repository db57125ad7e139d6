#include "tests/support/operators/cases.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "tests/support/operators/draw.h"
#include "trireme/operators/row.h"

namespace trireme::testing {

Sizes Draw::sizes(int64_t least, int64_t most) {
  Sizes made(between(least, most));
  for (int64_t& size : made) size = of<int64_t>({1, 2, 3, 4, 6, 6});
  return made;
}

Sizes Draw::broadcast(const Sizes& sizes) {
  Sizes made = sizes;
  for (int64_t& size : made)
    if (chance(0.3)) size = 1;
  if (!made.empty() && chance(0.5)) made.erase(made.begin(), made.begin() + below(static_cast<int64_t>(made.size())));
  return made;
}

at::Tensor Draw::floats(const Sizes& sizes) {
  at::Tensor made = at::empty(sizes, at::kDouble);
  for (int64_t i = 0; i < made.numel(); ++i)
    made.data_ptr<double>()[i] = std::uniform_real_distribution<double>(0.5, 1.5)(random);
  return made;
}

at::Tensor Draw::bools(const Sizes& sizes) { return floats(sizes) > 0.8; }

at::Tensor Draw::places(const Sizes& sizes, int64_t count) {
  at::Tensor made = at::empty(sizes, at::kLong);
  for (int64_t i = 0; i < made.numel(); ++i) made.data_ptr<int64_t>()[i] = below(count);
  return made;
}

at::Tensor Draw::distinct_places(const Sizes& sizes, int64_t dim, int64_t count) {
  Sizes all = sizes;
  all[dim] = count;
  return floats(all).argsort(dim).narrow(dim, 0, sizes[dim]).contiguous();
}

namespace {

c10::OperatorHandle handle_of(const std::string& op) {
  const size_t dot = op.find('.', op.find("::"));
  const std::string overload = dot == std::string::npos ? "" : op.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(op.substr(0, dot).c_str(), overload.c_str());
}

/// A call that works element by element, of tensors of a dtype.
OperatorCase elementwise_call(Draw& draw, const std::string& op, Sizes sizes, bool is_of_floats) {
  if (sizes.empty()) sizes = draw.sizes(1, 4);
  Given given;
  for (const c10::Argument& argument : handle_of(op).schema().arguments()) {
    const std::string& name = argument.name();
    const std::string type = argument.type()->str();
    if (type.starts_with("Tensor")) {
      const Sizes own = name == "value" ? Sizes() : given.empty() ? sizes : draw.broadcast(sizes);
      const bool is_mask = name == "condition" || name == "mask";
      given.push_back({name, is_mask ? draw.bools(own) : is_of_floats ? draw.floats(own) : draw.places(own, 4) + 1});
    } else if (name == "min" || name == "max" || type == "Scalar" || type == "number") {
      given.push_back({name, is_of_floats ? c10::IValue(name == "max" ? 1.2 : 0.8) : c10::IValue(2)});
    } else if (!argument.default_value()) {
      if (type == "int") given.push_back({name, 1});
      if (type == "float") given.push_back({name, 0.5});
      if (type == "bool") given.push_back({name, false});
    }
  }
  return call_of(op, given);
}

/// A call whose results are of real numbers; nothing: it has no such results.
bool has_real_results(const OperatorCase& one) {
  try {
    torch::jit::Stack stack(one.arguments);
    handle_of(one.op).callBoxed(stack);
    return std::ranges::all_of(
        stack, [](const c10::IValue& value) { return value.isTensor() && !value.toTensor().is_complex(); });
  } catch (const std::exception&) {
    return false;
  }
}

std::optional<OperatorCase> of_floats(Draw& draw, const std::string& op, Sizes sizes) {
  return elementwise_call(draw, op, std::move(sizes), true);
}
std::optional<OperatorCase> of_integers(Draw& draw, const std::string& op, Sizes sizes) {
  return elementwise_call(draw, op, std::move(sizes), false);
}

/// All overloads of libtorch whose row is that of element-wise operators and which give the same twice, by their dtype.
std::pair<std::string, std::string> elementwise_names() {
  const std::set<std::string> left_out = {"empty_like", "_conj", "conj", "view_as", "pin_memory", "prelu"};
  std::set<std::string> floats, integers;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    const OperatorRow* const row = op ? row_of(*op) : nullptr;
    if (!row || std::string_view(row->family) != "each" || name.name.ends_with('_') ||
        left_out.contains(name.name.substr(6)) || op->hasTag(at::Tag::nondeterministic_seeded))
      continue;
    std::mt19937_64 random(1);
    Draw draw{random};
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    try {
      if (has_real_results(elementwise_call(draw, full, {2, 3}, true)))
        floats.insert(full.substr(6));
      else if (has_real_results(elementwise_call(draw, full, {2, 3}, false)))
        integers.insert(full.substr(6));
    } catch (const std::exception&) {  // arguments that the schema does not give
    }
  }
  const auto joined = [](const std::set<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += name + " ";
    return text;
  };
  return {joined(floats), joined(integers)};
}

/// Operators whose gradients jump, or that have none of meaning.
bool is_kinked(std::string_view op) {
  static const std::set<std::string, std::less<>> kinked = [] {
    std::istringstream names(
        "lift_fresh copy abs absolute floor ceil round trunc fix frac sign sgn relu relu6 maximum minimum clamp clip "
        "clamp_min "
        "clamp_max "
        "fmax fmin fmod remainder amax amin aminmax prod max min median nanmedian mode kthvalue sort argsort msort "
        "topk "
        "cummax cummin argmax argmin cumprod leaky_relu hardtanh hardshrink softshrink threshold hardsigmoid hardswish "
        "floor_divide heaviside copysign nextafter elu celu selu prelu _prelu_kernel rrelu l1_loss smooth_l1_loss "
        "huber_loss scatter_reduce.two scatter.reduce scatter.value_reduce norm linalg_vector_norm nan_to_num logit "
        "div "
        "divide hypot igamma igammac polygamma digamma lgamma mvlgamma erfinv special_zeta");
    return std::set<std::string, std::less<>>(std::istream_iterator<std::string>(names), {});
  }();
  return kinked.contains(op) || kinked.contains(op.substr(0, op.find('.')));
}

bool is_in_chains(const std::string& op) {
  static const std::set<std::string> names = {"exp",
                                              "add.Tensor",
                                              "view",
                                              "reshape",
                                              "flatten.using_ints",
                                              "permute",
                                              "movedim.int",
                                              "unsqueeze",
                                              "squeeze",
                                              "expand",
                                              "stack",
                                              "repeat",
                                              "repeat_interleave.self_int",
                                              "slice.Tensor",
                                              "split.Tensor",
                                              "cat",
                                              "roll",
                                              "flip",
                                              "sum.dim_IntList",
                                              "mean.dim",
                                              "softmax.int",
                                              "constant_pad_nd",
                                              "tril",
                                              "transpose.int",
                                              "select.int"};
  return names.contains(op);
}

void add_cases(std::vector<NamedCase>& all, const MakerOfNames& maker) {
  std::istringstream names(maker.names);
  for (std::string name; names >> name;) {
    all.push_back({name,
                   [make = maker.make, name](std::mt19937_64& random, Sizes sizes) {
                     Draw draw{random};
                     std::optional<OperatorCase> made = make(draw, "aten::" + name, std::move(sizes));
                     if (made) made->is_smooth = !is_kinked(name);
                     return made;
                   },
                   is_in_chains(name)});
  }
}

}  // namespace

OperatorCase call_of(const std::string& op, const Given& given) {
  OperatorCase made{op, {}};
  for (const c10::Argument& argument : handle_of(op).schema().arguments()) {
    const auto found = std::ranges::find(given, argument.name(), &std::pair<std::string, c10::IValue>::first);
    const bool has_default = argument.default_value() || argument.type()->kind() == c10::TypeKind::OptionalType;
    if (found == given.end() && !has_default) throw std::invalid_argument(op + " lacks " + argument.name());
    made.arguments.push_back(found != given.end() ? found->second : argument.default_value().value_or(c10::IValue()));
  }
  for (const auto& [name, value] : given)
    if (!handle_of(op).schema().argumentIndexWithName(name)) throw std::invalid_argument(op + " has no " + name);
  return made;
}

const std::vector<NamedCase>& operator_cases() {
  static const std::vector<NamedCase> cases = [] {
    std::vector<NamedCase> all;
    const auto [floats, integers] = elementwise_names();
    add_cases(all, {of_floats, floats.c_str()});
    add_cases(all, {of_integers, integers.c_str()});
    for (const MakerOfNames& maker : makers_of_dims()) add_cases(all, maker);
    for (const MakerOfNames& maker : makers_of_products()) add_cases(all, maker);
    return all;
  }();
  return cases;
}

}  // namespace trireme::testing
