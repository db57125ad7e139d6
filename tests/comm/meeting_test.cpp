// The meeting point is nobody else's: where it listens, whose texts a rank believes, which memory it opens.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <future>
#include <sstream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/meeting/meeting_address.h"
#include "comm/meeting/meeting_file.h"
#include "comm/meeting/meeting_point.h"
#include "comm/meeting/seal.h"
#include "comm/memory.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/world.h"

namespace trireme::comm {
namespace {

using namespace std::chrono_literals;
using trireme::testing::TemporaryFolder;

std::string text_of_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Addresses.

std::vector<std::string> texts(const std::vector<HostAddress>& addresses) {
  std::vector<std::string> found;
  for (const HostAddress& address : addresses) found.push_back(address.text);
  return found;
}

const HostAddress kDebian{"127.0.1.1"}, kLoopback{"127.0.0.1"}, kLoopback6{"::1", true}, kCable{"10.213.7.1"},
    kCable6{"fd00::7", true};

TEST(MeetingAddress, OfLoopbackIsListenedOnAloneAndByItsName) {
  for (const char* host : {"localhost", "127.0.0.1", "127.8.9.1", "::1"}) EXPECT_TRUE(says_loopback(host)) << host;
  for (const char* host : {"127.0.0.1.example", "node7", "10.0.0.1", "::2"}) EXPECT_FALSE(says_loopback(host)) << host;
  EXPECT_EQ(texts(places_to_listen("localhost", {kLoopback6, kLoopback})),
            (std::vector<std::string>{"127.0.0.1", "::1"}));
  EXPECT_EQ(texts(places_to_listen("::1", {kLoopback6})), std::vector<std::string>{"::1"});
}

TEST(MeetingAddress, OfAnotherNameIsWhatOtherHostsSee) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(texts(places_to_listen("node7", {kCable6, kDebian, kCable})), (Texts{"10.213.7.1", "fd00::7", "", ""}));
  EXPECT_EQ(texts(places_to_listen("node7", {kDebian})), (Texts{"", ""}));
}

TEST(MeetingAddress, ThatIsNotThisHostsIsPassedOver) {
  const auto fd = listen_on({{"192.0.2.1"}, kLoopback}, 0);
  ASSERT_TRUE(fd);
  sockaddr_in bound{};
  socklen_t bytes = sizeof(bound);
  ASSERT_EQ(::getsockname(*fd, reinterpret_cast<sockaddr*>(&bound), &bytes), 0);
  EXPECT_EQ(ntohl(bound.sin_addr.s_addr), 0x7f000001u);
  const uint16_t port = ntohs(bound.sin_port);
  EXPECT_FALSE(listen_on({kLoopback}, port));
  EXPECT_EQ(owner_of_listener(kLoopback, port), ::geteuid());
  EXPECT_EQ(owner_of_listener(kDebian, port), std::nullopt);
  EXPECT_EQ(text_of_error([&] { check_listener(kLoopback, port, ::geteuid()); }), "no error");
  if (::geteuid() != 0) {
    const std::string problem = text_of_error([&] { check_listener(kLoopback, port, ::geteuid() + 1); });
    EXPECT_TRUE(says(problem, "set MASTER_PORT to another port")) << problem;
  }
  ::close(*fd);
  EXPECT_EQ(owner_of_listener(kLoopback, port), std::nullopt);
}

TEST(MeetingAddress, ThatAnotherUserServesIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t stranger = ::fork();
  if (stranger == 0) {
    if (::setuid(65534) != 0) ::_exit(1);
    const auto fd = listen_on({{"127.0.0.3"}}, 0);
    sockaddr_in bound{};
    socklen_t bytes = sizeof(bound);
    if (!fd || ::getsockname(*fd, reinterpret_cast<sockaddr*>(&bound), &bytes) != 0) ::_exit(1);
    if (::write(ready[1], &bound.sin_port, 2) != 2) ::_exit(1);
    ::pause();
  }
  uint16_t port = 0;
  ASSERT_EQ(::read(ready[0], &port, 2), 2);
  const std::string problem = text_of_error([&] { check_listener({"127.0.0.3"}, ntohs(port), ::geteuid()); });
  ::kill(stranger, SIGKILL);
  ::waitpid(stranger, nullptr, 0);
  for (const int fd : ready) ::close(fd);
  EXPECT_TRUE(says(problem, "a process of user 65534 listens at 127.0.0.3:")) << problem;
}

TEST(MeetingAddress, MayBecomeKnownLater) {
  int asked = 0;
  const auto late = [&asked](const std::string&) {
    return ++asked == 2 ? Resolved{{kCable}} : Resolved{{}, "not yet"};
  };
  EXPECT_EQ(texts(resolve_within("node7", 30s, late)), std::vector<std::string>{"10.213.7.1"});
  EXPECT_EQ(asked, 2);
}

TEST(MeetingAddress, ThatIsNeverKnownIsAnErrorOfItsOwnLimit) {
  const auto never = [](const std::string&) { return Resolved{{}, "not yet"}; };
  const std::string problem = text_of_error([&] { (void)resolve_within("node7", 10ms, never); });
  EXPECT_TRUE(says(problem,
                   "the name node7 is not known (not yet) after 0.01 s. Correct MASTER_ADDR; where the name "
                   "comes later, as in Kubernetes, raise TRIREME_RESOLVE_TIMEOUT_S"))
      << problem;
}

TEST(MeetingAddress, IsNamedInALogLineBeforeItIsAnError) {
  const auto results = run_processes(2, [](Group&, const std::string&) {
    set_log_sink([](LogLevel, const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); });
    ::setenv("MASTER_ADDR", "no such host", 1);
    ::setenv("TRIREME_RESOLVE_TIMEOUT_S", "0.6", 1);
    (void)init();
    return 0;
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.exit_code, 1);
    const size_t line = result.error_text.find(
        "looks for the name no such host (MASTER_ADDR), which is not known yet, and goes on looking, 0.6 s in all");
    EXPECT_LT(line, result.error_text.find("the name no such host is not known (")) << result.error_text;
  }
}

