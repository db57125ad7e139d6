// Sees every top-level libtorch operator of a thread before autograd does, whoever called it: torch::nn, a Python
// module, a loss.
//
// The main idea: a dispatch key (TESTING_ONLY_GenericMode) is included in the thread's dispatch state while an
// InterceptScope lives. Its one boxed fallback looks at the operator's arguments. A storage that Trireme manages
// carries a ManagedStorage as the context of its DataPtr, so that finding it costs three loads and no look-up.
// Transformations of the stream of operators are passes: links of a chain, each of which calls the next.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/intercept/random_streams.h"

namespace trireme {

class InterceptScope;
class RankContext;

/// The dispatch key that is included while a thread's operators are seen.
inline constexpr c10::DispatchKey kInterceptKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// The way in which an operator uses an argument, by its schema.
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

/// All calls that change a managed c10::StorageImpl.
class StorageHandle {
 public:
  /// Lets `storage` point at `bytes` bytes at `data` on its device, owned by `owner`; frees what it pointed at before.
  static void point(c10::StorageImpl& storage, void* data, size_t bytes, std::shared_ptr<ManagedStorage> owner);
  /// Takes the bytes away. Until the next point(), reading the data outside of an operator throws `message`.
  static void release(c10::StorageImpl& storage, std::shared_ptr<ManagedStorage> owner, const std::string& message);
  /// Gives `storage` ordinary memory; it is not managed afterwards.
  static void give(c10::StorageImpl& storage, c10::DataPtr data, size_t bytes);
  /// The owner, or nullptr where the storage is not managed. Never throws.
  static ManagedStorage* owner_of(c10::StorageImpl& storage) noexcept;
  /// The same as a shared_ptr.
  static std::shared_ptr<ManagedStorage> share_owner_of(c10::StorageImpl& storage);

 private:
  static void drop(void* context) noexcept;
};

/// Facts from an operator's schema; computed once.
struct OperatorTraits {
  uint32_t arguments = 0;
  uint64_t written = 0;     ///< bit i: argument i is written (the first 64 arguments)
  bool overwrites = false;  ///< the written argument is not read
  bool random = false;      ///< draws from a generator
  bool composite = false;   ///< may be implemented by other operators, which autograd then sees instead of it
};

/// The link at which the chain begins for an operator that a thread calls.
struct ChainStart {
  bool is_first = true;                        ///< at the first link; else at `link`
  const InterceptScope* link = nullptr;        ///< null: behind the last pass, at the touch
  RandomStream stream = RandomStream::kModel;  ///< of the operator around it
  std::optional<uint64_t> seed = {};           ///< of the operator around it
  uint64_t draws = 0;                          ///< parts of it that have drawn by `seed`
};

/// One operator on its way: its arguments are the top `traits.arguments` values of `stack`; afterwards its results are
/// on top.
struct OperatorCall {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;  ///< what is left to dispatch to, by the arguments that the program gave
  const OperatorTraits& traits;
  torch::jit::Stack& stack;
  int depth = 0;  ///< how many operators it runs inside of: opened ones, and those that a pass computes
  RandomStream stream = RandomStream::kModel;  ///< where it draws from; a pass may choose another one
  /// A pass may set it: the operator draws what its generator gives under this seed, on kSlice under one of this rank's
  /// place, and the generator goes on afterwards as if nothing had been drawn. Its parts draw by seeds that follow from
  /// it, the first one by it. A generator among the arguments is used as it is.
  std::optional<uint64_t> seed = {};
  const InterceptScope* opener = nullptr;  ///< its parts run through the chain from there on: Next::open()

  c10::ArrayRef<c10::IValue> arguments() const { return torch::jit::last(stack, traits.arguments); }
  c10::ArrayRef<c10::IValue> results() const { return torch::jit::last(stack, op.schema().returns().size()); }
};

/// Calls `visit` with each tensor in arguments or results, those in lists and undefined ones included.
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

/// The part of the chain that comes after a pass: later passes, the touch, the operator.
class Next {
 public:
  /// Runs `call` through the rest of the chain. At most once per operator.
  void operator()(OperatorCall& call) const;
  /// The same, but the operators that `call` is made of run through this pass and the rest of the chain, too. An
  /// operator that draws random numbers is not opened, since it holds the generator meanwhile.
  void open(OperatorCall& call) const;
  /// Calls `body`, whose operators run through the rest of the chain: a pass computes `call` by itself in it. Operators
  /// that a pass calls outside of it run without interception.
  template <class Body>
  decltype(auto) run(const OperatorCall& call, const Body& body) const {
    const Inside inside(call, after());
    return body();
  }
  /// The same, but they run through this pass, too.
  template <class Body>
  decltype(auto) again(const OperatorCall& call, const Body& body) const {
    const Inside inside(call, &scope_);
    return body();
  }

