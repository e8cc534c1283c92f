// Operations that run on another thread, so that the one that starts a program's operations can go on: to a collective,
// for example, which travels only once it is started.
#pragma once

#include <chrono>
#include <utility>

#include "xla/ffi/api/ffi.h"

// How long each operation in the background waited for a thread and how long it ran, in the order in which they were
// started, for profiles: XLA's show only the start.
class Durations {
 public:
  using Clock = std::chrono::steady_clock;

  static int64_t start();  // a number for `end`, -1 where nothing is recorded
  static void end(int64_t number, Clock::time_point started, Clock::time_point begun);
};

// Runs `work` here, or on a thread of XLA's. It must own all that it reads but the buffers' contents: XLA's description
// of the buffers ends with the call.
template <class Work>
xla::ffi::Future start(xla::ffi::ThreadPool& threads, bool background, Work work) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  if (!background) {
    work();
    promise.SetAvailable();
    return future;
  }
  const auto started = Durations::Clock::now();
  threads.Schedule([promise, started, number = Durations::start(), work = std::move(work)]() mutable {
    const auto begun = Durations::Clock::now();
    work();
    Durations::end(number, started, begun);
    promise.SetAvailable();
  });
  return future;
}

inline xla::ffi::Future refuse(const char* why) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(xla::ffi::Error::InvalidArgument(why));
  return future;
}
