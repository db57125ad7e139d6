#include "checkpoint/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>

#include "trireme/base/error.h"

namespace trireme {
namespace {

[[noreturn]] void throw_as(ErrorCode code, const std::string& message) {
  switch (code) {
    case ErrorCode::kCheckpoint:
    case ErrorCode::kTornLoad:
      throw CheckpointError(message, code);
    case ErrorCode::kIo:
      throw IoError(message);
    case ErrorCode::kState:
      throw StateError(message);
    case ErrorCode::kShape:
      throw ShapeError(message);
    case ErrorCode::kData:
      throw DataError(message);
    case ErrorCode::kConfig:
    case ErrorCode::kBatchSize:
    case ErrorCode::kUnsupported:
      throw ConfigError(message, code);
    default:
      throw Error(code, message);
  }
}

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

}  // namespace

std::vector<std::string> gather_or_throw(Group& group, const std::function<std::string()>& work) {
  auto outcomes = all_gather_text(group, outcome_of(work));
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::string& outcome = outcomes[rank];
    if (outcome[0] == '\0') continue;
    const std::string who = group.size() > 1 ? str("rank ", rank, ": ") : "";
    throw_as(static_cast<ErrorCode>(outcome[0] - 1), who + outcome.substr(1));
  }
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

}  // namespace trireme
