// Small programs as users of libtorch write them: on cut sequences they compute what they compute on whole ones.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"
#include "trireme/recompute/recompute.h"
#include "trireme/sequence/sequence_parallel.h"

namespace trireme::sequence_programs {
namespace {

using at::Tensor;
constexpr int64_t kVocab = 23, kHeads = 4, kHeadSize = 4, kHidden = kHeads * kHeadSize;

Tensor drawn(at::IntArrayRef sizes, int seed) { return at::randn(sizes, at::detail::createCPUGenerator(seed)); }

/// Arguments of a program: weights of which every gradient is compared, a batch, and a cut of other tensors.
struct Program {
  std::map<std::string, Tensor> weights;
  SequenceInputs in;
  SequenceParallel* parallel = nullptr;  ///< none where the sequence is whole

  Tensor& operator[](const std::string& name) { return weights.at(name); }
  Tensor cut(const Tensor& tensor, int64_t dim) { return parallel ? parallel->cut(tensor, dim) : tensor; }
  SequenceInputs cut(const SequenceInputs& batch) { return parallel ? parallel->cut(batch) : batch; }

  Tensor heads(const Tensor& x, const std::string& name) {
    return at::linear(x, weights.at(name)).view({x.size(0), x.size(1), -1, kHeadSize}).transpose(1, 2);
  }
  Tensor layer(const Tensor& x, const std::optional<Tensor>& mask = {}) {
    const Tensor normed = at::layer_norm(x, {x.size(-1)}, weights.at("norm"));
    const Tensor attended = at::scaled_dot_product_attention(heads(normed, "query"), heads(normed, "key"),
                                                             heads(normed, "value"), mask, 0, !mask);
    const Tensor y = x + at::linear(attended.transpose(1, 2).reshape({x.size(0), x.size(1), -1}), weights.at("out"));
    return y + at::linear(at::gelu(at::linear(y, weights.at("up"))), weights.at("down"));
  }
  Tensor embedded() {
    return at::embedding(weights.at("tokens"), in.input_ids) + at::embedding(weights.at("positions"), in.position_ids);
  }
  Tensor hidden() { return layer(embedded()); }
  Tensor logits() { return at::linear(hidden(), weights.at("tokens")); }
};

/// A number that each element of `y` changes in another way.
Tensor mixed(const Tensor& y) {
  const double scale = 1 / std::sqrt(static_cast<double>(y.numel()));
  return (y * drawn(y.sizes(), 5)).sum() * scale + y.square().mean();
}

using LossOf = std::function<Tensor(Program&)>;

struct Run {
  int64_t batch = 2, length = 16;
  SequenceAttention attention = SequenceAttention::kUlysses;
  at::ScalarType type = at::kFloat;
};

Program program_of(const Run& run) {
  Program program;
  int seed = 7;
  const auto add = [&](const std::string& name, at::IntArrayRef sizes) {
    program.weights[name] = (drawn(sizes, ++seed) * 0.3).to(run.type).requires_grad_();
  };
  add("tokens", {kVocab, kHidden});
  add("positions", {64, kHidden});
  for (const char* name : {"query", "key", "value", "out", "square"}) add(name, {kHidden, kHidden});
  add("up", {3 * kHidden, kHidden});
  add("down", {kHidden, 3 * kHidden});
  add("norm", {kHidden});
  add("bias", {kHidden});
  add("wide", {kHidden, kHidden, 3});
  add("narrow", {kHidden, kHidden, 1});
  add("gates", {3 * kHidden, kHidden});
  add("recurrent", {3 * kHidden, kHidden});
  add("relative", {kHeads, 2 * 64});
  add("floats", {run.batch, run.length, kHidden});
  add("second", {kVocab, kHidden});
  const at::Generator generator = at::detail::createCPUGenerator(11);
  program.in.input_ids = at::randint(kVocab, {run.batch, run.length}, generator, at::kLong);
  program.in.labels = at::randint(kVocab, {run.batch, run.length}, generator, at::kLong);
  program.in.position_ids = at::arange(run.length, at::kLong).unsqueeze(0);
  program.in.attention_mask = at::ones({run.batch, run.length}, at::kLong);
  program.in.attention_mask[run.batch - 1].narrow(0, run.length - 5, 5).fill_(0);
  program.in.labels.masked_fill_(program.in.attention_mask.eq(0), -100);
  program.in.labels.narrow(1, 0, run.length / 2 - 1).fill_(-100);
  return program;
}

struct Result {
  double loss = 0;
  std::map<std::string, Tensor> gradients;
};

Result result_of(Program& program, const LossOf& loss_of) {
  const Tensor loss = loss_of(program);
  std::vector<Tensor> inputs;
  for (const auto& [name, weight] : program.weights) inputs.push_back(weight);
  const auto gradients = torch::autograd::grad({loss}, inputs, {}, {}, false, /*allow_unused=*/true);
  Result result{.loss = loss.item<double>(), .gradients = {}};
  size_t i = 0;
  for (const auto& [name, weight] : program.weights) {
    const Tensor& gradient = gradients[i++];
    result.gradients[name] =
        (gradient.defined() ? gradient.to(at::kDouble) : at::zeros(weight.sizes(), at::kDouble)).contiguous();
  }
  return result;
}

struct Named {
  const char* name;
  LossOf loss_of;
};

void expect_near(const Result& got, const Result& expected, double tolerance, const char* program) {
  EXPECT_NEAR(got.loss, expected.loss, tolerance * std::max(1.0, std::abs(expected.loss))) << program;
  for (const auto& [name, gradient] : expected.gradients) {
    const auto difference = (got.gradients.at(name) - gradient).abs().max().item<double>();
    EXPECT_LE(difference, tolerance * std::max(gradient.abs().max().item<double>(), 1e-2)) << program << ": " << name;
  }
}

/// Loss and gradients of a program on `ranks` ranks, of which each has a part of the sequence, are those of one.
void compare_on(int ranks, const Named& named, const Run& run) {
  Program whole = program_of(run);
  const Result expected = result_of(whole, named.loss_of);
  run_ranks(ranks, [&](Rank& rank) {
    at::set_num_threads(1);
    SequenceParallel parallel(rank.world(), run.attention);
    Program program = program_of(run);
    program.parallel = &parallel;
    program.in = parallel.cut(program.in);
    Result got = result_of(program, named.loss_of);
    for (auto& [name, gradient] : got.gradients) {
      rank.world().all_reduce(gradient).wait();
      gradient.div_(ranks);
    }
    expect_near(got, expected, run.type == at::kDouble ? 1e-12 : 2e-5, named.name);
  });
}

/// On two ranks, and every third program on more.
void compare(const std::vector<Named>& programs, Run run = {}) {
  int number = 0;
  for (const Named& named : programs) {
    try {
      run.length = 17;
      compare_on(2, named, run);
      if (number++ % 3 != 0) continue;
      compare_on(3, named, run);
      run.length = 19;
      compare_on(4, named, run);
    } catch (const std::exception& error) {
      ADD_FAILURE() << named.name << ": " << error.what();
    }
  }
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Several outputs of several parts, of which some are saved.
struct TwoOut : torch::autograd::Function<TwoOut> {
  static variable_list forward(AutogradContext* c, const Tensor& x, const Tensor& y) {
    const Tensor s = at::sigmoid(x);
    c->save_for_backward({s, y});
    return {s * y, s.sum(-1)};
  }
  static variable_list backward(AutogradContext* c, const variable_list& g) {
    const auto v = c->get_saved_variables();
    const Tensor gs = g[0] * v[1] + g[1].unsqueeze(-1);
    return {gs * v[0] * (1 - v[0]), g[0] * v[0]};
  }
};

/// A gradient that mixes tokens.
struct Softmaxed : torch::autograd::Function<Softmaxed> {
  static Tensor forward(AutogradContext* c, const Tensor& x) {
    const Tensor y = at::softmax(x, 1);
    c->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* c, const variable_list& g) {
    const Tensor y = c->get_saved_variables()[0];
    return {y * (g[0] - (g[0] * y).sum(1, true))};
  }
};

/// Straight-through rounding.
struct Straight : torch::autograd::Function<Straight> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x.round(); }
  static variable_list backward(AutogradContext*, const variable_list& g) { return {g[0]}; }
};

/// A reversed gradient.
struct Reverse : torch::autograd::Function<Reverse> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x.view_as(x); }
  static variable_list backward(AutogradContext*, const variable_list& g) { return {-0.5 * g[0]}; }
};

