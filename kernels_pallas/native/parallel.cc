#include "parallel.h"

#include <pthread.h>
#include <sched.h>

namespace {

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return int(std::thread::hardware_concurrency());
}

Pool* pools[2] = {};
std::mutex making;

}  // namespace

Pool& Pool::get() { return numbered(0); }
Pool& Pool::of_updates() { return numbered(1); }

Pool& Pool::numbered(int number) {
  // threads do not survive a fork: a child makes its own
  static const int once = pthread_atfork(nullptr, nullptr, [] { pools[0] = pools[1] = nullptr; });
  (void)once;
  std::lock_guard<std::mutex> lock(making);
  if (!pools[number]) pools[number] = new Pool();
  return *pools[number];
}

Pool::Pool() : helpers_(std::max(0, usable_cores() - 1)) {
  for (int i = 0; i < helpers_; i++) std::thread([this] { help(); }).detach();
}

void Pool::help() {
  unsigned seen = 0;
  for (;;) {
    auto until = std::chrono::steady_clock::now() + kAwake;
    for (int spins = 1; generation_.load() == seen; spins++) {
      relax();
      if (spins % 64) continue;
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() < until) continue;
      parked_.fetch_add(1);
      generation_.wait(seen);
      parked_.fetch_sub(1);
    }
    seen = generation_.load();
    entered_.fetch_add(1);
    if (const Phases* phases = phases_.load()) work(*phases);
    left_.fetch_add(1);
  }
}

void Pool::work(const Phases& phases) {
  for (Phase* phase : phases) {
    int i;
    while ((i = phase->next.fetch_add(1)) < phase->count) {
      phase->task(i);
      phase->done.fetch_add(1);
    }
    for (int spins = 1; phase->done.load() < phase->count; spins++) {
      relax();
      if (spins % 1024 == 0) std::this_thread::yield();
    }
  }
}
