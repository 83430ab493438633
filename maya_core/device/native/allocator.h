// The caching allocator of one emulated GPU: PyTorch's CUDACachingAllocator as a model of addresses and sizes.
// It decides where every block would be, when a segment would be cudaMalloc'ed or released and when the real
// allocator would run out of memory. It does not depend on tensors or torch: memory.cpp connects it to c10.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace maya {

using StreamId = int64_t;
using MempoolId = std::pair<uint64_t, uint64_t>;  // c10::MempoolId_t; {0, 0} is the default pool

// The options of PYTORCH_CUDA_ALLOC_CONF / PYTORCH_ALLOC_CONF. Throws std::invalid_argument naming a wrong key or
// value. `previous` are the settings of a running program (torch.cuda.memory._set_allocator_settings): some options
// outlive them.
struct AllocatorSettings;  // allocator_settings.h
std::shared_ptr<const AllocatorSettings> parse_allocator_settings(const std::string& conf,
                                                                  const AllocatorSettings* previous = nullptr);

struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
};
using PoolStats = std::array<Stat, 3>;  // all, small pool, large pool

struct AllocatorStats {  // has the fields of CUDACachingAllocator's DeviceStats
  PoolStats allocation, segment, active, inactive_split, allocated_bytes, reserved_bytes, active_bytes,
      inactive_split_bytes, requested_bytes;
  std::map<MempoolId, PoolStats> reserved_bytes_by_private_pools;
  Stat oversize_allocations, oversize_segments;
  int64_t num_alloc_retries = 0, num_ooms = 0, num_sync_all_streams = 0, num_device_alloc = 0, num_device_free = 0,
          num_oom_rejections = 0, max_split_size = 0;
};

struct BlockInfo {
  int64_t size, requested_size;
  uint64_t address;
  bool allocated, active;
  std::shared_ptr<void> context;
};
struct SegmentInfo {
  int device;
  uint64_t address;
  int64_t total_size, requested_size, allocated_size, active_size;
  StreamId stream;
  bool is_large, is_expandable;
  MempoolId owner_pool;
  std::vector<BlockInfo> blocks;
  std::shared_ptr<void> context;
};

enum class MemoryAction : uint8_t {
  Alloc,
  FreeRequested,
  FreeCompleted,
  SegmentAlloc,
  SegmentFree,
  SegmentMap,
  SegmentUnmap,
  Snapshot,
  OutOfMemory
};
struct MemoryEvent {
  MemoryAction action;
  int device;
  uint64_t address;
  int64_t size;
  StreamId stream;
  MempoolId pool;
  int64_t time_us;
  std::shared_ptr<void> context;
};

// Thrown where the real allocator would throw; `what()` is PyTorch's own message.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Block;  // opaque: one allocated piece of device memory
uint64_t address_of(const Block*);
int64_t size_of(const Block*);  // rounded size
int64_t requested_size_of(const Block*);
StreamId stream_of(const Block*);

class CachingAllocator {
 public:
  // total_bytes: device memory as the driver reports it; outside_bytes: the part that the CUDA context and libraries
  // use.
  CachingAllocator(int device, int64_t total_bytes, int64_t outside_bytes,
                   std::shared_ptr<const AllocatorSettings> settings);
  ~CachingAllocator();

  // Takes memory that a library allocates directly from the driver; false if not enough is left.
  bool take_outside(int64_t bytes);
  void configure(std::shared_ptr<const AllocatorSettings> settings);  // new settings for later allocations

  Block* allocate(int64_t bytes, StreamId stream);  // bytes > 0; throws OutOfMemory
  void free(Block* block);
  void record_stream(Block* block, StreamId stream);
  void empty_cache(MempoolId pool = {0, 0});
  void set_memory_fraction(double fraction);  // within [0, 1], else std::invalid_argument
  double memory_fraction() const;
  // cudaMemGetInfo: {free, total}
  std::pair<int64_t, int64_t> memory_info() const;

  AllocatorStats stats() const;
  void reset_accumulated_stats();
  void reset_peak_stats();
  std::vector<SegmentInfo> snapshot(MempoolId pool = {0, 0}) const;

  // torch.cuda.memory._record_memory_history: keeps the last max_entries events, each with what gather_context returns.
  void record_history(bool enabled, std::function<std::shared_ptr<void>()> gather_context, size_t max_entries,
                      bool context_on_free);
  bool recording_history() const;
  std::vector<MemoryEvent> history() const;

  // Observes every event, for the trace. Called with the allocator's lock held: must not allocate device memory.
  void set_listener(std::function<void(const MemoryEvent&)> listener);

  // Private pools (CUDA graphs, torch.cuda.MemPool). `filter` says which streams' allocations go to the pool.
  void begin_allocate_to_pool(MempoolId pool, std::function<bool(StreamId)> filter);
  void end_allocate_to_pool(MempoolId pool);
  void create_or_keep_pool(MempoolId pool);  // adds a user (createOrIncrefPool); release_pool removes one
  void release_pool(MempoolId pool);
  void set_use_on_oom(MempoolId pool, bool use);  // its free blocks may serve the default pool before memory runs out
  void set_no_split(MempoolId pool);
  int pool_use_count(MempoolId pool) const;
  // During a capture, blocks used on other streams are not reclaimed, because no events can be queried.
  void capture_begins();
  void capture_ends();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace maya
