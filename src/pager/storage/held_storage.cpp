#include "pager/storage/held_storage.h"

#include <ATen/ops/from_blob.h>

#include "trireme/base/error.h"

namespace trireme {

void HeldStorage::check(Hold hold) const {
  const bool fits = hold == Hold::kRead ? !modifying_ : !is_held();
  if (!fits)
    throw StateError(str("GatheredParameters: ", label(), " is in another scope already",
                         modifying_ ? ", which may modify it" : "",
                         "; let that one end first (only scopes without modifier_rank may overlap)"));
}

void HeldStorage::hold(Hold hold) {
  check(hold);
  if (!is_held()) make_whole(hold);
  if (hold == Hold::kRead) {
    ++readers_;
  } else {
    modifying_ = true;
    unspread_ = true;
  }
}

void HeldStorage::let_go(Hold hold) noexcept {
  if (hold == Hold::kRead)
    --readers_;
  else
    modifying_ = false;
  if (!is_held() && mesh() != nullptr) release();
}

void HeldStorage::spread(int root) {
  const auto count = static_cast<int64_t>(bytes().nbytes());
  if (count > 0)
    broadcast_over(*mesh(),
                   at::for_blob(bytes().mutable_data(), {count})
                       .options(at::TensorOptions().dtype(at::kByte).device(bytes().device()))
                       .target_device(bytes().device())
                       .make_tensor(),
                   root);
  after_write();
  unspread_ = false;
}

void HeldStorage::require_free(const char* call) const {
  if (is_held())
    throw StateError(str(call, ": ", label(), " is in a GatheredParameters scope; let the scope end first"));
  require_spread(call);
}

void HeldStorage::require_spread(const char* call) const {
  if (unspread_)
    throw StateError(
        str(call, ": ", label(),
            " is in, or was left by, a GatheredParameters scope with a modifier_rank that was not closed, so "
            "ranks may hold different values; call close() at the end of the scope, on every rank"));
}

void HeldStorage::refuse_write(Access access) const {
  if (readers_ == 0 || access == Access::kRead) return;
  throw StateError(str(label(),
                       " was written inside a GatheredParameters scope without modifier_rank, which would leave each "
                       "rank its own values; name the rank whose values count as modifier_rank"));
}

}  // namespace trireme
