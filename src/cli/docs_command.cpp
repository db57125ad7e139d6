// `trireme docs`: the manual that came with the program, to which errors point.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <filesystem>
#include <memory>
#include <vector>

#include "cli/command.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"
#include "trireme/base/suggest.h"

namespace trireme::cli {
namespace {

constexpr const char* kDocsFooter =
    "Examples:\n"
    "  trireme docs              lists the pages\n"
    "  trireme docs config       every key of a configuration";

// Installed with the program, by `make install` and in the wheel; a build folder has a link to the sources' own.
std::filesystem::path docs_folder() {
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  const auto folder = program.parent_path().parent_path() / "share" / "doc" / "trireme";
  if (!posix_file_system().exists(folder))
    throw IoError(str(folder.string(),
                      ": the manual is not there; install Trireme as a whole: make install, or pip "
                      "install"));
  return folder;
}

std::vector<std::string> page_names(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : posix_file_system().list(folder))
    if (entry.ends_with(".md") && entry != "README.md") names.push_back(entry.substr(0, entry.size() - 3));
  return names;
}

// "# config: the keys" is the page's first line.
std::string title_of(const std::string& page) {
  const auto begin = page.find_first_not_of("# ");
  return begin == std::string::npos ? "" : page.substr(begin, page.find('\n') - begin);
}

int run_docs(const std::string& name) {
  const auto folder = docs_folder();
  FileSystem& files = posix_file_system();
  const auto names = page_names(folder);
  if (name.empty()) {
    std::string text = str("Pages in ", folder.string(), "; `trireme docs PAGE` prints one.\n\n");
    for (const auto& page : names)
      text += formatted("  {:<19} {}\n", page, title_of(files.read(folder / (page + ".md"))));
    print_result(text);
    return kDone;
  }
  for (const auto& page : names) {
    if (page != name) continue;
    print_result(files.read(folder / (page + ".md")));
    return kDone;
  }
  throw ConfigError(str("there is no page '", name, "'.", did_you_mean(name, names), " `trireme docs` lists them"));
}

}  // namespace

Action add_docs(CLI::App& app) {
  const auto page = std::make_shared<std::string>();
  app.add_option("PAGE", *page, "the page to print (default: a list of all)")->type_name("");
  app.footer(kDocsFooter);
  return [page](const Invocation&) { return run_docs(*page); };
}

}  // namespace trireme::cli
