#include "comm/call.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"

namespace trireme::comm {
namespace {

thread_local const char* caller = nullptr;
thread_local std::string_view subject;

/// "float32", as in Python.
std::string dtype_name(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

void check_tensor(CallKind kind, const char* role, const at::Tensor& tensor) {
  if (!tensor.defined())
    throw ShapeError(str(name_of(kind), ": expected a tensor as ", role, ", got an undefined one"));
  if (!tensor.is_contiguous())
    throw ShapeError(str(name_of(kind), ": expected a contiguous ", role, ", got sizes ", tensor.sizes(),
                         " with strides ", tensor.strides()));
}

void check_numel(CallKind kind, const char* role, const at::Tensor& tensor, int64_t expected) {
  if (tensor.numel() != expected)
    throw ShapeError(str(name_of(kind), ": expected ", role, " of ", expected, " elements, got ", tensor.numel()));
}

void check_same_dtype(CallKind kind, const at::Tensor& output, const at::Tensor& input) {
  if (output.scalar_type() != input.scalar_type())
    throw ShapeError(str(name_of(kind), ": expected output and input of one dtype, got ",
                         dtype_name(output.scalar_type()), " and ", dtype_name(input.scalar_type())));
}

void check_rank(CallKind kind, const char* role, int rank, int size) {
  if (rank < 0 || rank >= size)
    throw ShapeError(str(name_of(kind), ": expected ", role, " in [0, ", size, "), got ", rank));
}

void check_reducible(CallKind kind, at::ScalarType dtype, ReduceOp op) {
  const bool selects = op == ReduceOp::kMax || op == ReduceOp::kMin;
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      return;
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
      if (op == ReduceOp::kMean)
        throw ShapeError(str(name_of(kind), ": expected a floating dtype for a mean, got ", dtype_name(dtype)));
      return;
    case at::kBool:
      if (!selects)
        throw ShapeError(str(name_of(kind), ": bool has no ", name_of(op), "; use kMax (or) or kMin (and)"));
      return;
    default:
      throw ShapeError(str(name_of(kind), ": expected a dtype that can be reduced, got ", dtype_name(dtype)));
  }
}

/// Advice for two calls that do not fit because the ranks are in different methods of the engine.
std::string advice_on_methods(const Call& own, const Call& other) {
  if (own.caller == other.caller) return "";
  if (own.caller.front() == 0) return advice_on_method(other);
  if (other.caller.front() == 0) return advice_on_method(own);
  return str("; every rank must call ", own.caller.data(), "() and ", other.caller.data(),
             "() as often as the others and in the same order");
}

}  // namespace

CallerName current_caller() noexcept {
  CallerName name{};
  if (caller != nullptr) std::strncpy(name.data(), caller, name.size() - 1);
  return name;
}

Subject current_subject() noexcept {
  Subject text{};
  const size_t length = std::min(subject.size(), text.size() - 1);
  subject.copy(text.data(), length, subject.size() - length);
  return text;
}

const char* name_of(CallKind kind) noexcept {
  switch (kind) {
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kAllToAll:
      return "all_to_all";
    case CallKind::kGather:
      return "gather";
    case CallKind::kScatter:
      return "scatter";
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kShare:
      return "share";
    case CallKind::kSplit:
      return "split";
    case CallKind::kSend:
      return "send";
    case CallKind::kRecv:
      return "recv";
  }
  return "unknown";
}

const char* name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMean:
      return "mean";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
  }
  return "unknown";
}

std::string short_name(const Call& call) { return str(name_of(call.kind), " #", call.seq); }

std::string describe(const Call& call) {
  std::string context;
  if (call.subject.front() != 0) context += str(" of ", call.subject.data());
  if (call.caller.front() != 0) context += str(" in ", call.caller.data());
  if (call.kind == CallKind::kBarrier) return short_name(call) + context;
  if (call.kind == CallKind::kSplit)
    return str(short_name(call), " (fingerprint of the parts ", call.numel, ")", context);
  std::string text = str(short_name(call), " (numel ", call.numel, ", ", dtype_name(call.dtype));
  if (call.device != at::kCPU) text += str(" on ", c10::DeviceTypeName(call.device, /*lower_case=*/true));
  if (call.kind == CallKind::kAllReduce || call.kind == CallKind::kReduceScatter) text += str(", ", name_of(call.op));
  if (call.root >= 0) text += str(", root ", call.root);
  if (call.is_registered) text += ", registered";
  return text + ")" + context;
}

