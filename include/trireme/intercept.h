// Sees every top-level libtorch operator of a thread before autograd does, whoever called it: torch::nn, a Python
// module, a loss.
//
// The main idea: a dispatch key (TESTING_ONLY_GenericMode) is included in the thread's dispatch state while an
// InterceptScope lives. Its one boxed fallback looks at the operator's arguments. A storage that Trireme manages
// carries a ManagedStorage as the context of its DataPtr, so that finding it costs three loads and no look-up.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

/// Included in the dispatch state of threads whose operators are seen.
inline constexpr c10::DispatchKey kInterceptKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// What an operator does with an argument, by its schema.
enum class Access : uint8_t {
  kRead,
  kWrite,      ///< reads and writes, or writes in part
  kOverwrite,  ///< writes all of it without reading it (fill_, normal_, …)
};

/// The owner's side of one storage. The storage shares it, so it may outlive the engine that made it.
class ManagedStorage {
 public:
  virtual ~ManagedStorage() = default;
  /// Called before an operator that touches the storage runs: on return the bytes must be there. May throw.
  virtual void before_access(Access access) = 0;
  /// Called after an operator that wrote it (also when the operator threw).
  virtual void after_write() {}
};

/// The calls on c10::StorageImpl that managing needs, in one place.
class StorageHandle {
 public:
  /// Lets `storage` point at `bytes` bytes at `data` on its device, owned by `owner`; frees what it pointed at before.
  static void point(c10::StorageImpl& storage, void* data, size_t bytes, std::shared_ptr<ManagedStorage> owner);
  /// Takes the bytes away. Until the next point(), reading the data outside of an operator throws `message`.
  static void release(c10::StorageImpl& storage, std::shared_ptr<ManagedStorage> owner, const std::string& message);
  /// Gives `storage` ordinary memory; nothing is managed afterwards.
  static void give(c10::StorageImpl& storage, c10::DataPtr data, size_t bytes);
  /// The owner, or nullptr where the storage is not managed. Never throws.
  static ManagedStorage* owner_of(c10::StorageImpl& storage) noexcept;
  /// The same, with a share in it.
  static std::shared_ptr<ManagedStorage> share_owner_of(c10::StorageImpl& storage);

 private:
  static void drop(void* context) noexcept;
};

/// What is known of an operator from its schema; computed once.
struct OperatorTraits {
  uint32_t arguments = 0;
  uint64_t written = 0;     ///< bit i: argument i is written (the first 64 arguments)
  bool overwrites = false;  ///< the written argument is not read
  bool random = false;      ///< draws from a generator
  bool composite = false;   ///< may be made of other operators, which autograd then sees instead of it
};

/// One operator on its way: its arguments are the top `traits.arguments` values of `stack`; afterwards its results are
/// on top.
struct OperatorCall {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;  ///< what is left to dispatch to
  const OperatorTraits& traits;
  torch::jit::Stack& stack;
  int depth = 0;      ///< how many opened operators it runs inside of
  bool open = false;  ///< set by a pass in before(): what it is made of is to be seen, too (unless it draws)
};

/// Calls `visit` with each tensor in arguments or results, undefined ones included. One value is a list of one.
template <class Visit>
void for_each_tensor(c10::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        if (tensor.has_value()) visit(*tensor);
    }
  }
}

/// A transformation of the stream of operators. Calls nest where a pass opens an operator; there is no after() for one
/// that threw.
class Pass {
 public:
  virtual ~Pass() = default;
  virtual void before(OperatorCall&) {}
  virtual void after(OperatorCall&) {}
};

/// What belongs to the rank that this thread works for. What libtorch keeps once per process (the default generator,
/// the allocator) is reached through it, so that ranks can be threads.
class RankContext {
 public:
  /// This thread's context; autograd's helper threads find the one of the thread that called backward.
  static RankContext* current() noexcept;
  /// Like current(), made on first use.
  static RankContext& of_this_thread();

  /// The number of the operator that is running, with all that is seen inside of it; grows by one per operator.
  uint64_t serial() const { return serial_; }

  /// Gives the thread a random stream of its own, seeded with `seed`: operators draw from it instead of libtorch's
  /// default generator.
  void use_own_generator(uint64_t seed);
  bool has_own_generator() const { return generator_.defined(); }
  const at::Generator& own_generator() const { return generator_; }

  /// Runs `op` on `stack` with everything that is registered; its kernel is the one for `keys`.
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  friend class InterceptScope;
  const OperatorTraits& traits_of(const c10::OperatorHandle& op);
  void run(OperatorCall& call);
  void run_open(OperatorCall& call);
  void run_with_own_generator(OperatorCall& call);

  ska::flat_hash_map<c10::OperatorHandle, OperatorTraits> traits_;
  std::vector<Pass*> passes_;
  at::Generator generator_;
  uint64_t serial_ = 0;
  int depth_ = 0;
  int scopes_ = 0;
  int read_scopes_ = 0;
};

/// Seeds the calling rank: its own generator where it has one, else libtorch's default generator.
void manual_seed(uint64_t seed);

/// Interception is on for this thread while one of these lives. Construct and destroy on the same thread.
class [[nodiscard]] InterceptScope {
 public:
  enum class Watch {
    kWrites,  ///< managed storages are told of operators that write them
    kAll,     ///< and of those that read them
  };
  /// `pass` may be null; it outlives the scope. The first scope of a process proves that interception works with the
  /// libtorch that is loaded. Throws Error(kUnsupported) otherwise.
  explicit InterceptScope(Watch watch, Pass* pass = nullptr);
  ~InterceptScope();
  InterceptScope(const InterceptScope&) = delete;
  InterceptScope& operator=(const InterceptScope&) = delete;

 private:
  void enter();
  void leave() noexcept;

  RankContext& context_;
  Watch watch_;
  Pass* pass_;
};

/// While it lives, operators of this thread are seen by no scope: what the library itself computes and allocates is not
/// the model's.
class [[nodiscard]] WithoutInterception {
 public:
  WithoutInterception() {
    // Where no scope is open yet, one that is opened meanwhile must still be able to prove itself.
    if (c10::impl::tls_is_dispatch_key_included(kInterceptKey)) guard_.emplace(kInterceptKey);
  }

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

}  // namespace trireme