/// Writes into what it takes.
struct InPlace : torch::autograd::Function<InPlace> {
  static Tensor forward(AutogradContext* c, Tensor x) {
    c->mark_dirty({x});
    x.mul_(2);
    return x;
  }
  static variable_list backward(AutogradContext*, const variable_list& g) { return {g[0] * 2}; }
};

/// One of two outputs has no gradient.
struct NonDiff : torch::autograd::Function<NonDiff> {
  static variable_list forward(AutogradContext* c, const Tensor& x) {
    Tensor m = x.gt(0);
    c->mark_non_differentiable({m});
    c->save_for_backward({m});
    return {x * m, m};
  }
  static variable_list backward(AutogradContext* c, const variable_list& g) {
    return {g[0] * c->get_saved_variables()[0]};
  }
};

/// A recurrence written as a loop over tokens.
Tensor gru(Program& p, const Tensor& x) {
  Tensor h = at::zeros({x.size(0), kHidden}, x.options());
  std::vector<Tensor> out;
  for (int64_t t = 0; t < x.size(1); ++t) {
    const auto gx = at::linear(x.select(1, t), p["gates"]).chunk(3, -1),
               gh = at::linear(h, p["recurrent"]).chunk(3, -1);
    const Tensor r = at::sigmoid(gx[0] + gh[0]), z = at::sigmoid(gx[1] + gh[1]), n = at::tanh(gx[2] + r * gh[2]);
    h = (1 - z) * n + z * h;
    out.push_back(h);
  }
  return at::stack(out, 1);
}

Tensor alibi(Program& p) {
  const Tensor x = p.embedded();
  const int64_t n = x.size(1);
  const Tensor d = at::arange(n).unsqueeze(0) - at::arange(n).unsqueeze(1);
  const Tensor slopes = at::pow(2.0, -at::arange(1, kHeads + 1, at::kFloat)).view({-1, 1, 1});
  const Tensor bias = (slopes * d.abs().neg()).masked_fill(d.gt(0), -INFINITY);
  return mixed(p.layer(x, bias.unsqueeze(0)));
}

Tensor linear_attention(Program& p) {
  const Tensor x = p.embedded();
  const Tensor q = at::elu(p.heads(x, "query")) + 1, k = at::elu(p.heads(x, "key")) + 1, v = p.heads(x, "value");
  const Tensor kv = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2), z = k.cumsum(2);
  return mixed((q.unsqueeze(-2).matmul(kv)).squeeze(-2) / (q * z).sum(-1, true));
}

Tensor attention_in_windows(Program& p) {
  const Tensor x = p.embedded();
  std::vector<Tensor> y;
  for (int64_t s = 0; s < x.size(1); s += 6) {
    const Tensor c = x.slice(1, s, std::min(s + 6, x.size(1)));
    y.push_back(
        at::scaled_dot_product_attention(p.heads(c, "query"), p.heads(c, "key"), p.heads(c, "value"), {}, 0, true));
  }
  return mixed(at::cat(y, 2));
}

Tensor running_mean(Program& p) {
  const Tensor h = p.hidden();
  return mixed(h.cumsum(1) / at::arange(1, h.size(1) + 1).view({1, -1, 1}));
}

