#include "cli/training.h"

#include <ATen/ops/tensor.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "cli/explain.h"
#include "cli/resume_check.h"
#include "cli/run_flags.h"
#include "cli/run_record.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "cli/text.h"
#include "cli/trained_model.h"
#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/stop_signals.h"
#include "trireme/data/loader.h"
#include "trireme/models/language_model.h"
#include "trireme/optim/lr_schedule.h"

namespace trireme::cli {
namespace {

LoaderOptions loader_options(const TrainSetup& setup, const DataPlace& place) {
  return {.micro_batch = setup.config.batch.train_micro_batch_size_per_gpu,
          .rank = place.rank,
          .world = place.size,
          .seed = setup.options.seed};
}

bool is_due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

// Beside the engine's own state: where the data stands, and the model, so that a checkpoint can be used by itself.
std::string client_state(const TrainSetup& setup, const DataLoader& loader) {
  const auto state = loader.state();
  const Json data = {
      {"samples_consumed", state.samples_consumed}, {"seed", state.seed}, {"fingerprint", state.fingerprint}};
  Json json = {{"model", Json::parse(config_json(setup.model))},
               {"seq", setup.options.seq},
               {"byte_level", setup.data.format == DataFormat::kBytes},
               {"data", data}};
  if (setup.tokenizer)
    json["tokenizer"] = {{"fingerprint", setup.tokenizer->fingerprint()},
                         {"document_end", setup.tokenizer->document_end().value()},
                         {"eos_token", setup.options.text.eos_token}};
  const std::filesystem::path model = setup.options.model;  // whose folder may have a tokenizer
  if (model.filename() == "config.json") json["model_folder"] = std::filesystem::absolute(model).parent_path().string();
  return json.dump();
}

// A checkpoint that is written in the background is recorded when it is complete, with the step of its save.
void record_background_save(EngineBase& engine, RunRecord& record, int64_t step) {
  if (const auto saved = engine.wait_for_checkpoint()) record.checkpoint(*saved, step);
}

void save(const TrainSetup& setup, EngineBase& engine, const DataLoader& loader, RunRecord& record) {
  const auto saved = engine.save_checkpoint(
      setup.checkpoints(), {.client_state = client_state(setup, loader), .keep_last = setup.keep_last()});
  if (!saved.in_background) record.checkpoint(saved, engine.global_steps());
}

void resume(const TrainSetup& setup, TrainedModel& trained, DataLoader& loader) {
  std::optional<LoadedState> loaded;
  try {
    loaded = trained.load_checkpoint({.tag = setup.options.tag});
  } catch (const CheckpointError& error) {
    throw CheckpointError(error.what() + other_tags_hint(setup), error.code());
  }
  if (!loaded) return;
  const auto state = Json::parse(loaded->client_state);
  const auto& data = state.at("data");
  loader.load_state({data.at("samples_consumed").get<int64_t>(), data.at("seed").get<uint64_t>(),
                     data.at("fingerprint").get<int64_t>()});
  // A checkpoint brings the rate of its next step back, which the flag replaces.
  EngineBase& engine = trained.engine();
  const auto& config = engine.config();
  const LrSchedule schedule(config.scheduler.value_or(LrScheduleOptions{}), config.optimizer->lr);
  if (setup.options.lr) engine.set_lr(schedule.lr(engine.global_steps() - engine.skipped_steps()));
}

// Whoever reads that a file could not be written wants to know what is lost.
std::string what_is_left(const TrainSetup& setup) {
  std::vector<std::string> tags;
  try {
    tags = complete_tags(setup.checkpoints());
  } catch (const Error&) {  // the folder may be what is broken
  }
  const std::string command = resume_command(setup.out, !tags.empty());
  return tags.empty() ? str("there is no checkpoint yet: when this is mended, start anew with ", command)
                      : str("checkpoint ", tags.back(), " is intact: when this is mended, continue with ", command);
}

int signal_of_any_rank(Group& group, int own) {
  const auto signal = at::tensor({own}, at::kInt);
  group.all_reduce(signal, ReduceOp::kMax).wait();
  return signal.item<int>();
}

// The end of a run that was not interrupted: validation, sample, report. Returns what rank 0 is to print.
std::string conclude(const TrainSetup& setup, const Group& world, TrainedModel& trained, RunRecord& record) {
  const double loss = trained.validate();
  record.validation(loss);
  const auto text = trained.sample();
  if (!text.empty()) record.sample(text);
  if (trained.samples_later()) record.note(str("a sample: trireme generate --checkpoint ", setup.out.string()));
  record.note(str("report: ", (setup.out / "report.html").string()));
  record.finish("finished");
  if (world.rank() != 0) return "";
  const std::string sample =
      text.empty() || setup.options.quiet ? "" : str("sample:\n", printable(setup.options.prompt + text), "\n\n");
  return sample + formatted("validation loss {:.4f}\n", loss);
}

// The run is over and on record by now, whatever becomes of what is printed.
void print_conclusion(const TrainSetup& setup, const std::string& result) {
  try {
    print_result(result);
  } catch (const IoError& error) {
    throw IoError(str(error.what(), "; the validation loss and the sample are in ",
                      (setup.out / "metrics.jsonl").string(), " too"));
  }
}

// The exchanges of rank 0 in the first step. No more are counted.
void note_exchanges(const EngineBase& engine, RunRecord& record) {
  const std::vector<ExchangeRow> rows = engine.passes().exchanges();
  record.say(rows.empty() ? "no exchanges along \"sequence\" or \"tensor\""
                          : str("exchanges of rank 0 in this step\n", text_of(rows)));
  engine.passes().count_exchanges(false);
}

}  // namespace

int run_training(const TrainSetup& setup, World& world) {
  const auto& options = setup.options;
  Group& group = *world.group;
  const auto trained = make_trained_model(setup, world);
  EngineBase& engine = trained->engine();
  DataLoader loader(setup.data.train, loader_options(setup, engine.data_place()));
  if (options.resume) resume(setup, *trained, loader);

  RunRecord record(setup, engine, group);
  if (engine.global_steps() >= options.steps) {
    const std::string asked = options.epochs ? str("--epochs is ", *options.epochs, "; give larger --epochs")
                                             : str("--steps is ", options.steps, "; give a larger --steps");
    record.note(str("nothing is left to train: ", engine.global_steps(), " steps are done, ", asked, " to go on"));
  }
  const StopSignals signals;
  std::string result;
  try {
    bool stop = false;
    int64_t saved_step = engine.global_steps();
    bool tells_exchanges = options.tells_exchanges;
    if (tells_exchanges) engine.passes().count_exchanges();
    while (engine.global_steps() < options.steps && !stop) {
      const double lr = engine.get_lr();
      const auto agreed = agree_on_step(group, trained->step(loader), signals);
      stop = agreed.stop;
      record.step(agreed.loss, lr);
      if (std::exchange(tells_exchanges, false)) note_exchanges(engine, record);

      const bool is_last = stop || engine.global_steps() == options.steps;
      if (is_due(options.eval_every, engine.global_steps()) && !is_last) record.validation(trained->validate());
      if (is_due(options.save_every, engine.global_steps()) || agreed.save || is_last) {
        record_background_save(engine, record, saved_step);
        save(setup, engine, loader, record);
        saved_step = engine.global_steps();
      }
    }
    record_background_save(engine, record, saved_step);
    if (stop) {
      record.finish("interrupted");
      // The last line is the one that is read.
      const bool is_launched = !options.ranks && world.size > 1;
      record.say(str("interrupted after step ", saved_step,
                     is_launched ? "; continue, under the same launcher, with\n" : "; continue with\n",
                     resume_command(setup.out)));
      return 128 + signal_of_any_rank(group, signals.signal());
    }
    result = conclude(setup, group, *trained, record);
  } catch (const IoError& error) {
    const IoError told(str(error.what(), "; ", what_is_left(setup)));
    record.fail(told.what());
    throw told;
  } catch (const std::exception& error) {
    record.fail(explain(error, "trireme train"));
    throw;
  }
  print_conclusion(setup, result);
  return kDone;
}

}  // namespace trireme::cli
