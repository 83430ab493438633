// The internals of CachingAllocator, shared by the allocator_*.cpp files. A segment is the memory of one cudaMalloc (or
// one mapped range), a block is a piece of a segment, and a pool is a set of free blocks.
#pragma once
#include <atomic>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>

#include "allocator.h"
#include "allocator_order.h"
#include "allocator_settings.h"
#include "torch_version.h"

namespace maya {

constexpr int64_t kBlockGranularity = 512;         // every block is a multiple of this
constexpr int64_t kLargestSmall = kMiB;            // requests up to this size use the small pool
constexpr int64_t kSmallSegment = 2 * kMiB;        // what the small pool requests from the driver
constexpr int64_t kLargeSegmentBelow = 10 * kMiB;  // requests under this share a segment of large_segment_size
constexpr int64_t kDriverGranularity = 2 * kMiB;   // the driver allocates whole pages of this size

using Context = std::shared_ptr<void>;  // where in the program an event happened, opaque to the model
struct Block;
struct PrivatePool;

// cudaStream_t is compared as an unsigned pointer.
inline bool stream_before(StreamId a, StreamId b) { return static_cast<uint64_t>(a) < static_cast<uint64_t>(b); }

// Best fit: the smallest block of the stream that is large enough, and the first among equals. The entry contains the
// whole key, so a search does not access the blocks that it passes.
struct FreeEntry {
  uint64_t stream;
  int64_t size;
  uint64_t order;  // the block's address, or its number if the oldest is preferred
  Block* block;
  bool operator<(const FreeEntry& other) const {
    if (stream != other.stream) return stream < other.stream;
    return size != other.size ? size < other.size : order < other.order;
  }
};
using FreeBlocks = std::set<FreeEntry>;

struct ByAddress {
  using is_transparent = void;
  inline bool operator()(const Block* a, const Block* b) const;
  inline bool operator()(const Block* a, StreamId stream) const;
};

struct Pool {
  explicit Pool(bool of_small_blocks, PrivatePool* of_pool = nullptr) : is_small(of_small_blocks), owner(of_pool) {}
  void add(Block* block);  // and starts counting its age
  void remove(Block* block);
  FreeBlocks::iterator first_fit(StreamId stream, int64_t size);

  const bool is_small;
  PrivatePool* const owner;  // null: the default pool
  FreeBlocks free;
  std::set<Block*, ByAddress> unmapped;  // reserved address ranges of expandable segments without memory behind them
  int64_t searches = 0;                  // the clock of block ages
};

struct PrivatePool {
  explicit PrivatePool(MempoolId pool_id) : id(pool_id), small(true, this), large(false, this) {}
  const MempoolId id;
  int users = 1;
  // Device allocations that it holds, counted as PyTorch does, which may be wrong with expandable segments.
  int segments = 0;
  Pool small, large;
};

struct ExpandableSegment {
  uint64_t address;
  int64_t size, page;
};

struct Block {
  StreamId stream = 0;
  int64_t size = 0, requested_size = 0;
  uint64_t address = 0;
  uint64_t number = 0;  // counts blocks in the order in which they are made
  Pool* pool = nullptr;
  bool allocated = false;
  bool mapped = true;  // false only for address space of an expandable segment
  int pending_events = 0;
  int64_t searches_when_freed = 0;
  Block *prev = nullptr, *next = nullptr;  // neighbours in the segment
  Block *active_prev = nullptr, *active_next = nullptr;
  FreeBlocks::iterator place{};  // in the pool, while the block is free
  ExpandableSegment* expandable = nullptr;
  std::vector<StreamId> used_by;  // other streams that may still read it (record_stream)
  Context context,
      segment_context;  // of the allocation, and of the cudaMalloc, which the first block of a segment keeps

  bool is_split() const { return prev || next; }
  bool is_idle() const { return !allocated && pending_events == 0 && used_by.empty(); }
  int64_t age() const { return pool->searches - searches_when_freed; }
  MempoolId pool_id() const { return pool->owner ? pool->owner->id : MempoolId{0, 0}; }
  void insert_between(Block* before, Block* after) {
    prev = before;
    next = after;
    if (before) before->next = this;
    if (after) after->prev = this;
  }
};

bool ByAddress::operator()(const Block* a, const Block* b) const {
  return a->stream != b->stream ? stream_before(a->stream, b->stream) : a->address < b->address;
}
bool ByAddress::operator()(const Block* a, StreamId stream) const { return stream_before(a->stream, stream); }

inline void Pool::add(Block* block) {
  block->searches_when_freed = searches;
  const uint64_t order = kOldestFreeBlockFirst ? block->number : block->address;
  block->place = free.insert({static_cast<uint64_t>(block->stream), block->size, order, block}).first;
}
inline void Pool::remove(Block* block) { free.erase(block->place); }
inline FreeBlocks::iterator Pool::first_fit(StreamId stream, int64_t size) {
  return free.lower_bound({static_cast<uint64_t>(stream), size, 0, nullptr});
}

// Every split creates a block and every merge removes one, so they are recycled instead of returned to the heap.
class BlockStore {
 public:
  Block* make(StreamId stream, int64_t size, Pool* pool, uint64_t address);
  void discard(Block* block);

 private:
  uint64_t made_ = 0;
  std::deque<Block> all_;
  std::vector<Block*> unused_;
};

// The driver: how much of the device is in use, and fake addresses. Addresses only grow, because a tie between equal
// blocks goes to the lower one; returned ranges are reused only when the device's address window is full.
class Driver {
 public:
  Driver(int device, int64_t total, int64_t outside);
  bool take(int64_t bytes);  // false: not enough is left
  bool take_outside(int64_t bytes);
  void give_back(int64_t bytes);
  uint64_t reserve_addresses(int64_t bytes);
  void release_addresses(uint64_t address, int64_t bytes);
  int64_t total() const { return total_; }
  int64_t free() const;
  int64_t in_use() const { return outside_ + taken_; }

