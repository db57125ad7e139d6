// DeepSpeed's layout, written and read back: every stage, ranks whose parts end within parameters, and what is refused.
// That DeepSpeed itself agrees is shown by tests/peers/deepspeed_checkpoint_slow_test.cpp.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/checkpoint/fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/convert.h"
#include "trireme/formats/pickle/torch_archive.h"

namespace trireme {
namespace {

using namespace checkpoint_test;
using Contents = std::map<std::string, at::Tensor>;

/// Values of `seed`, seed + 1/64, …: no two tensors are alike, and in bf16 they are rounded.
at::Tensor filled(std::vector<int64_t> shape, at::ScalarType dtype, int seed) {
  int64_t numel = 1;
  for (const int64_t extent : shape) numel *= extent;
  return at::arange(numel, at::kFloat).div(64).add(seed).to(dtype).view(shape);
}

/// As one rank's engine saves it: two groups whose sizes no number of ranks divides, tied and frozen weights, buffers.
Contents contents_in(at::ScalarType dtype) {
  Contents contents;
  int seed = 1;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    const at::Tensor master = filled(shape, at::kFloat, seed += 10);
    contents["model." + name] = master.to(dtype);
    if (dtype != at::kFloat) contents["master." + name] = master;
    contents["optimizer.exp_avg." + name] = filled(shape, at::kFloat, seed += 10);
    contents["optimizer.exp_avg_sq." + name] = filled(shape, at::kFloat, seed += 10);
  };
  add("embed.weight", {7, 5});
  add("mid.weight", {13, 11});
  add("out.weight", {3, 13});
  add("embed.bias", {7});
  add("out.bias", {1});
  contents["model.frozen"] = filled({3, 3}, dtype, 500);
  contents["model.scale"] = filled({3}, at::kFloat, 600);
  contents["model.count"] = filled({}, at::kLong, 7);
  return contents;
}

Json values_in(at::ScalarType dtype) {
  Json values = {
      {"global_steps", 12},
      {"micro_steps", 24},
      {"skipped_steps", 2},
      {"global_samples", 96},
      {"lr", 0.25},
      {"group_lrs", {0.25, 0.5}},
      {"aliases", {{"head.weight", "embed.weight"}}},
      {"exclude_frozen_parameters", false},
      {"parameter_groups",
       {{{"names", {"embed.weight", "mid.weight", "out.weight"}}, {"lr", 0.25}, {"weight_decay", 0.125}},
        {{"names", {"embed.bias", "out.bias"}}, {"lr", 0.5}, {"weight_decay", 0.0}}}},
      {"parameter_steps",
       {{"embed.weight", 10},
        {"embed.bias", 10},
        {"mid.weight", 10},
        {"frozen", 0},
        {"out.weight", 10},
        {"out.bias", 10}}},
      {"config", {{"gradient_accumulation_steps", 2}, {"zero_optimization", {{"stage", 3}, {"sub_group_size", 40}}}}},
      {"client_state", {{"epoch", 3}, {"note", {1, 2.5, nullptr, "x"}}}}};
  if (dtype == at::kHalf)
    values["loss_scaler"] = {{"scale", 1024.0}, {"steps", 12}, {"last_overflow", 4}, {"hysteresis", 1}};
  return values;
}

CheckpointSource saved_here(const Folder& folder, at::ScalarType dtype, const Json& values, const Contents& contents) {
  run_ranks(1, [&](Rank& rank) {
    StateTree state;
    for (const auto& [name, tensor] : contents)
      state.tensors.push_back({name, {tensor.sizes().vec()}, 0, tensor.reshape({-1}).contiguous()});
    state.values = values.dump();
    save_checkpoint(rank.world(), folder / "ours", "step12", state);
  });
  (void)dtype;
  return open_checkpoint(folder / "ours");
}

CheckpointSource saved_here(const Folder& folder, at::ScalarType dtype) {
  return saved_here(folder, dtype, values_in(dtype), contents_in(dtype));
}

Contents read_all(const CheckpointSource& source) {
  Contents contents;
  TensorReader reader(source);
  for (size_t i = 0; i < source.manifest.tensors.size(); ++i) {
    const SavedTensor& tensor = source.manifest.tensors[i];
    at::Tensor read = at::empty(tensor.shape, at::TensorOptions().dtype(tensor.dtype));
    // In two halves: a reader may begin anywhere.
    const int64_t half = read.numel() / 2;
    auto* data = static_cast<std::byte*>(read.data_ptr());
    reader.read(i, 0, half, data);
    reader.read(i, half, read.numel() - half, data + half * read.element_size());
    contents[tensor.name] = read;
  }
  return contents;
}

void expect_equal(const Contents& found, const Contents& expected) {
  EXPECT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_EQ(found.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(found.at(name), tensor)) << name;
  }
}