/// The addresses at which something listens on `port`, as the kernel prints them.
std::string listeners_at(int port) {
  std::string found;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::string number, local, remote, state;
      std::istringstream(line) >> number >> local >> remote >> state;
      char end[8];
      std::snprintf(end, sizeof(end), ":%04X", port);
      if (state == "0A" && local.ends_with(end)) found += local.substr(0, local.size() - 5) + " ";
    }
  }
  return found;
}

/// argument: MASTER_ADDR and, if not empty, LOCAL_WORLD_SIZE
int meet_and_print_listeners(Group& world, const std::string& argument) {
  const auto space = argument.find(' ');
  ::setenv("MASTER_ADDR", argument.substr(0, space).c_str(), 1);
  if (space != std::string::npos) ::setenv("LOCAL_WORLD_SIZE", argument.substr(space + 1).c_str(), 1);
  const AwaitedRanks awaited = await_ranks();
  if (world.rank() == 0) std::fprintf(stderr, "%s", listeners_at(awaited.port).c_str());
  world.barrier();
  return 0;
}

TEST(MeetingPoint, ListensOnLoopbackWhereMasterAddrIsLoopbackOrAllRanksAreHere) {
  for (const char* argument : {"127.0.0.1", "localhost", "localhost 2", "0.0.0.0 2"}) {
    const auto results = run_processes(2, meet_and_print_listeners, {.argument = argument});
    EXPECT_EQ(results[0].exit_code + results[1].exit_code, 0) << results[0].error_text << results[1].error_text;
    EXPECT_EQ(results[0].error_text, "0100007F ") << argument;
  }
}

// Texts.

TEST(Seal, IsHmacSha1) {  // expected: Python's hmac.new(token, b"prefix", "sha1")
  EXPECT_EQ(Seal("Jefe").prefix(), "af35addc323b1e11b24b998dd9a6d187f6620f8f/");
  EXPECT_EQ(Seal(std::string(100, 'x')).prefix(), "5c33d7d0774f6266ba767c92968814664af41a80/");
  EXPECT_EQ(Seal("").prefix(), "");
}

TEST(Seal, OpensWhatARankWithItsTokenHasClosedUnderThatKey) {
  const Seal seal("Jefe");
  const std::string closed = seal.close("host/0", "oar");
  EXPECT_EQ(seal.open("host/0", closed), "oar");
  EXPECT_EQ(seal.open("host/1", closed), std::nullopt);
  EXPECT_EQ(seal.open("host/0", closed + "s"), std::nullopt);
  EXPECT_EQ(seal.open("host/0", "oar"), std::nullopt);
  EXPECT_EQ(Seal("jefe").open("host/0", closed), std::nullopt);
  EXPECT_EQ(Seal("").open("host/0", "oar"), "oar");
}

/// A store in which somebody puts a text of his own in place of what ranks put under keys with `part`.
class StrangersStore final : public c10d::HashStore {
 public:
  using Forge = std::function<std::string(const std::string& text)>;
  StrangersStore(std::string part, Forge forge) : part_(std::move(part)), forge_(std::move(forge)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (!says(key, part_)) return c10d::HashStore::set(key, value);
    const std::string forged = forge_({value.begin(), value.end()});
    c10d::HashStore::set(key, std::vector<uint8_t>(forged.begin(), forged.end()));
  }

