#include "background.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace {

std::mutex guard;
bool recording = false;
std::vector<double> recorded;  // of each operation two: the seconds that it waited and those that it ran

}  // namespace

int64_t Durations::start() {
  std::lock_guard<std::mutex> lock(guard);
  if (!recording) return -1;
  recorded.insert(recorded.end(), {0, 0});
  return int64_t(recorded.size()) / 2 - 1;
}

void Durations::end(int64_t number, Clock::time_point started, Clock::time_point begun) {
  const auto now = Clock::now();
  std::lock_guard<std::mutex> lock(guard);
  if (!recording || number < 0 || 2 * number >= int64_t(recorded.size())) return;
  recorded[2 * number] = std::chrono::duration<double>(begun - started).count();
  recorded[2 * number + 1] = std::chrono::duration<double>(now - begun).count();
}

// For a profile, by ctypes.
extern "C" {

// Forgets what was recorded and begins anew.
void jmoe_record_background() {
  std::lock_guard<std::mutex> lock(guard);
  recording = true;
  recorded.clear();
}

// Records no more; writes at most so many numbers and returns how many there are.
int64_t jmoe_recorded_background(double* to, int64_t most) {
  std::lock_guard<std::mutex> lock(guard);
  recording = false;
  std::copy_n(recorded.begin(), std::min<int64_t>(most, recorded.size()), to);
  return int64_t(recorded.size());
}

}  // extern "C"
