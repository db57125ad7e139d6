// The hyperparameters of the library's own optimizers, each in one row: what checks them, reads them from a
// configuration, writes them there and into checkpoints, and lets a program steer them goes over these.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "trireme/optim/options.h"

namespace trireme {

/// A row.
struct Field {
  const char* name;         ///< in configurations, checkpoints and a program's parameter groups
  uint32_t kinds;           ///< of optimizers that have it: a bit each
  const char* doc = "";     ///< one line, for the page of options
  bool muons_adam = false;  ///< Muon has it for the parameters that Adam updates
  double least = 0;
  double most = std::numeric_limits<double>::infinity();
  const char* fix = "use 0 or more";  ///< where it is less or more
  int place = -1;                     ///< of two numbers with one name, a list: which

  constexpr bool is_of(OptimizerKind kind) const { return (kinds >> static_cast<int>(kind) & 1) != 0; }
};

/// Calls visit(field, member of OptimizerOptions, member of ParameterGroup) for every row; the last one is nullptr
/// where a group has none of its own. In the order of the page of options. `kind` is no row, nor is adam_lr, which
/// group_parameters() makes the lr of a group.
template <class Visit>
constexpr void fields(Visit visit) {
  using Options = OptimizerOptions;
  using Kind = OptimizerKind;
  using Own = ParameterGroup;
  constexpr auto kinds = [](auto... kind) { return ((1U << static_cast<int>(kind)) | ...); };
  constexpr uint32_t all = ~0U, adams = kinds(Kind::kAdam, Kind::kAdamW, Kind::kLamb, Kind::kClient);
  constexpr uint32_t lion = kinds(Kind::kLion), adagrad = kinds(Kind::kAdagrad), lamb = kinds(Kind::kLamb);
  constexpr uint32_t muon = kinds(Kind::kMuon), sgd = kinds(Kind::kSgd);
  constexpr double above_0 = std::numeric_limits<double>::denorm_min();
  constexpr double below_1 = 1 - std::numeric_limits<double>::epsilon() / 2;
  visit(Field{.name = "lr", .kinds = all, .doc = "learning rate; Adagrad's default is 0.01"}, &Options::lr, &Own::lr);
  constexpr Field beta{
      .name = "betas", .kinds = adams | lion, .muons_adam = true, .most = below_1, .fix = "use 0 <= beta < 1"};
  Field first = beta, second = beta;
  first.place = 0, second.place = 1;
  visit(first, &Options::beta1, &Own::beta1);
  visit(second, &Options::beta2, &Own::beta2);
  // An element whose gradient was always zero divides by eps alone.
  visit(Field{.name = "eps",
              .kinds = adams | adagrad,
              .doc = "Adagrad's and Muon's default is 1e-10; of Muon's Adam",
              .muons_adam = true,
              .least = above_0,
              .fix = "use a small number above 0, such as 1e-8"},
        &Options::eps, &Own::eps);
  visit(Field{.name = "weight_decay", .kinds = all, .doc = "see `torch_adam`", .muons_adam = true},
        &Options::weight_decay, &Own::weight_decay);
  visit(Field{.name = "momentum", .kinds = sgd}, &Options::momentum, &Own::momentum);
  visit(Field{.name = "nesterov", .kinds = sgd, .doc = "needs a momentum"}, &Options::nesterov, &Own::nesterov);
  visit(Field{.name = "min_coeff", .kinds = lamb, .doc = "least trust ratio"}, &Options::min_coeff, nullptr);
  visit(Field{.name = "max_coeff", .kinds = lamb, .doc = "largest trust ratio"}, &Options::max_coeff, nullptr);
  visit(Field{.name = "bias_correction", .kinds = lamb}, &Options::bias_correction, nullptr);
  visit(Field{.name = "momentum",
              .kinds = muon,
              .doc = "below 1; 0.95 by default",
              .most = below_1,
              .fix = "use 0 <= momentum < 1"},
        &Options::momentum, &Own::momentum);
  visit(Field{.name = "ns_steps",
              .kinds = muon,
              .doc = "ours: Newton-Schulz iterations",
              .least = 1,
              .fix = "use 1 or more; 5 suffice"},
        &Options::ns_steps, nullptr);
}

/// The same for the rows that a parameter group may have of its own.
template <class Visit>
constexpr void group_fields(Visit visit) {
  fields([&](const Field& field, auto own, auto of_group) {
    if constexpr (!std::is_null_pointer_v<decltype(of_group)>) visit(field, own, of_group);
  });
}

}  // namespace trireme
