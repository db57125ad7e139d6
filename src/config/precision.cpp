#include "trireme/precision/precision.h"

#include "config/read_parts.h"

namespace trireme {
namespace {

const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp16"};

void read_bf16(Section& top, PrecisionOptions& precision) {
  top.rename("bfloat16", "bf16", Spelling::kAlias);
  Section bf16 = top.section("bf16");
  if (bf16.flag_or("enabled", false)) precision.weight_dtype = at::kBFloat16;
  precision.check_grad_overflow = bf16.flag_or("check_grad_overflow", precision.check_grad_overflow);
  if (bf16.has("immediate_grad_update")) {
    bf16.flag_or("immediate_grad_update", false);
    bf16.notes().without_meaning.push_back(bf16.path_of("immediate_grad_update"));
  }
  for (const char* key : {"bf16_master_weights_and_grads", "bf16_optimizer_states"})
    if (bf16.flag_or(key, false))
      bf16.not_there_yet(key, "masters and optimizer states are fp32; remove it or set it to false");
  bf16.finish();
}

void read_data_types(Section& top, PrecisionOptions& precision) {
  Section types = top.section("data_types");
  const std::string weights = short_name(precision.weight_dtype);
  const std::string accumulation = types.choice_or("grad_accum_dtype", "fp32", kDtypes);
  if (accumulation != "fp32" && accumulation != weights)
    types.fail("grad_accum_dtype",
               weights == "bf16" ? "\"fp32\" or \"bf16\"" : "\"fp32\", or bf16.enabled = true for \"bf16\"");
  precision.accumulation_dtype = accumulation == "fp32" ? at::kFloat : precision.weight_dtype;
  if (types.choice_or("param_dtype", weights, kDtypes) != weights)
    types.fail("param_dtype", "\"" + weights + "\", the dtype that bf16.enabled chooses");
  if (types.choice_or("buffer_dtype", weights, kDtypes) != weights)
    types.not_there_yet("buffer_dtype", "floating buffers have the weights' dtype; remove it");
  types.finish();
}

}  // namespace

PrecisionOptions read_precision(Section& top) {
  PrecisionOptions precision;
  read_bf16(top, precision);
  read_data_types(top, precision);

  const std::string weights = short_name(precision.weight_dtype);
  const std::string wire = top.choice_or("communication_data_type", weights, kDtypes);
  if (wire != weights && wire != "fp32")
    top.not_there_yet("communication_data_type", "gradients travel in the accumulation dtype; remove it");
  // A sum is folded in fp32 whatever travels, which is all that "fp32" asks for.
  if (top.has("communication_data_type")) top.notes().without_meaning.push_back(top.path_of("communication_data_type"));
  return precision;
}

}  // namespace trireme
