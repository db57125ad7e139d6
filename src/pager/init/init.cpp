#include "trireme/pager/init/init.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/SmallVector.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <list>
#include <utility>
#include <vector>

#include "pager/storage/held_storage.h"
#include "trireme/base/error.h"
#include "trireme/base/heap.h"

namespace trireme::zero {

/// One tensor's storage: whole (`data` set), or only this rank's part of its bytes (`shard`).
class InitStorage final : public HeldStorage {
 public:
  /// A storage that operator `serial` made.
  InitStorage(std::shared_ptr<Init::Store> store, c10::StorageImpl& storage, uint64_t serial);
  ~InitStorage() override;
  void before_access(Access access) override;
  // Random numbers, for one, are each rank's own; what is written in a hold is spread at its end.
  void after_write() override { is_alike_ = is_held(); }
  /// Ends the management: the storage gets its whole bytes as ordinary memory. Collective.
  void hand_back();

  bool is_whole() const { return !shard_.defined(); }
  /// Whether every rank has the same values.
  bool is_alike() const { return is_alike_; }
  int64_t byte_count() const { return bytes_; }

  std::string label() const override;
  const ShardMesh* mesh() const override;
  const void* manager() const override { return store_.get(); }
  uint64_t last_serial;
  std::list<InitStorage*>::iterator position;  // in the store's list of whole ones, coldest first; of a small one: none

  void shard();
  void touch(uint64_t serial, Access access);

 private:
  void make_whole(Access access);
  void make_whole(Hold) override {
    touch(/*serial=*/0, Access::kRead);
    make_alike();
  }
  /// Rank 0's values become everybody's. Collective.
  void make_alike();
  void release() noexcept override;
  c10::StorageImpl& bytes() override { return storage_; }
  std::shared_ptr<ManagedStorage> self() const;

  const std::shared_ptr<Init::Store> store_;
  c10::StorageImpl& storage_;  // holds us
  const int64_t bytes_;
  c10::DataPtr data_;
  at::Tensor shard_;
  bool is_alike_ = false;
  bool handed_back_ = false;
};

/// The tensors of one scope. Lives as long as any of them.
class Init::Store : public std::enable_shared_from_this<Init::Store> {
 public:
  Store(Group& group, const InitPolicy& policy) : mesh{.shards = group}, policy(policy) {}

  /// Takes over the storage of `tensor`, which operator `serial` made; 0: none did.
  void adopt(const at::Tensor& tensor, uint64_t serial) {
    if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return;
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    if (bytes == 0 || !storage.resizable() || StorageHandle::owner_of(storage) != nullptr) return;
    auto owner = std::make_shared<InitStorage>(shared_from_this(), storage, serial);
    void* data = storage.mutable_data();
    StorageHandle::point(storage, data, bytes, owner);
    if (is_small(bytes)) return;
    largest_bytes_ = std::max(largest_bytes_, bytes);
    make_room(bytes, serial);
    add(*owner);
  }

  /// Small ones stay whole, and do not count.
  bool is_small(int64_t bytes) const { return bytes < policy.smallest_bytes; }
  void add(InitStorage& storage) {
    storage.position = whole_.insert(whole_.end(), &storage);
    live_bytes_ += storage.byte_count();
    peak_live_bytes = std::max(peak_live_bytes, live_bytes_);
  }
  void remove(InitStorage& storage) {
    if (is_small(storage.byte_count())) return;
    whole_.erase(storage.position);
    live_bytes_ -= storage.byte_count();
    freed_bytes_ += storage.byte_count();
  }
  void touch(InitStorage& storage) {
    if (!is_small(storage.byte_count())) whole_.splice(whole_.end(), whole_, storage.position);
  }

  /// The running operator's number; 0: none was seen.
  static uint64_t serial() {
    const RankContext* context = RankContext::current();
    return context != nullptr ? context->serial() : 0;
  }

  // Shards the coldest until the limit holds with `coming` bytes more, or only those of operator `serial` are left. All
  // ranks must choose the same ones, so what one rank alone does (in a hold with a modifier_rank) has no part in it.
  // `locally`: of those alone that need no exchange for it.
  void make_room(int64_t coming, uint64_t serial, bool locally = false) {
    for (auto next = whole_.begin(); next != whole_.end() && live_bytes_ + coming > limit();) {
      InitStorage* storage = *next++;
      const bool is_in_use = serial != 0 && storage->last_serial == serial;
      if (!is_in_use && !storage->is_held() && (storage->is_alike() || !locally)) storage->shard();
    }
    // Tensors and shards of many sizes leave holes between them that malloc keeps.
    if (freed_bytes_ < limit()) return;
    give_back_freed_memory();
    freed_bytes_ = 0;
  }

