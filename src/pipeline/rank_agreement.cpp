#include "pipeline/rank_agreement.h"

#include <exception>

#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"

namespace trireme {

void agree(Group& all, const char* call, const std::function<std::string()>& text) {
  std::exception_ptr own;  // as it was thrown here, Python's with their class
  std::optional<LineDifference> difference;
  try {
    difference = first_different_line(all, [&] {
      try {
        return str(call, ", ", text());
      } catch (const Error&) {
        own = std::current_exception();
        throw;
      } catch (const std::exception& error) {  // a program's, which is told without Python's traceback
        own = std::current_exception();
        const std::string why = error.what();
        throw ConfigError(str(call, ": ", why.substr(0, why.find("\n\nAt:"))));
      }
    });
  } catch (const CommError&) {
    throw;
  } catch (...) {
    if (own) std::rethrow_exception(own);
    throw;
  }
  if (difference)
    throw ConfigError(str(call, ": the ranks differ: ", difference->text(),
                          "; call set_schedule(), set_train_batch_size() and eval_batch() alike on every rank"));
}

}  // namespace trireme
