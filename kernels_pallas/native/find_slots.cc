// Which slots a layer's experts are in, from a table that the host and the programs of a model share: what a token has
// chosen and what has no slot is asked of the host, and the program waits. Nothing else makes it wait.
//
// The host changes the table only while a program waits, or none runs; one program asks at a time.
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

class Finder {
 public:
  // slot_of: of each record, -1: none. chosen: set to 1 for each record that a token has chosen.
  Finder(const int32_t* slot_of, uint8_t* chosen, int64_t records, double limit_s)
      : slot_of(slot_of), chosen(chosen), records(records), limit_s_(limit_s) {}

  const int32_t* slot_of;
  uint8_t* chosen;
  int64_t records;

  // Asks for these experts of a layer and waits; returns what went wrong, or nothing.
  std::string ask(int32_t layer, std::vector<int32_t> experts) {
    std::unique_lock<std::mutex> lock(lock_);
    if (state_ != State::kIdle) return why_not();
    layer_ = layer;
    experts_ = std::move(experts);
    state_ = State::kAsked;
    changed_.notify_all();
    const auto limit = std::chrono::duration<double>(limit_s_);
    if (!changed_.wait_for(lock, limit, [this] { return state_ != State::kAsked; })) {
      state_ = State::kFailed;
      return "the host has not brought experts within " + std::to_string(limit_s_) + " s";
    }
    return state_ == State::kIdle ? "" : why_not();
  }

  // Waits until something is asked for; returns the number of experts, -1 when nothing will be any more.
  int64_t next(int32_t* layer, int32_t* experts) {
    std::unique_lock<std::mutex> lock(lock_);
    changed_.wait(lock, [this] { return state_ != State::kIdle; });
    if (state_ != State::kAsked) return -1;
    *layer = layer_;
    std::copy(experts_.begin(), experts_.end(), experts);
    return int64_t(experts_.size());
  }

  // What was asked for is there (kIdle), or nothing will be any more.
  void end(bool failed) { become(failed ? State::kFailed : State::kIdle, State::kAsked); }
  void close() { become(State::kClosed, State::kIdle), become(State::kClosed, State::kAsked); }

 private:
  enum class State { kIdle, kAsked, kFailed, kClosed };

  void become(State state, State from) {
    std::lock_guard<std::mutex> lock(lock_);
    if (state_ == from) state_ = state;
    changed_.notify_all();
  }

  std::string why_not() const {
    if (state_ == State::kAsked) return "another program waits for experts";
    return state_ == State::kClosed ? "the experts' places are closed" : "experts could not be brought";
  }

  std::mutex lock_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  int32_t layer_ = 0;
  std::vector<int32_t> experts_;
  double limit_s_;
};

std::mutex making;
std::map<int32_t, std::shared_ptr<Finder>> finders;  // a number is not given twice
int32_t numbers = 0;

std::shared_ptr<Finder> finder(int32_t number) {
  std::lock_guard<std::mutex> lock(making);
  const auto found = finders.find(number);
  return found == finders.end() ? nullptr : found->second;
}

ffi::Error handle(
    ffi::Buffer<ffi::S32> idx, ffi::Buffer<ffi::S32> where, ffi::ResultBuffer<ffi::S32> table, int64_t layer) {
  const int64_t experts = table->dimensions()[0];
  const int64_t of_layer = where.typed_data()[1] + layer, first = of_layer * experts;
  const std::shared_ptr<Finder> found = finder(where.typed_data()[0]);
  if (!found) return ffi::Error::Internal("find_slots: the experts' places are closed");
  if (first < 0 || first + experts > found->records) return ffi::Error::InvalidArgument("find_slots: no such layer");
  std::vector<uint8_t> wanted(experts, 0);
  bool all = true;
  for (int64_t i = 0; i < int64_t(idx.element_count()); i++) {
    const int32_t expert = idx.typed_data()[i];
    if (expert < 0 || expert >= experts) continue;
    wanted[expert] = found->chosen[first + expert] = 1;
    all = all && found->slot_of[first + expert] >= 0;
  }
  if (!all) {
    std::vector<int32_t> numbers;
    for (int64_t e = 0; e < experts; e++)
      if (wanted[e]) numbers.push_back(int32_t(e));
    const std::string wrong = found->ask(int32_t(of_layer), std::move(numbers));
    if (!wrong.empty()) return ffi::Error::Internal("find_slots: " + wrong);
  }
  for (int64_t e = 0; e < experts; e++) {
    const int32_t slot = found->slot_of[first + e];
    if (wanted[e] && slot < 0) return ffi::Error::Internal("find_slots: a chosen expert has no slot");
    table->typed_data()[e] = std::max(slot, 0);  // what nobody chose is not read
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_find_slots, handle,
    ffi::Ffi::Bind()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::Buffer<ffi::S32>>()
        .Attr<int64_t>("layer"));

// For the host, which calls them by ctypes: that waits without the interpreter's lock.
extern "C" {

int32_t jmoe_finder_open(const int32_t* slot_of, uint8_t* chosen, int64_t records, double limit_s) {
  std::lock_guard<std::mutex> lock(making);
  finders[++numbers] = std::make_shared<Finder>(slot_of, chosen, records, limit_s);
  return numbers;
}

int64_t jmoe_finder_next(int32_t number, int32_t* layer, int32_t* experts) {
  const std::shared_ptr<Finder> found = finder(number);
  return found ? found->next(layer, experts) : -1;
}

void jmoe_finder_end(int32_t number, int32_t failed) {
  if (const std::shared_ptr<Finder> found = finder(number)) found->end(failed != 0);
}

void jmoe_finder_close(int32_t number) {
  if (const std::shared_ptr<Finder> found = finder(number)) found->close();
  std::lock_guard<std::mutex> lock(making);
  finders.erase(number);
}

}  // extern "C"
