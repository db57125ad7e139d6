// The end of a stage whose step has failed.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <type_traits>

#include "trireme/base/error.h"
#include "trireme/comm/group.h"
#include "trireme/training/training.h"

namespace trireme {

/// Runs `work`, without which the engine does not go on: stages that wait for this one would wait for ever, and
/// messages of a step that has ended would arrive in the next one. Where it throws, `end` gets the reason, and the
/// error says `spent`.
template <class Work, class End>
std::invoke_result_t<const Work&> run_or_end(const Work& work, const char* spent, const End& end) {
  try {
    return work();
  } catch (c10::Error& error) {
    end(std::string(error.what_without_backtrace()));
    error.add_context(spent);
    throw;
  } catch (const Error& error) {
    end(std::string(error.what()));
    throw_error(error.code(), str(error.what(), ". ", spent));
  } catch (const std::exception& error) {
    end(std::string(error.what()));
    throw;
  }
}

/// Ends `training`: its calls and its peers throw `text` from now on. The group of the world stays.
void end_training(Training& training, const Group& world, const std::string& text);

}  // namespace trireme
