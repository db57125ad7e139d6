#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/tokenizers/pattern.h"

#include <pcre2.h>

#include "data/tokenizers/fields.h"
#include "data/tokenizers/letters.h"
#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme::tokenizers {
namespace {

// PCRE2 counts U+180E to white space, which Unicode does no more.
constexpr std::string_view kSpaces =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kOthers =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";

/// Oniguruma's expression in PCRE2's words; what the two read differently is refused.
class Translator {
 public:
  Translator(std::string_view from, const std::string& place) : from_(from), place_(place) {}

  std::string run() {
    while (at_ < from_.size()) {
      const char c = from_[at_];
      if (c == '\\') {
        escape();
      } else if (in_class_) {
        in_class();
      } else if (c == '[') {
        open_class();
      } else if (c == '(' && rest().starts_with("(?")) {
        group();
      } else if (c == '}' && rest().starts_with("}+")) {
        refuse("`}+`");
      } else if (c == '^' || c == '$' || c == '#') {
        refuse(trireme::str("`", c, "` outside of brackets"));
      } else {
        take(1);
      }
    }
    return std::move(to_);
  }

 private:
  std::string_view rest() const { return from_.substr(at_); }
  void take(size_t bytes) {
    to_ += from_.substr(at_, bytes);
    at_ += bytes;
  }

  void open_class() {
    in_class_ = true;
    take(1);
    if (rest().starts_with("^")) take(1);
    if (rest().starts_with("]")) refuse("`]` as the first of a class");
  }

  void in_class() {
    if (from_[at_] == '[') refuse("a class inside of a class");
    if (rest().starts_with("&&")) refuse("`&&`");
    in_class_ = from_[at_] != ']';
    take(1);
  }

  void group() {
    for (const char* known : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?i)"})
      if (rest().starts_with(known)) return take(std::string_view(known).size());
    refuse("a group that opens as `" + excerpt(rest().substr(0, 5)) + "`");
  }

  void write_class(std::string_view letters) {
    to_ += in_class_ ? std::string(letters) : trireme::str("[", letters, "]");
    at_ += 2;
  }

  void escape() {
    if (at_ + 1 == from_.size()) refuse("`\\` at its end");
    const char c = from_[at_ + 1];
    if (c == 's') return write_class(kSpaces);
    if (c == 'S') return write_class(kOthers);
    if (c == 'u') {
      if (from_.size() < at_ + 6) refuse("`\\u` without four digits");
      to_ += trireme::str("\\x{", from_.substr(at_ + 2, 4), "}");
      at_ += 6;
      return;
    }
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    constexpr std::string_view kKnown = "pPrntfvdDx";
    if (is_letter && kKnown.find(c) == kKnown.npos) refuse(trireme::str("`\\", c, "`"));
    if (c == 'v') refuse("`\\v`");  // a character there, a set here
    const size_t brace = rest().size() > 2 && rest()[2] == '{' ? rest().find('}') : rest().npos;
    if ((c == 'p' || c == 'P' || c == 'x') && brace != rest().npos) return take(brace + 1);
    take(1 + letter_bytes(from_.substr(at_ + 1)));
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw DataError(trireme::str(place_, ": the expression `", excerpt(from_), "` has ", what,
                                 ", of which it is not sure here that it means the same; encode the text by the ",
                                 "package tokenizers, and give the tokens as a .npy"));
  }

  std::string_view from_;
  const std::string& place_;
  std::string to_;
  size_t at_ = 0;
  bool in_class_ = false;
};

std::string message_of(int code) {
  char text[256] = "";
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof(text));
  return text;
}

struct FreeMatch {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

void add(std::vector<Match>& parts, size_t& done, size_t begin, size_t end) {
  if (done < begin) parts.push_back({done, begin, false});
  parts.push_back({begin, end, true});
  done = end;
}

}  // namespace

struct Pattern::Code {
  explicit Code(pcre2_code* compiled) : code(compiled) {}
  ~Code() { pcre2_code_free(code); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  pcre2_code* code;
};

Pattern Pattern::regex(std::string_view expression, const std::string& place) {
  const std::string translated = Translator(expression, place).run();
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (code == nullptr)
    throw DataError(
        trireme::str(place, ": the expression `", excerpt(expression), "` is not understood: ", message_of(error)));
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // without it matching is slower, and no other
  Pattern pattern;
  pattern.code_ = std::make_shared<const Code>(code);
  return pattern;
}

Pattern Pattern::literal(std::string text) {
  Pattern pattern;
  pattern.literal_ = std::move(text);
  return pattern;
}

Pattern Pattern::from_json(const Json& json, const std::string& place) {
  Fields fields(json, place);
  if (fields.find("Regex") != nullptr) {
    auto pattern = regex(fields.text("Regex"), fields.place_of("Regex"));
    fields.end();
    return pattern;
  }
  std::string text = fields.text("String");
  fields.end();
  if (text.empty()) fields.fail("String", "an empty text is everywhere");
  return literal(std::move(text));
}

std::vector<Match> Pattern::cut(std::string_view text) const {
  std::vector<Match> parts;
  size_t done = 0;
  if (!code_) {
    for (size_t at = text.find(literal_); at != text.npos; at = text.find(literal_, done))
      add(parts, done, at, at + literal_.size());
  } else {
    const std::unique_ptr<pcre2_match_data, FreeMatch> data(pcre2_match_data_create_from_pattern(code_->code, nullptr));
    if (!data) throw std::bad_alloc();
    const auto* letters = reinterpret_cast<PCRE2_SPTR>(text.data());
    for (size_t at = 0; at <= text.size();) {
      int found = pcre2_match(code_->code, letters, text.size(), at, PCRE2_NO_UTF_CHECK, data.get(), nullptr);
      if (found == PCRE2_ERROR_JIT_STACKLIMIT)
        found =
            pcre2_match(code_->code, letters, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data.get(), nullptr);
      if (found == PCRE2_ERROR_NOMATCH) break;
      if (found < 0)
        throw DataError(trireme::str("a text of ", text.size(),
                                     " bytes cannot be split by the tokenizer's expression: ", message_of(found),
                                     "; give it as several documents"));
      const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data.get());
      const size_t begin = offsets[0], end = offsets[1];
      // An empty match does not count where the last one has ended.
      if (begin < end || parts.empty() || begin != done) add(parts, done, begin, end);
      at = begin < end ? end : end + (end < text.size() ? letter_bytes(text.substr(end)) : 1);
    }
  }
  if (done < text.size()) parts.push_back({done, text.size(), false});
  return parts;
}

std::string Pattern::replaced(std::string_view text, std::string_view content) const {
  std::string result;
  for (const auto& part : cut(text)) result += part.is_match ? content : text.substr(part.begin, part.end - part.begin);
  return result;
}

}  // namespace trireme::tokenizers
