// Messages between stages that are damaged, or are others than the expected one.
#include "pipeline/messages.h"

#include <gtest/gtest.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using testing::error_of;

constexpr int64_t kPreamble = 1024;
constexpr Messages::Key kKey{.kind = 3, .micro_batch = 2};  // the activation of part 1
// Places in a preamble, in 8 bytes: the header, then the description of the tensors.
enum Word { kMark, kKind, kMicroBatch, kDescriptionBytes, kTextBytes, kTextChecksum, kChecksum, kDescription };

Message message_of(int64_t rows) {
  Message message{.value = flatten(c10::IValue(at::arange(rows * 3, at::kFloat).view({rows, 3}))),
                  .requires_grad = {true}};
  message.is_missing = {true};
  return message;
}

Messages messages_of(const Rank& rank) { return Messages(rank.world(), at::kCPU, /*dynamic_shapes=*/true); }

/// The preamble with which rank 0 sends a message to rank 1, on both.
at::Tensor captured(Rank& rank, const Message& message) {
  const at::Tensor preamble = at::zeros({kPreamble}, at::kByte);
  if (rank.id() == 0) {
    Messages messages = messages_of(rank);
    messages.send(1, kKey, message);
    messages.flush();
  } else {
    rank.world().recv(preamble, 0).wait();
    rank.world().recv(at::empty(message.value.tensors[0].sizes(), at::kFloat), 0).wait();
  }
  rank.world().broadcast(preamble, 1).wait();
  return preamble;
}

int64_t word_of(const at::Tensor& preamble, int64_t word) {
  int64_t value = 0;
  std::memcpy(&value, static_cast<const char*>(preamble.const_data_ptr()) + 8 * word, 8);
  return value;
}

void set_word(const at::Tensor& preamble, int64_t word, int64_t value) {
  std::memcpy(static_cast<char*>(preamble.mutable_data_ptr()) + 8 * word, &value, 8);
}

int64_t checksum_of(const at::Tensor& preamble, int64_t begin, int64_t count) {
  return static_cast<int64_t>(XXH3_64bits(preamble.const_data_ptr<uint8_t>() + begin, static_cast<size_t>(count)));
}

/// Makes the checksums those of what the preamble says.
void make_checksums(const at::Tensor& preamble) {
  const int64_t text = word_of(preamble, kTextBytes), room = kPreamble - 8 * kDescription;
  set_word(preamble, kTextChecksum, checksum_of(preamble, 8 * kDescription, std::clamp<int64_t>(text, 0, room)));
  set_word(preamble, kChecksum, checksum_of(preamble, 0, 8 * kChecksum));
}

/// Rank 0 sends `preamble`, and rank 1 must refuse it, with a text in which `part` is.
void expect_refused(Rank& rank, const at::Tensor& preamble, const char* part) {
  if (rank.id() == 0) return rank.world().send(preamble, 1).wait();
  Messages messages = messages_of(rank);
  messages.expect(0, {{.key = kKey, .subject = "stage 1, RecvActivation"}});
  const std::string text = error_of<CommError>([&] { messages.receive(0); });
  EXPECT_SAYS(text, "stage 1, RecvActivation: the message from stage 0 ");
  EXPECT_SAYS(text, part);
}

TEST(Messages, GivesWhatWasSent) {
  run_ranks(2, [](Rank& rank) {
    const Message message = message_of(4);
    Messages messages = messages_of(rank);
    if (rank.id() == 0) {
      messages.send(1, kKey, message);
      messages.flush();
      return;
    }
    messages.expect(0, {{.key = kKey, .subject = "test"}});
    const Message got = messages.receive(0);
    EXPECT_TRUE(at::equal(got.value.tensors[0], message.value.tensors[0]));
    EXPECT_EQ(got.value.structure, message.value.structure);
    EXPECT_TRUE(got.requires_grad[0] && got.is_missing[0]);
  });
}

TEST(Messages, RefusesAPreambleOfWhichAnyBitChanged) {
  run_ranks(2, [](Rank& rank) {
    const at::Tensor preamble = captured(rank, message_of(4));
    const int64_t bytes = 8 * kDescription + word_of(preamble, kTextBytes);
    ASSERT_GT(bytes, 100);
    for (int64_t bit = 0; bit < 8 * bytes; bit += 3) {
      const at::Tensor damaged = preamble.clone();
      damaged.mutable_data_ptr<uint8_t>()[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      SCOPED_TRACE(str("bit ", bit));
      expect_refused(rank, damaged, bit < 64 ? "does not begin as one of a pipeline" : "is damaged");
    }
  });
}

TEST(Messages, RefusesMemoryThatWasNeverWrittenAsAPreamble) {
  run_ranks(2, [](Rank& rank) {
    for (const int byte : {0, 1, 127, 255})
      expect_refused(rank, at::full({kPreamble}, byte, at::kByte), "does not begin as one of a pipeline");
  });
}

TEST(Messages, RefusesNumbersOutOfTheirRangesEvenWhereTheChecksumsFit) {
  run_ranks(2, [](Rank& rank) {
    const at::Tensor preamble = captured(rank, message_of(4));
    const int64_t last = kDescription + 7;  // tensors, is defined, dtype, needs a gradient, dims, 4, 3
    ASSERT_EQ(word_of(preamble, last - 1), 3);
    for (int64_t word = kKind; word < last; ++word)
      for (const int64_t value : {int64_t{-1}, INT64_MIN, INT64_MAX}) {
        if (word == kTextChecksum || word == kChecksum) continue;
        const at::Tensor damaged = preamble.clone();
        set_word(damaged, word, value);
        make_checksums(damaged);
        SCOPED_TRACE(str("word ", word, ", ", value));
        expect_refused(rank, damaged,
                       word <= kMicroBatch ? "expected is the activation of part 1 of micro-batch 2" : "is damaged: ");
      }
  });
}

TEST(Messages, RefusesAnotherLetterThanTheExpectedOneByItsName) {
  run_ranks(2, [](Rank& rank) {
    for (const Messages::Key& key :
         {Messages::Key{Messages::activation_of(1, false), 2}, Messages::Key{Messages::gradient_of(0), 2},
          Messages::Key{Messages::activation_of(1, true), 0}}) {
      Messages messages = messages_of(rank);
      if (rank.id() == 0) {
        messages.send(1, key, message_of(4));
        messages.flush();
        continue;
      }
      messages.expect(0, {{.key = kKey, .subject = "test"}});
      EXPECT_SAYS(error_of<CommError>([&] { messages.receive(0); }),
                  ", and expected is the activation of part 1 of micro-batch 2; the stages do not run the same step");
      rank.world().recv(at::empty({4, 3}, at::kFloat), 0).wait();
    }
  });
}

TEST(Messages, RefusesOtherShapesThanThoseForWhichMemoryIsReady) {
  run_ranks(2, [](Rank& rank) {
    const at::Tensor preamble = captured(rank, message_of(4)), other = preamble.clone(), values = at::zeros({4, 3});
    set_word(other, kDescription + 5, 2);  // rows
    make_checksums(other);
    if (rank.id() == 0) {
      for (const at::Tensor& message : {preamble, values, other, values}) rank.world().send(message, 1).wait();
      return;
    }
    Messages messages(rank.world(), at::kCPU, /*dynamic_shapes=*/false);
    const Messages::Expected expected{.key = kKey, .subject = "test"};
    messages.expect(0, {expected, expected});
    messages.receive(0);  // from now on the shapes are known
    EXPECT_SAYS(error_of<CommError>([&] { messages.receive(0); }), "has other shapes than the one before");
  });
}

}  // namespace
}  // namespace trireme
