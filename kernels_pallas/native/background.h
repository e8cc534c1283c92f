// Operations that go on while the thread that starts a program's operations starts the next one: a collective, say,
// which travels only from when that thread comes to it.
#pragma once

#include <chrono>
#include <utility>

#include "xla/ffi/api/ffi.h"

// How long each operation in the background ran, in the order in which they began, for profiles: XLA's tell only when one
// was started.
class Durations {
 public:
  static int64_t begin();  // a number for `end`, -1 where nothing is recorded
  static void end(int64_t number, double seconds);
};

// Runs `work` here, or on a thread of XLA's. It must own all that it reads but the buffers' contents: XLA's description
// of the buffers ends with the call.
template <class Work>
xla::ffi::Future run(xla::ffi::ThreadPool& threads, bool background, Work work) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  if (!background) {
    work();
    promise.SetAvailable();
    return future;
  }
  const auto begun = std::chrono::steady_clock::now();
  threads.Schedule([promise, begun, number = Durations::begin(), work = std::move(work)]() mutable {
    work();
    Durations::end(number, std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
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
