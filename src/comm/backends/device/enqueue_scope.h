// Enqueuing on a stream of a group's own, unseen by whoever watches the calling thread's operators.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "trireme/device/stream.h"
#include "trireme/intercept.h"

namespace trireme::comm {

/// While it lives, this thread enqueues on `stream`, and operators of ATen are neither recorded by autograd nor cast,
/// nor seen by a pass: what a group does with the bytes of a tensor is no business of the model's.
class [[nodiscard]] EnqueueScope {
 public:
  explicit EnqueueScope(const SideStream& stream) : on_(stream) {}

 private:
  static c10::DispatchKeySet watchers() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
           c10::DispatchKeySet(kInterceptKey);
  }

  const OnStream on_;
  const c10::impl::ExcludeDispatchKeyGuard unseen_{watchers()};
};

}  // namespace trireme::comm