TEST(SequencePrograms, LossesAreOfAllTokens) {
  compare({
      {"masked ce by hand",
       [](Program& p) {
         const Tensor lp = at::log_softmax(p.logits(), -1);
         const Tensor keep = p.in.labels.ne(-100);
         const Tensor nll = -lp.gather(-1, p.in.labels.clamp_min(0).unsqueeze(-1)).squeeze(-1);
         return (nll * keep).sum() / keep.sum();
       }},
      {"label smoothing by hand",
       [](Program& p) {
         const Tensor lp = at::log_softmax(p.logits(), -1);
         const Tensor keep = p.in.labels.ne(-100);
         Tensor target = at::full_like(lp, 0.1 / (kVocab - 1));
         target = target.scatter(-1, p.in.labels.clamp_min(0).unsqueeze(-1), 0.9);
         return -(target * lp).sum(-1).masked_select(keep).mean();
       }},
      {"scatter inplace smoothing",
       [](Program& p) {
         const Tensor lp = at::log_softmax(p.logits(), -1);
         const Tensor keep = p.in.labels.ne(-100);
         Tensor target = at::zeros(lp.sizes()).fill_(0.1 / (kVocab - 1));
         target.scatter_(-1, p.in.labels.clamp_min(0).unsqueeze(-1), 0.9);
         return -(target * lp).sum(-1).masked_fill(keep.logical_not(), 0).sum() / keep.sum();
       }},
      {"ce prob targets",
       [](Program& p) {
         const Tensor l = p.logits();
         return at::cross_entropy_loss(l.flatten(0, 1),
                                       at::one_hot(p.in.labels.clamp_min(0).flatten(), kVocab).to(at::kFloat));
       }},
      {"ce bcs", [](Program& p) { return at::cross_entropy_loss(p.logits().transpose(1, 2), p.in.labels); }},
      {"ce none weights",
       [](Program& p) {
         const Tensor l =
             at::cross_entropy_loss(p.logits().flatten(0, 1), p.in.labels.flatten(), {}, at::Reduction::None)
                 .view_as(p.in.labels);
         const Tensor w = at::linspace(0.5, 2, p.in.labels.size(1));
         return (l * w).sum() / p.in.labels.ne(-100).sum();
       }},
      {"per sample weights",
       [](Program& p) {
         const Tensor l =
             at::cross_entropy_loss(p.logits().flatten(0, 1), p.in.labels.flatten(), {}, at::Reduction::None)
                 .view({p.in.labels.size(0), -1});
         const Tensor keep = p.in.labels.ne(-100);
         const Tensor w = at::arange(1, l.size(0) + 1, at::kFloat);
         return (l.sum(1) / keep.sum(1) * w).mean();
       }},
      {"no grad teacher",
       [](Program& p) {
         Tensor t;
         {
           at::NoGradGuard g;
           t = at::softmax(p.logits(), -1);
         }
         const Tensor l = at::log_softmax(at::linear(p.layer(p.embedded() * 0.9), p["second"]), -1);
         return at::kl_div(l, t, at::Reduction::Sum) / (l.size(0) * l.size(1));
       }},
      {"two heads",
       [](Program& p) {
         const Tensor h = p.hidden();
         return at::cross_entropy_loss(at::linear(h, p["tokens"]).flatten(0, 1), p.in.labels.flatten()) +
                0.3 *
                    at::cross_entropy_loss(at::linear(h.mean(1), p["second"]), p.in.input_ids.sum(1).remainder(kVocab));
       }},
      {"next two tokens",
       [](Program& p) {
         const Tensor l = p.logits(), m = at::linear(p.hidden(), p["second"]);
         return at::cross_entropy_loss(l.slice(1, 0, -1).reshape({-1, kVocab}),
                                       p.in.input_ids.slice(1, 1).reshape(-1)) +
                at::cross_entropy_loss(m.slice(1, 0, -2).reshape({-1, kVocab}), p.in.input_ids.slice(1, 2).reshape(-1));
       }},
      {"z loss",
       [](Program& p) {
         const Tensor l = p.logits();
         return at::cross_entropy_loss(l.flatten(0, 1), p.in.labels.flatten()) + 1e-2 * l.logsumexp(-1).square().mean();
       }},
      {"weight decay",
       [](Program& p) {
         Tensor s = mixed(p.hidden());
         for (auto& [n, w] : p.weights) s = s + 1e-2 * w.square().sum();
         return s;
       }},
      {"mse floats",
       [](Program& p) {
         const Tensor t = p.cut(drawn({p.in.input_ids.size(0), p.in.input_ids.size(1), kHidden}, 9), 1);
         return at::mse_loss(p.hidden(), t);
       }},
      {"mse whole target",
       [](Program& p) {
         return at::mse_loss(p.hidden(), drawn({p.in.input_ids.size(0), p.in.input_ids.size(1), kHidden}, 9));
       }},
      {"bce tokens",
       [](Program& p) {
         const Tensor l = at::matmul(p.hidden(), p["bias"]);
         return at::binary_cross_entropy_with_logits(l, p.in.input_ids.lt(9).to(at::kFloat), {}, at::tensor(2.0f));
       }},
      {"cosine pairs",
       [](Program& p) {
         const Tensor h = p.hidden();
         return at::cosine_similarity(h, h.flip({1}), -1).mean() +
                mixed(at::cosine_similarity(h, p["bias"].view({1, 1, -1}), -1));
       }},
      {"contrastive pool",
       [](Program& p) {
         const Tensor h = p.hidden().mean(1), g = at::linear(h, p["square"]);
         return at::cross_entropy_loss(at::matmul(h, g.t()), at::arange(h.size(0))) + mixed(h);
       }},
      {"hinge ranking",
       [](Program& p) {
         const Tensor s = at::matmul(p.hidden(), p["bias"]);
         return at::relu(1 - s.unsqueeze(2) + s.unsqueeze(1)).mean();
       }},
      {"size arith",
       [](Program& p) {
         const Tensor h = p.hidden();
         return (h * drawn(h.sizes(), 3)).sum() / h.size(1) + h.square().sum() / h.numel();
       }},
  });
}

TEST(SequencePrograms, PoolingIsOfAllTokens) {
  compare({
      {"masked mean",
       [](Program& p) {
         const Tensor m = p.in.attention_mask.to(at::kFloat);
         const Tensor h = p.hidden();
         return mixed((h * m.unsqueeze(-1)).sum(1) / m.sum(1, true).clamp_min(1));
       }},
      {"masked max pool",
       [](Program& p) {
         return mixed(std::get<0>(p.hidden().masked_fill(p.in.attention_mask.eq(0).unsqueeze(-1), -1e9).max(1)));
       }},
      {"max pool max dim", [](Program& p) { return mixed(std::get<0>(p.hidden().max(1))); }},
      {"last token gather",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor last = p.in.attention_mask.sum(1) - 1;
         return mixed(h.gather(1, last.view({-1, 1, 1}).expand({-1, 1, h.size(2)})).squeeze(1));
       }},
      {"last token index",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor last = p.in.attention_mask.sum(1) - 1;
         return mixed(at::index(h, {at::arange(h.size(0)), last}));
       }},
      {"last token onehot",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor last = p.in.attention_mask.sum(1) - 1;
         const Tensor hot = at::arange(h.size(1)).unsqueeze(0).eq(last.unsqueeze(1)).to(h.dtype());
         return mixed((h * hot.unsqueeze(-1)).sum(1));
       }},
      {"eos argmax ids",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor i = p.in.input_ids.argmax(-1);
         return mixed(at::index(h, {at::arange(h.size(0)), i}));
       }},
      {"adaptive pool", [](Program& p) { return mixed(at::adaptive_avg_pool1d(p.hidden().transpose(1, 2), 1)); }},
      {"norm tokens", [](Program& p) { return mixed(p.hidden().norm(2, {1})); }},
      {"std", [](Program& p) { return mixed(p.hidden().std(1)); }},
      {"quantile", [](Program& p) { return mixed(at::quantile(p.hidden(), 0.3, 1)); }},
      {"count per sample index",
       [](Program& p) {
         const Tensor h = p.hidden();
         Tensor l = at::zeros({});
         for (int64_t b = 0; b < h.size(0); ++b) {
           const int64_t n = p.in.attention_mask[b].sum().item<int64_t>();
           l = l + mixed(h[b].slice(0, 0, n));
         }
         return l;
       }},
      {"nested lists cat",
       [](Program& p) {
         const Tensor h = p.hidden();
         std::vector<Tensor> rows;
         for (int64_t b = 0; b < h.size(0); ++b)
           rows.push_back(h[b].slice(0, 0, p.in.attention_mask[b].sum().item<int64_t>()));
         return mixed(at::linear(at::cat(rows, 0), p["square"]).tanh());
       }},
  });
}

