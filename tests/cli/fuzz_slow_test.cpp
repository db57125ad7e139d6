// Thousands of damaged and hostile files, each read by the command that would read it: no signal, no hang, no memory
// beyond measure, and an error that names the file.
//
// TRIREME_FUZZ_INPUTS: how many (300); TRIREME_FUZZ_SEED: of all of them; TRIREME_FUZZ_ONLY: one of them, by its
// number, whose files are kept.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <iostream>
#include <random>

#include "checkpoint/checksum.h"
#include "cli/command.h"
#include "tests/cli/program.h"  // its TemporaryFolder alone
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/utf8.h"

namespace trireme::cli {
namespace {

using Path = std::filesystem::path;
using Words = std::vector<std::string>;
using Random = std::mt19937_64;

constexpr int kMostSeconds = 20;
constexpr int64_t kMostBytesAboveEmpty = int64_t{200} << 20;
/// Ends an allocation that the machine would pay for; an error about it names no file, and so fails here too.
constexpr int64_t kMostAddressBytes = int64_t{6} << 30;

std::string bytes_of(const Path& path) { return posix_file_system().read(path); }

struct Ended {
  int status = 0;
  bool timed_out = false;
  int64_t peak_bytes = 0;
  std::string said;  ///< on stdout and stderr
};

/// Runs `trireme WORDS` in a process of its own that has everything loaded: some thousand per minute.
Ended run_forked(const Words& words, const Path& folder) {
  const Path output = folder / "output";
  const pid_t child = ::fork();
  if (child == 0) {
    ::setpgid(0, 0);
    const int file = ::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ::dup2(file, STDOUT_FILENO);
    ::dup2(file, STDERR_FILENO);
    const int null = ::open("/dev/null", O_RDONLY);
    ::dup2(null, STDIN_FILENO);
    const rlimit address{kMostAddressBytes, kMostAddressBytes};
    ::setrlimit(RLIMIT_AS, &address);
    if (::chdir(folder.c_str()) != 0) ::_exit(99);
    const int code = run(words);
    std::fflush(nullptr);
    ::_exit(code);
  }
  Ended ended;
  const int handle = static_cast<int>(::syscall(SYS_pidfd_open, child, 0));
  pollfd end{handle, POLLIN, 0};
  ended.timed_out = ::poll(&end, 1, kMostSeconds * 1000) == 0;
  ::close(handle);
  ::kill(-child, SIGKILL);  // what it left, too
  rusage used{};
  ::wait4(child, &ended.status, 0, &used);
  ended.peak_bytes = used.ru_maxrss * int64_t{1024};
  ended.said = bytes_of(output);
  return ended;
}

// --- what is read ---------------------------------------------------------------------------------------------------

struct Kind {
  std::string name;
  Words targets;  ///< files of the corpus, of which one is damaged
  Words needed;   ///< files and folders that are copied beside it
  /// One of the commands that read `target`.
  std::function<Words(const std::string& target, Random& random)> command;
  bool is_text = false;
};

/// One of each kind of file, as this program itself writes them.
class Corpus {
 public:
  Corpus() {
    std::string text;
    for (int i = 0; i < 300; ++i) text += "hello world, ";
    folder_.write("text.txt", text);
    std::string tokens;
    for (int i = 0; i < 2000; ++i) tokens += {static_cast<char>(i % 250), '\0'};
    folder_.write("tokens.bin", tokens);
    const std::string header = "{'descr': '<u2', 'fortran_order': False, 'shape': (2000,), }";
    folder_.write("tokens.npy", std::string("\x93NUMPY\x01\0v\0", 10) + header + std::string(117 - header.size(), ' ') +
                                    "\n" + tokens);
    folder_.write("model.json", R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 8, "intermediate_size": 8,
  "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32})");
    folder_.write("ds.json", R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
  "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
  "trireme": {"unit_patterns": ["(^|\\.)[0-9]+\\."]}, "zero_optimization": {"stage": 3}})");
    folder_.write("ds.hjson",
                  "# a comment\ntrain_micro_batch_size_per_gpu: 2\nbf16: {enabled: true}\n"
                  "optimizer: {type: AdamW, params: {lr: 0.001}}\nzero_optimization: {\n  stage: 2\n}\n"
                  "tensorboard: {job_name: '''\n  several\n  lines\n  '''}\n");
    folder_.write("fsdp.yaml",
                  "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 1\nfsdp_config:\n"
                  "  fsdp_version: 2\n  fsdp_state_dict_type: SHARDED_STATE_DICT\nx: &a [1, 2]\ny: *a\n");
    folder_.write("machines.txt", "# hosts\nlocalhost slots=2\n");
    made({"train", "--data", "text.txt", "--model", "model.json", "--config", "ds.json", "--seq", "8", "--steps", "2",
          "--eval-samples", "1", "--out", "my_run"});
    made({"consolidate", "my_run", "my_hf"});
    made({"consolidate", "my_run", "my_shards", "--max-shard-size", "2000"});
    made({"convert", "my_run", "my_ds2", "--to", "deepspeed", "--stage", "2", "--ranks", "2"});
    made({"convert", "my_run", "my_ds3", "--to", "deepspeed", "--stage", "3", "--ranks", "2"});
    made({"convert", "my_run", "my_dcp", "--to", "dcp"});
  }

