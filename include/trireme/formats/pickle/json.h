// Values as JSON, where they have a form in it.
#pragma once

#include <optional>

#include "trireme/base/json.h"
#include "trireme/formats/pickle/value.h"

namespace trireme::pickle {

/// nullopt: `value` or a part of it is no JSON (a tensor, an object, bytes, a key that is no string, a float that is
/// not finite, an integer beyond 64 bits, nested beyond kMaxDepth). Tuples become arrays.
std::optional<Json> to_json(const Value& value);

/// The inverse; integers beyond int64 become floats.
Value* from_json(Document& document, const Json& json);

}  // namespace trireme::pickle