TEST(SequencePrograms, PositionsAndMasksAreThoseOfAllTokens) {
  compare({
      {"arange positions",
       [](Program& p) {
         const Tensor x = at::embedding(p["tokens"], p.in.input_ids);
         return mixed(p.layer(x + at::embedding(p["positions"], at::arange(x.size(1)))));
       }},
      {"positions slice weight",
       [](Program& p) {
         const Tensor x = at::embedding(p["tokens"], p.in.input_ids);
         return mixed(p.layer(x + p["positions"].slice(0, 0, x.size(1))));
       }},
      {"positions cumsum mask",
       [](Program& p) {
         const Tensor pos = (p.in.attention_mask.cumsum(1) - 1).clamp_min(0);
         return mixed(p.layer(at::embedding(p["tokens"], p.in.input_ids) + at::embedding(p["positions"], pos)));
       }},
      {"sinusoid",
       [](Program& p) {
         const Tensor x = at::embedding(p["tokens"], p.in.input_ids);
         Tensor pe = at::zeros({x.size(1), kHidden});
         const Tensor t = at::arange(x.size(1), at::kFloat).unsqueeze(1),
                      f = at::exp(at::arange(0, kHidden, 2, at::kFloat) * (-std::log(10000.0) / kHidden));
         pe.slice(1, 0, {}, 2).copy_(at::sin(t * f));
         pe.slice(1, 1, {}, 2).copy_(at::cos(t * f));
         return mixed(p.layer(x + pe.unsqueeze(0)));
       }},
      {"rotary half",
       [](Program& p) {
         const Tensor x = p.embedded();
         const Tensor f = at::pow(10000.0, -at::arange(0, kHeadSize, 2, at::kFloat) / kHeadSize);
         const Tensor a = p.in.position_ids.to(at::kFloat).unsqueeze(-1) * f;
         const Tensor e = at::cat({a, a}, -1).unsqueeze(1);
         const auto turn = [&](const Tensor& q) {
           return q * e.cos() + at::cat({-q.slice(-1, kHeadSize / 2), q.slice(-1, 0, kHeadSize / 2)}, -1) * e.sin();
         };
         return mixed(at::scaled_dot_product_attention(turn(p.heads(x, "query")), turn(p.heads(x, "key")),
                                                       p.heads(x, "value"), {}, 0, true));
       }},
      {"rotary arange interleaved",
       [](Program& p) {
         const Tensor x = p.embedded();
         const Tensor f = at::pow(10000.0, -at::arange(0, kHeadSize, 2, at::kFloat) / kHeadSize);
         const Tensor a = at::outer(at::arange(x.size(1), at::kFloat), f);
         const auto turn = [&](const Tensor& q) {
           const Tensor e = q.slice(-1, 0, {}, 2), o = q.slice(-1, 1, {}, 2);
           return at::stack({e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()}, -1).flatten(-2);
         };
         return mixed(at::scaled_dot_product_attention(turn(p.heads(x, "query")), turn(p.heads(x, "key")),
                                                       p.heads(x, "value"), {}, 0, true));
       }},
      {"rotary complex",
       [](Program& p) {
         const Tensor x = p.embedded();
         const Tensor f = at::pow(10000.0, -at::arange(0, kHeadSize, 2, at::kFloat) / kHeadSize);
         const Tensor a = at::outer(at::arange(x.size(1), at::kFloat), f);
         const Tensor c = at::polar(at::ones_like(a), a);
         const auto turn = [&](const Tensor& q) {
           return at::view_as_real(
                      at::view_as_complex(q.reshape({q.size(0), q.size(1), q.size(2), -1, 2}).contiguous()) * c)
               .flatten(3);
         };
         return mixed(at::scaled_dot_product_attention(turn(p.heads(x, "query")), turn(p.heads(x, "key")),
                                                       p.heads(x, "value"), {}, 0, true));
       }},
      {"alibi", &alibi},
      {"relative bias sdpa grad",
       [](Program& p) {
         const Tensor x = p.embedded();
         const int64_t n = x.size(1);
         const Tensor d = at::arange(n).unsqueeze(0) - at::arange(n).unsqueeze(1) + 64;
         return mixed(p.layer(x, p["relative"].index_select(1, d.flatten()).view({1, kHeads, n, n})));
       }},
      {"causal tril padding",
       [](Program& p) {
         const Tensor x = p.embedded();
         const int64_t n = x.size(1);
         const Tensor c = at::ones({n, n}, at::kBool).tril();
         return mixed(p.layer(
             x, c.unsqueeze(0).unsqueeze(0).logical_and(p.in.attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1))));
       }},
      {"window mask",
       [](Program& p) {
         const Tensor x = p.embedded();
         const int64_t n = x.size(1);
         return mixed(p.layer(x, at::ones({n, n}, at::kBool).tril().logical_and(at::ones({n, n}, at::kBool).triu(-3))));
       }},
      {"fill diagonal mask",
       [](Program& p) {
         const Tensor x = p.embedded();
         const int64_t n = x.size(1);
         Tensor m = at::zeros({n, n}, at::kBool);
         for (int64_t i = 0; i < n; ++i) m[i].slice(0, std::max<int64_t>(0, i - 2), i + 1).fill_(true);
         return mixed(p.layer(x, m));
       }},
      {"packed documents",
       [](Program& p) {
         const Tensor doc = p.in.input_ids.eq(3).cumsum(1);
         return mixed(p.layer(p.embedded(), doc.unsqueeze(2).eq(doc.unsqueeze(1)).tril().unsqueeze(1)));
       }},
  });
}

