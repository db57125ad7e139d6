// Streams of instructions against the formulas that they come from.
#include "trireme/schedule/schedule.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>

#include "tests/support/error_of.h"
#include "trireme/base/error.h"
#include "trireme/schedule/check.h"
#include "trireme/schedule/simulate.h"

namespace trireme::pipeline {
namespace {

using testing::error_of;

/// DeepSpeed's documentation of one step, case by case, as text.
std::vector<std::string> expected_train_step(int step, int stage, int stages, int micro_batches) {
  const auto forward_id = [&](int t) { return t % 2 == 0 ? t / 2 - stage / 2 : (t - 1) / 2 - stage / 2; };
  const auto backward_id = [&](int t) {
    return t % 2 == 0 ? t / 2 - stages + (stage + 1) / 2 : (t - 1) / 2 - stages + 1 + stage / 2;
  };
  const auto is_forward = [&](int t) { return (t + stage) % 2 == 0; };
  const auto id = [&](int t) { return is_forward(t) ? forward_id(t) : backward_id(t); };
  const auto is_valid = [&](int i) { return 0 <= i && i < micro_batches; };
  const int buffers = std::max(2, std::min(stages - stage, micro_batches));
  const int now = id(step), before = step > 0 ? id(step - 1) : -1;
  const auto text = [&](const std::string& name, int i, int peer = -1) {
    return name + "(micro_batch=" + std::to_string(i) + ", chunk=0, buffer=" + std::to_string(i % buffers) +
           (peer >= 0 ? ", peer=" + std::to_string(peer) : "") + ")";
  };
  std::vector<std::string> list;
  const bool has_before = stage > 0, has_after = stage < stages - 1;
  if (is_forward(step)) {
    if (is_valid(before) && has_before) list.push_back(text("SendGrad", before, stage - 1));
    if (is_valid(now) && has_before) list.push_back(text("RecvActivation", now, stage - 1));
  } else {
    if (is_valid(now) && has_after) list.push_back(text("RecvGrad", now, stage + 1));
    if (is_valid(before) && has_after) list.push_back(text("SendActivation", before, stage + 1));
  }
  if (is_valid(now)) {
    if ((stage == 0 || stage == stages - 1) && is_forward(step)) list.push_back(text("LoadMicroBatch", now));
    list.push_back(text(is_forward(step) ? "ForwardPass" : "BackwardPass", now));
  }
  if (step == 2 * (micro_batches + stages - 1) - 1)
    for (const char* last : {"ReduceTiedGrads", "ReduceGrads", "OptimizerStep"}) list.emplace_back(last);
  return list;
}

std::vector<std::string> texts_of(const Step& step) {
  std::vector<std::string> texts;
  for (const Instruction& instruction : step) texts.push_back(to_text(instruction));
  return texts;
}

TEST(OneForwardOneBackward, IsDeepSpeedsForAllSmallSizes) {
  for (int stages = 1; stages <= 8; ++stages)
    for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
      const Schedule schedule = one_f_one_b(stages, micro_batches);
      for (int stage = 0; stage < stages; ++stage) {
        ASSERT_EQ(static_cast<int>(schedule.streams[stage].size()), 2 * (micro_batches + stages - 1));
        for (int step = 0; step < 2 * (micro_batches + stages - 1); ++step)
          ASSERT_EQ(texts_of(schedule.streams[stage][step]), expected_train_step(step, stage, stages, micro_batches))
              << "stage " << stage << " of " << stages << ", step " << step << ", " << micro_batches
              << " micro-batches";
      }
    }
}

TEST(Inference, IsDeepSpeedsForAllSmallSizes) {
  for (int stages = 1; stages <= 8; ++stages)
    for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
      const Schedule schedule = inference(stages, micro_batches);
      for (int stage = 0; stage < stages; ++stage) {
        ASSERT_EQ(static_cast<int>(schedule.streams[stage].size()), micro_batches + stages - 1);
        for (int step = 0; step < micro_batches + stages - 1; ++step) {
          const int id = step - stage;
          const bool is_even = stage % 2 == 0;
          const int receive_buffer = is_even ? step % 2 : (step + 1) % 2;
          const int send_buffer = is_even ? (step + 1) % 2 : step % 2;
          const auto is_valid = [&](int i) { return 0 <= i && i < micro_batches; };
          const auto text = [&](const std::string& name, int i, int buffer, int peer = -1) {
            return name + "(micro_batch=" + std::to_string(i) + ", chunk=0, buffer=" + std::to_string(buffer) +
                   (peer >= 0 ? ", peer=" + std::to_string(peer) : "") + ")";
          };
          std::vector<std::string> sends, receives, list;
          if (stage < stages - 1 && is_valid(id - 1))
            sends.push_back(text("SendActivation", id - 1, send_buffer, stage + 1));
          if (stage > 0 && is_valid(id)) receives.push_back(text("RecvActivation", id, receive_buffer, stage - 1));
          if ((stage == 0 || stage == stages - 1) && is_valid(id))
            list.push_back(text("LoadMicroBatch", id, receive_buffer));
          for (const auto& part : is_even ? std::vector{sends, receives} : std::vector{receives, sends})
            list.insert(list.end(), part.begin(), part.end());
          if (is_valid(id)) list.push_back(text("ForwardPass", id, receive_buffer));
          ASSERT_EQ(texts_of(schedule.streams[stage][step]), list) << "stage " << stage << ", step " << step;
        }
      }
    }
}

