// The file at which ranks that mpirun has started meet. Its name can be guessed, so who owns it is looked at.
#pragma once

#include <string>

namespace trireme::comm {

/// Makes the file `path` for this user alone, if no peer has.
///
/// Throws    ConfigError: the folder is another user's, or others may rename its files; the file is another user's, is
///           none, or others may write it. IoError: it cannot be made.
void prepare_meeting_file(const std::string& path);

}  // namespace trireme::comm