TEST(SequencePrograms, AttentionWrittenOutIsOfAllTokens) {
  compare({
      {"relative bias written",
       [](Program& p) {
         const Tensor x = p.embedded();
         const int64_t n = x.size(1);
         const Tensor d = at::arange(n).unsqueeze(0) - at::arange(n).unsqueeze(1) + 64;
         const Tensor s = at::matmul(p.heads(x, "query"), p.heads(x, "key").transpose(-2, -1)) / 2 +
                          at::index(p["relative"], {at::arange(kHeads).view({-1, 1, 1}), d});
         return mixed(at::matmul(at::softmax(s, -1), p.heads(x, "value")));
       }},
      {"written attention padding",
       [](Program& p) {
         const Tensor x = p.embedded();
         const Tensor m = (1 - p.in.attention_mask.to(at::kFloat)).unsqueeze(1).unsqueeze(2) * -1e9;
         const Tensor s = at::matmul(p.heads(x, "query"), p.heads(x, "key").transpose(-2, -1)) / 2 + m;
         return mixed(
             at::matmul(at::softmax(s, -1), p.heads(x, "value")).transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
       }},
      {"written attention bmm",
       [](Program& p) {
         const Tensor x = p.embedded();
         const int64_t B = x.size(0), n = x.size(1);
         const Tensor q = p.heads(x, "query").reshape({B * kHeads, n, kHeadSize}),
                      k = p.heads(x, "key").reshape({B * kHeads, n, kHeadSize}),
                      v = p.heads(x, "value").reshape({B * kHeads, n, kHeadSize});
         const Tensor s = at::baddbmm(at::ones({n, n}).triu(1).unsqueeze(0) * -1e9, q, k.transpose(1, 2), 1, 0.5);
         return mixed(at::bmm(at::softmax(s, -1), v).view({B, kHeads, n, kHeadSize}).transpose(1, 2).flatten(2));
       }},
      {"written attention einsum",
       [](Program& p) {
         const Tensor x = p.embedded();
         const int64_t n = x.size(1);
         Tensor s = at::einsum("bhid,bhjd->bhij", {p.heads(x, "query"), p.heads(x, "key")});
         s.masked_fill_(at::ones({n, n}, at::kBool).triu(1), -1e9);
         return mixed(at::einsum("bhij,bhjd->bihd", {at::softmax(s, -1), p.heads(x, "value")}));
       }},
      {"linear attention causal", &linear_attention},
      {"gqa expand",
       [](Program& p) {
         const Tensor x = p.embedded();
         const auto wide = [&](const Tensor& k) {
           return k.slice(1, 0, 2)
               .unsqueeze(2)
               .expand({x.size(0), 2, 2, x.size(1), kHeadSize})
               .reshape({x.size(0), 4, x.size(1), kHeadSize});
         };
         return mixed(at::scaled_dot_product_attention(p.heads(x, "query"), wide(p.heads(x, "key")),
                                                       wide(p.heads(x, "value")), {}, 0, true));
       }},
      {"memory attention",
       [](Program& p) {
         const Tensor a = p.embedded();
         const Tensor m = p["second"].slice(0, 0, 6).unsqueeze(0).expand({a.size(0), -1, -1});
         return mixed(at::scaled_dot_product_attention(p.heads(a, "query"), p.heads(m, "key"), p.heads(m, "value")));
       }},
      {"latent queries",
       [](Program& p) {
         const Tensor a = p.embedded();
         const Tensor m = p["second"].slice(0, 0, 6).unsqueeze(0).expand({a.size(0), -1, -1});
         return mixed(at::scaled_dot_product_attention(p.heads(m, "query"), p.heads(a, "key"), p.heads(a, "value")));
       }},
      {"cross attention two lengths",
       [](Program& p) {
         const Tensor a = p.embedded();
         const Tensor ids = p.cut(at::arange(2 * 13).view({2, 13}).remainder(kVocab), 1);
         const Tensor b = at::embedding(p["tokens"], ids).slice(0, 0, a.size(0));
         return mixed(at::scaled_dot_product_attention(p.heads(a, "query"), p.heads(b, "key"), p.heads(b, "value")));
       }},
      {"chunked attention windows", &attention_in_windows},
      {"blocks pad view attention",
       [](Program& p) {
         const Tensor x = p.embedded();
         const int64_t n = (x.size(1) + 3) / 4;
         const Tensor y = at::pad(x, {0, 0, 0, 4 * n - x.size(1)}).reshape({x.size(0) * n, 4, kHidden});
         return mixed(p.layer(y).reshape({x.size(0), 4 * n, kHidden}).slice(1, 0, x.size(1)));
       }},
  });
}

TEST(SequencePrograms, TokensAreMovedAsInOneSequence) {
  compare({
      {"windows unfold", [](Program& p) { return mixed(p.hidden().unfold(1, 4, 2).mean(-1)); }},
      {"strided odd", [](Program& p) { return mixed(p.hidden().slice(1, 1, {}, 3)); }},
      {"pairs view",
       [](Program& p) {
         const Tensor h = p.hidden();
         const int64_t n = h.size(1) / 2;
         return mixed(h.slice(1, 0, 2 * n).reshape({h.size(0), n, 2 * kHidden}).mean(1));
       }},
      {"blocks mean",
       [](Program& p) {
         const Tensor h = p.hidden();
         const int64_t n = h.size(1) / 4;
         return mixed(h.slice(1, 0, 4 * n).reshape({h.size(0), n, 4, kHidden}).mean(2));
       }},
      {"flip bidirectional",
       [](Program& p) {
         const Tensor e = p.embedded();
         return mixed(at::cat({p.layer(e), p.layer(e.flip({1})).flip({1})}, -1));
       }},
      {"token shift pad",
       [](Program& p) {
         const Tensor e = p.embedded();
         const Tensor s = at::pad(e, {0, 0, 1, -1});
         return mixed(p.layer(e * 0.5 + s * 0.5));
       }},
      {"token shift cat",
       [](Program& p) {
         const Tensor e = p.embedded();
         const Tensor s = at::cat({at::zeros({e.size(0), 1, e.size(2)}), e.slice(1, 0, -1)}, 1);
         return mixed(p.layer(e * 0.5 + s * 0.5));
       }},
      {"cls prepend",
       [](Program& p) {
         const Tensor e = p.embedded();
         const Tensor x = at::cat({p["bias"].view({1, 1, -1}).expand({e.size(0), 1, -1}), e}, 1);
         return mixed(p.layer(x).select(1, 0));
       }},
      {"diff",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(h.slice(1, 1) - h.slice(1, 0, -1));
       }},
      {"pad reflect",
       [](Program& p) {
         return mixed(at::pad(p.hidden().transpose(1, 2), {2, 2}, "reflect"));
       }},
      {"chunk",
       [](Program& p) {
         const auto c = p.hidden().chunk(3, 1);
         Tensor t = c[0].mean(1);
         for (size_t i = 1; i < c.size(); ++i) t = t * 0.5 + c[i].mean(1);
         return mixed(t);
       }},
      {"split sizes",
       [](Program& p) {
         const Tensor h = p.hidden();
         const auto c = h.split_with_sizes({3, h.size(1) - 3}, 1);
         return mixed(c[0].sum(1)) + mixed(c[1]);
       }},
      {"unbind stack",
       [](Program& p) {
         const auto c = p.hidden().unbind(1);
         std::vector<Tensor> y;
         for (size_t i = 0; i < c.size(); ++i) y.push_back(c[c.size() - 1 - i].tanh());
         return mixed(at::stack(y, 1));
       }},
      {"repeat tokens",
       [](Program& p) {
         return mixed(p.hidden().repeat({1, 2, 1}));
       }},
      {"repeat interleave tokens", [](Program& p) { return mixed(p.hidden().repeat_interleave(2, 1)); }},
      {"merge tokens features linear",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor f = h.reshape({h.size(0), -1});
         return mixed(at::linear(f, drawn({5, f.size(1)}, 8)));
       }},
      {"heads merged",
       [](Program& p) {
         const Tensor x = p.embedded();
         const Tensor q = p.heads(x, "query");
         return mixed(
             q.permute({2, 0, 1, 3}).reshape({x.size(1), -1}).unflatten(1, {x.size(0), kHeads, kHeadSize}).sum(2));
       }},
      {"swin shift",
       [](Program& p) {
         const Tensor x = p.embedded().slice(1, 0, 16).roll(-2, 1);
         const Tensor y = p.layer(x.reshape({x.size(0) * 4, 4, kHidden})).reshape({x.size(0), 16, kHidden}).roll(2, 1);
         return mixed(y);
       }},
      {"permute tokens",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor o = at::randperm(h.size(1), at::detail::createCPUGenerator(3), at::kLong);
         return mixed(p.layer(h.index({at::indexing::Slice(), o})));
       }},
      {"take along dim",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor o = p.in.input_ids.argsort(1, false);
         return mixed(at::take_along_dim(h, o.unsqueeze(-1), 1));
       }},
      {"random masking mae",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor o = drawn({h.size(0), h.size(1)}, 8).argsort(1, false).slice(1, 0, h.size(1) / 2);
         return mixed(h.gather(1, o.unsqueeze(-1).expand({-1, -1, kHidden})));
       }},
      {"tokens dim2",
       [](Program& p) {
         const Tensor t = p.cut(drawn({p.in.input_ids.size(0), 3, p.in.input_ids.size(1), kHidden}, 9), 2);
         const Tensor y = at::linear(t, p["square"], p["bias"]);
         return mixed(p.layer(y.mean(1))) + mixed(y.sum(2));
       }},
      {"tokens dim2 attention",
       [](Program& p) {
         const Tensor t = p.cut(drawn({p.in.input_ids.size(0), kHeads, p.in.input_ids.size(1), kHidden}, 9), 2);
         return mixed(at::scaled_dot_product_attention(at::linear(t, p["query"]), at::linear(t, p["key"]),
                                                       at::linear(t, p["value"]), {}, 0, true));
       }},
      {"tokens dim0",
       [](Program& p) {
         const Tensor t = p.cut(drawn({p.in.input_ids.size(1), kHidden}, 9), 0);
         const Tensor y = at::linear(t, p["square"], p["bias"]);
         return mixed(y.softmax(0) * 5) + mixed(at::matmul(y.t(), y));
       }},
  });
}

