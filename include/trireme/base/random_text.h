// Random numbers that nobody can guess, for names and secrets. Not for training: they come from the system.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace trireme {

/// 128 random bits.
///
/// Throws    IoError: the system has none.
std::array<uint64_t, 2> random_words();

/// 32 hexadecimal digits of `words`.
std::string hexadecimal(const std::array<uint64_t, 2>& words);

/// The same of random words.
std::string random_text();

}  // namespace trireme
