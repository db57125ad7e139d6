#include "trireme/base/torch/autograd_metadata.h"

#include <memory>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {
namespace {

// Each TensorImpl owns its metadata alone. Naming a private member in an explicit instantiation is allowed C++, and
// breaks when it is compiled if libtorch renames it.
using OwnedMetadata = std::unique_ptr<c10::AutogradMetaInterface>;
OwnedMetadata& metadata_of(c10::TensorImpl& impl);

template <OwnedMetadata c10::TensorImpl::*kMetadata>
struct MetadataMember {
  friend OwnedMetadata& metadata_of(c10::TensorImpl& impl) { return impl.*kMetadata; }
};
template struct MetadataMember<&c10::TensorImpl::autograd_meta_>;

}  // namespace

void share_autograd_metadata(const c10::TensorImpl& owner, c10::TensorImpl& other) {
  TRIREME_CHECK(other.autograd_meta() == nullptr, "it has metadata");
  metadata_of(other).reset(owner.autograd_meta());
}

void forget_autograd_metadata(c10::TensorImpl& other) noexcept { (void)metadata_of(other).release(); }

void move_autograd_metadata(c10::TensorImpl& from, c10::TensorImpl& to) {
  TRIREME_CHECK(to.autograd_meta() == nullptr, "it has metadata");
  metadata_of(to) = std::move(metadata_of(from));
}

}  // namespace trireme