TEST(SequencePrograms, TokensAreMixedAsInOneSequence) {
  compare({
      {"cummean sizes", &running_mean},
      {"logcumsumexp", [](Program& p) { return mixed(p.hidden().logcumsumexp(1)); }},
      {"sort", [](Program& p) { return mixed(std::get<0>(p.hidden().sort(1))); }},
      {"topk values", [](Program& p) { return mixed(std::get<0>(p.hidden().topk(3, 1))); }},
      {"median", [](Program& p) { return mixed(std::get<0>(p.hidden().median(1))); }},
      {"batch norm flat",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(at::batch_norm(h.reshape({-1, kHidden}), p["norm"], p["bias"], {}, {}, true, 0.1, 1e-5, false));
       }},
      {"group norm",
       [](Program& p) { return mixed(at::group_norm(p.hidden().transpose(1, 2), 4, p["norm"], p["bias"])); }},
      {"instance norm",
       [](Program& p) {
         return mixed(
             at::instance_norm(p.hidden().transpose(1, 2), p["norm"], p["bias"], {}, {}, true, 0.1, 1e-5, false));
       }},
      {"rms norm",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(h * at::rsqrt(h.square().mean(-1, true) + 1e-5) * p["norm"]);
       }},
      {"conv 3 causal",
       [](Program& p) {
         const Tensor e = at::pad(p.embedded().transpose(1, 2), {2, 0});
         return mixed(p.layer(at::conv1d(e, p["wide"], p["bias"]).transpose(1, 2)));
       }},
      {"conv depthwise",
       [](Program& p) {
         return mixed(at::conv1d(p.hidden().transpose(1, 2), p["wide"].slice(1, 0, 1), p["bias"], 1, 1, 1, kHidden));
       }},
      {"conv by shifts",
       [](Program& p) {
         const Tensor x = at::pad(p.hidden(), {0, 0, 2, 0});
         const int64_t n = x.size(1) - 2;
         Tensor y = at::matmul(x.slice(1, 0, n), p["wide"].select(2, 0));
         for (int k = 1; k < 3; ++k) y = y + at::matmul(x.slice(1, k, n + k), p["wide"].select(2, k));
         return mixed(y);
       }},
      {"gru loop masked",
       [](Program& p) {
         const Tensor x = p.embedded();
         Tensor h = at::zeros({x.size(0), kHidden});
         for (int64_t t = 0; t < x.size(1); ++t) {
           const Tensor n = at::tanh(at::linear(x.select(1, t), p["square"]) + at::linear(h, p["out"]));
           h = at::where(p.in.attention_mask.select(1, t).to(at::kBool).unsqueeze(-1), n, h);
         }
         return mixed(h);
       }},
      {"mixer weight",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor w = at::matmul(p["positions"], p["positions"].t()).slice(0, 0, h.size(1)).slice(1, 0, h.size(1));
         return mixed(at::matmul(w, h));
       }},
      {"associative scan",
       [](Program& p) {
         Tensor a = p.hidden().sigmoid(), b = p.hidden();
         for (int64_t k = 1; k < a.size(1); k *= 2) {
           const Tensor pa = at::pad(a.slice(1, 0, -k), {0, 0, k, 0}, "constant", 1),
                        pb = at::pad(b.slice(1, 0, -k), {0, 0, k, 0});
           b = b + a * pb;
           a = a * pa;
         }
         return mixed(b);
       }},
      {"outer tokens add",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(at::linear(h, p["square"]).unsqueeze(2) + at::linear(h, p["out"]).unsqueeze(1));
       }},
      {"feature covariance",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(at::einsum("bsd,bse->bde", {h, h}) / h.size(1));
       }},
  });
}