struct Shape {
  int stage;
  int ranks;
  at::ScalarType dtype;
};

std::vector<Shape> all_shapes() {
  std::vector<Shape> shapes;
  for (int stage = 1; stage <= 3; ++stage) {
    for (const int ranks : {1, 2, 3, 8}) shapes.push_back({stage, ranks, at::kBFloat16});
    shapes.push_back({stage, 3, at::kFloat});
    shapes.push_back({stage, 2, at::kHalf});
  }
  return shapes;
}

TEST(DeepSpeedLayout, KeepsEveryBitAtEveryStageAndNumberOfRanks) {
  for (const auto& [stage, ranks, dtype] : all_shapes()) {
    SCOPED_TRACE(str("stage ", stage, ", ", ranks, " ranks, ", dtype));
    const Folder folder;
    write_deepspeed_checkpoint(saved_here(folder, dtype), folder / "theirs", {.stage = stage, .ranks = ranks});
    EXPECT_EQ(text_of(folder / "theirs/latest"), "step12");
    const CheckpointSource source = open_checkpoint(folder / "theirs");
    EXPECT_EQ(source.layout, CheckpointLayout::kDeepSpeed);
    EXPECT_EQ(source.manifest.world_size(), ranks);
    expect_equal(read_all(source), contents_in(dtype));
    const Json found = Json::parse(source.manifest.values);
    const Json expected = values_in(dtype);
    for (const auto& [key, value] : expected.items()) {
      if (key == "parameter_groups") continue;
      EXPECT_EQ(found.value(key, Json()), value) << key;
    }
    EXPECT_EQ(found["parameter_groups"][0]["names"], expected["parameter_groups"][0]["names"]);
    EXPECT_EQ(found["parameter_groups"][0]["weight_decay"], 0.125);
    EXPECT_EQ(found["parameter_groups"][1]["weight_decay"], 0.0);
    EXPECT_EQ(found["parameter_groups"][1]["lr"], 0.5);
  }
}

TEST(DeepSpeedLayout, IsCopiedIntoOursWithChecksums) {
  const Folder folder;
  write_deepspeed_checkpoint(saved_here(folder, at::kBFloat16), folder / "theirs", {.stage = 3, .ranks = 2});
  int64_t last = 0;
  int64_t in_all = 0;
  const SavedCheckpoint saved = write_trireme_checkpoint(
      open_checkpoint(folder / "theirs"), folder / "again",
      {.tag = "copy", .progress = [&](int64_t done, int64_t total) { last = done, in_all = total; }});
  EXPECT_EQ(saved.path, folder / "again/copy");
  EXPECT_EQ(last, in_all);
  EXPECT_EQ(in_all, saved.tensor_bytes);
  const CheckpointSource copy = open_checkpoint(folder / "again");
  EXPECT_EQ(copy.layout, CheckpointLayout::kTrireme);
  EXPECT_EQ(copy.manifest.world_size(), 2);
  expect_equal(read_all(copy), contents_in(at::kBFloat16));
  EXPECT_EQ(Json::parse(copy.manifest.values)["client_state"], values_in(at::kBFloat16)["client_state"]);
  run_ranks(3, [&](Rank& rank) {  // and loads at any number of ranks
    StateTree state;
    at::Tensor part = at::empty({50});
    state.tensors.push_back({"master.mid.weight", {{13, 11}}, rank.id() * 40, part});
    load_checkpoint(rank.world(), folder / "again", "", state, {.extra = Mismatch::kIgnore});
    EXPECT_TRUE(
        at::equal(part, contents_in(at::kBFloat16)["master.mid.weight"].view({-1}).narrow(0, rank.id() * 40, 50)));
  });
}

