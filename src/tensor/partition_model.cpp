// Heads of a model as a Hugging Face config.json describes them.
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/tensor/partition.h"

namespace trireme {
namespace {

/// The first of `keys` that is there; 0 without any.
int64_t count_of(const Json& config, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) continue;
    if (!found->is_number_integer() || found->get<int64_t>() < 1)
      throw ConfigError(str("config.json: ", key, "=", found->dump(), ": expected a whole number from 1 on"));
    return found->get<int64_t>();
  }
  return 0;
}

bool is_true(const Json& config, const char* key, bool otherwise) {
  const auto found = config.find(key);
  return found == config.end() || !found->is_boolean() ? otherwise : found->get<bool>();
}

}  // namespace

PartitionModel partition_model_from(const Json& config) {
  if (!config.is_object()) throw ConfigError("config.json: expected an object");
  PartitionModel model;
  if (const auto type = config.find("model_type"); type != config.end() && type->is_string())
    model.model_type = type->get<std::string>();
  model.heads = count_of(config, {"num_attention_heads", "n_head", "num_heads"});
  if (model.model_type == "falcon" && !is_true(config, "new_decoder_architecture", false)) {
    // The key num_kv_heads says nothing there.
    model.key_value_heads = is_true(config, "multi_query", true) ? 1 : model.heads;
    return model;
  }
  const bool has_groups = model.model_type != "chatglm" || is_true(config, "multi_query_attention", false);
  if (has_groups)
    model.key_value_heads = count_of(config, {"num_key_value_heads", "num_kv_heads", "multi_query_group_num"});
  if (model.key_value_heads == 0) model.key_value_heads = model.heads;
  return model;
}

}  // namespace trireme