TEST(DataParallel, AccumulatesAndSteps) {
  const Schedule schedule = data_parallel(2);
  EXPECT_EQ(texts_of(schedule.streams[0][0]),
            (std::vector<std::string>{"LoadMicroBatch(micro_batch=0, chunk=0, buffer=0)",
                                      "ForwardPass(micro_batch=0, chunk=0, buffer=0)",
                                      "BackwardPass(micro_batch=0, chunk=0, buffer=0)"}));
  EXPECT_EQ(texts_of(schedule.streams[0][1]).back(), "OptimizerStep");
  EXPECT_EQ(schedule.buffers, (std::vector<std::vector<int>>{{1}}));
}

/// Every schedule that has these sizes.
std::vector<Schedule> all_schedules(int stages, int micro_batches) {
  std::vector<Schedule> all = {one_f_one_b(stages, micro_batches), inference(stages, micro_batches),
                               gpipe(stages, micro_batches), zero_bubble_h1(stages, micro_batches)};
  if (micro_batches % stages == 0)
    for (const int chunks : {1, 2, 3}) all.push_back(interleaved(stages, micro_batches, chunks));
  if (micro_batches >= 2 * stages) {
    all.push_back(zero_bubble_v(stages, micro_batches));
    all.push_back(dual_pipe_v(stages, micro_batches));
  }
  return all;
}

TEST(Schedules, AreSoundForAllSmallSizes) {
  for (int stages = 1; stages <= 8; ++stages)
    for (int micro_batches = 1; micro_batches <= 16; ++micro_batches)
      for (const Schedule& schedule : all_schedules(stages, micro_batches))
        EXPECT_NO_THROW(check(schedule)) << schedule.name << " of " << stages << " stages, " << micro_batches;
}

/// Every two parts share a parameter.
TiedParts all_tied(const Schedule& schedule, bool each_micro_batch) {
  TiedParts ties{.parts = {}, .each_micro_batch = each_micro_batch};
  for (int owner = 0; owner < schedule.parts(); ++owner)
    for (int copy = owner + 1; copy < schedule.parts(); ++copy) ties.parts.push_back({owner, copy});
  return ties;
}

TEST(Schedules, TrainWithAnyTwoPartsTied) {
  for (int stages = 1; stages <= 5; ++stages)
    for (int micro_batches = 1; micro_batches <= 12; ++micro_batches)
      for (const Schedule& schedule : all_schedules(stages, micro_batches))
        for (const bool each_micro_batch : {false, true}) {
          if (schedule.name == "inference") continue;
          if (schedule.name == "zb-v" && each_micro_batch && stages > 2) continue;  // see below
          EXPECT_NO_THROW(check_training(schedule, all_tied(schedule, each_micro_batch)))
              << schedule.name << " of " << stages << " stages, " << micro_batches << " micro-batches, "
              << each_micro_batch;
        }
}

