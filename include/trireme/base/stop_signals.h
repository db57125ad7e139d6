// Signals that ask a program to end, or to save, as answers that a training loop asks for between two steps.
#pragma once

namespace trireme {

/// Catches SIGUSR1 while it lives, as a request to save. It stays as it is where it is ignored, or where the program
/// handles it itself. Any number of them may live at once; requests that nobody took end with the last one.
class SaveSignal {
 public:
  SaveSignal();
  ~SaveSignal();
  SaveSignal(const SaveSignal&) = delete;
  SaveSignal& operator=(const SaveSignal&) = delete;

  /// Whether a save was asked for since the last call. Async-signal-safe, and safe from any thread.
  bool take_request() const noexcept;
};

/// Catches SIGINT, SIGTERM and SIGHUP while it lives, and SIGUSR1 as SaveSignal does. The first of the three only sets
/// the answer; the second ends the process at once, as if nobody had caught it. A signal that was ignored before
/// (nohup) stays ignored. Any number of them may live at once; the last one puts back what was there before.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The first of the three that came; 0 before.
  int signal() const noexcept;
  bool take_save_request() const noexcept { return save_.take_request(); }

 private:
  SaveSignal save_;
};

/// Whether this process was asked to end, of a program without a StopSignals of its own: the first call of this or of
/// take_save_request() catches the signals, until the process ends. Call it once before the loop, too, where the first
/// step takes long: a signal that comes earlier ends the process.
///
/// The answer is this rank's own. Ranks get a signal at different moments; a loop of several ranks asks
/// `stop_requested(group)` of trireme/comm/stop_agreement.h, which answers alike on all of them.
bool stop_requested();

/// Whether this process was asked to save (SIGUSR1) since the last call; else as stop_requested().
bool take_save_request();

}  // namespace trireme
