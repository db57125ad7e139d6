#include "trireme/base/worker.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

namespace trireme {

void Worker::start_once(const std::function<void()>& body) {
  if (thread_.joinable()) return;
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread(body);
  process_ = ::getpid();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Worker::join() noexcept {
  if (!thread_.joinable()) return;
  // A fork copies the object but not the thread, so that a forked process would wait for ever.
  if (process_ == ::getpid())
    thread_.join();
  else
    thread_.detach();
}

}  // namespace trireme