TEST(Schedules, InWhichTheOwnerOfATieWaitsForEverAreRefused) {
  const Schedule schedule = zero_bubble_v(3, 6);
  EXPECT_EQ(error_of([&] { check_training(schedule, all_tied(schedule, true)); }),
            "schedule 'zb-v': stage 0's BackwardWeight(micro_batch=4, chunk=0, buffer=4) waits for ever for part 1 of "
            "the model, on stage 1, which shares parameters with it; let the last parts' gradients of weights come "
            "first, take another schedule, or leave \"deterministic\" out");
  const TiedParts first_and_last{.parts = {{0, 5}}, .each_micro_batch = true};  // an embedding and its head
  EXPECT_NO_THROW(check_training(schedule, first_and_last));
}

TEST(Training, NeedsBackwardPassesOneStepAndWhatTheFirstAndLastPartRead) {
  const auto changed = [](const std::function<void(Schedule&)>& change) {
    Schedule schedule = gpipe(2, 2);
    change(schedule);
    check(schedule);  // nothing of it is wrong with the order of messages and computations
    return error_of([&] { check_training(schedule); });
  };
  const auto erase = [](Schedule& schedule, int stage, Kind kind) {
    for (Step& step : schedule.streams[stage])
      std::erase_if(step, [&](const Instruction& each) { return each.kind == kind; });
  };
  EXPECT_NO_THROW(check_training(gpipe(2, 2)));
  EXPECT_EQ(error_of([] { check_training(inference(2, 2)); }),
            "schedule 'inference': there is no backward pass, so that nothing can be trained; add a BackwardPass of "
            "each micro-batch through each part, or call eval_batch()");
  EXPECT_EQ(changed([&](Schedule& it) { erase(it, 1, Kind::kStep); }),
            "schedule 'gpipe': stage 1 has no OptimizerStep, so that its weights would never change; add one after its "
            "last backward pass");
  EXPECT_EQ(changed([](Schedule& it) { it.streams[0].back().push_back({.kind = Kind::kStep}); }),
            "schedule 'gpipe': stage 0 has two OptimizerSteps; leave one out");
  EXPECT_EQ(
      changed([](Schedule& it) {
        it.streams[1].back().pop_back();
        it.streams[1].insert(it.streams[1].end() - 2, Step{{.kind = Kind::kStep}});
      }),
      "schedule 'gpipe': stage 1's OptimizerStep comes before 1 of the stage's backward passes; let it follow the "
      "last one");
  EXPECT_EQ(changed([&](Schedule& it) {
              erase(it, 0, Kind::kReduceGradients);
              it.streams[0].insert(it.streams[0].begin(), Step{{.kind = Kind::kReduceGradients}});
            }),
            "schedule 'gpipe': stage 0's ReduceGrads comes before 2 of the stage's backward passes; let it follow the "
            "last one");
  EXPECT_EQ(changed([&](Schedule& it) {
              erase(it, 0, Kind::kReduceGradients);
              it.streams[0].push_back({{.kind = Kind::kReduceGradients}});
            }),
            "schedule 'gpipe': stage 0's ReduceGrads comes after the OptimizerStep; let it come before");
  for (const int stage : {0, 1})
    EXPECT_EQ(changed([&](Schedule& it) { erase(it, stage, Kind::kLoadMicroBatch); }),
              "schedule 'gpipe': stage " + std::to_string(stage) +
                  "'s ForwardPass(micro_batch=0, chunk=0, buffer=0) has no LoadMicroBatch before it, which gives the "
                  "first part its inputs and the last part its labels; add one");
}

TEST(Schedules, OfStepsThatStagesMakeTogetherSurviveABarrierAfterEach) {
  for (int stages = 1; stages <= 8; ++stages)
    for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
      EXPECT_NO_THROW(check(one_f_one_b(stages, micro_batches), Waits::kBarriers));
      EXPECT_NO_THROW(check(inference(stages, micro_batches), Waits::kBarriers));
    }
}

