// A small map that iterates in the order of PyTorch's ska::flat_hash_map. That order is visible: blocks that wait for
// several streams are freed in it (inactive_split counts every step of a merge), and pools lend memory in it.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace maya {

template <typename Key, typename Value, typename Hash>
class HashOrdered {
 public:
  explicit HashOrdered(Hash hash = {}) : hash_(hash) {}

  struct Entry {
    Key key;
    Value value;
  };
  using Entries = std::vector<Entry>;
  bool empty() const { return entries_.empty(); }
  typename Entries::iterator begin() { return entries_.begin(); }
  typename Entries::iterator end() { return entries_.end(); }
  typename Entries::iterator erase(typename Entries::iterator at) { return entries_.erase(at); }
  void erase_key(const Key& key) {
    std::erase_if(entries_, [&](const Entry& entry) { return entry.key == key; });
  }

  Value& operator[](const Key& key) {
    for (Entry& entry : entries_)
      if (entry.key == key) return entry.value;
    if (2 * (entries_.size() + 1) > slots_) grow();
    return insert({key, Value{}})->value;
  }

 private:
  // Robin Hood probing keeps entries sorted by their preferred slot, and older entries before newer ones.
  typename Entries::iterator insert(Entry entry) {
    const uint64_t slot = slot_of(entry.key);
    auto at =
        std::find_if(entries_.begin(), entries_.end(), [&](const Entry& other) { return slot_of(other.key) > slot; });
    return entries_.insert(at, std::move(entry));
  }
  void grow() {
    slots_ = std::max<uint64_t>(4, 2 * slots_);
    Entries before = std::exchange(entries_, {});
    for (Entry& entry : before) insert(std::move(entry));
  }
  uint64_t slot_of(const Key& key) const {
    return (hash_(key) * 11400714819323198485ull) >> (64 - std::countr_zero(slots_));
  }

  Hash hash_;
  uint64_t slots_ = 0;  // a power of two; never shrinks
  Entries entries_;
};

struct StreamHash {  // of c10::Stream on a CUDA device
  uint64_t device;
  uint64_t operator()(int64_t stream) const {
    constexpr uint64_t cuda = 1;
    return cuda << 56 | device << 48 | (static_cast<uint64_t>(stream) & ((uint64_t{1} << 48) - 1));
  }
};
struct MempoolHash {
  uint64_t operator()(const std::pair<uint64_t, uint64_t>& id) const { return id.first != 0 ? id.first : id.second; }
};

}  // namespace maya
