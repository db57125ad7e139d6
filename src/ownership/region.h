// A part of a forward pass that runs again in the backward pass, on each stage by itself (torch.utils.checkpoint).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ownership/homes.h"
#include "ownership/mailbox.h"
#include "ownership/sizes.h"

namespace trireme::ownership {

/// How far a forward pass is.
struct Place {
  int64_t position = 0;  ///< operators so far
  int64_t randoms = 0;   ///< of them those that draw
};

/// The first run of a region, and all of it that a second one could not have without the other stages: its place in the
/// micro-batch, by which it draws random numbers, and a journal of what came from them.
struct Region {
  int64_t micro_batch = 0, number_in_step = 0;
  uint64_t seed = 0;
  Place place = {};               ///< of the micro-batch, when the region began
  std::vector<int> entered = {};  ///< stages of the modules around it
  OperatorTrace operators = {};
  /// A tensor of another stage, as an operator of this one used it.
  struct Value {
    at::Tensor data;
    bool needs_gradient;
  };
  /// Numbers that the program read.
  using Numbers = std::vector<c10::IValue>;
  std::vector<std::variant<Value, ToldCall, Numbers>> received = {};
  /// Storages that operators of every stage have made in the first run, without their bytes.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made = {};
  bool is_open = true;     ///< its first run has not ended
  bool is_second = false;  ///< it began in another region's second run, so that it has no journal
};

/// A second run of a region: takes in order what the first one received.
class Replay {
 public:
  explicit Replay(std::shared_ptr<const Region> region) : region_(std::move(region)) {}

  /// The next operator. Throws StateError: the first run had another one here.
  void follow(const OperatorFacts& facts, uint64_t of_call);
  at::Tensor value(const OperatorFacts& facts);
  ToldCall told(const OperatorFacts& facts);
  Region::Numbers numbers(const OperatorFacts& facts);

 private:
  [[noreturn]] void refuse(const std::string& op, const std::string& before) const;
  template <class Kind>
  const Kind& next(const OperatorFacts& facts);

  const std::shared_ptr<const Region> region_;
  size_t operators_ = 0, received_ = 0;
};

/// Whether a region's runs have to agree in this operator: hooks that keep what autograd saves detach it in a second
/// run alone.
bool is_compared(const std::string& name);

}  // namespace trireme::ownership
