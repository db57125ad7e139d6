#include "data/tokenizers/decoder.h"

#include <algorithm>
#include <optional>

#include "data/tokenizers/fields.h"
#include "data/tokenizers/letters.h"
#include "data/tokenizers/pattern.h"
#include "data/tokenizers/pre_tokenizer.h"
#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/base/words.h"

namespace trireme::tokenizers {
namespace {

using Texts = std::vector<std::string>;

class ByteLevelDecoder final : public Decoder {
 public:
  Texts apply(Texts tokens) const override {
    for (std::string& token : tokens) token = bytes_of_letters(token);
    return {joined(tokens, "")};
  }
};

/// Tokens such as <0x0A> become bytes; those that are no UTF-8 together become U+FFFD each.
class ByteFallback final : public Decoder {
 public:
  Texts apply(Texts tokens) const override {
    Texts result;
    std::string bytes;
    const auto end_bytes = [&] {
      if (is_utf8(bytes)) {
        if (!bytes.empty()) result.push_back(bytes);
      } else {
        result.insert(result.end(), bytes.size(), "\uFFFD");
      }
      bytes.clear();
    };
    for (std::string& token : tokens) {
      const auto byte = byte_of(token);
      if (byte) {
        bytes += *byte;
        continue;
      }
      end_bytes();
      result.push_back(std::move(token));
    }
    end_bytes();
    return result;
  }

 private:
  static int digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  }

  static std::optional<char> byte_of(const std::string& token) {
    if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with(">")) return std::nullopt;
    const int high = digit(token[3]), low = digit(token[4]);
    if (high < 0 || low < 0) return std::nullopt;
    return static_cast<char>(16 * high + low);
  }
};

class Fuse final : public Decoder {
 public:
  Texts apply(Texts tokens) const override { return {joined(tokens, "")}; }
};

class ReplaceInTokens final : public Decoder {
 public:
  ReplaceInTokens(Pattern pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  Texts apply(Texts tokens) const override {
    for (std::string& token : tokens) token = pattern_.replaced(token, content_);
    return tokens;
  }

 private:
  Pattern pattern_;
  std::string content_;
};

class Strip final : public Decoder {
 public:
  Strip(std::string content, int64_t most_before, int64_t most_behind)
      : content_(std::move(content)), most_before_(most_before), most_behind_(most_behind) {}

  Texts apply(Texts tokens) const override {
    for (std::string& token : tokens) {
      for (int64_t i = 0; i < most_before_ && token.starts_with(content_); ++i) token.erase(0, content_.size());
      for (int64_t i = 0; i < most_behind_ && token.ends_with(content_); ++i)
        token.resize(token.size() - content_.size());
    }
    return tokens;
  }

 private:
  std::string content_;
  int64_t most_before_;
  int64_t most_behind_;
};

class MetaspaceDecoder final : public Decoder {
 public:
  MetaspaceDecoder(std::string replacement, bool has_first)
      : space_(Pattern::literal(std::move(replacement))), has_first_(has_first) {}

  Texts apply(Texts tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = space_.replaced(tokens[i], i == 0 && has_first_ ? "" : " ");
    return tokens;
  }

 private:
  Pattern space_;
  bool has_first_;  // the space that a pre-tokenizer puts before a text
};

class DecoderSequence final : public Decoder {
 public:
  explicit DecoderSequence(std::vector<std::unique_ptr<const Decoder>> parts) : parts_(std::move(parts)) {}
  Texts apply(Texts tokens) const override {
    for (const auto& part : parts_) tokens = part->apply(std::move(tokens));
    return tokens;
  }

 private:
  std::vector<std::unique_ptr<const Decoder>> parts_;
};

}  // namespace

std::unique_ptr<const Decoder> make_decoder(const Json& json, const std::string& place) {
  if (json.is_null()) return nullptr;
  const std::string type = type_of(json, place);
  Fields fields(json, place);
  fields.pass_over({"type"});
  std::unique_ptr<const Decoder> made;
  if (type == "ByteLevel") {
    fields.pass_over({"add_prefix_space", "trim_offsets", "use_regex"});
    made = std::make_unique<ByteLevelDecoder>();
  } else if (type == "ByteFallback") {
    made = std::make_unique<ByteFallback>();
  } else if (type == "Fuse") {
    made = std::make_unique<Fuse>();
  } else if (type == "Replace") {
    made = std::make_unique<ReplaceInTokens>(Pattern::from_json(fields.required("pattern"), fields.place_of("pattern")),
                                             fields.text("content"));
  } else if (type == "Strip") {
    std::string content = fields.text("content");
    if (content.empty()) fields.fail("content", "expected a letter");
    made = std::make_unique<Strip>(std::move(content), fields.integer("start"), fields.integer("stop"));
  } else if (type == "Metaspace") {
    fields.pass_over({"str_rep", "split"});
    const bool has_first = prepend_scheme(fields) != PrependScheme::kNever;
    made = std::make_unique<MetaspaceDecoder>(fields.text("replacement"), has_first);
  } else if (type == "Sequence") {
    const Json& list = fields.list("decoders");
    std::vector<std::unique_ptr<const Decoder>> parts;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string part = trireme::str(fields.place_of("decoders"), "[", i, "]");
      (void)type_of(list[i], part);  // null is none of a sequence
      parts.push_back(make_decoder(list[i], part));
    }
    made = std::make_unique<DecoderSequence>(std::move(parts));
  } else {
    refuse_type(place, type, {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"});
  }
  fields.end();
  return made;
}

}  // namespace trireme::tokenizers
