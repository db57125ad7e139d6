// What a GPU leaves to the host.
#include <array>
#include <string>

#include "config/known_keys.h"
#include "config/read_parts.h"

namespace trireme {

namespace {

constexpr NumberRange kShare = {.min = 0, .max = 1, .words = "a number from 0 to 1"};

// Memory is always page-locked, and comes in blocks that fit the units.
constexpr const char* kBufferKeys = R"({"nvme_path": null, "buffer_count": 4, "pin_memory": true})";
constexpr const char* kOptimizerKeys =
    R"({"pipeline": null, "pipeline_read": false, "pipeline_write": false, "fast_init": false, "super_offload": false,
        "cpuadam_cores_perc": 0.8})";
constexpr const char* kParameterKeys = R"({"buffer_size": 100000000, "max_in_cpu": 1000000000})";

/// An old switch, each of which a section has replaced.
bool read_old_switch(Section& zero, const char* old, const char* section) {
  if (!zero.has(old)) return false;
  if (zero.has(section))
    zero.refuse(str("`", zero.path_of(old), "` and `", zero.path_of(section), "` exclude each other; keep `",
                    zero.path_of(section), "`"));
  zero.notes().warnings.push_back(
      str(zero.notes().origin, ": `", zero.path_of(old), "` is deprecated; write `", zero.path_of(section), "`"));
  return zero.flag_or(old, false);
}

bool is_to_host(Section& offload) {
  const std::string device = offload.choice_or("device", "none", {"none", "cpu", "nvme"});
  if (device == "nvme") offload.not_there_yet("device", R"(set it to "cpu" or "none")");
  return device == "cpu";
}

}  // namespace

void read_offload(Section& zero, PagerPolicy& pager) {
  const bool old_optimizer = read_old_switch(zero, "cpu_offload", "offload_optimizer");
  const bool old_parameters = read_old_switch(zero, "cpu_offload_param", "offload_param");
  (void)read_old_switch(zero, "cpu_offload_use_pin_memory", "offload_optimizer");

  Section parameters = zero.section("offload_param");
  pager.offload_parameters = is_to_host(parameters) || old_parameters;
  read_without_meaning(parameters, kBufferKeys);
  read_without_meaning(parameters, kParameterKeys);
  parameters.finish();

  Section optimizer = zero.section("offload_optimizer");
  const double ratio = optimizer.number_or("ratio", 1, kShare);
  const bool offloads = is_to_host(optimizer) || old_optimizer;
  read_without_meaning(optimizer, kBufferKeys);
  read_without_meaning(optimizer, kOptimizerKeys);
  optimizer.finish();

  if (pager.offload_parameters && pager.stage < 3) {
    zero.notes().warnings.push_back(str(zero.notes().origin, ": `", zero.path_of("offload_param"),
                                        "` has no effect at `", zero.path_of("stage"), "` ", pager.stage,
                                        "; set the stage to 3"));
    pager.offload_parameters = false;
  }
  // What the host keeps it updates too.
  pager.offload_ratio = offloads ? ratio : pager.offload_parameters ? 1 : 0;
  if (pager.offload_ratio > 0 && pager.stage == 0) {
    zero.notes().warnings.push_back(str(zero.notes().origin, ": `", zero.path_of("offload_optimizer"),
                                        "` has no effect at `", zero.path_of("stage"),
                                        "` 0; set the stage to 1, 2 or 3"));
    pager.offload_ratio = 0;
  }
  pager.offload_parameters &= pager.offload_ratio > 0;
}

}  // namespace trireme
