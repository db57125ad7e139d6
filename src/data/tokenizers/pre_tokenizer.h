// Pre-tokenizers: what cuts a text into the words within which letters are merged.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "trireme/base/json.h"

namespace trireme::tokenizers {

struct Piece {
  std::string text;
  bool begins_text = false;  ///< it is from the beginning of the text that is encoded
};

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual std::vector<Piece> apply(std::vector<Piece> pieces) const = 0;
};

/// The pre-tokenizer that `json` describes; null for null. Throws DataError opening with `place`.
std::unique_ptr<const PreTokenizer> make_pre_tokenizer(const Json& json, const std::string& place);

/// Whether a Metaspace's decoder takes the first space away: its `prepend_scheme`, or the older `add_prefix_space`.
enum class PrependScheme { kFirst, kNever, kAlways };
class Fields;
PrependScheme prepend_scheme(Fields& fields);

}  // namespace trireme::tokenizers
