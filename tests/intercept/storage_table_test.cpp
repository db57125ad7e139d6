#include "trireme/intercept/storage_table.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace trireme {
namespace {

const c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

TEST(StorageTable, FindsAValueThroughEveryView) {
  StorageTable<int> table;
  const at::Tensor tensor = at::ones({2, 3}), other = at::ones({2, 3});
  table.set(tensor.storage(), 7);
  ASSERT_NE(table.find(storage_of(tensor.t().select(0, 1))), nullptr);
  EXPECT_EQ(*table.find(storage_of(tensor.detach())), 7);
  EXPECT_EQ(table.find(storage_of(other)), nullptr);
  EXPECT_EQ(table.find(nullptr), nullptr);
  table.set(tensor.storage(), 8);
  EXPECT_EQ(*table.find(storage_of(tensor)), 8);
  table.erase(storage_of(tensor));
  EXPECT_EQ(table.find(storage_of(tensor)), nullptr);
}

TEST(StorageTable, AStorageThatDiesFreesItsEntry) {
  StorageTable<std::shared_ptr<int>> table;
  const at::Tensor alive = at::ones({2});
  const auto kept = std::make_shared<int>(1), freed = std::make_shared<int>(2);
  table.set(alive.storage(), kept);
  table.set(at::ones({2}).storage(), freed);
  table.sweep();
  EXPECT_EQ(freed.use_count(), 1);
  EXPECT_EQ(table.size(), 1u);
  EXPECT_EQ(*table.find(storage_of(alive)), kept);
}

TEST(StorageTable, IsSweptAsItGrows) {
  StorageTable<int> table;
  const at::Tensor alive = at::ones({2});
  table.set(alive.storage(), 0);
  for (int i = 0; i < 1000; ++i) table.set(at::ones({2}).storage(), i);
  EXPECT_LT(table.size(), 20u);
  EXPECT_EQ(*table.find(storage_of(alive)), 0);
}

TEST(StorageTable, AnEntryDoesNotKeepTheBytes) {
  StorageTable<int> table;
  auto bytes = std::make_shared<int>();
  {
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 4,
                                                               c10::InefficientStdFunctionContext::makeDataPtr(
                                                                   bytes.get(), [bytes](void*) {}, c10::kCPU),
                                                               nullptr, false));
    table.set(storage, 1);
  }
  EXPECT_EQ(bytes.use_count(), 1);
}

// malloc gives the address of the last freed block first.
TEST(StorageTable, ANewStorageIsNotTheOldOne) {
  StorageTable<int> table;
  {
    const at::Tensor old = at::ones({2});
    table.set(old.storage(), 1);
  }
  std::vector<at::Tensor> others;
  for (int i = 0; i < 100; ++i) {
    others.push_back(at::ones({2}));
    EXPECT_EQ(table.find(storage_of(others.back())), nullptr);
  }
}

}  // namespace
}  // namespace trireme
