#include "trireme/base/torch/carried.h"

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

namespace trireme {
namespace {

using c10::ThreadLocalDebugInfo;

constexpr std::string_view kName = "TRIREME";

/// A kind that is Trireme's own. In torch 2.11 kinds are numbers of one byte, of which libtorch uses the first few; in
/// later versions a kind is the address of its name, which any library may make.
template <class Kind>
constexpr Kind own_kind() {
  if constexpr (std::is_enum_v<Kind>) {
    static_assert(sizeof(Kind) == 1);
    return static_cast<Kind>(0xd7);
  } else {
    return Kind(&kName);
  }
}

constexpr c10::DebugInfoKind kOwn = own_kind<c10::DebugInfoKind>();

struct Link {
  c10::DebugInfoKind kind;
  std::shared_ptr<c10::DebugInfoBase> info;
  const ThreadLocalDebugInfo* below;
};

// A thread's debug information is a chain whose links tell nobody their kind, so that none can be put below them.
// Naming a private member in an explicit instantiation is allowed C++, and breaks when it is compiled if libtorch
// renames it.
Link link_of(const ThreadLocalDebugInfo& link);

template <auto kKind, auto kInfo, auto kBelow>
struct Members {
  friend Link link_of(const ThreadLocalDebugInfo& link) { return {link.*kKind, link.*kInfo, (link.*kBelow).get()}; }
};
template struct Members<&ThreadLocalDebugInfo::kind_, &ThreadLocalDebugInfo::info_,
                        &ThreadLocalDebugInfo::parent_info_>;

}  // namespace

void carry(std::shared_ptr<Carried> carried) {
  const std::shared_ptr<ThreadLocalDebugInfo> top = ThreadLocalDebugInfo::current();
  c10::SmallVector<Link, 4> links;
  for (const ThreadLocalDebugInfo* link = top.get(); link != nullptr; link = links.back().below)
    links.push_back(link_of(*link));
  ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  if (carried != nullptr) ThreadLocalDebugInfo::_push(kOwn, std::move(carried));
  for (auto link = links.rbegin(); link != links.rend(); ++link)
    if (link->kind != kOwn) ThreadLocalDebugInfo::_push(link->kind, link->info);
}

Carried* carried() noexcept { return ThreadLocalDebugInfo::get(kOwn); }

}  // namespace trireme