TEST(DeepSpeedLayout, IsRefusedWhenFilesAreMissingOrOfAnotherKind) {
  const auto error_after = [](const std::function<void(const std::filesystem::path&)>& change, int stage) {
    const Folder folder;
    write_deepspeed_checkpoint(saved_here(folder, at::kFloat), folder / "theirs", {.stage = stage, .ranks = 3});
    change(folder / "theirs/step12");
    return named_error_of([&] { open_checkpoint(folder / "theirs"); });
  };
  using Path = std::filesystem::path;
  const std::string optimizer = "_mp_rank_00_optim_states.pt";
  const auto says = [&](const std::string& error, const char* text) {
    EXPECT_TRUE(error.starts_with("CheckpointError: ")) << error;
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  says(error_after([&](const Path& path) { std::filesystem::remove(path / ("zero_pp_rank_1" + optimizer)); }, 2),
       "there is zero_pp_rank_2_mp_rank_00_optim_states.pt, but none of rank 1");
  says(error_after([&](const Path& path) { std::filesystem::remove(path / ("zero_pp_rank_2" + optimizer)); }, 2),
       "saved by 3 ranks, but there are 2 files");
  says(error_after([&](const Path& path) { std::filesystem::remove(path / ("zero_pp_rank_2" + optimizer)); }, 3),
       "3 files *_model_states.pt, but 2 *_optim_states.pt");
  says(error_after([&](const Path& path) { write_text(path / "mp_rank_01_model_states.pt", ""); }, 1),
       "mp_rank_01_model_states.pt: a checkpoint of a model in several model-parallel parts is not supported yet");
  says(error_after([&](const Path& path) { write_text(path / "layer_00-model_states.pt", ""); }, 1),
       "pipeline stages or experts");
  says(error_after([&](const Path& path) { write_text(path / ("bf16_zero_pp_rank_1" + optimizer), ""); }, 1),
       "two files of rank 1");
  says(error_after([&](const Path& path) { write_text(path / "mp_rank_00_model_states.pt", ""); }, 3),
       "checkpoints of two ZeRO stages");
  says(error_after([&](const Path& path) { std::filesystem::resize_file(path / ("zero_pp_rank_0" + optimizer), 900); },
                   1),
       "damaged, or not written by torch.save()");
  says(error_after(
           [&](const Path& path) {
             std::filesystem::copy_file(path / ("zero_pp_rank_1" + optimizer), path / ("zero_pp_rank_0" + optimizer),
                                        std::filesystem::copy_options::overwrite_existing);
             std::filesystem::copy_file(path / ("zero_pp_rank_2" + optimizer), path / ("zero_pp_rank_1" + optimizer),
                                        std::filesystem::copy_options::overwrite_existing);
             write_text(path / "zero_pp_rank_2_mp_rank_00_optim_states.pt",
                        text_of(path / "mp_rank_00_model_states.pt"));
           },
           2),
       "expected 'optimizer_state_dict', found none");
}

TEST(DeepSpeedLayout, IsNotWrittenWhereDeepSpeedCouldNotLoadIt) {
  const auto error_with = [](const std::function<void(Json&, Contents&)>& change, const DeepSpeedLayout& layout) {
    const Folder folder;
    Json values = values_in(at::kBFloat16);
    Contents contents = contents_in(at::kBFloat16);
    change(values, contents);
    const CheckpointSource source = saved_here(folder, at::kBFloat16, values, contents);
    const std::string error = named_error_of([&] { write_deepspeed_checkpoint(source, folder / "theirs", layout); });
    EXPECT_EQ(folder.names().size(), std::filesystem::exists(folder / "theirs") ? 2U : 1U);
    EXPECT_FALSE(std::filesystem::exists(folder / "theirs/step12"));
    return error;
  };
  const auto nothing = [](Json&, Contents&) {};
  const auto says = [](const std::string& error, const char* text) {
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  says(error_with(nothing, {.stage = 0, .ranks = 2}), "ConfigError: stage 0: DeepSpeed's ZeRO stages");
  says(error_with(nothing, {.stage = 1, .ranks = 0}), "ConfigError: ranks 0: expected at least 1");
  says(error_with(
           [](Json&, Contents& contents) {
             std::erase_if(contents, [](const auto& item) { return item.first.starts_with("optimizer."); });
           },
           {}),
       "it holds no optimizer states");
  says(error_with([](Json&, Contents& contents) { contents.erase("optimizer.exp_avg.out.bias"); }, {}),
       "other optimizer states");
  says(error_with([](Json&, Contents& contents) { contents.erase("master.out.bias"); }, {}),
       "\"out.bias\" is BFloat16 and has no fp32 master");
  says(error_with([](Json& values, Contents&) { values.erase("parameter_groups"); }, {}),
       "does not say which parameter is in which");
  says(error_with([](Json& values, Contents&) { values["parameter_groups"][0]["names"].erase(0); }, {}),
       "name 4 parameters, 5 have");
  says(error_with([](Json& values, Contents&) { values.erase("global_steps"); }, {}),
       "expected the value 'global_steps'");
  says(error_with([](Json& values, Contents&) { values["client_state"]["module"] = 1; }, {}),
       "client_state[\"module\"]: DeepSpeed keeps");
  says(error_with([](Json& values, Contents&) { values["parameter_groups"] = 3; }, {}), "a value is of the wrong kind");
}

TEST(DeepSpeedLayout, LeavesAnExistingTagAndNoHalfOneWhereverTheDiskFails) {
  const Folder folder;
  const CheckpointSource source = saved_here(folder, at::kBFloat16);
  int failures = 0;
  for (int fail_at = 0; failures == fail_at; ++fail_at) {
    FaultyFiles files(fail_at, FaultyFiles::Then::kRecover);
    const std::string error = named_error_of(
        [&] { write_deepspeed_checkpoint(source, folder / "theirs", {.stage = 2, .ranks = 2}, {.files = &files}); });
    if (error == "nothing") break;
    ++failures;
    ASSERT_TRUE(error.starts_with("IoError: ")) << error;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "theirs", ignored))
      ASSERT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path() << " after operation " << fail_at;
    std::filesystem::remove_all(folder / "theirs", ignored);
  }
  EXPECT_GE(failures, 10);
  expect_equal(read_all(open_checkpoint(folder / "theirs")), contents_in(at::kBFloat16));
  const std::string again =
      named_error_of([&] { write_deepspeed_checkpoint(source, folder / "theirs", {.stage = 1, .ranks = 1}); });
  EXPECT_NE(again.find("theirs/step12: this tag exists already"), std::string::npos) << again;
}

