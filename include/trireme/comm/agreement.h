// How ranks agree: local work that may fail succeeds everywhere, or every rank throws; values that must be the same are
// compared, and what differs is known to every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

/// Runs `work` and returns what every rank's returned, by rank. Collective.
///
/// Requires  `work` issues no collective.
/// Throws    on every rank, when `work` threw on any: the error of the lowest such rank, with its type and code.
std::vector<std::string> gather_or_throw(Group& group, const std::function<std::string()>& work);

/// As gather_or_throw, where nothing needs to be exchanged.
void all_or_throw(Group& group, const std::function<void()>& work);

/// As all_or_throw, but a rank whose own `work` threw throws that as it was thrown: of Python with its class.
void together(Group& group, const std::function<void()>& work);

/// Runs `work` on rank 0 and returns its text everywhere; throws as gather_or_throw.
std::string broadcast_or_throw(Group& group, const std::function<std::string()>& work);

/// Runs `work` on every rank and hands the texts to `take` on rank 0, by ascending rank. Rank 0 holds one text at a
/// time.
/// Throws as gather_or_throw, also where `take` threw.
void collect_or_throw(Group& group, const std::function<std::string()>& work,
                      const std::function<void(int rank, const std::string& text)>& take);

/// Runs `work` on rank 0 once for each rank and sends that rank the text. Rank 0 holds one text at a time.
/// Requires  `work` throws nothing except when memory runs out.
std::string distribute(Group& group, const std::function<std::string(int rank)>& work);

/// A hash of bytes; never 0, which a caller may give where it has no value.
int64_t digest_of(std::string_view bytes);

/// The same for the elements of `flat`, which is contiguous. Equal bytes have equal digests on one kind of device, and
/// the host waits for that device.
int64_t digest_of(const at::Tensor& flat);

/// The first place where ranks have different values, with those of rank 0 and of the lowest rank that has another.
/// Where a rank has fewer values than others, the first of these is different, and nothing on that rank.
struct Difference {
  size_t index = 0;
  int rank = 0;
  std::optional<int64_t> of_rank_0, of_rank;
};

/// Compares `values`, such as digests; nothing where all ranks have the same. Collective.
///
/// Cost      one all-reduce of 16 bytes between the hosts; where ranks differ, their values.
std::optional<Difference> first_difference(Group& group, const std::vector<int64_t>& values);

/// As Difference, of lines; empty where a rank has no more of them.
struct LineDifference {
  int rank = 0;
  std::string of_rank_0, of_rank;

  /// "`A` on rank 0 and `B` on rank 3".
  std::string text() const;
};

/// Runs `text` on every rank and compares what they return by lines; nothing where all have the same. Collective.
///
/// Requires  `text` issues no collective.
/// Cost      one all-reduce of 16 bytes between the hosts; where ranks differ, the texts.
/// Throws    as together(), where `text` threw.
std::optional<LineDifference> first_different_line(Group& group, const std::function<std::string()>& text);

}  // namespace trireme
