// A program's code, told apart from libtorch's and ours, which call operators, too.
#pragma once

namespace torch::autograd {
struct Node;
}

namespace trireme {

/// Whether this thread is inside of an operator that a pass computes by itself, or runs a recorded one again.
bool is_inside_of_operator() noexcept;

/// Whether `node` is a torch::autograd::Function, of a program or of ours, as libtorch makes nodes of them in C++ and
/// Python.
bool is_function(const torch::autograd::Node& node);

/// `node`, which is_function(), belongs to an operator, whose kernel is made of functions: it is no program's.
void mark_operators(torch::autograd::Node& node);

/// Whether a program's code runs in this backward pass: its own function, a block that is computed again, a hook.
/// Otherwise a node of libtorch's does, or of ours.
bool program_runs_in_backward();

/// While it lives, the code of this thread that belongs to the present backward pass is a program's, or is not.
class [[nodiscard]] ProgramScope {
 public:
  enum class Whose { kProgram, kOurs };
  explicit ProgramScope(Whose whose);
  ~ProgramScope();
  ProgramScope(const ProgramScope&) = delete;
  ProgramScope& operator=(const ProgramScope&) = delete;

 private:
  const int outer_task_;
  const bool outer_is_program_;
};

}  // namespace trireme
