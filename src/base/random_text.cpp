#include "trireme/base/random_text.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "trireme/base/error.h"
#include "trireme/base/format.h"

namespace trireme {

std::array<uint64_t, 2> random_words() {
  std::array<uint64_t, 2> words{};
  if (::getentropy(words.data(), sizeof(words)) != 0)
    throw IoError(str("the system gives no random numbers: ", std::strerror(errno)));
  return words;
}

std::string hexadecimal(const std::array<uint64_t, 2>& words) {
  return formatted("{:016x}{:016x}", words[0], words[1]);
}

std::string random_text() { return hexadecimal(random_words()); }

}  // namespace trireme