 private:
  const std::string part_;
  const Forge forge_;
};

/// Ranks 0 and 1, joined in `store`: "shares memory", or an error.
std::vector<std::string> join_two(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout) {
  std::vector<std::future<std::string>> joining;
  for (int rank = 0; rank < 2; ++rank)
    joining.push_back(std::async(std::launch::async, [&store, rank, timeout] {
      try {
        const World world = join(store, nullptr, {.rank = rank, .size = 2, .timeout = timeout});
        return std::string(world.group->memory_sharing() ? "shares memory" : "shares none");
      } catch (const Error& error) {
        return std::string(error.what());
      }
    }));
  std::vector<std::string> said;
  for (auto& each : joining) said.push_back(each.get());
  return said;
}

class Token {
 public:
  explicit Token(const char* token) { ::setenv("TRIREME_TOKEN", token, 1); }
  ~Token() { ::unsetenv("TRIREME_TOKEN"); }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
};

const std::vector<std::string> kBothShare{"shares memory", "shares memory"};

TEST(Strangers, CannotPartTheRanksByAQuestionOfTheirOwn) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  static_cast<c10d::Store&>(*store).set("trireme/join/asks/1", std::string("a question of an earlier program"));
  store->add("trireme/join/joined/1", 1);
  EXPECT_EQ(join_two(store, 20s), kBothShare);
  EXPECT_EQ(join_two(store, 20s), kBothShare);  // and what the first meeting has left there does not, either
}

TEST(Strangers, AreAskedOverTheirQuestionAgain) {
  // The first question of rank 1 is replaced once, as a stranger would who writes a moment later.
  auto times = std::make_shared<std::atomic<int>>(0);
  const auto store = c10::make_intrusive<StrangersStore>(
      "asks/1", [times](const std::string& text) { return (*times)++ == 0 ? "a stranger's" : text; });
  EXPECT_EQ(join_two(store, 20s), kBothShare);
  EXPECT_EQ(*times, 2);
}

struct OpenFile {
  TemporaryFolder folder;
  std::string path = (folder.path() / "precious").string();
  int fd = -1;
  OpenFile() {
    std::ofstream(path) << std::string(3 << 20, 'p');
    fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  }
  ~OpenFile() { ::close(fd); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  bool is_untouched() const {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {}) == std::string(3 << 20, 'p');
  }
};

/// A record of rank 0 that names `fd` as the memory to open.
StrangersStore::Forge naming(int fd) {
  return [fd](const std::string& text) {
    std::istringstream words(text);
    std::string forged;
    int number = 0;
    for (std::string word; words >> word; ++number)
      forged += (number == 0 ? "" : " ") + (number == 5 ? std::to_string(fd) : word);
    return forged;
  };
}

TEST(Strangers, CannotHaveAFileOpenedInPlaceOfThePeersMemory) {
  const OpenFile file;
  const auto store = c10::make_intrusive<StrangersStore>("host/0", naming(file.fd));
  for (const std::string& said : join_two(store, 20s)) {
    EXPECT_TRUE(says(said, "is not the shared memory of a peer: it is '" + file.path)) << said;
    EXPECT_TRUE(says(said, "give all ranks one secret TRIREME_TOKEN")) << said;
  }
  EXPECT_TRUE(file.is_untouched());
}

TEST(Strangers, AreNotBelievedWhereThereIsAToken) {
  const Token token("a secret of the job");
  EXPECT_EQ(join_two(c10::make_intrusive<c10d::HashStore>(), 20s), kBothShare);
  const OpenFile file;
  const auto store = c10::make_intrusive<StrangersStore>("host/0", naming(file.fd));
  for (const std::string& said : join_two(store, 300ms))
    EXPECT_TRUE(says(said, "for rank 0 of 2, which did not come with this rank's TRIREME_TOKEN")) << said;
  EXPECT_TRUE(file.is_untouched());
}

TEST(Token, ThatIsEmptyIsRefused) {
  const Token token("");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_TRUE(says(text_of_error([&] { (void)join(store, nullptr, {.rank = 0, .size = 1}); }),
                   "TRIREME_TOKEN is set, and empty"));
}

// Memory.

std::string refusal(const SegmentTicket& ticket) {
  return text_of_error([&] { (void)file_memory()->open(ticket); });
}