 private:
  int64_t total_, outside_, taken_ = 0;
  uint64_t next_, end_;
  std::map<uint64_t, uint64_t> returned_;  // address to size
};

// One allocation request.
struct Request {
  int64_t bytes;         // as requested
  int64_t size;          // rounded
  int64_t segment_size;  // what the driver would be asked to allocate
  StreamId stream;
  Pool* pool;
  bool expandable;
  bool rejected = false;  // by throw_on_cudamalloc_oom, without a call of the driver
  Block* block = nullptr;
};

struct HistoryRing {
  void add(MemoryEvent event);
  std::vector<MemoryEvent> in_order() const;
  size_t limit = 1, next = 0;
  std::vector<MemoryEvent> events;
};

struct CachingAllocator::State {
  State(int device, int64_t total, int64_t outside, std::shared_ptr<const AllocatorSettings> settings);

  // allocator.cpp: the life of a block
  Block* allocate(int64_t bytes, StreamId stream, Context context);
  void free(Block* block, const Context& context);
  void record_stream(Block* block, StreamId stream);
  void set_memory_fraction(double fraction);
  Request make_request(int64_t bytes, StreamId stream);
  bool find_free(Request& request);
  bool find_in_overflow_pools(Request& request);
  bool reclaim_and_obtain(Request& request, const Context& context);
  bool obtain_segment(Request& request, bool is_retry, const Context& context);
  bool should_split(const Request& request) const;
  Block* hand_out(const Request& request, Context context);
  void return_to_pool(Block* block, const Context& context);
  int64_t try_merge(Block* into, Block* neighbour);
  void discard(Block* block);
  Pool& pool_for(int64_t size, StreamId stream);

  // allocator_release.cpp: returning memory to the driver, and blocks that wait for other streams
  bool release_oversize(const Request& request, const Context& context);
  void release_cached(const Context& context, MempoolId pool);
  void release_pool_blocks(Pool& pool, const Context& context);
  void release_segment(Block* block, const Context& context);
  void collect_garbage(const Context& context);
  void await_streams(Block* block);
  void complete_events(const Context& context);
  void complete_events_now(const Context& context, const PrivatePool* only);
  void await_deferred(const Context& context);
  bool capturing() const { return captures > 0; }
  bool collects_garbage() const { return allowed_bytes >= 0 && settings->garbage_collection_threshold > 0; }

  // allocator_expandable.cpp
  Block* obtain_expandable(const Request& request, const Context& context);
  Block* find_expandable(const Request& request);
  bool map(Block* block, int64_t size, const Context& context);
  void unmap(Block* block, const Context& context);
  void release_address_space(Block* block);

  // allocator_report.cpp
  std::vector<SegmentInfo> snapshot(MempoolId pool);
  std::vector<const Block*> segment_heads(MempoolId pool) const;
  [[noreturn]] void run_out(const Request& request, const Context& context);
  void report(MemoryAction action, uint64_t address, int64_t size, StreamId stream, MempoolId pool,
              const Context& context);
  void reserved_changed(const Pool& pool, int64_t bytes);
  template <typename Visit>
  void for_each_stat(Visit visit);
  Context gather(bool freeing);
  PrivatePool& private_pool(MempoolId id) const;

  mutable std::recursive_mutex mutex;
  const int device;
  std::shared_ptr<const AllocatorSettings> settings;
  Driver driver;
  AllocatorStats stats;
  int64_t allocated_from_driver = 0;
  int64_t allowed_bytes = -1;  // by the memory fraction; -1: no limit

  BlockStore blocks;
  Pool small{true}, large{false};
  Block* active = nullptr;  // list of blocks that are allocated or wait for other streams
  HashOrdered<StreamId, std::deque<Block*>, StreamHash> events;  // freed blocks that wait for the stream
  std::vector<Block*> deferred;                                  // freed during a capture: no event may be recorded
  std::unordered_map<Block*, std::vector<StreamId>> used_by_in_capture;
  std::vector<std::unique_ptr<ExpandableSegment>> expandable_segments;

  std::map<MempoolId, std::unique_ptr<PrivatePool>> private_pools;
  std::vector<std::unique_ptr<PrivatePool>> retired_pools;  // removed, but a leftover block may still point to one
  std::vector<MempoolId> freeable_pools, unsplit_pools;
  HashOrdered<MempoolId, bool, MempoolHash> overflow_pools;
  std::vector<std::pair<MempoolId, std::function<bool(StreamId)>>> routes;  // the latest that matches wins
  int captures = 0;

  std::function<void(const MemoryEvent&)> listener;
  std::atomic<bool> recording{false};
  bool context_on_free = false;
  std::function<Context()> gather_context;
  HistoryRing history;
};

inline void increase(Stat& stat, int64_t by) {
  stat.current += by;
  stat.allocated += by;
  if (stat.current > stat.peak) stat.peak = stat.current;
}
inline void decrease(Stat& stat, int64_t by) {
  stat.current -= by;
  stat.freed += by;
}
inline void increase(PoolStats& stats, const Pool& pool, int64_t by) {
  increase(stats[0], by);
  increase(stats[pool.is_small ? 1 : 2], by);
}
inline void decrease(PoolStats& stats, const Pool& pool, int64_t by) {
  decrease(stats[0], by);
  decrease(stats[pool.is_small ? 1 : 2], by);
}
inline void change(PoolStats& stats, const Pool& pool, int64_t by) {
  if (by > 0) increase(stats, pool, by);
  if (by < 0) decrease(stats, pool, -by);
}

}  // namespace maya