  Path path() const { return folder_.path(); }

  /// Files below `folder`, as paths in the corpus.
  Words files(const std::string& folder) const {
    Words found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path() / folder))
      if (entry.is_regular_file() && entry.path().extension() != ".py")
        found.push_back(entry.path().lexically_relative(path()).string());
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  void made(const Words& words) const {
    const Ended ended = run_forked(words, path());
    if (ended.status != 0) throw StateError(str("the corpus: ", words[0], ": ", ended.said));
  }

  const TemporaryFolder folder_;
};

Words one_of(const std::vector<Words>& commands, Random& random) { return commands[random() % commands.size()]; }

std::vector<Kind> kinds_of(const Corpus& corpus) {
  const auto checkpoint = [](const std::string& folder) {
    return [folder](const std::string&, Random& random) {
      return one_of({{"inspect", folder},
                     {"inspect", folder, "--json", "--tensors"},
                     {"consolidate", folder, "out", "--dtype", "bf16"},
                     {"convert", folder, "out", "--to", "trireme"},
                     {"convert", folder, "out", "--to", "dcp"},
                     {"convert", folder, "out", "--to", "deepspeed", "--stage", "2", "--ranks", "2"},
                     {"convert", folder, "out", "--to", "huggingface"}},
                    random);
    };
  };
  const auto check = [](const std::string& target, Random& random) {
    return one_of({{"config", "check", target}, {"config", "convert", target, "--to", "deepspeed"}}, random);
  };
  const auto train_on = [](const std::string& target, Random&) {
    return Words{"train", "--data",  target, "--model",        "model.json", "--seq", "8",  "--steps",
                 "1",     "--batch", "1",    "--eval-samples", "1",          "--out", "out"};
  };
  return {
      {"json", {"ds.json"}, {}, check, true},
      {"hjson", {"ds.hjson"}, {}, check, true},
      {"yaml", {"fsdp.yaml"}, {}, check, true},
      {"config.json",
       {"model.json"},
       {},
       [](const std::string& target, Random&) {
         return Words{"estimate", "--model", target, "--world", "2"};
       },
       true},
      {"config.json of a folder",
       {"my_hf/config.json"},
       {"my_run", "my_hf"},
       [](const std::string&, Random&) {
         return Words{"consolidate", "my_run", "out", "--model", "my_hf"};
       },
       true},
      {"hosts",
       {"machines.txt"},
       {},
       [](const std::string& target, Random&) {
         return Words{"launch", "--hostfile", target, "--num_gpus", "1", "/bin/true"};
       },
       true},
      {"checkpoint", corpus.files("my_run/checkpoints"), {"my_run"}, checkpoint("my_run")},
      {"manifest", {"my_run/checkpoints/global_step2/manifest.json"}, {"my_run"}, checkpoint("my_run"), true},
      {"run",
       corpus.files("my_run"),
       {"my_run", "text.txt"},
       [](const std::string&, Random& random) {
         return one_of({{"generate", "--checkpoint", "my_run", "--tokens", "2"},
                        {"train", "--resume", "--out", "my_run", "--steps", "3"}},
                       random);
       }},
      {"safetensors",
       {"my_hf/model.safetensors"},
       {"my_hf", "model.json", "text.txt"},
       [&, check = checkpoint("my_hf")](const std::string& target, Random& random) {
         if (random() % 3 != 0) return check(target, random);
         return Words{"train", "--data",         "text.txt", "--model", "model.json", "--init-from",
                      target,  "--seq",          "8",        "--steps", "1",          "--batch",
                      "1",     "--eval-samples", "1",        "--out",   "out"};
       }},
      {"sharded safetensors", corpus.files("my_shards"), {"my_shards"}, checkpoint("my_shards")},
      {"deepspeed 2", corpus.files("my_ds2"), {"my_ds2"}, checkpoint("my_ds2")},
      {"deepspeed 3", corpus.files("my_ds3"), {"my_ds3"}, checkpoint("my_ds3")},
      {"dcp", corpus.files("my_dcp"), {"my_dcp"}, checkpoint("my_dcp")},
      {"tokens", {"tokens.bin", "tokens.npy"}, {"model.json"}, train_on},
      {"text", {"text.txt"}, {"model.json"}, train_on},
  };
}

