// Results on stdout: they arrive, or the command fails.
#pragma once

#include <string>
#include <string_view>

namespace trireme::cli {

/// Writes all of `text`, however often that takes. Returns 0, or the errno of the write that failed.
int write_all(int fd, std::string_view text);

/// Writes a command's result to stdout at once. Where nobody reads any more (`| head`) the rest is dropped.
///
/// Throws    IoError: stdout cannot take it, for example because a disk is full.
void print_result(const std::string& text);

/// The message of print_result() for a write that ended with `error`.
std::string lost_output(int error);

}  // namespace trireme::cli
