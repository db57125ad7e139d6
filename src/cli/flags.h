// Flags whose wrong values are refused with a sentence that says what is needed.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Option.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::cli {

struct WholeRange {
  int64_t least = 1;
  int64_t most = std::numeric_limits<int64_t>::max();
};

struct RealRange {
  double least = 0;
  double most = std::numeric_limits<double>::max();
};

/// Refuses what is no whole number of `range`: "--steps: 'abc' is not a whole number of at least 1". Goes into
/// transform(): it writes the number plainly, because CLI11 takes 010 for an octal one.
CLI::Validator whole_number(const WholeRange& range);
/// Refuses what is no finite number of `range`; accepts 7.5e9.
CLI::Validator real_number(const RealRange& range);

/// Refuses what is no number of `range` of things; accepts 7B, 350M, 1.3b and 7.5e9. Goes into transform(): it writes
/// the number plainly.
CLI::Validator count_of(const std::string& things, const RealRange& range);

/// Refuses what is no finite number above 0: "--peak-tflops: '0' is not a number above 0; FIX".
CLI::Validator positive_number(const std::string& fix);

/// Refuses an empty text, as a shell makes one of a variable that is not set: "--tokenizer: '' is no path; FIX".
CLI::Validator path_text();

/// Refuses what is none of `names`: "--dtype: 'fp16' is none of fp32, bf16".
CLI::Validator one_of(const std::vector<std::string>& names);
/// Refuses nothing: `names` are what a shell offers for an option that takes others, too.
CLI::Validator offered(const std::vector<std::string>& names);
/// The names of one_of() or offered(), with spaces between them; empty where `option` has neither.
std::string choices_of(CLI::Option& option);

/// A flag with a whole number, shown as `N` in --help. `Target` is an integer or an optional of one.
template <class Target>
CLI::Option* add_whole(CLI::App& app, const char* flag, Target& target, const char* description,
                       const WholeRange& range = {}) {
  return app.add_option(flag, target, description)->transform(whole_number(range))->type_name("N");
}

/// A flag with a number, shown as `X` in --help.
template <class Target>
CLI::Option* add_real(CLI::App& app, const char* flag, Target& target, const char* description,
                      const RealRange& range = {}) {
  return app.add_option(flag, target, description)->check(real_number(range))->type_name("X");
}

/// Calls `read`, which reads what the user named: a file that cannot be read is then wrong use, not a failure.
template <class Read>
auto read_input(const Read& read) {
  try {
    return read();
  } catch (const IoError& error) {
    throw ConfigError(error.what());
  }
}

}  // namespace trireme::cli
