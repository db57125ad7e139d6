#include "data/tokenizers/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "data/tokenizers/fields.h"
#include "data/tokenizers/pattern.h"
#include "trireme/base/error.h"

namespace trireme::tokenizers {
namespace {

struct FreeText {
  void operator()(utf8proc_uint8_t* text) const { std::free(text); }
};

/// One of Unicode's four forms.
class Form final : public Normalizer {
 public:
  explicit Form(int options) : options_(static_cast<utf8proc_option_t>(options)) {}

  std::string apply(std::string text) const override {
    if (std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; })) return text;
    utf8proc_uint8_t* made = nullptr;
    const auto bytes = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                    static_cast<utf8proc_ssize_t>(text.size()), &made, options_);
    const std::unique_ptr<utf8proc_uint8_t, FreeText> owner(made);
    if (bytes == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
    if (bytes < 0) throw DataError(trireme::str("a text cannot be normalized: ", utf8proc_errmsg(bytes)));
    return {reinterpret_cast<const char*>(made), static_cast<size_t>(bytes)};
  }

 private:
  utf8proc_option_t options_;
};

class Prepend final : public Normalizer {
 public:
  explicit Prepend(std::string before) : before_(std::move(before)) {}
  std::string apply(std::string text) const override { return text.empty() ? text : before_ + text; }

 private:
  std::string before_;
};

class Replace final : public Normalizer {
 public:
  Replace(Pattern pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  std::string apply(std::string text) const override { return pattern_.replaced(text, content_); }

 private:
  Pattern pattern_;
  std::string content_;
};

class NormalizerSequence final : public Normalizer {
 public:
  explicit NormalizerSequence(std::vector<std::unique_ptr<const Normalizer>> parts) : parts_(std::move(parts)) {}
  std::string apply(std::string text) const override {
    for (const auto& part : parts_) text = part->apply(std::move(text));
    return text;
  }

 private:
  std::vector<std::unique_ptr<const Normalizer>> parts_;
};

std::unique_ptr<const Normalizer> normalizer_sequence(const Json& list, const std::string& place) {
  std::vector<std::unique_ptr<const Normalizer>> parts;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string part = trireme::str(place, "[", i, "]");
    (void)type_of(list[i], part);  // null is none of a sequence
    parts.push_back(make_normalizer(list[i], part));
  }
  return std::make_unique<NormalizerSequence>(std::move(parts));
}

}  // namespace

std::unique_ptr<const Normalizer> make_normalizer(const Json& json, const std::string& place) {
  if (json.is_null()) return nullptr;
  const std::string type = type_of(json, place);
  Fields fields(json, place);
  fields.pass_over({"type"});
  std::unique_ptr<const Normalizer> made;
  constexpr int kStable = UTF8PROC_STABLE;
  if (type == "NFC") {
    made = std::make_unique<Form>(kStable | UTF8PROC_COMPOSE);
  } else if (type == "NFD") {
    made = std::make_unique<Form>(kStable | UTF8PROC_DECOMPOSE);
  } else if (type == "NFKC") {
    made = std::make_unique<Form>(kStable | UTF8PROC_COMPOSE | UTF8PROC_COMPAT);
  } else if (type == "NFKD") {
    made = std::make_unique<Form>(kStable | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
  } else if (type == "Prepend") {
    made = std::make_unique<Prepend>(fields.text("prepend"));
  } else if (type == "Replace") {
    made = std::make_unique<Replace>(Pattern::from_json(fields.required("pattern"), fields.place_of("pattern")),
                                     fields.text("content"));
  } else if (type == "Sequence") {
    made = normalizer_sequence(fields.list("normalizers"), fields.place_of("normalizers"));
  } else {
    refuse_type(place, type, {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Sequence"});
  }
  fields.end();
  return made;
}

}  // namespace trireme::tokenizers