/// A model file as ZeRO stage 0 leaves it, of two matrices and a bias; the matrices' shapes are given.
void write_stage_zero(const std::filesystem::path& folder, std::vector<int64_t> first, std::vector<int64_t> second,
                      bool first_is_frozen) {
  std::filesystem::create_directories(folder);
  std::ofstream file(folder / "mp_rank_00_model_states.pt", std::ios::binary);
  pickle::TorchArchiveWriter archive(
      [&](const void* data, size_t bytes) { file.write(static_cast<const char*>(data), bytes); });
  pickle::Document document;
  int storages = 0;
  const auto tensor = [&](const std::vector<int64_t>& shape, int seed) {
    const at::Tensor values = filled(shape, at::kFloat, seed);
    archive.storage(std::to_string(storages), values.const_data_ptr(), values.nbytes());
    return document.tensor(std::to_string(storages++), at::kFloat, shape);
  };
  pickle::Document::Pairs module{{"a", tensor(first, 1)}, {"a_bias", tensor({4}, 2)}, {"b", tensor(second, 3)}};
  std::vector<pickle::Value*> matrices;
  pickle::Value& states = document.add(pickle::Kind::kDict);
  const auto add_state = [&](const std::vector<int64_t>& shape, int seed) {
    states.items.push_back(document.integer(static_cast<int64_t>(states.items.size() / 2)));
    states.items.push_back(document.dict({{"step", document.integer(5)}, {"exp_avg", tensor(shape, seed)}}));
    return states.items[states.items.size() - 2];
  };
  if (!first_is_frozen) matrices.push_back(add_state(first, 11));
  matrices.push_back(add_state(second, 13));
  pickle::Value* bias = add_state({4}, 12);
  const auto group = [&](std::vector<pickle::Value*> members) {
    return document.dict({{"lr", document.real(0.5)}, {"params", document.list(std::move(members))}});
  };
  pickle::Value* optimizer =
      document.dict({{"state", &states}, {"param_groups", document.list({group(matrices), group({bias})})}});
  document.set_root(document.dict({{"module", document.dict(module, /*ordered=*/true)},
                                   {"buffer_names", document.list({})},
                                   {"optimizer", optimizer},
                                   {"global_steps", document.integer(5)}}));
  archive.finish(document);
}

