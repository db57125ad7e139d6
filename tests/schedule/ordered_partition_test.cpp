// Cuts of a model in the order of its program.
#include "trireme/schedule/ordered_partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/schedule/tree_partition.h"

namespace trireme::pipeline {
namespace {

using Bounds = std::vector<int64_t>;
constexpr int64_t kPlenty = 1'000'000;

std::vector<Atom> atoms_of(const std::vector<int64_t>& costs) {
  std::vector<Atom> atoms;
  for (const int64_t cost : costs)
    atoms.push_back({.name = "atom" + std::to_string(atoms.size()), .cost = cost, .bytes = cost, .crossing_bytes = 1});
  return atoms;
}

std::string error_of(const std::vector<Atom>& atoms, int stages, int64_t limit_bytes) {
  try {
    (void)ordered_partition(atoms, stages, limit_bytes);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(OrderedPartition, MakesTheHeaviestStageAsLightAsPossible) {
  EXPECT_EQ(ordered_partition(atoms_of({3, 1, 1, 1, 1, 1}), 2, kPlenty), (Bounds{0, 2, 6}));
  EXPECT_EQ(ordered_partition(atoms_of({1, 1, 1, 1, 1, 3}), 2, kPlenty), (Bounds{0, 4, 6}));
  EXPECT_EQ(ordered_partition(atoms_of({4, 1, 1, 4}), 3, kPlenty), (Bounds{0, 1, 3, 4}));
}

TEST(OrderedPartition, OfOneStageHasAll) {
  EXPECT_EQ(ordered_partition(atoms_of({3, 1}), 1, kPlenty), (Bounds{0, 2}));
  EXPECT_EQ(ordered_partition({}, 2, kPlenty), (Bounds{0, 0, 0}));
}

TEST(OrderedPartition, OfMoreStagesThanAtomsLeavesTheLastEmpty) {
  EXPECT_EQ(ordered_partition(atoms_of({3, 1}), 4, kPlenty), (Bounds{0, 1, 2, 2, 2}));
  EXPECT_EQ(ordered_partition(atoms_of({3}), 3, kPlenty), (Bounds{0, 1, 1, 1}));
}

TEST(OrderedPartition, GivesEachStageAnAtomThatCostsNothingToo) {
  EXPECT_EQ(ordered_partition(atoms_of({0, 0, 5}), 3, kPlenty), (Bounds{0, 1, 2, 3}));
}

TEST(OrderedPartition, WithinTwoPercentTakesTheFewestCrossingBytes) {
  // A layer is a norm, attention, a norm and an MLP; between them queries, keys and values cross beside the residual.
  std::vector<Atom> atoms;
  for (int layer = 0; layer < 100; ++layer)
    for (const auto& [cost, crossing] : {std::pair{1, 2}, {30, 4}, {1, 2}, {68, 1}})
      atoms.push_back({.name = "layer" + std::to_string(layer), .cost = cost, .bytes = 1, .crossing_bytes = crossing});
  atoms.push_back({.name = "head", .cost = 60, .bytes = 1, .crossing_bytes = 1});
  // 10060 / 2 = 5030: 50 layers and an attention would be 5031, 50 layers 5060 on the other stage, which is in 2 %.
  EXPECT_EQ(ordered_partition(atoms, 2, kPlenty), (Bounds{0, 200, 401}));
  atoms.back().cost = 1000;  // 5500: 54 or 55 layers are 5500 and 5600, of which 55 layers are the best
  EXPECT_EQ(ordered_partition(atoms, 2, kPlenty), (Bounds{0, 220, 401}));
}

TEST(OrderedPartition, BeyondTwoPercentTakesTheLighter) {
  // 200 and 200 with 9 crossing bytes, or 204 and 196, 205 and 195 with 8.
  for (const auto& [middle, bound] : {std::pair{4, 3}, {5, 2}}) {
    std::vector<Atom> atoms = atoms_of({100, 100, middle, 100 - middle, 100});
    atoms[1].crossing_bytes = 9;
    atoms[2].crossing_bytes = 8;
    EXPECT_EQ(ordered_partition(atoms, 2, kPlenty), (Bounds{0, bound, 5}));
  }
}

TEST(OrderedPartition, AmongEqualCrossingBytesTakesTheLighter) {
  EXPECT_EQ(ordered_partition(atoms_of({100, 1, 100, 1}), 2, kPlenty), (Bounds{0, 2, 4}));
  EXPECT_EQ(ordered_partition(atoms_of({100, 1, 100, 0}), 2, kPlenty),
            (Bounds{0, 2, 4}));  // of equal ones the later begin
  EXPECT_EQ(ordered_partition(atoms_of({1, 1, 1, 1}), 3, kPlenty), (Bounds{0, 2, 3, 4}));
}

TEST(OrderedPartition, StaysWithinTheMemoryOfARank) {
  std::vector<Atom> atoms = atoms_of({1, 1, 1, 1, 1, 1});
  atoms[0].bytes = 6;
  EXPECT_EQ(ordered_partition(atoms, 2, 8), (Bounds{0, 3, 6}));
  EXPECT_EQ(ordered_partition(atoms, 2, 7), (Bounds{0, 2, 6}));
  EXPECT_EQ(ordered_partition(atoms, 2, 6), (Bounds{0, 1, 6}));
}

TEST(OrderedPartition, NamesTheAtomThatNoRankCanHold) {
  std::vector<Atom> atoms = atoms_of({1, 7, 1});
  EXPECT_EQ(error_of(atoms, 3, 6),
            "partition: 'atom1' takes 7 bytes, and a rank has 6; an atom is not cut over stages: use ranks with more "
            "memory, or fewer open micro-batches (active_microbatches)");
  EXPECT_EQ(error_of({{.name = "one", .bytes = 7}}, 1, 6).find("partition: 'one' takes 7 bytes, and a rank has 6"), 0);
}

TEST(OrderedPartition, NamesTheAtomsThatTakeTheLeastLimit) {
  EXPECT_EQ(
      error_of(atoms_of({1, 5, 5, 3}), 2, 7),
      "partition: no cut over 2 stages stays within the 7 bytes of a rank; the least limit for which there is one "
      "is 8, taken by 'atom2' to 'atom3': use more stages, ranks with more memory, or fewer open micro-batches "
      "(active_microbatches)");
  EXPECT_EQ(error_of(atoms_of({1, 5, 5, 3}), 2, 8), "");
}

TEST(OrderedPartition, RefusesNumbersBelow0) {
  EXPECT_EQ(error_of({{.name = "norm", .cost = -2}}, 1, 1), "partition: 'norm' has -2 of cost or bytes; use 0 or more");
  EXPECT_NE(error_of(atoms_of({1}), 0, 1), "");
}

/// A Llama-like model: an embedding, layers of cost 100 (norm, attention, norm, MLP), a norm of cost 1, and a head.
struct Llama {
  int layers;
  int64_t embedding;
  int64_t head;

  std::vector<TreeModule> tree() const {
    std::vector<TreeModule> modules = {{-1}, {0}, {1, embedding}, {1}};  // the model, its body, embedding, layers
    for (int layer = 0; layer < layers; ++layer) {
      modules.push_back({3});
      const int parent = static_cast<int>(modules.size()) - 1;
      for (const int64_t cost : {1, 30, 1, 68}) modules.push_back({parent, cost});
    }
    modules.push_back({1, 1});
    modules.push_back({0, head});
    return modules;
  }
  std::vector<Atom> whole_layers() const {
    std::vector<int64_t> costs = {embedding};
    costs.insert(costs.end(), layers, 100);
    costs.push_back(1);
    if (head > 0) costs.push_back(head);
    return atoms_of(costs);
  }
};

struct Row {
  Llama model;
  int stages;
  int64_t tree, ordered;  // the heaviest stage
  int embedding_home;
  std::vector<int> layer_homes;
  int head_home;
};

class OfLlama : public testing::TestWithParam<Row> {};

TEST_P(OfLlama, TheHeaviestStageIs) {
  const auto& [model, stages, tree, ordered, embedding_home, layer_homes, head_home] = GetParam();
  const std::vector<TreeModule> modules = model.tree();
  const std::vector<int> homes = tree_partition(modules, stages);
  std::vector<int64_t> loads(stages);
  for (size_t i = 0; i < modules.size(); ++i) loads[homes[i]] += modules[i].own_cost;
  EXPECT_EQ(*std::max_element(loads.begin(), loads.end()), tree);
  EXPECT_EQ(homes[2], embedding_home);
  for (int layer = 0; layer < model.layers; ++layer)
    for (int inner = 0; inner < 5; ++inner)
      EXPECT_EQ(homes[4 + 5 * layer + inner], layer_homes[layer * layer_homes.size() / model.layers]) << layer;
  EXPECT_EQ(homes.back(), head_home);
  EXPECT_EQ(homes[homes.size() - 2], 0);  // the norm

  const std::vector<Atom> atoms = model.whole_layers();
  const Bounds bounds = ordered_partition(atoms, stages, kPlenty);
  int64_t heaviest = 0;
  for (int stage = 0; stage < stages; ++stage) {
    int64_t cost = 0;
    for (int64_t i = bounds[stage]; i < bounds[stage + 1]; ++i) cost += atoms[i].cost;
    heaviest = std::max(heaviest, cost);
  }
  EXPECT_EQ(heaviest, ordered);
}

// Figures of the published algorithm are those of a program of its own in Python.
INSTANTIATE_TEST_SUITE_P(
    Partitions, OfLlama,
    testing::Values(Row{{12, 300, 300}, 2, 1201, 901, 0, {0, 1}, 0}, Row{{12, 300, 300}, 4, 701, 500, 3, {0, 1, 2}, 0},
                    Row{{32, 120, 120}, 8, 641, 500, 0, {0, 1, 2, 3, 4, 5, 6, 7}, 0},
                    Row{{4, 10, 10}, 3, 221, 200, 0, {1, 2, 0, 0}, 0}, Row{{2, 1000, 0}, 4, 1201, 1000, 0, {0}, 0},
                    Row{{4, 800, 800}, 4, 801, 800, 0, {3}, 1}, Row{{6, 2000, 0}, 6, 2001, 2000, 0, {3}, 0}));

}  // namespace
}  // namespace trireme::pipeline
