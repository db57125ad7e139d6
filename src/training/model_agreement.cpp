#include "trireme/training/model_agreement.h"

#include <nlohmann/json.hpp>
#include <string>

#include "training/module_tensors.h"
#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/config/config.h"
#include "trireme/precision/precision.h"

namespace trireme {

namespace {

std::string text_of(const char* kind, const std::string& name, const at::Tensor& tensor) {
  return str(kind, " '", name, "' ", tensor.sizes(), " ", short_name(tensor.scalar_type()));
}

/// A line for each parameter and buffer.
std::string text_of(const ModuleTensors& tensors) {
  std::string text;
  for (const NamedParameter& parameter : tensors.parameters)
    text += text_of("parameter", parameter.name, parameter.tensor) +
            (parameter.tensor.requires_grad() ? "\n" : ", frozen\n");
  for (const NamedBuffer& buffer : tensors.buffers) text += text_of("buffer", buffer.name, buffer.tensor) + "\n";
  return text;
}

}  // namespace

void check_same_model(Group& group, torch::nn::Module& module, const PrecisionOptions& precision,
                      const std::set<std::string>& unmanaged) {
  check_same_model(group, list_tensors(module, precision, unmanaged));
}

void check_same_config(Group& group, const Config& config) {
  const CallerScope caller("initialize");
  const SubjectScope subject("the configuration");
  const auto lines = [&] {
    const Json options = to_json(config).flatten();
    std::string text;
    for (const auto& [path, value] : options.items())
      text += str(path.empty() ? "" : path.substr(1), " = ", value.dump(), "\n");
    return text;
  };
  if (const auto difference = first_different_line(group, lines))
    throw ConfigError(str("initialize: the ranks' configurations differ, first in ", difference->text(),
                          "; give every rank the same"));
}

void check_same_model(Group& group, const ModuleTensors& tensors) {
  const CallerScope caller("initialize");
  const SubjectScope subject("the model");
  if (const auto difference = first_different_line(group, [&] { return text_of(tensors); }))
    throw ConfigError(str("initialize: the ranks' models differ, first in ", difference->text(),
                          "; make the same model on every rank, slices of a program's own of equal shapes"));
}

}  // namespace trireme