  const ShardMesh mesh;
  const InitPolicy policy;
  int64_t peak_live_bytes = 0;

 private:
  int64_t limit() const { return std::max(policy.live_bytes, largest_bytes_); }

  std::list<InitStorage*> whole_;
  int64_t live_bytes_ = 0;
  int64_t freed_bytes_ = 0;  ///< since freed memory was given back
  int64_t largest_bytes_ = 0;
};

InitStorage::InitStorage(std::shared_ptr<Init::Store> store, c10::StorageImpl& storage, uint64_t serial)
    : last_serial(serial), store_(std::move(store)), storage_(storage), bytes_(static_cast<int64_t>(storage.nbytes())) {
  // From now on the storage only points at these bytes.
  std::swap(data_, storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(c10::DataPtr(data_.get(), c10::Device(c10::kCPU)));
}

InitStorage::~InitStorage() {
  if (is_whole() && !handed_back_) store_->remove(*this);
}

std::string InitStorage::label() const { return str("a tensor of ", bytes_, " bytes that zero.Init sharded"); }

const ShardMesh* InitStorage::mesh() const { return handed_back_ ? nullptr : &store_->mesh; }
void InitStorage::release() noexcept { store_->make_room(0, /*serial=*/0, /*locally=*/true); }

void InitStorage::before_access(Access access) {
  refuse_write(access);
  if (!is_held()) touch(Init::Store::serial(), access);
}

void InitStorage::touch(uint64_t serial, Access access) {
  last_serial = serial;
  if (is_whole()) return store_->touch(*this);
  store_->make_room(bytes_, serial);
  make_whole(access);
  store_->add(*this);
}

void InitStorage::make_whole(Access access) {
  c10::DataPtr data = c10::GetCPUAllocator()->allocate(bytes_);
  if (access != Access::kOverwrite) {
    const at::Tensor whole = at::from_blob(data.get(), {bytes_}, at::TensorOptions().dtype(at::kByte));
    store_->mesh.shards.all_gather(whole, shard_).wait();
  }
  is_alike_ = true;
  StorageHandle::point(storage_, data.get(), bytes_, self());
  data_ = std::move(data);
  shard_.reset();
}

void InitStorage::make_alike() {
  if (std::exchange(is_alike_, true)) return;
  broadcast_over(store_->mesh, at::from_blob(data_.get(), {bytes_}, at::TensorOptions().dtype(at::kByte)));
}

void InitStorage::shard() {
  make_alike();
  const ShardRange mine = shard_range(bytes_, store_->mesh.shards.size(), store_->mesh.shards.rank());
  at::Tensor shard = at::empty({mine.numel()}, at::TensorOptions().dtype(at::kByte));
  if (mine.numel() > 0) std::memcpy(shard.data_ptr(), static_cast<std::byte*>(data_.get()) + mine.begin, mine.numel());
  store_->remove(*this);
  shard_ = std::move(shard);
  StorageHandle::release(
      storage_, self(),
      "this tensor was sharded by zero.Init, so this rank has a part of its data: read it by operators inside of the "
      "scope, wrap the access in zero.GatheredParameters, or read it after initialize()");
  data_ = {};
}

void InitStorage::hand_back() {
  if (!is_whole()) {
    make_whole(Access::kRead);
    store_->add(*this);
  }
  const auto keep = self();  // the storage lets go of us here
  store_->remove(*this);
  handed_back_ = true;
  StorageHandle::give(storage_, std::move(data_), bytes_);
}

// Our own shared pointer stands in the storage that holds us.
std::shared_ptr<ManagedStorage> InitStorage::self() const { return StorageHandle::share_owner_of(storage_); }

namespace {

// Adopts what operators make. A result over the memory of an argument (a view, an in-place result) is not made: that
// memory is adopted already, or is not ours.
class AdoptResults final : public Pass {
 public:
  AdoptResults(std::function<void(const at::Tensor&)> adopt, std::optional<at::ScalarType> dtype)
      : adopt_(std::move(adopt)), dtype_(dtype) {}
  PassOrder order() const override { return PassOrder::kTouch; }
  void run(OperatorCall& call, Next next) override {
    if (call.depth > 0) return next(call);
    const bool is_told = dtype_ && has_dtype(call);
    c10::SmallVector<const void*, 8> given;  // storages of the arguments
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
      if (const void* storage = storage_of(tensor)) given.push_back(storage);
    });
    next(call);
    if (dtype_ && !is_told && given.empty()) cast(call);
    for_each_tensor(call.results(), [&](const at::Tensor& tensor) {
      if (std::find(given.begin(), given.end(), storage_of(tensor)) == given.end()) adopt_(tensor);
    });
  }

 private:
  static const void* storage_of(const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  }

  // A factory that was told no dtype gives the default one; this is ours. One that was told keeps what it was told.
  void cast(OperatorCall& call) {
    if (call.op.schema().returns().size() != 1 || !call.stack.back().isTensor()) return;
    c10::IValue& result = call.stack.back();
    if (result.toTensor().scalar_type() == at::get_default_dtype_as_scalartype())
      result = result.toTensor().to(*dtype_);
  }

  // Operators that make no new kind of tensor have no such argument: they are left as they are.
  static bool has_dtype(const OperatorCall& call) {
    const auto& arguments = call.op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == "dtype") return !torch::jit::peek(call.stack, i, arguments.size()).isNone();
    return true;
  }

