#include "trireme/training/model_agreement.h"

#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <algorithm>
#include <string>
#include <vector>

#include "training/module_tensors.h"
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/precision/precision.h"

namespace trireme {

namespace {

std::string text_of(const char* kind, const std::string& name, const at::Tensor& tensor) {
  return str(kind, " '", name, "' ", tensor.sizes(), " ", short_name(tensor.scalar_type()));
}

std::vector<std::string> texts_of(const ModuleTensors& tensors) {
  std::vector<std::string> texts;
  for (const NamedParameter& parameter : tensors.parameters)
    texts.push_back(text_of("parameter", parameter.name, parameter.tensor) +
                    (parameter.tensor.requires_grad() ? "" : ", frozen"));
  for (const NamedBuffer& buffer : tensors.buffers) texts.push_back(text_of("buffer", buffer.name, buffer.tensor));
  return texts;
}

struct Extremes {
  std::vector<int64_t> least, most;
};

/// Over all ranks, of each of `values`, by one reduction.
Extremes extremes_of(Group& group, const std::vector<int64_t>& values) {
  const size_t count = values.size();
  at::Tensor message = at::zeros({static_cast<int64_t>(2 * count)}, at::kLong);
  int64_t* const data = message.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < count; ++i) {
    data[i] = -values[i];
    data[count + i] = values[i];
  }
  if (count > 0) group.all_reduce(message, ReduceOp::kMax).wait();
  Extremes extremes;
  for (size_t i = 0; i < count; ++i) {
    extremes.least.push_back(-data[i]);
    extremes.most.push_back(data[count + i]);
  }
  return extremes;
}

}  // namespace

void check_same_model(Group& group, torch::nn::Module& module, const PrecisionOptions& precision,
                      const std::set<std::string>& unmanaged) {
  check_same_model(group, list_tensors(module, precision, unmanaged));
}

void check_same_model(Group& group, const ModuleTensors& tensors) {
  if (group.size() == 1) return;
  const CallerScope caller("initialize");
  const SubjectScope subject("the model");
  const char* fix = "; make the same model on every rank";
  const std::vector<std::string> texts = texts_of(tensors);
  const Extremes count = extremes_of(group, {static_cast<int64_t>(texts.size())});
  const auto common = static_cast<size_t>(count.least[0]);
  std::vector<int64_t> digests;
  for (size_t i = 0; i < common; ++i)
    digests.push_back(static_cast<int64_t>(XXH3_64bits(texts[i].data(), texts[i].size()) >> 1));
  const Extremes seen = extremes_of(group, digests);
  for (size_t i = 0; i < common; ++i)
    if (seen.least[i] != seen.most[i])
      throw ConfigError(str("initialize: the ranks' models differ, first in ", texts[i], " (as it is on rank ",
                            group.rank(), ")", fix));
  if (count.least[0] == count.most[0]) return;
  const bool has_more = texts.size() > common;
  throw ConfigError(str("initialize: the ranks' models differ: rank ", group.rank(), " has ", texts.size(),
                        " parameters and buffers, another rank ", has_more ? count.least[0] : count.most[0],
                        has_more ? str("; ", texts[common], " is missing there") : "", fix));
}

}  // namespace trireme
