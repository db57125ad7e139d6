#include "pipeline/rank_agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <xxhash.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

bool are_alike(Group& all, int64_t digest) {
  if (all.size() == 1) return true;
  const WithoutInterception own_operators;
  const at::Tensor own = at::full({1}, digest, at::kLong), of_ranks = at::empty({all.size()}, at::kLong);
  all.all_gather(of_ranks, own).wait();
  const int64_t* const digests = of_ranks.const_data_ptr<int64_t>();
  return std::all_of(digests, digests + all.size(), [&](int64_t each) { return each == digest; });
}

/// The first line in which two texts differ, by which one is called `mine` and the other `others`.
std::string difference_of(const std::string& mine, const std::string& others) {
  std::istringstream one(mine), other(others);
  std::string line, other_line;
  for (;;) {
    const bool has_line = static_cast<bool>(std::getline(one, line));
    const bool has_other = static_cast<bool>(std::getline(other, other_line));
    if (!has_line && !has_other) return "";
    if (!has_line || !has_other || line != other_line)
      return str("`", has_line ? line : "nothing more", "` on rank 0 and `", has_other ? other_line : "nothing more",
                 "`");
  }
}

}  // namespace

void agree(Group& all, const char* call, const std::function<std::string()>& text) {
  std::string mine;
  std::exception_ptr own;  // as it was thrown here, Python's with their class
  try {
    mine = str(call, ", ", text());
  } catch (...) {
    own = std::current_exception();
  }
  const auto digest = static_cast<int64_t>(own ? 0 : XXH3_64bits(mine.data(), mine.size()) | 1);
  if (are_alike(all, digest) && !own) return;
  std::vector<std::string> texts;
  try {
    texts = gather_or_throw(all, [&] {
      try {
        if (own) std::rethrow_exception(own);
      } catch (const Error&) {
        throw;
      } catch (const std::exception& error) {  // a program's, which is told without Python's traceback
        const std::string why = error.what();
        throw ConfigError(str(call, ": ", why.substr(0, why.find("\n\nAt:"))));
      }
      return mine;
    });
  } catch (const CommError&) {
    throw;
  } catch (...) {
    if (own) std::rethrow_exception(own);
    throw;
  }
  for (size_t rank = 1; rank < texts.size(); ++rank)
    if (texts[rank] != texts[0])
      throw ConfigError(str(call, ": the ranks differ: ", difference_of(texts[0], texts[rank]), " on rank ", rank,
                            "; call set_schedule(), set_train_batch_size() and eval_batch() alike on every rank"));
}

}  // namespace trireme
