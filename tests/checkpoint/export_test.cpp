// A file of whole tensors that rank 0 writes: complete, or not there.
#include "trireme/checkpoint/export.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <gtest/gtest.h>

#include "tests/checkpoint/fixture.h"
#include "tests/support/run_ranks.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using namespace checkpoint_test;

/// Two tensors, fetched by collectives, as a sharded model's are; `fetched` counts.
std::vector<ExportedTensor> two_tensors(Group& group, int& fetched) {
  const auto fetch = [&group, &fetched](const at::Tensor& value) {
    return [&group, &fetched, value] {
      ++fetched;
      at::Tensor sent = group.rank() == 0 ? value.clone() : at::ones_like(value);
      group.broadcast(sent, 0).wait();
      return sent;
    };
  };
  return {{"half", {2, 3}, at::kBFloat16, fetch(at::arange(6, at::kBFloat16).view({2, 3}))},
          {"wide", {4}, at::kFloat, fetch(at::arange(4, at::kFloat))}};
}

TEST(ExportTensors, AreWrittenOnceEachInTheOrderOfTheFile) {
  const Folder folder;
  run_ranks(2, [&](Rank& rank) {
    int fetched = 0;
    export_tensors(rank.world(), folder / "a/b.safetensors", two_tensors(rank.world(), fetched));
    EXPECT_EQ(fetched, 2);
    const NamedTensors saved = read_safetensors(folder / "a/b.safetensors");
    EXPECT_TRUE(at::equal(saved.at("half"), at::arange(6, at::kBFloat16).view({2, 3})));
    EXPECT_TRUE(at::equal(saved.at("wide"), at::arange(4, at::kFloat)));
  });
}

TEST(ExportTensors, LeaveTheFormerFileAndNoHalfOneWhereverTheDiskFails) {
  for (const char* name : {"model.safetensors", "model.bin"}) {
    const Folder folder;
    write_text(folder / name, "former");
    int failures = 0;
    for (int fail_at = 0; failures == fail_at; ++fail_at) {
      run_ranks(2, [&](Rank& rank) {
        FaultyFiles files(rank.id() == 0 ? fail_at : -1, FaultyFiles::Then::kRecover);
        int fetched = 0;
        const std::string error = named_error_of([&] {
          export_tensors(rank.world(), folder / name, two_tensors(rank.world(), fetched), {.files = &files});
        });
        EXPECT_EQ(fetched, 2);  // no rank was left waiting
        if (rank.id() != 0) return;
        if (error == "nothing") return;
        ++failures;
        EXPECT_TRUE(error.starts_with("IoError: rank 0: ")) << error;
        EXPECT_EQ(folder.names(), std::vector<std::string>{name});
      });
      if (failures > fail_at && fail_at < 4) {
        EXPECT_EQ(text_of(folder / name), "former") << fail_at;
      }
    }
    EXPECT_GE(failures, 5) << name;  // folder, file, writes, sync, rename
    EXPECT_NE(text_of(folder / name), "former");
  }
}

TEST(ExportTensors, RefuseWhatTheFormatCannotHoldOnEveryRank) {
  const Folder folder;
  run_ranks(2, [&](Rank& rank) {
    const auto ones = [](at::IntArrayRef shape) { return [=, s = shape.vec()] { return at::ones(s); }; };
    const auto error = [&](const char* name, const std::vector<ExportedTensor>& tensors) {
      return named_error_of([&] { export_tensors(rank.world(), folder / name, tensors); });
    };
    for (const char* name : {"twice.safetensors", "twice.bin"})
      EXPECT_NE(
          error(name, {{"a", {2}, at::kFloat, ones({2})}, {"a", {2}, at::kFloat, ones({2})}}).find("stands twice"),
          std::string::npos);
    EXPECT_NE(error("shape.bin", {{"a", {3}, at::kFloat, ones({2})}}).find("expected Float [3], fetched Float [2]"),
              std::string::npos);
    EXPECT_EQ(error("a.npy", {}).find("ConfigError: 'a.npy' names no format"), 0U);
    rank.world().barrier();
    EXPECT_TRUE(folder.names().empty());
  });
}

}  // namespace
}  // namespace trireme
