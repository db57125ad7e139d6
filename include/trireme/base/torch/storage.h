// Replaces the data of a storage, and what it keeps beside them.
#pragma once

#include <c10/core/StorageImpl.h>

namespace trireme {

/// Puts `data` in the place of what `storage` has. It may be read again where it was told to throw, and what was to be
/// copied at the next write (a lazy clone) is not.
void replace_data(c10::StorageImpl& storage, c10::DataPtr data);

}  // namespace trireme