TEST(Schedules, KeepNoMoreActivationsThanTheyHaveBuffers) {
  for (int stages = 1; stages <= 8; ++stages)
    for (const int micro_batches : {1, 8, 16})
      for (const Schedule& schedule : all_schedules(stages, micro_batches)) {
        if (schedule.name == "inference") continue;
        const Timeline timeline = simulate(schedule);
        for (int stage = 0; stage < stages; ++stage) {
          int buffers = 0;
          for (const int of_chunk : schedule.buffers[stage]) buffers += of_chunk;
          EXPECT_LE(timeline.peak_activations[stage], buffers) << schedule.name << ", stage " << stage;
        }
      }
}

TEST(Schedules, ByNameAndWhatIsRefused) {
  EXPECT_EQ(schedule_names(),
            (std::vector<std::string>{"1f1b", "inference", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}));
  for (const std::string& name : schedule_names()) EXPECT_EQ(make_schedule(name, 4, 8, 2).name, name);
  EXPECT_EQ(error_of([] { (void)make_schedule("1f2b", 4, 8); }),
            "schedule: '1f2b' is no schedule; use one of 1f1b, inference, gpipe, interleaved, zb-h1, zb-v, "
            "dualpipe-v");
  EXPECT_EQ(error_of([] { (void)zero_bubble_v(4, 7); }),
            "schedule 'zb-v': micro_batches=7; with 4 stages it needs 8 or more");
  EXPECT_EQ(error_of([] { (void)interleaved(4, 6, 2); }),
            "schedule 'interleaved': micro_batches=6 is no multiple of 4 stages; use 8");
  EXPECT_EQ(error_of([] { (void)gpipe(0, 6); }), "schedule 'gpipe': stages=0; use 1 or more");
}

// Without micro-batches and peers, as DeepSpeed's instructions are.
Schedule by_buffers(Schedule schedule) {
  for (auto& stream : schedule.streams)
    for (Step& step : stream)
      for (Instruction& instruction : step) instruction.micro_batch = instruction.peer = -1;
  return schedule;
}

TEST(FollowBuffers, GivesBackMicroBatchesAndPeers) {
  for (int stages = 1; stages <= 8; ++stages)
    for (int micro_batches = 1; micro_batches <= 16; ++micro_batches)
      for (const Schedule& schedule : {one_f_one_b(stages, micro_batches), inference(stages, micro_batches),
                                       gpipe(stages, micro_batches), zero_bubble_h1(stages, micro_batches)})
        EXPECT_EQ(follow_buffers(by_buffers(schedule)).streams, schedule.streams)
            << schedule.name << ", " << stages << ", " << micro_batches;
}

TEST(FollowBuffers, RefusesEmptyBuffersMessagesThatNobodySendsAndLabelsOfOthers) {
  const auto error_without = [](int stage, size_t step, Kind kind) {
    Schedule schedule = by_buffers(gpipe(2, 2));
    std::erase_if(schedule.streams[stage][step], [&](const Instruction& each) { return each.kind == kind; });
    return error_of([&] { (void)follow_buffers(schedule); });
  };
  EXPECT_EQ(
      error_without(0, 0, Kind::kLoadMicroBatch),
      "schedule 'gpipe': stage 0's ForwardPass(buffer=0) has nothing in its buffer; load or receive into it before");
  EXPECT_EQ(error_without(0, 1, Kind::kSendActivation),
            "schedule 'gpipe': stage 1's RecvActivation(buffer=1) receives activation 2, but the stage before sends 1");
  EXPECT_EQ(
      error_without(1, 0, Kind::kLoadMicroBatch),
      "schedule 'gpipe': stage 1's ForwardPass(buffer=1) computes micro-batch 1 with the labels of 0; load in the "
      "order in which activations arrive");
}