TEST(MemoryFile, IsOpenedOnlyByTheTicketOfItsMaker) {
  const auto segment = file_memory()->create(4096);
  SegmentTicket ticket = segment->ticket();
  EXPECT_EQ(refusal(ticket), "no error");
  const auto other = file_memory()->create(4096);
  ticket.handle = other->ticket().handle;
  EXPECT_TRUE(says(refusal(ticket), "is not the shared memory of a peer: it is '/memfd:trireme-")) << refusal(ticket);
  ticket = segment->ticket();
  ticket.bytes = 8192;
  EXPECT_TRUE(says(refusal(ticket), "it has 4096 bytes, not 8192")) << refusal(ticket);
}

TEST(MemoryFile, IsNeverAPipeWhoseOtherEndNobodyHas) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  SegmentTicket ticket = file_memory()->create(4096)->ticket();
  ticket.handle = fd;
  EXPECT_TRUE(says(refusal(ticket), "it is '" + path)) << refusal(ticket);
  ::close(fd);
}

TEST(MemoryFile, OfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  ASSERT_EQ(::seteuid(65534), 0);
  const auto theirs = file_memory()->create(4096);
  ASSERT_EQ(::seteuid(0), 0);
  const std::string text = refusal(theirs->ticket());
  EXPECT_TRUE(says(text, "it is user 65534's, not user 0's")) << text;
}

// The file of mpirun's ranks.

class MeetingFile : public ::testing::Test {
 protected:
  std::string problem() const {
    return text_of_error([this] { prepare_meeting_file(path_); });
  }

  const TemporaryFolder folder_;
  const std::string path_ = (folder_.path() / "trireme-7").string();
};

TEST_F(MeetingFile, IsThisUsersAlone) {
  EXPECT_EQ(problem(), "no error");
  EXPECT_EQ(problem(), "no error");  // a peer has made it
  struct stat about {};
  ASSERT_EQ(::stat(path_.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0600u);
}

TEST_F(MeetingFile, IsRefusedInAFolderWhoseFilesOthersMayReplace) {
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0777), 0);
  EXPECT_TRUE(says(problem(), "others may replace files in folder " + folder_.path().string() + " (mode 0777): chmod"))
      << problem();
  ASSERT_EQ(::chmod(folder_.path().c_str(), 01777), 0);
  EXPECT_EQ(problem(), "no error");
}

TEST_F(MeetingFile, IsRefusedWhereOthersMayWriteIt) {
  std::ofstream(path_) << "";
  ASSERT_EQ(::chmod(path_.c_str(), 0666), 0);
  EXPECT_TRUE(says(problem(), "others may write it (mode 0666): remove it; let them meet at an address")) << problem();
}

TEST_F(MeetingFile, IsRefusedWhereItIsALinkOrNoFile) {
  const std::string target = (folder_.path() / "target").string();
  std::ofstream(target) << "precious";
  ASSERT_EQ(::symlink(target.c_str(), path_.c_str()), 0);
  EXPECT_TRUE(says(problem(), "it is a link")) << problem();
  ::unlink(path_.c_str());
  ASSERT_EQ(::link(target.c_str(), path_.c_str()), 0);
  EXPECT_TRUE(says(problem(), "it has another name, too")) << problem();
  ::unlink(path_.c_str());
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_TRUE(says(problem(), "it is no file")) << problem();
}

TEST_F(MeetingFile, OfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  std::ofstream(path_) << "";
  ASSERT_EQ(::chown(path_.c_str(), 65534, 65534), 0);
  EXPECT_TRUE(says(problem(), "it is user 65534's, not user 0's")) << problem();
  ASSERT_EQ(::chown(folder_.path().c_str(), 65534, 65534), 0);
  EXPECT_TRUE(says(problem(), "is user 65534's, not user 0's")) << problem();
}

/// argument: the folder of the job
int join_under_mpirun(Group& world, const std::string& argument) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
  const std::string rank = std::to_string(world.rank());
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"}) ::setenv(name, rank.c_str(), 1);
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}) ::setenv(name, "2", 1);
  ::setenv("PMIX_NAMESPACE", "77", 1);
  ::setenv("PMIX_SERVER_TMPDIR", argument.c_str(), 1);
  for (int time = 0; time < 2; ++time) {
    const World met = init();
    if (met.size != 2 || met.rank != world.rank()) return 3;
    met.group->barrier();
  }
  return 0;
}

TEST_F(MeetingFile, IsWhereRanksOfMpirunMeetOrAreRefused) {
  const ProcessOptions options{.argument = folder_.path().string()};
  for (const auto& result : run_processes(2, join_under_mpirun, options))
    EXPECT_EQ(result.exit_code, 0) << result.error_text;
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0777), 0);
  for (const auto& result : run_processes(2, join_under_mpirun, options)) {
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_TRUE(says(result.error_text, "others may replace files in folder")) << result.error_text;
  }
}

}  // namespace
}  // namespace trireme::comm
