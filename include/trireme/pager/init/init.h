// zero::Init: a scope in which each parameter is sharded over the ranks as soon as it is made, so that a model may be
// larger than the memory of any rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "trireme/comm/group.h"
#include "trireme/intercept.h"

namespace trireme::zero {

/// Options of Init.
struct InitPolicy {
  /// Tensors smaller than this stay whole.
  int64_t smallest_bytes = 4096;
  /// Whole tensors may take this many bytes on a rank (more if the largest one, or those of one operator, need it); the
  /// least recently used are sharded first.
  int64_t live_bytes = 16 << 20;
  /// The dtype of tensors that are made without one (usually parameters). Random numbers drawn in bf16 differ from
  /// those drawn in fp32: the values are those of a plain construction with this default dtype.
  std::optional<at::ScalarType> dtype = {};
  /// Where shards stay: "" or "none", and "cpu", which is the same here.
  std::string remote_device = {};
  /// False: the scope does nothing.
  bool enabled = true;
};

/// While it lives, every tensor that an operator of this thread makes is sharded over `group` when `live_bytes` runs
/// out, and made whole again when an operator touches it. Construction runs as usual, with the same random numbers on
/// every rank, so the values are those of an unsharded construction, bit for bit; the peak is one rank's shards plus
/// `live_bytes`. Where ranks draw other numbers, rank 0's count: in shards, in GatheredParameters and after
/// initialize().
///
///   auto world = trireme::init();
///   MyNet net = [&] { trireme::zero::Init scope(*world.group); return MyNet(options); }();
///   auto engine = trireme::initialize(world, net, …);
///
/// Scopes may be nested: a tensor belongs to the innermost one that is enabled, and gets its dtype.
///
/// Requires  all ranks construct the same model; `group` outlives the tensors.
/// Ordering  touching a sharded tensor is collective. After the scope, or inside of it, initialize() takes the
///           parameters over; train after it.
/// Throws    ConfigError: a dtype that is not floating, a remote_device that is not there yet. Reading the data of a
///           sharded tensor outside of an operator raises an error that names this scope.
/// Source    ZeRO-Infinity's partitioned initialisation, arXiv:2104.07857. Test: tests/pager/init_test.cpp.
class [[nodiscard]] Init {
 public:
  explicit Init(Group& group, const InitPolicy& policy = {});
  ~Init();
  Init(const Init&) = delete;
  Init& operator=(const Init&) = delete;

  /// Whether an enabled scope is open on this thread.
  static bool is_open();

  /// Shards `tensor`, which was made elsewhere, as if an operator had made it here.
  void adopt(const at::Tensor& tensor);

  /// The most bytes that whole tensors took at once on this rank.
  int64_t peak_live_bytes() const;

 private:
  class Store;
  std::shared_ptr<Store> store_;
  std::unique_ptr<Pass> pass_;
  std::unique_ptr<InterceptScope> scope_;

  friend class InitStorage;
};

/// Whether an Init scope sharded `tensor`, which may be whole at present. Local.
bool is_sharded(const at::Tensor& tensor);

/// Makes `tensor` whole until another one is touched, if an Init scope sharded it. Collective over the scope's group.
void gather(const at::Tensor& tensor);

/// Gives `tensor` whole, unmanaged memory again if an Init scope sharded it. Collective over the scope's group.
void make_whole(const at::Tensor& tensor);

}  // namespace trireme::zero