TEST(Check, NamesTheTwoInstructionsThatDoNotFit) {
  Schedule crossed = gpipe(2, 2);
  std::swap(crossed.streams[0][0].back(), crossed.streams[0][1].back());
  EXPECT_EQ(error_of([&] { check(crossed); }),
            "schedule 'gpipe': message 0 from stage 0 to stage 1 is stage 0's SendActivation(micro_batch=1, chunk=0, "
            "buffer=1, peer=1), and stage 1's RecvActivation(micro_batch=0, chunk=0, buffer=0, peer=0) takes it; "
            "messages of one direction arrive in the order in which they are sent");
  Schedule lost = gpipe(2, 1);
  lost.streams[1][0].erase(lost.streams[1][0].begin());
  EXPECT_EQ(error_of([&] { check(lost); }),
            "schedule 'gpipe': stage 0's SendActivation(micro_batch=0, chunk=0, buffer=0, peer=1) is received by "
            "nobody; let stage 1 receive it");
}

TEST(Check, NamesStagesThatWaitForEachOther) {
  // Both stages wait for a gradient or an activation before they send what the other one waits for.
  Schedule cycle = gpipe(2, 2);
  auto& first = cycle.streams[0];
  // Stage 0 wants micro-batch 0's gradient before it computes micro-batch 1; stage 1 computes both forwards first.
  std::swap(first[1], first[2]);
  EXPECT_EQ(error_of([&] { check(cycle); }),
            "schedule 'gpipe': stage 0's RecvGrad(micro_batch=0, chunk=0, buffer=0, peer=1) waits for ever: its sender "
            "waits in stage 1's RecvActivation(micro_batch=1, chunk=0, buffer=1, peer=0); let the sender's "
            "instructions come in an order in which no stage waits for itself");
}

TEST(Kinds, HaveNames) {
  EXPECT_EQ(kind_of("RecvGrad"), Kind::kReceiveGradient);
  EXPECT_EQ(kind_of("OptimizerStep"), Kind::kStep);
  EXPECT_TRUE(error_of([] { (void)kind_of("Forward"); })
                  .starts_with("schedule: 'Forward' is no instruction; use one of "
                               "LoadMicroBatch, RecvActivation, "));
}

TEST(Check, NamesWhatIsOverwrittenMissingOrTwice) {
  Schedule overwritten = gpipe(1, 2);
  for (Step& step : overwritten.streams[0])
    for (Instruction& instruction : step)
      if (instruction.buffer == 1) instruction.buffer = 0;
  EXPECT_EQ(error_of([&] { check(overwritten); }),
            "schedule 'gpipe': stage 0's BackwardPass(micro_batch=0, chunk=0, buffer=0) needs a buffer that stage 0's "
            "LoadMicroBatch(micro_batch=1, chunk=0, buffer=0) has overwritten; give one of the two another buffer");
  EXPECT_EQ(error_of([] {
              (void)assemble("own", 1, 1, 1, PartOrder::kLoop, {{{Kind::kBackward, 0, 0}}});
            }),
            "schedule 'own': stage 0 computes chunk 0 of micro-batch 0 0 times forward, 1 times backward, 0 times for "
            "inputs and 0 times for weights; expected one forward, and one backward or one of each half");
  Schedule early = data_parallel(1);
  std::swap(early.streams[0][0][1], early.streams[0][0][2]);
  EXPECT_EQ(error_of([&] { check(early); }),
            "schedule 'data-parallel': stage 0's BackwardPass(micro_batch=0, chunk=0, buffer=0) comes before its "
            "ForwardPass(micro_batch=0, chunk=0, buffer=0); let it follow");
}

// Work per computation that grows with the number of micro-batches or of stages took minutes here; less than a second
// is needed, and the rest of the limit is for slow machines and sanitizers.
TEST(Schedules, WithThousandsOfMicroBatchesOrStagesAreMadeAndSimulatedInSeconds) {
  const auto start = std::chrono::steady_clock::now();
  const Schedule long_one = gpipe(2, 5000), wide_one = gpipe(20'000, 2);
  EXPECT_EQ(long_one.buffers[1], std::vector<int>{5000});
  EXPECT_EQ(simulate(long_one, {}).makespan, 3 * (5000 + 1));
  EXPECT_EQ(simulate(wide_one, {}).makespan, 3 * (20'000 + 1));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace trireme::pipeline
