// What the allocator reports: statistics, snapshots, the history of events and the out-of-memory message.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "allocator_state.h"

namespace maya {

namespace {

std::string format_size(int64_t bytes) {
  if (bytes <= 1024) return std::to_string(bytes) + " bytes";
  const char* units[] = {" KiB", " MiB", " GiB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; value > 1024 && unit < 2; ++unit) value /= 1024;
  char text[64];
  std::snprintf(text, sizeof text, "%.2f%s", value, units[unit]);
  return text;
}

int64_t total_size(const FreeBlocks& blocks) {
  int64_t sum = 0;
  for (const FreeEntry& entry : blocks) sum += entry.size;
  return sum;
}

int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace

void HistoryRing::add(MemoryEvent event) {
  if (events.size() < limit) {
    events.push_back(std::move(event));
  } else {
    events[next] = std::move(event);
    next = next + 1 == limit ? 0 : next + 1;
  }
}

std::vector<MemoryEvent> HistoryRing::in_order() const {
  std::vector<MemoryEvent> result;
  result.reserve(events.size());
  const auto oldest = events.begin() + static_cast<std::ptrdiff_t>(std::min(next, events.size()));
  std::rotate_copy(events.begin(), oldest, events.end(), std::back_inserter(result));
  return result;
}

Context CachingAllocator::State::gather(bool freeing) {
  if (!recording.load(std::memory_order_relaxed)) return nullptr;
  std::function<Context()> gather_now;
  {
    std::lock_guard lock(mutex);
    if (gather_context && (!freeing || context_on_free)) gather_now = gather_context;
  }
  return gather_now ? gather_now() : nullptr;
}

void CachingAllocator::State::report(MemoryAction action, uint64_t address, int64_t size, StreamId stream,
                                     MempoolId pool, const Context& context) {
  const bool keep = recording.load(std::memory_order_relaxed);
  if (!keep && !listener) return;
  MemoryEvent event{action, device, address, size, stream, pool, now_us(), context};
  if (listener) listener(event);
  if (keep) history.add(std::move(event));
}

void CachingAllocator::State::reserved_changed(const Pool& pool, int64_t bytes) {
  allocated_from_driver += bytes;
  change(stats.reserved_bytes, pool, bytes);
  if (pool.owner) change(stats.reserved_bytes_by_private_pools[pool.owner->id], pool, bytes);
}

void CachingAllocator::State::run_out(const Request& request, const Context& context) {
  if (request.rejected) {
    throw OutOfMemory(
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed"
        " per_process_memory_fraction limit. Requested size: " +
        format_size(request.bytes));
  }
  report(MemoryAction::OutOfMemory, static_cast<uint64_t>(driver.free()), request.size, request.stream,
         request.pool->owner ? request.pool->owner->id : MempoolId{0, 0}, context);
  ++stats.num_ooms;
  int64_t in_private_pools = 0;
  for (auto& [id, pool] : private_pools)
    in_private_pools += total_size(pool->small.free) + total_size(pool->large.free);
  const int64_t allocated = stats.allocated_bytes[0].current, reserved = stats.reserved_bytes[0].current;
  throw OutOfMemory(
      "CUDA out of memory. Tried to allocate " + format_size(request.segment_size) + ". GPU " + std::to_string(device) +
      " has a total capacity of " + format_size(driver.total()) + " of which " + format_size(driver.free()) +
      " is free. Including non-PyTorch memory, this process has " + format_size(driver.in_use()) + " memory in use. " +
      (allowed_bytes >= 0 ? format_size(allowed_bytes) + " allowed; " : "") + "Of the allocated memory " +
      format_size(allocated + in_private_pools) + " is allocated by PyTorch, " +
      (in_private_pools > 0
           ? "with " + format_size(in_private_pools) + " allocated in private pools (e.g., CUDA Graphs), "
           : "") +
      "and " + format_size(reserved - allocated - in_private_pools) +
      " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
      " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
      "Management "
      " (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)");
}

template <typename Visit>
void CachingAllocator::State::for_each_stat(Visit visit) {
  for (PoolStats* group :
       {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
        &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (Stat& stat : *group) visit(stat);
  }
  for (auto& [id, group] : stats.reserved_bytes_by_private_pools)
    for (Stat& stat : group) visit(stat);
  visit(stats.oversize_allocations);
  visit(stats.oversize_segments);
}

// Blocks that begin a segment, or a mapped range of an expandable one.
std::vector<const Block*> CachingAllocator::State::segment_heads(MempoolId id) const {
  std::vector<const Block*> heads;
  const bool everything = id == MempoolId{0, 0};
  auto consider = [&](const Block* block) {
    if (!block->prev || (everything && !block->prev->mapped)) heads.push_back(block);
  };
  auto consider_pool = [&](const Pool& pool) {
    for (const FreeEntry& entry : pool.free) consider(entry.block);
  };
  if (everything) consider_pool(small), consider_pool(large);
  for (auto& [pool_id, pool] : private_pools) {
    if (everything || pool_id == id) consider_pool(pool->small), consider_pool(pool->large);
  }
  for (const Block* block = active; block; block = block->active_next) {
    if (everything || block->pool_id() == id) consider(block);
  }
  std::sort(heads.begin(), heads.end(), [](const Block* a, const Block* b) { return a->address < b->address; });
  return heads;
}

std::vector<SegmentInfo> CachingAllocator::State::snapshot(MempoolId id) {
  std::vector<SegmentInfo> segments;
  int64_t total_active = 0;
  for (const Block* head : segment_heads(id)) {
    SegmentInfo segment{device,
                        head->address,
                        0,
                        0,
                        0,
                        0,
                        head->stream,
                        !head->pool->is_small,
                        head->expandable != nullptr,
                        head->pool_id(),
                        {},
                        head->segment_context};
    for (const Block* block = head; block && block->mapped; block = block->next) {
      const bool is_active = !block->is_idle();
      segment.blocks.push_back(
          {block->size, block->requested_size, block->address, block->allocated, is_active, block->context});
      segment.total_size += block->size;
      if (block->allocated) segment.allocated_size += block->size;
      if (!is_active) continue;
      segment.active_size += block->size;
      segment.requested_size += block->requested_size;
    }
    total_active += segment.active_size;
    segments.push_back(std::move(segment));
  }
  report(MemoryAction::Snapshot, 0, total_active, 0, id, nullptr);
  return segments;
}

using Lock = std::unique_lock<std::recursive_mutex>;

AllocatorStats CachingAllocator::stats() const {
  Lock lock(state_->mutex);
  return state_->stats;
}

void CachingAllocator::reset_accumulated_stats() {
  Lock lock(state_->mutex);
  state_->for_each_stat([](Stat& stat) { stat.allocated = stat.freed = 0; });
  AllocatorStats& stats = state_->stats;
  stats.num_alloc_retries = stats.num_ooms = stats.num_sync_all_streams = 0;
  stats.num_device_alloc = stats.num_device_free = stats.num_oom_rejections = 0;
}

void CachingAllocator::reset_peak_stats() {
  Lock lock(state_->mutex);
  state_->for_each_stat([](Stat& stat) { stat.peak = stat.current; });
}

std::vector<SegmentInfo> CachingAllocator::snapshot(MempoolId pool) const {
  Lock lock(state_->mutex);
  return state_->snapshot(pool);
}

void CachingAllocator::record_history(bool enabled, std::function<Context()> gather_context, size_t max_entries,
                                      bool context_on_free) {
  Lock lock(state_->mutex);
  state_->recording = enabled;
  state_->gather_context = enabled ? std::move(gather_context) : nullptr;
  state_->context_on_free = context_on_free;
  state_->history.limit = std::max<size_t>(1, max_entries);
  if (!enabled) {
    state_->history.events.clear();
    state_->history.next = 0;
  }
}

bool CachingAllocator::recording_history() const { return state_->recording; }

std::vector<MemoryEvent> CachingAllocator::history() const {
  Lock lock(state_->mutex);
  return state_->history.in_order();
}

void CachingAllocator::set_listener(std::function<void(const MemoryEvent&)> listener) {
  Lock lock(state_->mutex);
  state_->listener = std::move(listener);
}

}  // namespace maya
