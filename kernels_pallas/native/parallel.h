// Work of one operation on all cores, by threads that wait for the next one awake: to wake a thread takes longer than
// most of these operations do.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <thread>

// Tasks [0, count), in any order.
struct Phase {
  int count;
  std::function<void(int)> task;
  std::atomic<int> next{0}, done{0};
  Phase(int count, std::function<void(int)> task) : count(count), task(std::move(task)) {}
};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  // Never destroyed: their threads end with the process. Updates of parameters have threads of their own: they run
  // beside the operations of a step, and neither is to take all cores from the other.
  static Pool& get();
  static Pool& of_updates();

  int threads() const { return helpers_ + 1; }

  // Runs the phases, each when the one before has ended, on this thread and all that the pool has; on this one alone
  // while the pool works for another.
  void run(std::initializer_list<Phase*> phases) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine || helpers_ == 0) return work(phases);
    phases_.store(&phases);
    generation_.fetch_add(1);
    if (parked_.load() > 0) generation_.notify_all();
    work(phases);
    phases_.store(nullptr);
    // who has seen the phases may still look at them; `left_` is read first: who enters in between counts as inside
    for (int left = left_.load(); left != entered_.load(); left = left_.load()) relax();
  }

 private:
  using Phases = std::initializer_list<Phase*>;
  static constexpr std::chrono::microseconds kAwake{200};  // longer than between two operations of a step

  Pool();
  static Pool& numbered(int number);
  void help();
  static void work(const Phases& phases);

  int helpers_ = 0;
  std::mutex busy_;
  std::atomic<const Phases*> phases_{nullptr};
  std::atomic<unsigned> generation_{0};
  std::atomic<int> parked_{0}, entered_{0}, left_{0};
};