  std::function<void(const at::Tensor&)> adopt_;
  const std::optional<at::ScalarType> dtype_;
};

}  // namespace

namespace {

void check(const InitPolicy& policy) {
  if (policy.dtype && !at::isFloatingType(*policy.dtype))
    throw ConfigError(str("zero.Init: dtype=", *policy.dtype, " is not floating; use fp32, bf16 or fp16"));
  const std::string& device = policy.remote_device;
  if (device != "" && device != "none" && device != "cpu")
    throw ConfigError(str("zero.Init: remote_device=\"", device, "\" is not there yet; use \"cpu\" or \"none\""),
                      ErrorCode::kUnsupported);
}

// glibc's settings are the process's, so the outermost scope of all threads makes and ends them.
std::atomic<int> open_scopes{0};
thread_local int open_here = 0;

}  // namespace

Init::Init(Group& group, const InitPolicy& policy) {
  check(policy);
  if (!policy.enabled) return;
  store_ = std::make_shared<Store>(group, policy);
  // Shards are many and small; freed whole tensors must go back to the system at once, or the heap keeps the peak:
  // glibc raises this threshold by itself as soon as a large block is freed, unless it was set.
  ++open_here;
  if (open_scopes++ == 0) mallopt(M_MMAP_THRESHOLD, 64 << 10);
  pass_ = std::make_unique<AdoptResults>(
      [store = store_.get()](const at::Tensor& tensor) { store->adopt(tensor, Store::serial()); }, policy.dtype);
  scope_ = std::make_unique<InterceptScope>(InterceptScope::Watch::kAll, pass_.get());
}

Init::~Init() {
  if (!scope_) return;
  scope_.reset();
  --open_here;
  if (--open_scopes > 0) return;
  // Where glibc's own adjustment ends up in a program that frees large blocks; training would map every activation anew
  // otherwise.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
}

bool Init::is_open() { return open_here > 0; }

void Init::adopt(const at::Tensor& tensor) {
  if (store_) store_->adopt(tensor, /*serial=*/0);
}

int64_t Init::peak_live_bytes() const { return store_ ? store_->peak_live_bytes : 0; }

namespace {

InitStorage* init_storage_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return dynamic_cast<InitStorage*>(StorageHandle::owner_of(*tensor.storage().unsafeGetStorageImpl()));
}

}  // namespace

bool is_sharded(const at::Tensor& tensor) { return init_storage_of(tensor) != nullptr; }

void gather(const at::Tensor& tensor) {
  if (InitStorage* storage = init_storage_of(tensor)) storage->touch(/*serial=*/0, Access::kRead);
}

void make_whole(const at::Tensor& tensor) {
  if (InitStorage* storage = init_storage_of(tensor)) storage->hand_back();
}

}  // namespace trireme::zero
