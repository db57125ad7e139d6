#include "ownership/transfers.h"

namespace trireme::ownership {

Transfers::Use Transfers::use(const at::Tensor& tensor, int home, int stage, int stages, bool needs_gradient) {
  auto found = entries_.find(tensor.unsafeGetTensorImpl());
  if (found == entries_.end()) {
    if (stage == home) return {};
    Entry made{.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())};
    found = entries_.emplace(tensor.unsafeGetTensorImpl(), std::move(made)).first;
  }
  Entry& entry = found->second;
  const auto version = static_cast<uint32_t>(tensor._version());
  if (entry.is_at.empty() || entry.version != version) {  // a write gives it another history, at home
    entry.version = version;
    entry.home = entry.holder = home;
    entry.is_at.assign(stages, false);
    entry.data.reset();
    entry.whole.reset();
    entry.used_as.reset();
  }
  Use use{.entry = &entry};
  use.brings_data = stage != home && !entry.is_at[stage];
  entry.is_at[stage] = true;
  if (needs_gradient && entry.holder != stage) use.from = std::exchange(entry.holder, stage);
  return use;
}

const Transfers::Entry* Transfers::away(const at::Tensor& tensor) const {
  const auto found = entries_.find(tensor.unsafeGetTensorImpl());
  if (found == entries_.end()) return nullptr;
  const Entry& entry = found->second;
  const bool is_away = entry.holder != entry.home && entry.version == static_cast<uint32_t>(tensor._version());
  return is_away ? &entry : nullptr;
}

void Transfers::follow(const at::Tensor& view, const Entry& of, const at::Tensor& used_as) {
  Entry made{.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(view.getIntrusivePtr()),
             .version = static_cast<uint32_t>(view._version()),
             .home = of.home,
             .holder = of.holder,
             .is_at = std::vector<bool>(of.is_at.size()),
             .used_as = used_as};
  made.is_at[of.holder] = true;
  if (used_as.defined()) made.data = used_as.detach();
  entries_.insert_or_assign(view.unsafeGetTensorImpl(), std::move(made));
}

}  // namespace trireme::ownership
