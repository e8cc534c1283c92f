#include "background.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace {

std::mutex guard;
bool recording = false;
std::vector<double> recorded;

}  // namespace

int64_t Durations::begin() {
  std::lock_guard<std::mutex> lock(guard);
  if (!recording) return -1;
  recorded.push_back(0);
  return int64_t(recorded.size()) - 1;
}

void Durations::end(int64_t number, double seconds) {
  std::lock_guard<std::mutex> lock(guard);
  if (number >= 0 && number < int64_t(recorded.size())) recorded[number] = seconds;
}

// For a profile, by ctypes.
extern "C" {

// Forgets what was recorded and begins anew.
void jmoe_record_background() {
  std::lock_guard<std::mutex> lock(guard);
  recording = true;
  recorded.clear();
}

// Writes the first `most` durations, in seconds; returns how many there are.
int64_t jmoe_recorded_background(double* to, int64_t most) {
  std::lock_guard<std::mutex> lock(guard);
  std::copy_n(recorded.begin(), std::min<int64_t>(most, recorded.size()), to);
  return int64_t(recorded.size());
}

}  // extern "C"
