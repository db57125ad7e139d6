// Every variable of the environment that Trireme reads, in one list, and the one function that reads them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace trireme {

/// The one who sets a variable. docs/environment.md has a table of each.
enum class VariableKind { kUsers, kLaunchers, kOwn };

/// One row of the list.
struct EnvironmentVariable {
  std::string_view name;
  VariableKind kind;
  std::string_view usual;    ///< what holds where it is not set; "" where nothing does
  std::string_view meaning;  ///< one line of Markdown
};

/// All of them, in the order of the page.
std::span<const EnvironmentVariable> environment_variables();

/// The value of `name`; nothing where it is not set. An empty value is one.
///
/// Throws    Error (kInternal): `name` is not in the list.
std::optional<std::string> environment(std::string_view name);

/// The tables of docs/environment.md.
std::string environment_page();

}  // namespace trireme