std::string describe_mismatch(const GroupInfo& group, const CallOfRank& own, const CallOfRank& other) {
  const bool messages = own.call.kind == CallKind::kSend || own.call.kind == CallKind::kRecv;
  const auto calls = str(group.title(own.rank), " called ", describe(own.call), ", ", group.title(other.rank),
                         " called ", describe(other.call));
  return messages ? str("messages in group '", group.name, "' do not match: ", calls)
                  : str("ranks called different operations in group '", group.name, "': ", calls,
                        advice_on_methods(own.call, other.call));
}

Notice notice_of(const GroupInfo& group, const Call& call, Notice::Kind kind) {
  const bool moves_bytes =
      call.kind != CallKind::kBarrier && call.kind != CallKind::kSplit && call.kind != CallKind::kShare;
  return {.kind = kind,
          .name = name_of(call.kind),
          .subject = call.subject.data(),
          .caller = call.caller.data(),
          .group = group.name,
          .group_size = group.place.size,
          .bytes = moves_bytes ? call.numel * static_cast<int64_t>(c10::elementSize(call.dtype)) : 0,
          .number = call.seq,
          .rank = group.world_rank(group.place.rank)};
}

std::string advice_on_method(const Call& call) {
  return call.caller.front() == 0
             ? ""
             : str("; every rank must call ", call.caller.data(), "(), as often as the others and in the same order");
}

Request all_reduce_request(const at::Tensor& tensor, ReduceOp op) {
  const auto kind = CallKind::kAllReduce;
  check_tensor(kind, "tensor", tensor);
  check_reducible(kind, tensor.scalar_type(), op);
  return {{.kind = kind, .dtype = tensor.scalar_type(), .op = op, .numel = tensor.numel()}, tensor, tensor};
}

Request reduce_scatter_request(const Place& place, const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  const auto kind = CallKind::kReduceScatter;
  check_tensor(kind, "input", input);
  check_tensor(kind, "output", output);
  check_numel(kind, "output", output, shard_range(input.numel(), place.size, place.rank).numel());
  const auto dtype = input.scalar_type();
  const bool widens = output.scalar_type() == at::kFloat && (dtype == at::kBFloat16 || dtype == at::kHalf);
  if (!widens) check_same_dtype(kind, output, input);
  check_reducible(kind, dtype, op);
  return {{.kind = kind, .dtype = dtype, .op = op, .numel = input.numel()}, output, input};
}

Request all_gather_request(const Place& place, const at::Tensor& output, const at::Tensor& input) {
  const auto kind = CallKind::kAllGather;
  check_tensor(kind, "output", output);
  check_tensor(kind, "input", input);
  check_same_dtype(kind, output, input);
  check_numel(kind, "input", input, shard_range(output.numel(), place.size, place.rank).numel());
  return {{.kind = kind, .dtype = output.scalar_type(), .numel = output.numel()}, output, input};
}

Request broadcast_request(const Place& place, const at::Tensor& tensor, int root) {
  const auto kind = CallKind::kBroadcast;
  check_tensor(kind, "tensor", tensor);
  check_rank(kind, "root", root, place.size);
  return {{.kind = kind, .dtype = tensor.scalar_type(), .root = root, .numel = tensor.numel()}, tensor, tensor};
}

Request all_to_all_request(const Place& place, const at::Tensor& output, const at::Tensor& input) {
  const auto kind = CallKind::kAllToAll;
  check_tensor(kind, "output", output);
  check_tensor(kind, "input", input);
  check_same_dtype(kind, output, input);
  check_numel(kind, "output", output, input.numel());
  if (input.numel() % place.size != 0)
    throw ShapeError(str("all_to_all: expected a multiple of ", place.size, " elements, got ", input.numel()));
  if (input.numel() > 0 && input.const_data_ptr() == output.const_data_ptr())
    throw ShapeError("all_to_all: expected output and input in different memory, got the same tensor");
  return {{.kind = kind, .dtype = input.scalar_type(), .numel = input.numel()}, output, input};
}

