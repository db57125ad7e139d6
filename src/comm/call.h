// One collective as all ranks must agree on it: what is compared, recorded and named in errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>

#include "comm/group_info.h"
#include "trireme/base/notices.h"
#include "trireme/comm/group.h"

namespace trireme::comm {

enum class CallKind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kGather,
  kScatter,
  kBarrier,
  kShare,
  kSplit,
  kSend,
  kRecv,
};

const char* name_of(CallKind kind) noexcept;
const char* name_of(ReduceOp op) noexcept;

/// The method that a collective is a part of (CallerScope), cut to what fits a CallRecord; empty: none.
using CallerName = std::array<char, 24>;
CallerName current_caller() noexcept;
/// The subject of a collective (SubjectScope), cut from the left; empty: not said.
using Subject = std::array<char, 48>;
Subject current_subject() noexcept;

struct Call {
  CallKind kind = CallKind::kBarrier;
  at::ScalarType dtype = at::kByte;
  ReduceOp op = ReduceOp::kSum;
  int root = -1;      ///< -1: none
  int64_t numel = 0;  ///< of the whole: the tensor that is reduced or gathered; of a split a fingerprint of its parts
  int64_t seq = 0;  ///< counts the collectives of a group from 1; messages of a pair, and calls on a device, separately
  bool is_registered = false;        ///< between memory of Group::buffer_registration()
  at::DeviceType device = at::kCPU;  ///< where the tensors are; told in errors, not compared
  Subject subject = current_subject();
  CallerName caller = current_caller();  ///< told in errors, not compared

  bool same_as(const Call& other) const {
    return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root && numel == other.numel &&
           seq == other.seq && is_registered == other.is_registered && subject == other.subject;
  }
};

/// "all_gather #12"
std::string short_name(const Call& call);
/// "all_gather #3 (numel 1000, float32) of layers.3 in step"
std::string describe(const Call& call);

/// The fix where a rank does not come to `call`: "; every rank must call step(), …"; nothing where no method is known.
std::string advice_on_method(const Call& call);

/// A call and the rank that made it.
struct CallOfRank {
  int rank;
  const Call& call;
};
/// Which two calls of `group` do not fit each other: the text of every kDiverged.
std::string describe_mismatch(const GroupInfo& group, const CallOfRank& own, const CallOfRank& other);

/// A checked call and where its bytes are. The tensors are held because an asynchronous call may outlive the caller's.
struct Request {
  Call call;
  at::Tensor output;
  at::Tensor input;
  std::byte* out() const { return output.defined() ? static_cast<std::byte*>(output.data_ptr()) : nullptr; }
  const std::byte* in() const {
    return input.defined() ? static_cast<const std::byte*>(input.const_data_ptr()) : nullptr;
  }
  int64_t itemsize() const { return static_cast<int64_t>(c10::elementSize(call.dtype)); }
};

// Each checks the arguments of one collective, but for their device, and throws ShapeError (operation, expected, got).
Request all_reduce_request(const at::Tensor& tensor, ReduceOp op);
Request reduce_scatter_request(const Place& place, const at::Tensor& output, const at::Tensor& input, ReduceOp op);
Request all_gather_request(const Place& place, const at::Tensor& output, const at::Tensor& input);
Request broadcast_request(const Place& place, const at::Tensor& tensor, int root);
Request all_to_all_request(const Place& place, const at::Tensor& output, const at::Tensor& input);
Request gather_request(const Place& place, const at::Tensor& output, const at::Tensor& input, int root);
Request scatter_request(const Place& place, const at::Tensor& output, const at::Tensor& input, int root);
Request send_request(const Place& place, const at::Tensor& tensor, int peer);
Request recv_request(const Place& place, const at::Tensor& tensor, int peer);

/// A notice of `call` of `group`, whose times are to be set; it lives as long as both.
Notice notice_of(const GroupInfo& group, const Call& call, Notice::Kind kind);

/// Bytes of this rank's data that go to other ranks: the cost lines of docs/comm.md.
int64_t bytes_sent(const Place& place, const Call& call);

}  // namespace trireme::comm
