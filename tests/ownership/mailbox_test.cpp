// Messages between stages: what arrives, and that stages which do not run the same program are told so, both of them,
// with both operators.
#include "ownership/mailbox.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"

namespace trireme::ownership {
namespace {

using namespace std::chrono_literals;
using testing::error_of;
using enum MessageKind;

const std::string kAdd = "aten::add", kMul = "aten::mul", kExp = "aten::exp";

MessageName value(int64_t micro_batch, int64_t number, int64_t position, const std::string& op = kAdd) {
  return {micro_batch, number, kValue, position, op};
}

at::Tensor received(Mailbox& mailbox, int stage, const MessageName& name, const at::Tensor& like) {
  const at::Tensor buffer = at::zeros_like(like);
  mailbox.take(stage, name, buffer);
  return buffer;
}

void end_everywhere(Mailbox& mailbox, const Rank& rank, int64_t micro_batch, const OperatorTrace& trace = {}) {
  uint64_t digest = 0;
  for (const auto& [op, one] : trace) digest = 31 * digest + one;
  for (int stage = 0; stage < rank.size(); ++stage)
    if (stage != rank.id()) mailbox.send_end(stage, micro_batch, digest, trace);
}

class AMailbox : public ::testing::TestWithParam<RankBackend> {
 protected:
  static void run(int size, const std::function<void(Rank&)>& body) { run_ranks(size, body, {.backend = GetParam()}); }

