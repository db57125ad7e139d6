#include "config/read_parts.h"

namespace trireme {
namespace {

void refuse_unless(Section& section, const char* key, bool normal) {
  if (section.flag_or(key, normal) == normal) return;
  section.not_there_yet(key, str("remove it or set it to ", normal ? "true" : "false"));
}

/// How DeepSpeed's writers work has no meaning here, but for one key: a decoupled one lets training go on.
bool read_writer(Section& checkpoint) {
  Section writer = checkpoint.section("writer");
  const bool decoupled = writer.flag_or("decoupled", false);
  for (const char* key :
       {"type", "io_buffer_size", "io_buffer_double", "show_statistics", "data_parallel", "io_multiplier"})
    if (writer.has(key)) writer.without_meaning(key);
  writer.finish();
  return decoupled;
}

}  // namespace

CheckpointOptions read_checkpoint(Section& top) {
  Section section = top.section("checkpoint");
  CheckpointOptions options;
  const std::string validation = section.choice_or("tag_validation", "Warn", {"Ignore", "Warn", "Fail"});
  options.tag_validation = validation == "Ignore" ? TagValidation::kIgnore
                           : validation == "Fail" ? TagValidation::kFail
                                                  : TagValidation::kWarn;
  options.keep_last = static_cast<int>(section.integer_or(
      "keep_last", 0, {.min = 0, .max = 1'000'000, .words = "a number of checkpoints from 0 (all) to 1000000"}));
  const bool decoupled = read_writer(section);
  options.async_save = section.flag_or("async_save", decoupled);
  options.verify = section.choice_or("verify", "while_reading", {"while_reading", "full"}) == "full"
                       ? Verify::kFirst
                       : Verify::kWhileReading;
  if (section.flag_or("load_universal", false))
    section.notes().hints.push_back(str("`", section.path_of("load_universal"),
                                        "`: every checkpoint loads at any number of ranks and any stage as it is; "
                                        "`trireme convert` takes DeepSpeed's"));
  refuse_unless(section, "use_node_local_storage", false);
  refuse_unless(section, "checkpoint_serialization", true);
  Section parallel = section.section("parallel_write");
  refuse_unless(parallel, "pipeline_stage", false);
  parallel.finish();
  section.finish();
  return options;
}

}  // namespace trireme
