// Explanations of errors, for whoever reads a terminal.
#pragma once

#include <exception>
#include <string>

namespace trireme::cli {

/// The error in one line: without the stack trace of libtorch's errors, and with memory that ran out (std::bad_alloc,
/// libtorch's allocator) named as that, with what to lower in `command`, such as "trireme train".
std::string explain(const std::exception& error, const std::string& command);

}  // namespace trireme::cli