  /// Each of two stages does its part and gets an error in it, within a second. Returns their texts.
  static std::array<std::string, 2> errors_of(const std::function<void(Mailbox&, Rank&)>& body) {
    std::array<std::string, 2> texts;
    run(2, [&](Rank& rank) {
      const auto group = rank.world().clone("stages");
      Mailbox mailbox(*group, c10::kCPU);
      const auto begun = std::chrono::steady_clock::now();
      texts[static_cast<size_t>(rank.id())] = error_of<CommError>([&] { body(mailbox, rank); });
      EXPECT_LT(std::chrono::steady_clock::now() - begun, 30s);  // and not by the group's timeout, a minute
      rank.world().barrier();
    });
    return texts;
  }
  static void expect_both_say(const std::array<std::string, 2>& texts, const std::string& part) {
    for (const std::string& text : texts) EXPECT_SAYS(text, part);
  }
};
INSTANTIATE_TEST_SUITE_P(Mailbox, AMailbox, ::testing::Values(RankBackend::kThreads, RankBackend::kC10d),
                         [](const auto& info) {
                           return info.param == RankBackend::kThreads ? "OfThreads" : "OverTorchDistributed";
                         });

TEST_P(AMailbox, BringsTensorsOfEveryKind) {
  run(2, [](Rank& rank) {
    Mailbox mailbox(rank.world(), c10::kCPU);
    const std::vector<at::Tensor> all = {
        at::arange(6, at::kFloat).view({2, 3}),
        at::arange(5) > 2,
        at::arange(7, at::kBFloat16),
        at::arange(3, at::kHalf),
        at::randn({4}, at::kComplexFloat),
        at::arange(4, at::kDouble).view({1, 4, 1}),
        at::full({}, 3, at::kLong),
        at::empty({0, 5}),
        at::arange(1 << 20, at::kInt),  // more than the ring between a pair holds
    };
    for (size_t i = 0; i < all.size(); ++i) {
      const auto name = value(0, static_cast<int64_t>(i), static_cast<int64_t>(3 * i));
      if (rank.id() == 0)
        mailbox.send(1, name, all[i]);
      else
        EXPECT_TRUE(at::equal(received(mailbox, 0, name, all[i]), all[i])) << i;
    }
    const MessageName told{0, 20, kTold, 50, kMul}, empty{0, 21, kScalar, 51, kMul};
    if (rank.id() == 0) {
      mailbox.send_bytes(1, told, std::string("a\0b", 3));
      mailbox.send_bytes(1, empty, "");
    } else {
      EXPECT_EQ(mailbox.take_bytes(0, told), std::string("a\0b", 3));
      EXPECT_EQ(mailbox.take_bytes(0, empty), "");
    }
    end_everywhere(mailbox, rank, 0);
    mailbox.finish();
    int64_t bytes = 3;
    for (const at::Tensor& tensor : all) bytes += static_cast<int64_t>(tensor.nbytes());
    EXPECT_EQ(mailbox.messages(), rank.id() == 0 ? static_cast<int64_t>(all.size()) + 2 + 1 : 1);
    EXPECT_EQ(mailbox.bytes(), rank.id() == 0 ? bytes : 0);
    EXPECT_EQ(mailbox.waits(kValue) <= static_cast<int64_t>(all.size()), true);
  });
}

// Stage 0 has sent all of two micro-batches before stage 1 looks at the first message.
TEST_P(AMailbox, KeepsWhatComesBeforeItIsDue) {
  run(2, [](Rank& rank) {
    Mailbox mailbox(rank.world(), c10::kCPU);
    const at::Tensor one = at::ones({3});
    if (rank.id() == 0) {
      for (int64_t m = 0; m < 2; ++m) {
        mailbox.send(1, value(m, 0, 4), one * m);
        mailbox.send(1, value(m, 1, 7, kMul), one * (m + 10));
        end_everywhere(mailbox, rank, m);
        mailbox.send_output(1, m, 5, one * (m + 20));
      }
      for (int64_t m = 1; m >= 0; --m) {
        EXPECT_TRUE(at::equal(mailbox.take_gradient(1, m, 1, {3}, at::kFloat), one * (m + 30)));
        EXPECT_FALSE(mailbox.take_gradient(1, m, 0, {3}, at::kFloat).defined());
      }
      return mailbox.finish();
    }
    const at::Tensor output = at::zeros({3});
    for (int64_t m = 0; m < 2; ++m) {
      EXPECT_TRUE(at::equal(received(mailbox, 0, value(m, 0, 4), one), one * m));
      EXPECT_TRUE(at::equal(received(mailbox, 0, value(m, 1, 7, kMul), one), one * (m + 10)));
      end_everywhere(mailbox, rank, m);
    }
    mailbox.take_output(0, 1, 5, output);
    EXPECT_TRUE(at::equal(output, one * 21));
    mailbox.take_output(0, 0, 5, output);
    EXPECT_TRUE(at::equal(output, one * 20));
    for (int64_t m = 0; m < 2; ++m) {
      mailbox.send_gradient(0, m, 0, {});
      mailbox.send_gradient(0, m, 1, one * (m + 30));
    }
    mailbox.finish();
  });
}

// Elements go from device to device, and their names over the hosts; those that come early wait on the device.
TEST(AMailboxOfDevices, BringsElementsThatAreThere) {
  testing::FakeRecord record;
  run_ranks(2, [](Rank& rank) {
    const c10::Device device = testing::fake_device(rank.id());
    const auto group = testing::make_fake_nccl_group(rank.world(), device);
    Mailbox mailbox(*group, device);
    const at::Tensor numbers = at::arange(6, at::kFloat);
    if (rank.id() == 0) {
      mailbox.send(1, value(0, 1, 4), numbers.to(device));
      mailbox.send_bytes(1, {0, 2, kTold, 5, kAdd}, "sizes");
      mailbox.send(1, value(0, 3, 6), numbers.to(device) * 2);
    } else {
      const at::Tensor buffer = at::zeros({6}, device);
      mailbox.take(0, value(0, 1, 4), buffer);
      EXPECT_TRUE(at::equal(buffer.cpu(), numbers));
      EXPECT_EQ(mailbox.take_bytes(0, {0, 2, kTold, 5, kAdd}), "sizes");
      mailbox.take(0, value(0, 3, 6), buffer);
      EXPECT_TRUE(at::equal(buffer.cpu(), numbers * 2));
      mailbox.send_gradient(0, 0, 3, buffer);
      mailbox.send_gradient(0, 0, 1, (buffer * 2).view({3, 2}).t());
    }
    end_everywhere(mailbox, rank, 0);
    if (rank.id() == 0) {
      const at::Tensor second = mailbox.take_gradient(1, 0, 1, {2, 3}, at::kFloat);
      EXPECT_TRUE(at::equal(second.cpu(), (numbers * 4).view({3, 2}).t()));
      EXPECT_EQ(second.strides(), (std::vector<int64_t>{1, 2}));
      EXPECT_TRUE(at::equal(mailbox.take_gradient(1, 0, 3, {6}, at::kFloat).cpu(), numbers * 2));
    }
    mailbox.finish();
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

// A ring of four: every stage sends to every other one, and micro-batches follow each other.
TEST_P(AMailbox, OfFourStagesHasALaneForEachPair) {
  run(4, [](Rank& rank) {
    Mailbox mailbox(rank.world(), c10::kCPU);
    const auto tensor = [](int from, int to, int64_t m) { return at::full({10}, 100 * from + 10 * to + m); };
    for (int64_t m = 0; m < 5; ++m) {
      for (int from = 0; from < rank.size(); ++from)  // at operator `from`, all others need its value
        for (int to = 0; to < rank.size(); ++to) {
          if (from == to) continue;
          if (rank.id() == from) mailbox.send(to, value(m, 0, from), tensor(from, to, m));
          if (rank.id() != to) continue;
          EXPECT_TRUE(
              at::equal(received(mailbox, from, value(m, 0, from), at::zeros({10}, at::kLong)), tensor(from, to, m)));
        }
      end_everywhere(mailbox, rank, m, {{&kAdd, 7}});
      mailbox.progress();
    }
    mailbox.finish();
    EXPECT_EQ(mailbox.messages(), 5 * 3 * 2);
    EXPECT_EQ(mailbox.bytes(), 5 * 3 * 10 * 8);
  });
}

TEST(AMailboxOfThreads, CountsTheMessagesThatWereNotThereYet) {
  run_ranks(2, [](Rank& rank) {
    const auto group = rank.world().clone("stages");
    Mailbox mailbox(*group, c10::kCPU);
    const MessageName first{0, 0, kTold, 1, kAdd}, second{0, 1, kTold, 2, kAdd};
    if (rank.id() == 0) {
      std::this_thread::sleep_for(50ms);  // stage 1 asks before that, as a rule
      mailbox.send_bytes(1, first, "x");
      mailbox.send_bytes(1, second, "y");
      mailbox.send_bytes(1, value(0, 2, 3), "z");
      mailbox.flush();
      rank.world().barrier();
    } else {
      (void)mailbox.take_bytes(0, first);
      rank.world().barrier();
      const int64_t waits = mailbox.waits(kTold);
      (void)mailbox.take_bytes(0, second);
      (void)mailbox.take_bytes(0, value(0, 2, 3));
      EXPECT_LE(waits, 1);
      EXPECT_EQ(mailbox.waits(kTold), waits);
      EXPECT_EQ(mailbox.waits(kValue), 0);
    }
    end_everywhere(mailbox, rank, 0);
    mailbox.finish();
  });
}

// Between two steps no receive is left that would count as late, however long the next step is not begun.
TEST(AMailboxBetweenSteps, ReceivesNothing) {
  run_ranks(2,
            [](Rank& rank) {
              Mailbox mailbox(rank.world(), c10::kCPU);
              for (int64_t m = 0; m < 2; ++m) {
                if (rank.id() == 0)
                  mailbox.send(1, value(m, 0, 4), at::ones({3}));
                else
                  received(mailbox, 0, value(m, 0, 4), at::ones({3}));
                end_everywhere(mailbox, rank, m);
                mailbox.finish();
                std::this_thread::sleep_for(m == 0 ? 1500ms : 0ms);
                mailbox.progress();
              }
            },
            {.backend = RankBackend::kC10d, .timeout = 1s});
}

TEST_P(AMailbox, TellsBothStagesOfAGradientThatNobodyTakes) {
  const auto texts = errors_of([](Mailbox& mailbox, Rank& rank) {
    end_everywhere(mailbox, rank, 0);
    if (rank.id() == 0) mailbox.send_gradient(1, 0, 3, at::ones({3}));
    mailbox.finish();
    end_everywhere(mailbox, rank, 1);
    mailbox.finish();
  });
  expect_both_say(texts, "stage 0 has sent a gradient of micro-batch 0 (number 3) to stage 1, which does not take it");
}

// --- stages that do not run the same program -----------------------------------------------------------------------

TEST_P(AMailbox, TellsBothStagesOfAnotherOperator) {
  struct Case {
    MessageName sent;
    std::string text;
  };
  for (const Case& other : std::vector<Case>{
           {value(2, 0, 4, kMul), "a value for aten::mul (operator 4 of micro-batch 2)"},
           {value(2, 0, 5), "a value for aten::add (operator 5 of micro-batch 2)"},
           {value(2, 1, 4), "a value for aten::add (operator 4 of micro-batch 2)"},  // of another argument
           {value(3, 0, 4), "a value for aten::add (operator 4 of micro-batch 3)"},
           {{2, 0, kScalar, 4, kAdd}, "the number of aten::add (operator 4 of micro-batch 2)"},
       }) {
    const auto texts = errors_of([&](Mailbox& mailbox, Rank& rank) {
      const at::Tensor one = at::ones({3});
      if (rank.id() == 0)
        mailbox.send(1, other.sent, one);
      else
        received(mailbox, 0, value(2, 0, 4), one);
      received(mailbox, 1 - rank.id(), value(4, 1, 9, kExp), one);
    });
    expect_both_say(texts,
                    "stage 1 waits for a value for aten::add (operator 4 of micro-batch 2) from stage 0; stage 0 has "
                    "sent " +
                        other.text + "; every stage has to run the same operators");
  }
}

TEST_P(AMailbox, TellsBothStagesOfAnotherShapeOrDtype) {
  for (const at::Tensor& other : {at::ones({3, 1}), at::ones({2}), at::ones({3}, at::kInt)}) {
    const auto texts = errors_of([&](Mailbox& mailbox, Rank& rank) {
      const at::Tensor one = at::ones({3});
      if (rank.id() == 0) mailbox.send(1, value(0, 0, 4), one);
      received(mailbox, 1 - rank.id(), value(0, 0, 4), other);
    });
    expect_both_say(texts, str("aten::add (operator 4 of micro-batch 0) from stage 0, of ", other.scalar_type(), " ",
                               other.sizes(), "; stage 0 has sent Float [3]"));
  }
}

// Stage 0 leaves the operator out, and ends the micro-batch while stage 1 waits.
TEST_P(AMailbox, TellsBothStagesOfAMessageThatIsMissing) {
  const auto texts = errors_of([](Mailbox& mailbox, Rank& rank) {
    if (rank.id() == 1) received(mailbox, 0, value(0, 0, 4), at::ones({3}));
    end_everywhere(mailbox, rank, 0, {{&kMul, 1}, {&kExp, 2}});
    mailbox.finish();
  });
  expect_both_say(texts,
                  "stage 1 waits for a value for aten::add (operator 4 of micro-batch 0) from stage 0; stage 0 has "
                  "ended micro-batch 0 after 2 operators");
}

TEST_P(AMailbox, TellsBothStagesOfAMessageThatNobodyTakes) {
  const auto texts = errors_of([](Mailbox& mailbox, Rank& rank) {
    if (rank.id() == 0) mailbox.send(1, value(0, 0, 4), at::ones({3}));
    end_everywhere(mailbox, rank, 0, {{&kAdd, 1}});
    mailbox.finish();
  });
  expect_both_say(texts,
                  "stage 0 has sent a value for aten::add (operator 4 of micro-batch 0) to stage 1, which has ended "
                  "micro-batch 0 after 1 operators");
}

// Both wait, each for what the other one will never send.
TEST_P(AMailbox, TellsStagesThatWaitForEachOther) {
  for (const int64_t further : {4, 9}) {
    const auto texts = errors_of([&](Mailbox& mailbox, Rank& rank) {
      if (rank.id() == 0)
        received(mailbox, 1, value(0, 0, 4), at::ones({3}));
      else
        received(mailbox, 0, value(0, 0, further, kMul), at::ones({3}));
    });
    expect_both_say(texts, "waits for a value for aten::add (operator 4 of micro-batch 0) from stage 1");
    expect_both_say(texts,
                    str("waits for a value for aten::mul (operator ", further, " of micro-batch 0) from stage 0"));
    expect_both_say(texts, "which has not sent it");
  }
}

// Waiting long is no divergence: stage 1 is slow, and stage 0 has told it that it waits.
TEST_P(AMailbox, WaitsForAStageThatIsSlow) {
  run(2, [](Rank& rank) {
    Mailbox mailbox(rank.world(), c10::kCPU);
    const at::Tensor one = at::ones({3});
    if (rank.id() == 0) {
      EXPECT_TRUE(at::equal(received(mailbox, 1, value(0, 0, 4), one), one));
      EXPECT_EQ(mailbox.waits(kValue), 1);
      std::this_thread::sleep_for(300ms);  // stage 1 is past what this one waited for, and has sent it
      mailbox.send(1, value(0, 0, 6, kMul), one);
    } else {
      std::this_thread::sleep_for(300ms);
      mailbox.progress();
      mailbox.send(0, value(0, 0, 4), one);
      EXPECT_TRUE(at::equal(received(mailbox, 0, value(0, 0, 6, kMul), one), one));
    }
    end_everywhere(mailbox, rank, 0);
    mailbox.finish();
    EXPECT_EQ(mailbox.messages(), 2);  // without that it waited
  });
}

// Three stages in a ring, of which only one is past the operator that another one waits at.
TEST_P(AMailbox, TellsStagesThatWaitInARing) {
  run(3, [](Rank& rank) {
    const auto group = rank.world().clone("stages");
    Mailbox mailbox(*group, c10::kCPU);
    const std::string text = error_of<CommError>([&] {
      const int next = (rank.id() + 1) % 3;
      received(mailbox, next, value(0, 0, 4 + rank.id(), rank.id() == 2 ? kMul : kAdd), at::ones({3}));
    });
    EXPECT_SAYS(text, ", which has not sent it and waits for a value for aten::");
    rank.world().barrier();
  });
}

TEST_P(AMailbox, TellsBothStagesTheFirstOperatorThatTheyRanOtherwise) {
  struct Case {
    OperatorTrace first, second;
    std::vector<const char*> says;
  };
  for (const Case& one : std::vector<Case>{
           {{{&kAdd, 1}, {&kMul, 2}, {&kExp, 3}},
            {{&kAdd, 1}, {&kExp, 3}, {&kMul, 2}},
            {"stage 0 ran aten::mul", "stage 1 ran aten::exp", " as operator 1 of micro-batch 1"}},
           {{{&kAdd, 1}, {&kMul, 2}},
            {{&kAdd, 1}, {&kMul, 3}},
            {"ran aten::mul as operator 1 of micro-batch 1 with other arguments"}},
           {{{&kAdd, 1}, {&kMul, 2}},
            {{&kAdd, 1}},
            {"stage 0 ran aten::mul", "stage 1 ended it after 1 operators", "as operator 1 of micro-batch 1"}},
       }) {
    const auto texts = errors_of([&](Mailbox& mailbox, Rank& rank) {
      end_everywhere(mailbox, rank, 0, {{&kAdd, 1}});
      end_everywhere(mailbox, rank, 1, rank.id() == 0 ? one.first : one.second);
      mailbox.finish();
    });
    for (const char* part : one.says) expect_both_say(texts, part);
  }
}

// The end is met where the next micro-batch's message is taken, long before the step's end.
TEST_P(AMailbox, ComparesAMicroBatchBeforeTheNextOnesMessages) {
  const auto texts = errors_of([](Mailbox& mailbox, Rank& rank) {
    const at::Tensor one = at::ones({3});
    end_everywhere(mailbox, rank, 0, {{rank.id() == 0 ? &kAdd : &kMul, static_cast<uint64_t>(rank.id())}});
    if (rank.id() == 0) mailbox.send(1, value(1, 0, 4), one);
    received(mailbox, 1 - rank.id(), value(1, rank.id(), 4), one);
  });
  expect_both_say(texts, "stage 0 ran aten::add");
  expect_both_say(texts, "stage 1 ran aten::mul");
}

// As where stages were given other numbers of micro-batches.
TEST_P(AMailbox, TellsBothStagesOfAMicroBatchThatOneDoesNotRun) {
  const auto texts = errors_of([](Mailbox& mailbox, Rank& rank) {
    for (int64_t m = 0; m < 1 + rank.id(); ++m) end_everywhere(mailbox, rank, m);
    mailbox.finish();
    end_everywhere(mailbox, rank, 1);
    mailbox.finish();
  });
  expect_both_say(texts,
                  "stage 1 waits for the end of micro-batch 1 from stage 0, which has finished the step without");
}

TEST_P(AMailbox, AnExceptionOnOneStageReachesAll) {
  run(4, [](Rank& rank) {
    const auto group = rank.world().clone("stages");
    Mailbox mailbox(*group, c10::kCPU);
    if (rank.id() == 2) {
      mailbox.abort("the tide is out");
    } else {
      const int next = (rank.id() + 1) % 4;
      const std::string text = error_of<CommError>([&] { received(mailbox, next, value(3, 0, 17), at::ones({3})); });
      EXPECT_SAYS(text, "the tide is out");
      EXPECT_SAYS(text, "aten::add (operator 17 of micro-batch 3)");
    }
    rank.world().barrier();
  });
}

TEST(AMailboxOfASlowGroup, SaysWhatItWaitedForWhenTheTimeIsUp) {
  run_ranks(2,
            [](Rank& rank) {
              const auto group = rank.world().clone("stages");
              Mailbox mailbox(*group, c10::kCPU);
              if (rank.id() == 0)
                EXPECT_SAYS(
                    error_of<CommError>([&] { received(mailbox, 1, value(0, 0, 4), at::ones({3})); }),
                    "stage 0 waits for a value for aten::add (operator 4 of micro-batch 0) from stage 1, and nothing");
              else
                std::this_thread::sleep_for(1500ms);
            },
            {.timeout = 1s});
}

// --- headers -------------------------------------------------------------------------------------------------------

constexpr int64_t kHeader = 256;

/// The header of a message without elements, on both ranks.
at::Tensor captured(Rank& rank) {
  const at::Tensor header = at::zeros({kHeader}, at::kByte);
  if (rank.id() == 0) {
    Mailbox mailbox(rank.world(), c10::kCPU);
    mailbox.send(1, value(0, 0, 4), {});
    mailbox.flush();
  } else {
    rank.world().recv(header, 0).wait();
  }
  rank.world().broadcast(header, 1).wait();
  return header;
}

TEST(AHeader, OfWhichAnyBitChangedIsRefused) {
  at::Tensor header;
  run_ranks(2, [&](Rank& rank) {
    const at::Tensor got = captured(rank);
    if (rank.id() == 1) header = got;
  });
  for (int64_t bit = 0; bit < 8 * kHeader; bit += 29) {
    SCOPED_TRACE(str("bit ", bit));
    run_ranks(2, [&](Rank& rank) {
      const auto group = rank.world().clone("stages");
      if (rank.id() == 0) {
        const at::Tensor damaged = header.clone();
        damaged.mutable_data_ptr<uint8_t>()[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        group->send(damaged, 1).wait();
      } else {
        Mailbox mailbox(*group, c10::kCPU);
        const std::string text = error_of<CommError>([&] { mailbox.take(0, value(0, 0, 4), {}); });
        EXPECT_SAYS(text, "stage 1 got a message from stage 0 that ");
        EXPECT_SAYS(text, bit < 64 ? "does not begin as one of a step function" : "is damaged");
      }
      rank.world().barrier();
    });
  }
}

// --- processes -----------------------------------------------------------------------------------------------------

/// Exchanges values for ever.
int exchange(Group& world, const std::string&) {
  Mailbox mailbox(world, c10::kCPU);
  const int other = 1 - world.rank();
  const at::Tensor buffer = at::zeros({1000});
  for (int64_t m = 0;; ++m) {
    if (world.rank() == 1 && m == 3) ::raise(SIGKILL);
    mailbox.send(other, value(m, 0, 4), at::ones({1000}));
    mailbox.take(other, value(m, 0, 4), buffer);
    mailbox.send_end(other, m, 7, {{&kAdd, 7}});
  }
}

TEST(AMailboxOfProcesses, NamesAStageThatWasKilledAndWhatWasAwaited) {
  const auto results = run_processes(2, exchange, {});
  EXPECT_EQ(results[1].signal, SIGKILL);
  EXPECT_EQ(results[0].exit_code, 1);
  EXPECT_SAYS(results[0].error_text,
              "stage 0 waits for a value for aten::add (operator 4 of micro-batch 3) from stage 1");
  EXPECT_SAYS(results[0].error_text, "rank 1");
  EXPECT_SAYS(results[0].error_text, "died");
  EXPECT_LE(results[0].seconds - results[1].seconds, 5.0);
}

}  // namespace
}  // namespace trireme::ownership
