#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <limits>
#include <regex>

#include "config/known_keys.h"
#include "config/read_parts.h"

namespace trireme {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

int64_t bytes_of(int64_t elements, const PrecisionOptions& precision) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(precision.weight_dtype));
  return elements > kUnlimited / itemsize ? kUnlimited : elements * itemsize;
}

/// A budget of whole parameters at stage 3. DeepSpeed counts elements, Trireme bytes: one of the two may be given.
struct Budget {
  const char* elements_key;
  int64_t default_elements;
  const char* bytes_key;
};
constexpr Budget kLive = {"stage3_max_live_parameters", 1'000'000'000, "live_bytes"};
constexpr Budget kPrefetch = {"stage3_prefetch_bucket_size", 50'000'000, "prefetch_bytes"};

int64_t read_budget(Section& zero, Section& own, const Budget& budget, const PrecisionOptions& precision) {
  const int64_t elements = zero.integer_or(budget.elements_key, budget.default_elements, kCount);
  if (!own.has(budget.bytes_key)) return bytes_of(elements, precision);
  if (zero.has(budget.elements_key))
    own.refuse(str("`", zero.path_of(budget.elements_key), "` and `", own.path_of(budget.bytes_key),
                   "` are the same budget in elements and in bytes; keep one of the two"));
  return own.integer_or(budget.bytes_key, 0, kCount);
}

/// Stage-3 keys are also known without their prefix.
void rename_stage3_keys(Section& zero) {
  zero.rename("stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
              Spelling::kDeprecated);
  for (const char* key : {"prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
                          "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save",
                          "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"})
    zero.rename(key, str("stage3_", key), Spelling::kAlias);
}

/// `zero_optimization` as an object: it may be written as true, the old way to say stage 1.
Json zero_object(Section& top) {
  const Json* json = top.value("zero_optimization");
  if (!json) return Json();
  if (!json->is_boolean()) return *json;
  top.notes().warnings.push_back(str(top.notes().origin, ": `zero_optimization` = ", json->dump(),
                                     R"( is deprecated; write {"stage": )", json->get<bool>() ? 1 : 0, "}"));
  return Json{{"stage", json->get<bool>() ? 1 : 0}};
}

GatherPolicy read_gather(Section& own) {
  const std::string gather = own.choice_or("gather", "auto", {"auto", "shared", "copy"});
  return gather == "shared" ? GatherPolicy::kShared : gather == "copy" ? GatherPolicy::kCopy : GatherPolicy::kAuto;
}

UnitRules read_unit_rules(Section& own) {
  UnitRules rules;
  rules.merge_below_bytes = own.integer_or("merge_below_bytes", rules.merge_below_bytes, kCount);
  rules.patterns = own.texts_or("unit_patterns", rules.patterns);
  for (const std::string& pattern : rules.patterns) {
    try {
      std::regex compiled(pattern);
    } catch (const std::regex_error& error) {
      own.fail("unit_patterns", str("regular expressions, which `", pattern, "` is not: ", error.what()));
    }
  }
  return rules;
}

LeafModuleOptions read_leaf_modules(Section& zero) {
  Section section = zero.section("leaf_module");
  LeafModuleOptions leaves;
  leaves.classes = section.text_or_texts("classes", leaves.classes);
  leaves.names = section.text_or_texts("names", leaves.names);
  leaves.name_suffixes = section.text_or_texts("name_suffixes", leaves.name_suffixes);
  section.finish();
  return leaves;
}

}  // namespace

void read_zero(Section& top, const PrecisionOptions& precision, Config& config) {
  Section zero(zero_object(top), top.path_of("zero_optimization"), top.notes());
  Section own = top.section("trireme");
  rename_stage3_keys(zero);

  PagerPolicy& pager = config.pager;
  pager.stage = static_cast<int>(zero.integer_or("stage", 0, {.min = 0, .max = 3, .words = "an integer from 0 to 3"}));
  pager.gather = read_gather(own);
  pager.live_bytes = read_budget(zero, own, kLive, precision);
  pager.prefetch_bytes = read_budget(zero, own, kPrefetch, precision);
  pager.accumulation_dtype = precision.accumulation_dtype;
  pager.poison = own.flag_or("poison", pager.poison);
  pager.register_buffers = own.flag_or("register_buffers", pager.register_buffers);
  pager.units = read_unit_rules(own);
  read_offload(zero, pager);
  config.leaf_modules = read_leaf_modules(zero);
  config.recompute = read_recompute(own);
  config.tiled = read_tiled(own);
  config.ignore_unused_parameters = zero.flag_or("ignore_unused_parameters", config.ignore_unused_parameters);
  read_known_zero_keys(zero);
  zero.finish();
  own.finish();
}

}  // namespace trireme
