// Values by stream, visited in the order PyTorch's hash map (ska::flat_hash_map over c10::Stream) would visit them. The
// order is visible: blocks that wait for several streams are freed in it, and inactive_split counts every step of a merge.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace maya {

template <typename Value>
class StreamTable {
 public:
  explicit StreamTable(int device) : device_(device) {}

  struct Entry { int64_t stream; Value value; };
  using Entries = std::vector<Entry>;
  bool empty() const { return entries_.empty(); }
  typename Entries::iterator begin() { return entries_.begin(); }
  typename Entries::iterator end() { return entries_.end(); }
  typename Entries::iterator erase(typename Entries::iterator at) { return entries_.erase(at); }

  Value& operator[](int64_t stream) {
    for (Entry& entry : entries_) if (entry.stream == stream) return entry.value;
    if (2 * (entries_.size() + 1) > slots_) grow();
    return insert({stream, Value{}})->value;
  }

 private:
  // Robin Hood probing keeps entries sorted by the slot they would like, the older first among equals.
  typename Entries::iterator insert(Entry entry) {
    const uint64_t slot = slot_of(entry.stream);
    auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& other) { return slot_of(other.stream) > slot; });
    return entries_.insert(at, std::move(entry));
  }
  void grow() {
    slots_ = std::max<uint64_t>(4, 2 * slots_);
    Entries before = std::exchange(entries_, {});
    for (Entry& entry : before) insert(std::move(entry));
  }
  uint64_t slot_of(int64_t stream) const {
    constexpr uint64_t cuda = 1;  // c10::DeviceType::CUDA
    const uint64_t hash = cuda << 56 | static_cast<uint64_t>(device_) << 48 | (static_cast<uint64_t>(stream) & ((uint64_t{1} << 48) - 1));
    return (hash * 11400714819323198485ull) >> (64 - std::countr_zero(slots_));
  }

  int device_;
  uint64_t slots_ = 0;  // a power of two; never shrinks
  Entries entries_;
};

}  // namespace maya