TEST(SequencePrograms, TokensAreTakenAndWrittenAsInOneSequence) {
  compare({
      {"token dropout where",
       [](Program& p) {
         const Tensor e = p.embedded();
         const Tensor drop = p.in.input_ids.remainder(3).eq(0).unsqueeze(-1);
         return mixed(p.layer(at::where(drop, at::zeros_like(e), e)));
       }},
      {"segment sum out of place",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor seg = at::arange(h.size(1)).div(4, "floor");
         return mixed(at::zeros({h.size(0), 5, kHidden}).index_add(1, seg, h));
       }},
      {"segment scatter add",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor seg = p.in.input_ids.remainder(5).unsqueeze(-1).expand_as(h);
         return mixed(at::zeros({h.size(0), 5, kHidden}).scatter_add(1, seg, h));
       }},
      {"scatter reduce",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor seg = p.in.input_ids.remainder(5).unsqueeze(-1).expand_as(h);
         return mixed(at::zeros({h.size(0), 5, kHidden}).scatter_reduce(1, seg, h, "mean", false));
       }},
      {"flat index add ids",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(at::zeros({kVocab, kHidden}).index_add(0, p.in.input_ids.flatten(), h.flatten(0, 1)));
       }},
      {"mask take layer back",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor k = p.in.attention_mask.to(at::kBool);
         const Tensor y = at::linear(at::index(h, {k}), p["square"]).tanh();
         Tensor o = at::zeros_like(h);
         o.index_put_({k}, y);
         return mixed(o + h);
       }},
      {"index put images",
       [](Program& p) {
         Tensor e = p.embedded().clone();
         const Tensor k = p.in.input_ids.lt(6);
         const int64_t n = k.sum().item<int64_t>();
         e.index_put_({k}, p["positions"].slice(0, 0, n));
         return mixed(p.layer(e));
       }},
      {"nonzero flat index select",
       [](Program& p) {
         const Tensor h = p.hidden().flatten(0, 1);
         const Tensor i = p.in.labels.flatten().ne(-100).nonzero().squeeze(-1);
         return mixed(h.index_select(0, i));
       }},
      {"moe loop",
       [](Program& p) {
         const Tensor h = p.hidden().reshape({-1, kHidden});
         const Tensor g = at::softmax(at::linear(h, p["square"].slice(0, 0, 3)), -1);
         const auto [w, e] = g.max(-1);
         Tensor out = at::zeros_like(h);
         for (int64_t k = 0; k < 3; ++k) {
           const Tensor rows = e.eq(k).nonzero().squeeze(-1);
           if (rows.numel() == 0) continue;
           const Tensor y = at::linear(h.index_select(0, rows), p["up"].slice(0, 16 * k, 16 * (k + 1))) *
                            w.index_select(0, rows).unsqueeze(-1);
           out.index_add_(0, rows, y);
         }
         return mixed(out.view({-1, p.in.input_ids.size(1), kHidden}));
       }},
      {"moe top2 where",
       [](Program& p) {
         const Tensor h = p.hidden().reshape({-1, kHidden});
         const auto [w, e] = at::softmax(at::linear(h, p["square"].slice(0, 0, 3)), -1).topk(2, -1);
         Tensor out = at::zeros_like(h);
         for (int64_t k = 0; k < 3; ++k) {
           const auto ij = at::where(e.eq(k));
           const Tensor y = at::linear(at::index(h, {ij[0]}), p["up"].slice(0, 16 * k, 16 * (k + 1))) *
                            at::index(w, {ij[0], ij[1]}).unsqueeze(-1);
           out.index_add_(0, ij[0], y);
         }
         return mixed(out);
       }},
      {"moe capacity cumsum",
       [](Program& p) {
         const Tensor h = p.hidden().reshape({-1, kHidden});
         const Tensor g = at::softmax(at::linear(h, p["square"].slice(0, 0, 3)), -1);
         const Tensor hot = at::one_hot(g.argmax(-1), 3);
         const Tensor place = hot.cumsum(0) * hot;
         const Tensor keep = place.le(6).logical_and(hot.to(at::kBool));
         return mixed((g * keep).sum(-1, true) * h);
       }},
      {"moe sorted",
       [](Program& p) {
         const Tensor h = p.hidden().reshape({-1, kHidden});
         const Tensor g = at::softmax(at::linear(h, p["square"].slice(0, 0, 3)), -1);
         const Tensor e = g.argmax(-1);
         const Tensor o = e.argsort(true, -1, false);
         const Tensor y = h.index_select(0, o);
         return mixed(at::zeros_like(h).index_copy(0, o, y.tanh()) * g.amax(-1, true));
       }},
      {"inplace mul add",
       [](Program& p) {
         Tensor h = p.hidden();
         h.mul_(0.5).add_(p["bias"]);
         h.tanh_();
         return mixed(h);
       }},
      {"inplace zeros by parts",
       [](Program& p) {
         const Tensor h = p.hidden();
         Tensor o = at::zeros({h.size(0), h.size(1), 2 * kHidden});
         o.slice(2, 0, kHidden).copy_(h);
         o.slice(2, kHidden).copy_(h.flip({1}));
         return mixed(o);
       }},
      {"shift right labels inplace",
       [](Program& p) {
         Tensor ids = at::zeros_like(p.in.input_ids);
         ids.slice(1, 1).copy_(p.in.input_ids.slice(1, 0, -1));
         ids.select(1, 0).fill_(2);
         return mixed(p.layer(at::embedding(p["tokens"], ids)));
       }},
      {"write select then sum",
       [](Program& p) {
         const Tensor h = p.hidden();
         Tensor o = at::zeros({h.size(0), h.size(1), kHidden});
         o.select(1, 3).copy_(h.select(1, 5));
         return mixed(o) + mixed(o + h);
       }},
      {"write twice",
       [](Program& p) {
         const Tensor h = p.hidden();
         Tensor o = at::zeros({h.size(0), h.size(1), kHidden});
         o.add_(h);
         o.add_(drawn(o.sizes(), 4));
         o.mul_(p["bias"]);
         return mixed(o);
       }},
      {"write whole ids after cut",
       [](Program& p) {
         Tensor ids = p.in.input_ids;
         ids.slice(1, 2, 5).fill_(1);
         ids.masked_fill_(ids.eq(3), 4);
         return mixed(p.layer(at::embedding(p["tokens"], ids)));
       }},
      {"zero selected on rank",
       [](Program& p) {
         Tensor k = at::zeros_like(p.in.input_ids);
         k.slice(1, 0, 2).fill_(1);
         const Tensor y = at::index(p.hidden(), {k.to(at::kBool)});
         return mixed(at::linear(y, p["square"]));
       }},
      {"selected softmax",
       [](Program& p) {
         const Tensor y = at::index(p.hidden(), {p.in.labels.ne(-100)});
         return mixed(at::softmax(y, 0) * 5) + mixed(y.cumsum(0));
       }},
      {"selected select",
       [](Program& p) {
         const Tensor y = at::index(p.hidden(), {p.in.labels.ne(-100)});
         return mixed(y[0] + y.select(0, -1)) + mixed(y.slice(0, 1, 3));
       }},
      {"selected by activations count",
       [](Program& p) {
         const Tensor h = p.hidden();
         const Tensor y = at::index(h, {h.select(2, 1).gt(0)});
         return y.square().sum() / y.size(0) + mixed(y);
       }},
  });
}

TEST(SequencePrograms, WhatAProgramDecidesByNumbersIsAlike) {
  compare({
      {"branch on sum",
       [](Program& p) {
         const Tensor h = p.hidden();
         if (h.sum().item<double>() > h.abs().max().item<double>()) return mixed(h);
         return mixed(h * 3);
       }},
      {"branch on count",
       [](Program& p) {
         const Tensor h = p.hidden();
         const int64_t n = p.in.attention_mask.sum().item<int64_t>();
         return mixed(h) * n / p.in.attention_mask.numel();
       }},
      {"max length trim",
       [](Program& p) {
         const Tensor h = p.hidden();
         const int64_t n = p.in.attention_mask.select(0, p.in.attention_mask.size(0) - 1).sum().item<int64_t>();
         return mixed(h.slice(1, 0, n));
       }},
      {"trim inputs",
       [](Program& p) {
         const int64_t n = p.in.attention_mask.select(0, p.in.attention_mask.size(0) - 1).sum().item<int64_t>();
         return mixed(p.layer(at::embedding(p["tokens"], p.in.input_ids.slice(1, 0, n)) +
                              at::embedding(p["positions"], p.in.position_ids.slice(1, 0, n))));
       }},
      {"argmax vocab accuracy",
       [](Program& p) {
         const Tensor l = p.logits();
         const double acc = l.argmax(-1).eq(p.in.input_ids).to(at::kFloat).mean().item<double>();
         return mixed(l) * (1 + acc);
       }},
      {"item of element",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(h) * (1 + h[0][5][2].item<double>());
       }},
      {"accessor ids",
       [](Program& p) {
         const auto a = p.in.input_ids.accessor<int64_t, 2>();
         int64_t s = 0;
         for (int64_t t = 0; t < a.size(1); ++t) s += a[0][t];
         return mixed(p.hidden()) * (1 + s / 100.0);
       }},
      {"any nan guard",
       [](Program& p) {
         const Tensor h = p.hidden();
         if (at::isnan(h).any().item<bool>() || at::isfinite(h).logical_not().any().item<bool>()) return mixed(h * 0);
         return mixed(h);
       }},
      {"two batches",
       [](Program& p) {
         const Tensor a = p.hidden();
         SequenceInputs o{.input_ids = at::randint(kVocab, {3, 12}, at::detail::createCPUGenerator(4), at::kLong),
                          .position_ids = at::arange(12).unsqueeze(0)};
         const auto b = p.cut(o);
         const Tensor x =
             p.layer(at::embedding(p["tokens"], b.input_ids) + at::embedding(p["positions"], b.position_ids));
         return mixed(a) + mixed(x) + (a.mean(1).sum(0) * x.mean(1).sum(0)).sum();
       }},
      {"float inputs",
       [](Program& p) {
         const Tensor x = p.cut(p["floats"], 1);
         return mixed(p.layer(x + at::embedding(p["positions"], p.in.position_ids)));
       }},
      {"float inputs plain", [](Program& p) { return mixed(p.layer(p.embedded() + p["floats"])); }},
  });
}