Request gather_request(const Place& place, const at::Tensor& output, const at::Tensor& input, int root) {
  const auto kind = CallKind::kGather;
  check_tensor(kind, "input", input);
  check_rank(kind, "root", root, place.size);
  if (place.rank == root) {
    check_tensor(kind, "output", output);
    check_same_dtype(kind, output, input);
    check_numel(kind, "output", output, input.numel() * place.size);
  }
  return {{.kind = kind, .dtype = input.scalar_type(), .root = root, .numel = input.numel() * place.size},
          place.rank == root ? output : at::Tensor(),
          input};
}

Request scatter_request(const Place& place, const at::Tensor& output, const at::Tensor& input, int root) {
  const auto kind = CallKind::kScatter;
  check_tensor(kind, "output", output);
  check_rank(kind, "root", root, place.size);
  if (place.rank == root) {
    check_tensor(kind, "input", input);
    check_same_dtype(kind, output, input);
    check_numel(kind, "input", input, output.numel() * place.size);
  }
  return {{.kind = kind, .dtype = output.scalar_type(), .root = root, .numel = output.numel() * place.size},
          output,
          place.rank == root ? input : at::Tensor()};
}

Request send_request(const Place& place, const at::Tensor& tensor, int peer) {
  const auto kind = CallKind::kSend;
  check_tensor(kind, "tensor", tensor);
  check_rank(kind, "peer", peer, place.size);
  if (peer == place.rank) throw ShapeError(str("send: expected another rank as peer, got this rank, ", peer));
  return {{.kind = kind, .dtype = tensor.scalar_type(), .root = peer, .numel = tensor.numel()}, {}, tensor};
}

Request recv_request(const Place& place, const at::Tensor& tensor, int peer) {
  const auto kind = CallKind::kRecv;
  check_tensor(kind, "tensor", tensor);
  check_rank(kind, "peer", peer, place.size);
  if (peer == place.rank) throw ShapeError(str("recv: expected another rank as peer, got this rank, ", peer));
  return {{.kind = kind, .dtype = tensor.scalar_type(), .root = peer, .numel = tensor.numel()}, tensor, {}};
}

int64_t bytes_sent(const Place& place, const Call& call) {
  const int64_t shard = shard_range(call.numel, place.size, place.rank).numel();
  const int64_t peers = place.size - 1;
  const int64_t block = call.numel / place.size;
  const bool is_root = call.root == place.rank;
  int64_t elements = 0;
  switch (call.kind) {
    case CallKind::kAllReduce:
      elements = (call.numel - shard) + peers * shard;
      break;
    case CallKind::kReduceScatter:
      elements = call.numel - shard;
      break;
    case CallKind::kAllGather:
      elements = peers * shard;
      break;
    case CallKind::kBroadcast:
      elements = is_root ? peers * call.numel : 0;
      break;
    case CallKind::kAllToAll:
      elements = peers * block;
      break;
    case CallKind::kGather:
      elements = is_root ? 0 : block;
      break;
    case CallKind::kScatter:
      elements = is_root ? peers * block : 0;
      break;
    case CallKind::kSend:
      elements = call.numel;
      break;
    case CallKind::kRecv:
    case CallKind::kBarrier:
    case CallKind::kShare:
    case CallKind::kSplit:
      break;
  }
  return elements * static_cast<int64_t>(c10::elementSize(call.dtype));
}

}  // namespace trireme::comm

namespace trireme {

CallerScope::CallerScope(const char* name, const void* of) noexcept : outer_(comm::caller) {
  if (outer_ != nullptr) return;
  comm::caller = name;
  notice_.emplace(Notice::Kind::kCall, name, of);
}
CallerScope::~CallerScope() { comm::caller = outer_; }
const char* CallerScope::current(const char* otherwise) noexcept {
  return comm::caller != nullptr ? comm::caller : otherwise;
}

SubjectScope::SubjectScope(std::string_view subject) noexcept : outer_(comm::subject) { comm::subject = subject; }
SubjectScope::~SubjectScope() { comm::subject = outer_; }

}  // namespace trireme
