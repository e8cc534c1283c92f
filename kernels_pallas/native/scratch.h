// Memory of a thread that it keeps from one task to the next: fresh memory is slow to touch.
#pragma once

#include <cstdint>
#include <vector>

class Scratch {
 public:
  // Take all of it back, and make it large enough for what `take` is asked for next, in words of four bytes.
  void begin(int64_t num_words) {
    if (int64_t(memory_.size()) < num_words) memory_.resize(num_words);
    at_ = memory_.data();
  }
  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(at_);
    at_ += (count * int64_t(sizeof(T)) + 3) / 4;
    return taken;
  }

 private:
  std::vector<uint32_t> memory_;
  uint32_t* at_ = nullptr;
};
