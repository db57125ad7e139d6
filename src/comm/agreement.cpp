#include "trireme/comm/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>

#include "trireme/base/error.h"

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

}  // namespace trireme
