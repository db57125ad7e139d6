#include "cli/flags.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/suggest.h"
#include "trireme/base/words.h"

namespace trireme::cli {
namespace {

constexpr std::string_view kChoices = "one of: ";  // opens the name of a validator

template <class Number>
bool parse(const std::string& text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

}  // namespace

CLI::Validator whole_number(const WholeRange& range) {
  return CLI::Validator(
      [range](std::string& text) {
        int64_t value = 0;
        if (parse(text, value) && value >= range.least && value <= range.most) {
          text = std::to_string(value);
          return std::string();
        }
        const bool bounded = range.most < std::numeric_limits<int64_t>::max();
        return str("'", text, "' is not a whole number ", bounded ? "from " : "of at least ", range.least,
                   bounded ? str(" to ", range.most) : "");
      },
      "");
}

CLI::Validator real_number(const RealRange& range) {
  return CLI::Validator(
      [range](const std::string& text) {
        double value = 0;
        if (parse(text, value) && value >= range.least && value <= range.most) return std::string();
        const bool bounded = range.most < std::numeric_limits<double>::max();
        return str("'", text, "' is not a number ", bounded ? "from " : "of at least ", range.least,
                   bounded ? str(" to ", range.most) : "");
      },
      "");
}

CLI::Validator count_of(const std::string& things, const RealRange& range) {
  return CLI::Validator(
      [things, range](std::string& text) {
        constexpr std::string_view kSuffixes = "kmbt";
        const int letter = text.empty() ? 0 : std::tolower(static_cast<unsigned char>(text.back()));
        const size_t power = letter == 0 ? std::string_view::npos : kSuffixes.find(static_cast<char>(letter));
        const bool has_suffix = power != std::string_view::npos;
        double value = 0;
        bool is_number = parse(has_suffix ? text.substr(0, text.size() - 1) : text, value);
        if (has_suffix) value *= std::pow(1000.0, static_cast<double>(power + 1));
        is_number = is_number && value >= range.least && value <= range.most;
        if (!is_number)
          return str("'", text, "' is not a number of ", things, " from ", range.least, " to ", range.most,
                     "; write it as 7B, 350M, 1.3b or 7.5e9");
        text = formatted("{}", value);
        return std::string();
      },
      "");
}

CLI::Validator positive_number(const std::string& fix) {
  return CLI::Validator(
      [fix](const std::string& text) {
        double value = 0;
        if (parse(text, value) && std::isfinite(value) && value > 0) return std::string();
        return str("'", text, "' is not a number above 0; ", fix);
      },
      "");
}

CLI::Validator path_text() {
  return CLI::Validator(
      [](const std::string& text) {
        return text.empty() ? std::string("'' is no path; give one, or leave the flag out") : std::string();
      },
      "");
}

CLI::Validator one_of(const std::vector<std::string>& names) {
  CLI::Validator validator(
      [names](const std::string& text) {
        if (std::find(names.begin(), names.end(), text) != names.end()) return std::string();
        std::string list;
        for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
        const auto hint = did_you_mean(text, names);
        return str("'", text, "' is none of ", list, hint.empty() ? "" : ".", hint);
      },
      "");
  return validator.name(std::string(kChoices) + joined(names, " "));
}

CLI::Validator offered(const std::vector<std::string>& names) {
  return CLI::Validator([](const std::string&) { return std::string(); }, "")
      .name(std::string(kChoices) + joined(names, " "));
}

std::string choices_of(CLI::Option& option) {
  std::string choices;
  try {
    for (int i = 0; choices.empty(); ++i) {
      const std::string name = option.get_validator(i)->get_name();
      if (name.starts_with(kChoices)) choices = name.substr(kChoices.size());
    }
  } catch (const CLI::OptionNotFound&) {  // behind the last one
  }
  return choices;
}

}  // namespace trireme::cli
