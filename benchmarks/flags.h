// The flags of a benchmark's program: --help at once, and errors that name the flag, its value and the flags that there
// are.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/suggest.h"

namespace benchmarks {

/// Values of a flag that takes several: "fp32,bf16".
inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::stringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

/// Flags in the order of --help, each bound to the variable that it sets, whose value at that time is the default.
class Flags {
 public:
  /// `about`: what the program measures and what its columns mean, in lines of its own.
  Flags(std::string program, std::string about) : program_(std::move(program)), about_(std::move(about)) {}

  /// A flag without a value.
  Flags& act(const std::string& name, std::function<void()> run, const std::string& help) {
    flags_.push_back({name, "", help, false, [run = std::move(run)](const std::string&) { run(); }});
    return *this;
  }

  Flags& on(const std::string& name, bool& target, const std::string& help) {
    return act(
        name, [&target] { target = true; }, help);
  }

  Flags& text(const std::string& name, std::string& target, const std::string& help) {
    return add(name, target, help, [&target](const std::string& value) { target = value; });
  }

  Flags& one_of(const std::string& name, std::string& target, const std::vector<std::string>& known,
                const std::string& help) {
    return add(name, target, help + ": " + joined(known), [=, &target](const std::string& value) {
      check_known(name, value, known);
      target = value;
    });
  }

  /// Several values between commas; each is one of `known`, unless that is empty.
  Flags& list(const std::string& name, std::vector<std::string>& target, const std::vector<std::string>& known,
              const std::string& help) {
    const std::string all = known.empty() ? "" : ": " + joined(known);
    return add(name, joined(target), help + all, [=, &target](const std::string& value) {
      target = split(value);
      if (target.empty()) throw trireme::ConfigError(name + ": no value is given");
      for (const std::string& word : target)
        if (!known.empty()) check_known(name, word, known);
    });
  }

  Flags& path(const std::string& name, std::filesystem::path& target, const std::string& help) {
    return add(name, target.string(), help, [&target](const std::string& value) { target = value; });
  }

  template <class Integer>
  Flags& whole(const std::string& name, Integer& target, const std::string& help, Integer least = 1) {
    return add(name, std::to_string(target), help, [=, &target](const std::string& value) {
      Integer number = 0;
      if (!parsed(value, number) || number < least)
        throw trireme::ConfigError(trireme::str(name, " ", value, ": no whole number of at least ", least));
      target = number;
    });
  }

  /// A share of a whole: above 0, at most 1.
  Flags& share(const std::string& name, double& target, const std::string& help) {
    return add(name, trireme::str(target), help, [=, &target](const std::string& value) {
      double number = 0;
      if (!parsed(value, number) || !(number > 0 && number <= 1))
        throw trireme::ConfigError(trireme::str(name, " ", value, ": no number above 0 and up to 1"));
      target = number;
    });
  }

  /// A flag that the program gives its own ranks; not in --help.
  Flags& of_ranks(const std::string& name, std::string& target) {
    flags_.push_back({name, "", "", true, [&target](const std::string& value) { target = value; }});
    return *this;
  }

  /// Sets what the flags say, from left to right. After --help and after a wrong flag the program ends, with 0 and
  /// with 2.
  void parse(int argc, char** argv) const {
    const std::vector<std::string> words(argv + 1, argv + argc);
    for (const std::string& word : words) {
      if (word != "--help" && word != "-h") continue;
      std::printf("%s", help().c_str());
      std::exit(0);
    }
    try {
      for (size_t i = 0; i < words.size(); ++i) {
        const Flag& flag = find(words[i]);
        if (flag.has_value && i + 1 == words.size()) throw trireme::ConfigError(flag.name + " needs a value");
        flag.set(flag.has_value ? words[++i] : "");
      }
    } catch (const trireme::ConfigError& error) {
      std::fprintf(stderr, "%s: %s\n%s --help says what each flag does\n", program_.c_str(), error.what(),
                   program_.c_str());
      std::exit(2);
    }
  }

 private:
  struct Flag {
    std::string name;
    std::string default_value;
    std::string help;
    bool has_value = false;
    std::function<void(const std::string&)> set;
  };

  template <class Number>
  static bool parsed(const std::string& text, Number& number) {
    const char* const last = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data(), last, number);
    return error == std::errc() && end == last;
  }

  static std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : ",") + word;
    return text;
  }

  static void check_known(const std::string& flag, const std::string& value, const std::vector<std::string>& known) {
    for (const std::string& name : known)
      if (name == value) return;
    throw trireme::ConfigError(flag + " " + value + ": there are " + joined(known));
  }

  Flags& add(const std::string& name, const std::string& default_value, const std::string& help,
             std::function<void(const std::string&)> set) {
    flags_.push_back({name, default_value, help, true, std::move(set)});
    return *this;
  }

  const Flag& find(const std::string& word) const {
    std::vector<std::string> names;
    for (const Flag& flag : flags_) {
      if (flag.name == word) return flag;
      if (!flag.help.empty()) names.push_back(flag.name);
    }
    std::string known;
    for (const std::string& name : names) known += name + " ";
    throw trireme::ConfigError(trireme::str(word, ": there is no such flag.", trireme::did_you_mean(word, names),
                                            " There are ", known, "--help"));
  }

  std::string help() const {
    std::string text = program_ + ": " + about_ + "\n\n";
    for (const Flag& flag : flags_) {
      if (flag.help.empty()) continue;
      constexpr size_t kColumn = 34;
      const std::string head = trireme::str("  ", flag.name, flag.default_value.empty() ? "" : " ", flag.default_value);
      const bool fits = head.size() < kColumn;
      text +=
          trireme::str(head, fits ? "" : "\n", std::string(kColumn - (fits ? head.size() : 0), ' '), flag.help, "\n");
    }
    return text + "\nA value beside a flag is its default.\n";
  }

  std::string program_;
  std::string about_;
  std::vector<Flag> flags_;
};

}  // namespace benchmarks
