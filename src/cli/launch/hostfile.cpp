#include "cli/launch/hostfile.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>
#include <sstream>
#include <unordered_set>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme::cli {
namespace {

// Beyond what any machine has: a typing error, which would otherwise cost memory for every slot.
constexpr int kMostSlots = 1024;
constexpr size_t kMostHosts = 20'000;

constexpr const char* kSelectionForm = "write it as host:0,2@other (a host without slots means all of them)";

std::optional<int> parse_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::string part;
  std::istringstream in(text);
  while (std::getline(in, part, separator)) parts.push_back(part);
  if (text.empty() || text.back() == separator) parts.emplace_back();
  return parts;
}

template <class Hosts>
auto find_host(Hosts& hosts, const std::string& name) {
  return std::find_if(hosts.begin(), hosts.end(), [&](const HostSlots& one) { return one.host == name; });
}

std::string names_of(const std::vector<HostSlots>& hosts) {
  std::string names;
  for (const auto& one : hosts) names += str(names.empty() ? "" : ", ", one.host);
  return names;
}

HostSlots parse_host_line(const std::string& line, const std::string& where) {
  std::istringstream words(line);
  std::string host, slots, rest;
  words >> host >> slots >> rest;
  const auto count = slots.starts_with("slots=") ? parse_number(std::string_view(slots).substr(6)) : std::nullopt;
  if (!count || *count == 0 || !rest.empty())
    throw ConfigError(str(where, ": '", excerpt(line), "' is not `host slots=N` with N of at least 1"));
  if (*count > kMostSlots)
    throw ConfigError(str(where, ": host '", excerpt(host), "' has ", *count, " slots, at most ", kMostSlots,
                          " are known on one host; write how many ranks may run there"));
  if (!is_utf8(host)) throw ConfigError(str(where, ": '", excerpt(host), "' is no host's name: not UTF-8"));
  HostSlots parsed{host, std::vector<int>(*count)};
  std::iota(parsed.slots.begin(), parsed.slots.end(), 0);
  return parsed;
}

// One `host` or `host:0,2` of a selection, checked against the pool.
HostSlots parse_selected_host(const std::string& text, const std::vector<HostSlots>& pool, const std::string& flag) {
  const auto colon = text.find(':');
  const std::string host = text.substr(0, colon);
  const auto known = find_host(pool, host);
  if (host.empty()) throw ConfigError(str(flag, ": '", text, "' names no host; ", kSelectionForm));
  if (known == pool.end()) {
    throw ConfigError(str(flag, ": there is no host '", host, "'; the hosts are: ", names_of(pool)));
  }
  if (colon == std::string::npos) return *known;
  HostSlots selected{host, {}};
  for (const auto& word : split(text.substr(colon + 1), ',')) {
    const auto slot = parse_number(word);
    if (!slot) throw ConfigError(str(flag, ": '", word, "' in '", text, "' is no slot number; ", kSelectionForm));
    if (std::find(known->slots.begin(), known->slots.end(), *slot) == known->slots.end()) {
      throw ConfigError(
          str(flag, ": host '", host, "' has no slot ", *slot, "; it has ", known->slots.size(), ", counted from 0"));
    }
    selected.slots.push_back(*slot);
  }
  return selected;
}

}  // namespace

std::vector<HostSlots> parse_hostfile(std::string_view text, const std::string& origin) {
  std::vector<HostSlots> hosts;
  std::unordered_set<std::string> names;
  std::istringstream in{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    line.erase(std::min(line.find('#'), line.size()));
    line.erase(line.find_last_not_of(" \t\r") + 1);
    if (line.empty()) continue;
    auto parsed = parse_host_line(line, str(origin, ":", number));
    if (!names.insert(parsed.host).second)
      throw ConfigError(
          str(origin, ":", number, ": host '", parsed.host, "' stands twice; give all its slots in one line"));
    if (names.size() > kMostHosts)
      throw ConfigError(str(origin, ":", number, ": more than ", kMostHosts, " hosts; keep those of this job"));
    hosts.push_back(std::move(parsed));
  }
  if (hosts.empty()) throw ConfigError(str(origin, ": no host in this file; write lines of the form `host slots=N`"));
  return hosts;
}

std::vector<HostSlots> select_slots(const std::vector<HostSlots>& pool, const std::string& include,
                                    const std::string& exclude) {
  if (!include.empty() && !exclude.empty()) throw ConfigError("--include and --exclude exclude each other; give one");
  if (include.empty() && exclude.empty()) return pool;
  const bool keeps = !include.empty();
  const std::string flag = keeps ? "--include" : "--exclude";
  std::vector<HostSlots> named;
  for (const auto& part : split(keeps ? include : exclude, '@')) {
    auto selected = parse_selected_host(part, pool, flag);
    auto earlier = find_host(named, selected.host);
    if (earlier == named.end()) earlier = named.insert(named.end(), {selected.host, {}});
    earlier->slots.insert(earlier->slots.end(), selected.slots.begin(), selected.slots.end());
  }
  std::vector<HostSlots> kept;
  for (const auto& one : pool) {
    const auto match = find_host(named, one.host);
    HostSlots left{one.host, {}};
    for (const int slot : one.slots) {
      const bool is_named =
          match != named.end() && std::find(match->slots.begin(), match->slots.end(), slot) != match->slots.end();
      if (is_named == keeps) left.slots.push_back(slot);
    }
    if (!left.slots.empty()) kept.push_back(std::move(left));
  }
  if (kept.empty()) throw ConfigError(str(flag, " ", keeps ? include : exclude, ": no slot is left to run on"));
  return kept;
}

}  // namespace trireme::cli
