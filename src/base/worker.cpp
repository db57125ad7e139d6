#include "trireme/base/worker.h"

#include <pthread.h>
#include <signal.h>

namespace trireme {

void Worker::start_once(const std::function<void()>& body) {
  if (thread_.joinable()) return;
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread(body);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace trireme
