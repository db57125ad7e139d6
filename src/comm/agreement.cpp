#include "trireme/comm/agreement.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>

#include "trireme/base/error.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

/// First byte: 0 for success, otherwise 1 + the error's code; then the text.
std::string outcome_of(const std::function<std::string()>& work) {
  const auto failure = [](ErrorCode code, const char* what) {
    return static_cast<char>(1 + static_cast<int>(code)) + std::string(what);
  };
  try {
    std::string text = work();
    text.insert(text.begin(), '\0');
    return text;
  } catch (const Error& error) {
    return failure(error.code(), error.what());
  } catch (const std::exception& error) {
    return failure(ErrorCode::kInternal, error.what());
  }
}

std::vector<std::string> all_gather_text(Group& group, const std::string& text) {
  if (group.size() == 1) return {text};
  const auto own_bytes = at::empty({1}, at::kLong);
  const auto all_bytes = at::empty({group.size()}, at::kLong);
  own_bytes.data_ptr<int64_t>()[0] = static_cast<int64_t>(text.size());
  group.all_gather(all_bytes, own_bytes).wait();
  const int64_t* bytes = all_bytes.data_ptr<int64_t>();

  const int64_t longest = *std::max_element(bytes, bytes + group.size());
  const auto own = at::zeros({longest}, at::kByte);
  const auto all = at::empty({longest * group.size()}, at::kByte);
  std::memcpy(own.data_ptr(), text.data(), text.size());
  group.all_gather(all, own).wait();

  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank)
    texts.emplace_back(static_cast<const char*>(all.data_ptr()) + rank * longest, bytes[rank]);
  return texts;
}

void throw_if_failed(const std::string& outcome, const std::string& who) {
  if (outcome[0] != '\0') throw_error(static_cast<ErrorCode>(outcome[0] - 1), who + outcome.substr(1));
}

at::Tensor bytes_of(const std::string& text) {
  const auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

void send_text(Group& group, const std::string& text, int peer) {
  const auto size = at::empty({1}, at::kLong);
  size.data_ptr<int64_t>()[0] = static_cast<int64_t>(text.size());
  group.send(size, peer).wait();
  if (!text.empty()) group.send(bytes_of(text), peer).wait();
}

std::string receive_text(Group& group, int peer) {
  const auto size = at::empty({1}, at::kLong);
  group.recv(size, peer).wait();
  std::string text(size.data_ptr<int64_t>()[0], '\0');
  if (text.empty()) return text;
  const auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  group.recv(bytes, peer).wait();
  std::memcpy(text.data(), bytes.const_data_ptr(), text.size());
  return text;
}

int64_t positive(uint64_t bits) { return static_cast<int64_t>(bits >> 2) + 1; }

bool is_same(Group& group, int64_t digest) {
  const at::Tensor extremes = at::empty({2}, at::kLong);
  int64_t* const data = extremes.mutable_data_ptr<int64_t>();
  data[0] = digest, data[1] = -digest;
  group.all_reduce(extremes, ReduceOp::kMax).wait();
  return data[0] == -data[1];
}

std::string_view bytes_of(const std::vector<int64_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t)};
}

std::vector<int64_t> values_of(const std::string& bytes) {
  std::vector<int64_t> values(bytes.size() / sizeof(int64_t));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

template <class Value>
std::optional<Value> at_or_none(const std::vector<Value>& values, size_t index) {
  return index < values.size() ? std::optional(values[index]) : std::nullopt;
}

struct Place {
  size_t index = 0;
  int rank = 0;
};

/// The first place in which a rank differs from rank 0.
template <class Value>
std::optional<Place> first_place(const std::vector<std::vector<Value>>& by_rank) {
  std::optional<Place> first;
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const std::vector<Value>&one = by_rank[0], &other = by_rank[rank];
    const auto index = std::mismatch(one.begin(), one.end(), other.begin(), other.end()).first - one.begin();
    const Place place{static_cast<size_t>(index), static_cast<int>(rank)};
    if (one != other && (!first || place.index < first->index)) first = place;
  }
  return first;
}

}  // namespace

std::vector<std::string> gather_or_throw(Group& group, const std::function<std::string()>& work) {
  auto outcomes = all_gather_text(group, outcome_of(work));
  for (int rank = 0; rank < group.size(); ++rank)
    throw_if_failed(outcomes[rank], group.size() > 1 ? str("rank ", rank, ": ") : "");
  for (auto& outcome : outcomes) outcome.erase(0, 1);
  return outcomes;
}