TEST(DeepSpeedLayout, FindsTheNamesThatStageZeroDoesNotSaveByShapeAndOrder) {
  const Folder folder;
  write_stage_zero(folder / "same", {4, 3}, {4, 3}, /*first_is_frozen=*/false);
  const Contents same = read_all(open_checkpoint(folder / "same"));
  EXPECT_TRUE(at::equal(same.at("optimizer.exp_avg.a"), filled({4, 3}, at::kFloat, 11)));
  EXPECT_TRUE(at::equal(same.at("optimizer.exp_avg.b"), filled({4, 3}, at::kFloat, 13)));
  EXPECT_TRUE(at::equal(same.at("optimizer.exp_avg.a_bias"), filled({4}, at::kFloat, 12)));
  EXPECT_TRUE(at::equal(same.at("model.b"), filled({4, 3}, at::kFloat, 3)));
  write_stage_zero(folder / "frozen", {4, 3}, {3, 4}, /*first_is_frozen=*/true);
  const Contents frozen = read_all(open_checkpoint(folder / "frozen"));
  EXPECT_EQ(frozen.size(), 5U);
  EXPECT_TRUE(at::equal(frozen.at("optimizer.exp_avg.b"), filled({3, 4}, at::kFloat, 13)));
  EXPECT_FALSE(frozen.contains("optimizer.exp_avg.a"));
}

TEST(DeepSpeedLayout, LeavesStatesOfStageZeroOutRatherThanGuessWhoseTheyAre) {
  const Folder folder;
  write_stage_zero(folder / "unclear", {4, 3}, {4, 3}, /*first_is_frozen=*/true);  // are they a's or b's?
  CapturedLog log;
  const CheckpointSource source = open_checkpoint(folder / "unclear");
  EXPECT_EQ(read_all(source).size(), 3U);
  EXPECT_NE(log.text().find("the optimizer states are left out"), std::string::npos) << log.text();
  EXPECT_EQ(Json::parse(source.manifest.values)["lr"], 0.5);
}

}  // namespace
}  // namespace trireme