// --- how it is damaged ----------------------------------------------------------------------------------------------

std::string repeated(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

void put(std::string& bytes, size_t at, const std::string& what, bool replaces) {
  bytes.replace(at, replaces ? std::min(what.size(), bytes.size() - at) : 0, what);
}

void damage_bytes(std::string& bytes, Random& random) {
  const size_t at = bytes.empty() ? 0 : random() % bytes.size();
  const size_t left = bytes.size() - at;
  constexpr const char* kNumbers[] = {"\xff\xff\xff\xff\xff\xff\xff\x7f",
                                      "\xff\xff\xff\xff\xff\xff\xff\xff",
                                      "\xff\xff\xff\x7f\0\0\0\0",
                                      "\0\0\0\0\0\0\0\x40",
                                      "\0\0\0\0\x01\0\0\0",
                                      "\0\0\0\0\0\0\0\0"};
  switch (random() % 8) {
    case 0:
      for (uint64_t i = 0, flips = 1 + random() % 8; i < flips && !bytes.empty(); ++i)
        bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
      return;
    case 1:
      return bytes.resize(at);
    case 2:
      return put(bytes, at, std::string(1 + random() % 300, static_cast<char>(random())), random() % 2 == 0);
    case 3:
      return put(bytes, at, std::string(kNumbers[random() % std::size(kNumbers)], random() % 2 == 0 ? 8 : 4), true);
    case 4:  // a part twice
      return put(bytes, at, bytes.substr(at, 1 + random() % (left + 1)), false);
    case 5:
      return void(bytes.erase(at, 1 + random() % 64));
    case 6:  // lengths at the beginning and at the end
      return put(bytes, random() % 2 == 0 || bytes.size() < 64 ? 0 : bytes.size() - 1 - random() % 63,
                 std::string(kNumbers[random() % std::size(kNumbers)], 8), true);
    case 7: {  // operations of a pickle: values, marks, and names of values that came before
      const std::string operations[] = {"]", ")", "N", "(", "\x94", "\x85", std::string("h\0", 2), "h\x01", "h\x05"};
      const std::string& operation = operations[random() % std::size(operations)];
      return put(bytes, at, repeated(operation, random() % 2 == 0 ? 500'000 : 100), false);
    }
    default:
      return;
  }
}

void damage_text(std::string& bytes, Random& random) {
  const auto place = [&] {  // in front of or behind what means something
    for (int tries = 0; tries < 200 && !bytes.empty(); ++tries) {
      const size_t at = random() % bytes.size();
      if (std::strchr("{}[],:\n\"' =", bytes[at]) != nullptr) return at + random() % 2;
    }
    return bytes.empty() ? size_t{0} : random() % bytes.size();
  };
  const std::string brackets[] = {"[", "{\"a\":", "- ", "(", "? ", "{a: ", "[\"", "'''", "/*"};
  const std::string words[] = {"1e999",
                               "-1",
                               "99999999999999999999",
                               "9223372036854775807",
                               "1e15",
                               "NaN",
                               "null",
                               "true",
                               "\"\"",
                               "[]",
                               "{}",
                               "\"auto\"",
                               "\xff\xfe",
                               "\xed\xa0\x80",
                               "\\ud800",
                               "*a",
                               "&a ",
                               "!!binary ",
                               "slots=100000000",
                               "localhost slots=3\n",
                               "\t",
                               "\"" + std::string(1'000'000, 'k') + "\": 1,"};
  switch (random() % 6) {
    case 0:
      return put(bytes, place(), repeated(brackets[random() % std::size(brackets)], random() % 2 == 0 ? 100'000 : 600),
                 false);
    case 1:
    case 2: {  // another value in the place of one
      const std::string& word = words[random() % std::size(words)];
      const size_t at = place();
      const size_t end = std::min(bytes.find_first_of(",]}\n", at), bytes.size());
      return void(bytes.replace(at, random() % 2 == 0 ? end - at : 0, word));
    }
    case 3: {
      std::string many;
      for (int i = 0; i < 60'000; ++i)
        many += random() % 2 == 0 ? str("\"k", i, "\": 1,\n") : str("k", i, random() % 2 == 0 ? ": 1\n" : " slots=1\n");
      return put(bytes, place(), many, false);
    }
    case 4: {  // a line twice
      const size_t begin = bytes.rfind('\n', place()) + 1;
      return put(bytes, begin, bytes.substr(begin, bytes.find('\n', begin) - begin + 1), false);
    }
    default:
      return damage_bytes(bytes, random);
  }
}

/// Something else in the place of the file.
void replace_file(const Path& path, Random& random) {
  std::filesystem::remove(path);
  switch (random() % 5) {
    case 0:
      return void(::mkfifo(path.c_str(), 0600));
    case 1:
      return std::filesystem::create_symlink("/dev/zero", path);
    case 2:
      return void(std::filesystem::create_directory(path));
    case 3:
      return void(::mknod(path.c_str(), S_IFSOCK | 0600, 0));
    default:
      return;  // it is gone
  }
}

void make_checksum_right(std::string& manifest) {
  const std::string key = "  \"manifest_checksum\": \"";
  const size_t at = manifest.rfind(key);
  if (at == std::string::npos || manifest.size() < at + key.size() + 16) return;
  manifest.replace(at + key.size(), 16, checksum_text(checksum_of(manifest.substr(0, at))));
}

void damage(const Path& path, bool is_text, Random& random) {
  if (random() % 25 == 0) return replace_file(path, random);
  std::string bytes = bytes_of(path);
  for (uint64_t i = 0, times = 1 + random() % 3 / 2; i < times; ++i)
    is_text || random() % 4 == 0 ? damage_text(bytes, random) : damage_bytes(bytes, random);
  if (path.filename() == "manifest.json" && random() % 4 != 0) make_checksum_right(bytes);
  std::ofstream(path, std::ios::binary) << bytes;
}

// --- the test -------------------------------------------------------------------------------------------------------

/// Empty: as it should be.
std::string complaint_about(const Ended& ended, const Path& target, int64_t empty_bytes) {
  if (ended.timed_out) return str("it did not end within ", kMostSeconds, " s");
  if (WIFSIGNALED(ended.status)) return str("signal ", WTERMSIG(ended.status));
  if (ended.peak_bytes > empty_bytes + kMostBytesAboveEmpty)
    return str((ended.peak_bytes - empty_bytes) >> 20, " MiB more than an empty run");
  const bool names_it = ended.said.find(target.filename().string()) != std::string::npos ||
                        ended.said.find(target.parent_path().filename().string()) != std::string::npos;
  return WEXITSTATUS(ended.status) != 0 && !names_it ? "its error does not name the file" : "";
}

int64_t number_from(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::stoll(text) : otherwise;
}

TEST(Fuzz, DamagedFilesAreErrorsThatNameThem) {
  const int64_t seed = number_from("TRIREME_FUZZ_SEED", std::random_device{}());
  const int64_t only = number_from("TRIREME_FUZZ_ONLY", -1);
  const int64_t inputs = only < 0 ? number_from("TRIREME_FUZZ_INPUTS", 300) : only + 1;
  std::cout << "TRIREME_FUZZ_SEED=" << seed << " TRIREME_FUZZ_INPUTS=" << inputs << std::endl;
  const Corpus corpus;
  const std::vector<Kind> kinds = kinds_of(corpus);
  const TemporaryFolder scratch;
  const int64_t empty_bytes = run_forked({"docs"}, scratch.path()).peak_bytes;
  int64_t accepted = 0;
  for (int64_t i = only < 0 ? 0 : only; i < inputs; ++i) {
    Random random(static_cast<uint64_t>(seed) * 1'000'003 + static_cast<uint64_t>(i));
    const Kind& kind = kinds[static_cast<size_t>(i) % kinds.size()];
    const Path work = scratch.path() / str("input", i);
    for (const std::string& name : kind.needed)
      std::filesystem::create_directories(work),
          std::filesystem::copy(corpus.path() / name, work / name, std::filesystem::copy_options::recursive);
    const std::string target = kind.targets[random() % kind.targets.size()];
    std::filesystem::create_directories((work / target).parent_path());
    if (!std::filesystem::exists(work / target)) std::filesystem::copy(corpus.path() / target, work / target);
    damage(work / target, kind.is_text, random);
    const Words words = kind.command(target, random);
    const Ended ended = run_forked(words, work);
    const std::string complaint = complaint_about(ended, work / target, empty_bytes);
    accepted += ended.status == 0 ? 1 : 0;
    std::string line = "trireme";
    for (const std::string& word : words) line += " " + word;
    EXPECT_EQ(complaint, "") << kind.name << ", " << target << ": TRIREME_FUZZ_SEED=" << seed
                             << " TRIREME_FUZZ_ONLY=" << i << ": " << line << "\n"
                             << excerpt(ended.said, 600);
    if (only >= 0) std::filesystem::copy(work, "fuzz_input", std::filesystem::copy_options::recursive);
    std::filesystem::remove_all(work);
  }
  std::cout << accepted << " of " << inputs << " were taken, all others refused" << std::endl;
}

}  // namespace
}  // namespace trireme::cli