 private:
  friend class RankContext;
  /// While it lives, operators that this thread calls run through the chain from `first` on, as parts of `call`.
  class [[nodiscard]] Inside {
   public:
    Inside(const OperatorCall& call, const InterceptScope* first);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    const ChainStart outer_;
    bool shares_seed_ = false;
  };
  Next(RankContext& context, const InterceptScope& scope) : context_(context), scope_(scope) {}
  const InterceptScope* after() const;

  RankContext& context_;
  const InterceptScope& scope_;
};

/// Where a pass stands in the chain, outermost first; passes of one order stand in the order of registration. After the
/// last pass comes the touch, in which the owners of managed storages make the arguments whole, then the operator. So
/// an operator that a pass computes by itself touches nothing.
enum class PassOrder : uint8_t {
  kOwnership,  ///< which rank computes an operator
  kSequence,   ///< activations that are cut along the sequence
  kTensor,     ///< parameters that are cut
  kTiles,      ///< computes wide activations a tile of tokens at a time
  kRecompute,  ///< records operators as this rank runs them, without communication
  kTouch,      ///< frees and shards storages (zero::Init)
};

/// The order of the first pass after ownership: for what stages send each other, which later passes make whole.
inline constexpr PassOrder kBehindOwnership = PassOrder::kSequence;

/// One link of the chain: a transformation of the stream of operators.
class Pass {
 public:
  virtual ~Pass() = default;
  virtual PassOrder order() const = 0;
  /// Replaces the arguments on `call`'s stack by its results: either calls `next(call)`, perhaps with other arguments
  /// of the same types, or computes them itself without calling `next`. Exceptions of `next` pass through and need not
  /// be errors (recompute() ends by one), so undo things in destructors. run() nests where an operator is opened or a
  /// pass computes one.
  virtual void run(OperatorCall& call, Next next) = 0;
};

/// The state of the rank that this thread works for. State that libtorch keeps once per process (the default generator,
/// the allocator) is reached through it, so that ranks can be threads.
class RankContext {
 public:
  /// This thread's context; autograd's helper threads find the one of the thread that called backward.
  static RankContext* current() noexcept;
  /// Like current(), made on first use.
  static RankContext& of_this_thread();
  /// The context that of_this_thread() will return; current() does not return it before of_this_thread() was called.
  static RankContext& to_be();

  /// The number of the outermost operator that this thread runs; operators inside of it have the same. Unique within
  /// the rank.
  uint64_t serial() const;

  RandomStreams& streams() { return streams_; }

  /// Runs `op` on `stack` through the chain; its kernel is the one for `keys`.
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  friend class ChainFrom;
  friend class InterceptScope;
  friend class Next;
  const InterceptScope* first_of(PassOrder order) const;
  void run(OperatorCall& call, const InterceptScope* link);
  void touch_and_run(OperatorCall& call);
  void run_kernel(OperatorCall& call);
  void run_random(OperatorCall& call);
  void run_seeded(OperatorCall& call);

  InterceptScope* first_ = nullptr;  // of those that have a pass
  RandomStreams streams_;
  std::atomic<uint64_t> serials_ = 0;
  int scopes_ = 0;
  int read_scopes_ = 0;
};

/// While it lives, this thread works for the rank of another one, which waits meanwhile: scopes that are opened here
/// are that rank's.
class [[nodiscard]] RankThreadScope {
 public:
  explicit RankThreadScope(RankContext& context);
  ~RankThreadScope();
  RankThreadScope(const RankThreadScope&) = delete;
  RankThreadScope& operator=(const RankThreadScope&) = delete;
};

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
  friend class Next;
  friend class RankContext;
  void enter();
  void leave() noexcept;

  RankContext& context_;
  Watch watch_;
  Pass* pass_;
  InterceptScope* next_ = nullptr;  // the next link of the chain
};

/// While it lives, operators that this thread calls run through the passes from `order` on only, and draw from
/// `stream`, by `seed` where the recorded one did: to run a recorded operator again, which has been through the earlier
/// passes.
class [[nodiscard]] ChainFrom {
 public:
  ChainFrom(PassOrder order, RandomStream stream, std::optional<uint64_t> seed = {});
  ~ChainFrom();
  ChainFrom(const ChainFrom&) = delete;
  ChainFrom& operator=(const ChainFrom&) = delete;

 private:
  const ChainStart outer_;
};

/// While it lives, operators of this thread are seen by no scope: for what the library itself computes and allocates.
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