TEST(SequencePrograms, GradientsGoThroughFunctionsHooksAndRecomputation) {
  compare({
      {"detach target",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(h - h.detach().mean(1, true)) + (h - h.roll(1, 1).detach()).square().mean();
       }},
      {"fn two out",
       [](Program& p) {
         const Tensor h = p.hidden();
         const auto o = TwoOut::apply(h, h.flip({1}));
         return mixed(o[0]) + mixed(o[1]);
       }},
      {"fn two out one used",
       [](Program& p) {
         const Tensor h = p.hidden();
         const auto o = TwoOut::apply(h, h * 2);
         return mixed(o[0]);
       }},
      {"fn softmax tokens", [](Program& p) { return mixed(Softmaxed::apply(p.hidden()) * 10); }},
      {"fn straight", [](Program& p) { return mixed(Straight::apply(p.hidden() * 4)); }},
      {"fn reverse",
       [](Program& p) {
         const Tensor h = p.hidden();
         return mixed(h) + mixed(at::linear(Reverse::apply(h), p["square"]));
       }},
      {"fn inplace", [](Program& p) { return mixed(InPlace::apply(p.hidden() * 1)); }},
      {"fn nondiff",
       [](Program& p) {
         const auto o = NonDiff::apply(p.hidden());
         return mixed(o[0]) + o[1].to(at::kFloat).mean();
       }},
      {"hook mean tokens",
       [](Program& p) {
         const Tensor h = p.hidden() * 1;
         h.register_hook([](Tensor g) { return g - g.mean(1, true); });
         return mixed(h.tanh());
       }},
      {"hook weight",
       [](Program& p) {
         p["square"].register_hook([](Tensor g) { return g * 2; });
         return mixed(at::linear(p.hidden(), p["square"]));
       }},
      {"fgsm",
       [](Program& p) {
         const Tensor x = p.embedded();
         const Tensor d = x.detach().clone().requires_grad_();
         const Tensor g = torch::autograd::grad({mixed(p.layer(d))}, {d})[0];
         return mixed(p.layer(x + 0.1 * g.sign()));
       }},
      {"recompute mixers",
       [](Program& p) {
         const Tensor x = p.embedded();
         return mixed(recompute(
             [&p](const Tensor& y) {
               const Tensor z = y.cumsum(1) / at::arange(1, y.size(1) + 1).view({1, -1, 1});
               return z + y.roll(1, 1) * at::softmax(y, 1) + Softmaxed::apply(y);
             },
             p.layer(x)));
       }},
      {"recompute mask take",
       [](Program& p) {
         const Tensor x = p.embedded();
         return mixed(recompute(
             [&p](const Tensor& y) {
               const Tensor k = p.in.attention_mask.to(at::kBool);
               Tensor o = at::zeros_like(y);
               o.index_put_({k}, at::linear(at::index(y, {k}), p["square"]));
               return o + y;
             },
             x));
       }},
      {"recompute gru",
       [](Program& p) { return mixed(recompute([&p](const Tensor& y) { return gru(p, y); }, p.embedded())); }},
  });
}

TEST(SequencePrograms, ARingServesTheSame) {
  compare(
      {
          {"gqa flag",
           [](Program& p) {
             const Tensor x = p.embedded();
             return mixed(at::scaled_dot_product_attention(p.heads(x, "query"), p.heads(x, "key").slice(1, 0, 2),
                                                           p.heads(x, "value").slice(1, 0, 2), {}, 0, true,
                                                           std::nullopt, true));
           }},
          {"causal tril padding",
           [](Program& p) {
             const Tensor x = p.embedded();
             const int64_t n = x.size(1);
             const Tensor c = at::ones({n, n}, at::kBool).tril();
             return mixed(p.layer(x, c.unsqueeze(0).unsqueeze(0).logical_and(
                                         p.in.attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1))));
           }},
          {"alibi", &alibi},
          {"window mask",
           [](Program& p) {
             const Tensor x = p.embedded();
             const int64_t n = x.size(1);
             return mixed(
                 p.layer(x, at::ones({n, n}, at::kBool).tril().logical_and(at::ones({n, n}, at::kBool).triu(-3))));
           }},
          {"latent queries",
           [](Program& p) {
             const Tensor a = p.embedded();
             const Tensor m = p["second"].slice(0, 0, 6).unsqueeze(0).expand({a.size(0), -1, -1});
             return mixed(
                 at::scaled_dot_product_attention(p.heads(m, "query"), p.heads(a, "key"), p.heads(a, "value")));
           }},
          {"chunked attention windows", &attention_in_windows},
          {"recompute layer",
           [](Program& p) {
             const Tensor x = p.embedded();
             return mixed(recompute([&p](const Tensor& y) { return p.layer(y); }, x));
           }},
      },
      {.attention = SequenceAttention::kRing});
}

TEST(SequencePrograms, DoubleIsAsExact) {
  compare(
      {
          {"cummean sizes", &running_mean},
          {"written attention padding",
           [](Program& p) {
             const Tensor x = p.embedded();
             const Tensor m = (1 - p.in.attention_mask.to(at::kFloat)).unsqueeze(1).unsqueeze(2) * -1e9;
             const Tensor s = at::matmul(p.heads(x, "query"), p.heads(x, "key").transpose(-2, -1)) / 2 + m;
             return mixed(at::matmul(at::softmax(s, -1), p.heads(x, "value"))
                              .transpose(1, 2)
                              .reshape({x.size(0), x.size(1), -1}));
           }},
          {"linear attention causal", &linear_attention},
      },
      {.type = at::kDouble});
}

}  // namespace
}  // namespace trireme::sequence_programs