void all_or_throw(Group& group, const std::function<void()>& work) {
  (void)gather_or_throw(group, [&] {
    work();
    return std::string();
  });
}

void together(Group& group, const std::function<void()>& work) {
  std::exception_ptr own;
  try {
    all_or_throw(group, [&] {
      try {
        work();
      } catch (...) {
        own = std::current_exception();
        throw;
      }
    });
  } catch (...) {
    if (own) std::rethrow_exception(own);
    throw;
  }
}

std::string broadcast_or_throw(Group& group, const std::function<std::string()>& work) {
  // The text itself goes by broadcast: a gather would hold it once per rank.
  std::string text;
  const auto bytes_of = gather_or_throw(group, [&] {
    if (group.rank() == 0) text = work();
    return std::to_string(text.size());
  });
  if (group.size() == 1) return text;
  const auto buffer = at::empty({std::stoll(bytes_of[0])}, at::kByte);
  if (group.rank() == 0) std::memcpy(buffer.data_ptr(), text.data(), text.size());
  group.broadcast(buffer, 0).wait();
  return std::string(static_cast<const char*>(buffer.data_ptr()), buffer.numel());
}

void collect_or_throw(Group& group, const std::function<std::string()>& work,
                      const std::function<void(int rank, const std::string& text)>& take) {
  std::string own;
  all_or_throw(group, [&] { own = work(); });
  std::exception_ptr error;  // the other ranks send whatever happens here
  if (group.rank() != 0) send_text(group, own, 0);
  for (int rank = 0; group.rank() == 0 && rank < group.size(); ++rank) {
    const std::string text = rank == 0 ? std::move(own) : receive_text(group, rank);
    try {
      if (!error) take(rank, text);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
  }
  // An error of all ranks' texts together is no rank's own.
  const std::string outcome = outcome_of([&]() -> std::string {
    if (error) std::rethrow_exception(error);
    return "";
  });
  throw_if_failed(all_gather_text(group, outcome)[0], "");
}

std::string distribute(Group& group, const std::function<std::string(int rank)>& work) {
  if (group.rank() != 0) return receive_text(group, 0);
  for (int rank = 1; rank < group.size(); ++rank) send_text(group, work(rank), rank);
  return work(0);
}

int64_t digest_of(std::string_view bytes) { return positive(XXH3_64bits(bytes.data(), bytes.size())); }

int64_t digest_of(const at::Tensor& flat) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  if (is_host(flat)) return digest_of({static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()});
  const at::Tensor words = flat.view(at::kByte).to(at::kLong);
  const at::Tensor places = at::arange(1, words.numel() + 1, words.options());
  return positive(static_cast<uint64_t>((words * (places * 2654435761).remainder(2147483647)).sum().item<int64_t>()));
}

std::optional<Difference> first_difference(Group& group, const std::vector<int64_t>& values) {
  const WithoutInterception own_operators;
  if (group.size() == 1 || is_same(group, digest_of(bytes_of(values)))) return {};
  std::vector<std::vector<int64_t>> by_rank;
  for (const std::string& bytes : all_gather_text(group, std::string(bytes_of(values))))
    by_rank.push_back(values_of(bytes));
  const auto place = first_place(by_rank);
  if (!place) return {};
  return Difference{place->index, place->rank, at_or_none(by_rank[0], place->index),
                    at_or_none(by_rank[place->rank], place->index)};
}

std::string LineDifference::text() const {
  const auto quoted = [](const std::string& line) { return str("`", line.empty() ? "nothing more" : line, "`"); };
  return str(quoted(of_rank_0), " on rank 0 and ", quoted(of_rank), " on rank ", rank);
}

std::optional<LineDifference> first_different_line(Group& group, const std::function<std::string()>& text) {
  const WithoutInterception own_operators;
  std::string own;
  std::exception_ptr problem;
  try {
    own = text();
  } catch (...) {
    problem = std::current_exception();
  }
  constexpr int64_t kFailed = 0;
  const bool same = group.size() == 1 || is_same(group, problem ? kFailed : digest_of(own));
  if (same && !problem) return {};
  std::vector<std::vector<std::string>> by_rank;
  together(group, [&] {
    if (problem) std::rethrow_exception(problem);
  });
  for (const std::string& one : all_gather_text(group, own)) by_rank.push_back(lines_of(one));
  const auto place = first_place(by_rank);
  if (!place) return {};
  return LineDifference{place->rank, at_or_none(by_rank[0], place->index).value_or(""),
                        at_or_none(by_rank[place->rank], place->index).value_or("")};
}

}  // namespace trireme
