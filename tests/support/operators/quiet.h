// libtorch's warnings of calls at random, unheard.
#pragma once

#include <c10/util/Exception.h>

namespace trireme::testing {

class [[nodiscard]] QuietWarnings {
  struct Deaf final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Deaf deaf_;
  c10::WarningUtils::WarningHandlerGuard guard_{&deaf_};
};

}  // namespace trireme::testing
