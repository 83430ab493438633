// Returns memory: cached segments to the driver, and blocks used on other streams to their pool. Also models the
// driver.
#include <algorithm>

#include "allocator_state.h"

namespace maya {

Driver::Driver(int device, int64_t total, int64_t outside)
    : total_(total),
      outside_(outside),
      next_(0x7f0000000000 + (static_cast<uint64_t>(device) << 42)),
      end_(next_ + (uint64_t{1} << 42)) {}

bool Driver::take(int64_t bytes) {
  if (bytes > total_ - outside_ - taken_) return false;
  taken_ += bytes;
  return true;
}

bool Driver::take_outside(int64_t bytes) {
  if (bytes > free()) return false;
  outside_ += bytes;
  return true;
}

void Driver::give_back(int64_t bytes) { taken_ -= bytes; }

int64_t Driver::free() const { return std::max<int64_t>(0, total_ - outside_ - taken_); }

uint64_t Driver::reserve_addresses(int64_t bytes) {
  const auto size = static_cast<uint64_t>((bytes + kDriverGranularity - 1) / kDriverGranularity * kDriverGranularity);
  if (end_ - next_ < size) {
    for (auto it = returned_.begin(); it != returned_.end(); ++it) {
      const auto [address, room] = *it;
      if (room < size) continue;
      returned_.erase(it);
      if (room > size) returned_[address + size] = room - size;
      return address;
    }
    end_ += uint64_t{1} << 42;  // cannot happen on a device of a few hundred GiB; an odd address is better than none
  }
  return std::exchange(next_, next_ + size);
}

void Driver::release_addresses(uint64_t address, int64_t bytes) {
  uint64_t size = static_cast<uint64_t>((bytes + kDriverGranularity - 1) / kDriverGranularity * kDriverGranularity);
  auto after = returned_.lower_bound(address);
  if (after != returned_.end() && after->first == address + size) {
    size += after->second;
    after = returned_.erase(after);
  }
  if (after != returned_.begin() && std::prev(after)->first + std::prev(after)->second == address)
    std::prev(after)->second += size;
  else returned_[address] = size;
}

// With max_split_size, oversize blocks of this stream are released first: one that is large enough, otherwise the
// largest ones.
bool CachingAllocator::State::release_oversize(const Request& request, const Context& context) {
  const int64_t oversize = settings->max_split_size;
  if (oversize == kUnlimitedSplit) return false;
  // A split block of that size exists only if the limit changed in the meantime; PyTorch would free its neighbours
  // with it.
  auto releasable = [](const Block* block) { return !block->expandable && !block->is_split(); };
  FreeBlocks& free = request.pool->free;
  const int64_t wanted = std::max(request.size, oversize);
  auto it = request.pool->first_fit(request.stream, wanted);
  if (it != free.end() && it->block->stream == request.stream && releasable(it->block)) {
    release_segment(it->block, context);
    return true;
  }
  int64_t released = 0;
  while (it != free.begin() && released < wanted) {
    Block* block = (--it)->block;
    if (block->size < oversize || block->stream != request.stream) break;
    if (!releasable(block)) continue;
    released += block->size;
    ++it;  // stays valid when the block leaves the set
    release_segment(block, context);
  }
  return released >= wanted;
}

void CachingAllocator::State::release_cached(const Context& context, MempoolId pool) {
  const bool everything = pool == MempoolId{0, 0};
  if (everything && !capturing()) {
    complete_events_now(context, nullptr);
    release_pool_blocks(large, context);
    release_pool_blocks(small, context);
  }
  for (size_t i = 0; i < freeable_pools.size();) {
    const MempoolId id = freeable_pools[i];
    PrivatePool& freeable = private_pool(id);
    if (!everything && id != pool) {
      ++i;
      continue;
    }
    if (!everything) complete_events_now(context, &freeable);
    release_pool_blocks(freeable.small, context);
    release_pool_blocks(freeable.large, context);
    if (freeable.segments != 0) {
      ++i;
      continue;
    }
    retired_pools.push_back(std::move(private_pools.extract(id).mapped()));
    freeable_pools.erase(freeable_pools.begin() + i);
  }
}

void CachingAllocator::State::release_pool_blocks(Pool& pool, const Context& context) {
  std::vector<Block*> expandable;
  for (auto it = pool.free.begin(); it != pool.free.end();) {
    Block* block = (it++)->block;
    if (block->expandable) expandable.push_back(block);  // unmapping changes the set that this loop walks
    else if (!block->is_split()) release_segment(block, context);
  }
  for (Block* block : expandable) {
    unmap(block, context);
    if (!block->is_split()) release_address_space(block);
  }
}

void CachingAllocator::State::release_segment(Block* block, const Context& context) {
  Pool& pool = *block->pool;
  ++stats.num_device_free;
  report(MemoryAction::SegmentFree, block->address, block->size, block->stream, block->pool_id(),
         context ? context : block->segment_context);
  driver.give_back((block->size + kDriverGranularity - 1) / kDriverGranularity * kDriverGranularity);
  driver.release_addresses(block->address, block->size);
  if (pool.owner) --pool.owner->segments;
  decrease(stats.segment, pool, 1);
  reserved_changed(pool, -block->size);
  if (block->size >= settings->max_split_size) decrease(stats.oversize_segments, 1);
  pool.remove(block);
  discard(block);
}

// Above the threshold, releases whole cached segments older than the average until enough is free or none is left.
void CachingAllocator::State::collect_garbage(const Context& context) {
  const auto threshold =
      static_cast<int64_t>(settings->garbage_collection_threshold * static_cast<double>(allowed_bytes));
  if (allocated_from_driver <= threshold) return;
  const int64_t target = allocated_from_driver - threshold;
  int64_t total_age = 0, candidates = 0, reclaimed = 0;
  for (const FreeEntry& entry : large.free) {
    const Block* block = entry.block;
    if (block->is_split()) continue;
    total_age += block->age();
    ++candidates;
  }
  bool freed_one = true;
  while (reclaimed < target && freed_one && candidates > 0) {
    const double average = static_cast<double>(total_age) / static_cast<double>(candidates);
    freed_one = false;
    for (auto it = large.free.begin(); it != large.free.end();) {
      Block* block = (it++)->block;
      if (block->is_split() || block->expandable || static_cast<double>(block->age()) < average) continue;
      freed_one = true;
      reclaimed += block->size;
      total_age -= block->age();
      --candidates;
      release_segment(block, context);
    }
  }
}

// A freed block waits for an event on every stream that used it. The emulated device keeps up with the host, so an
// event is complete when it is first queried, which is in the next allocation.
void CachingAllocator::State::await_streams(Block* block) {
  for (StreamId stream : std::exchange(block->used_by, {})) {
    ++block->pending_events;
    events[stream].push_back(block);
  }
}

void CachingAllocator::State::complete_events(const Context& context) {
  if (!deferred.empty()) await_deferred(context);
  if (!events.empty()) {
    for (auto it = events.begin(); it != events.end(); it = events.erase(it)) {
      for (Block* block : it->value)
        if (--block->pending_events == 0) return_to_pool(block, context);
    }
  }
}

void CachingAllocator::State::complete_events_now(const Context& context, const PrivatePool* only) {
  ++stats.num_sync_all_streams;
  if (capturing()) throw std::runtime_error("cannot wait for other streams while a CUDA graph is being captured");
  await_deferred(context);
  for (auto it = events.begin(); it != events.end();) {
    std::erase_if(it->value, [&](Block* block) {
      if (only && block->pool->owner != only) return false;
      if (--block->pending_events == 0) return_to_pool(block, context);
      return true;
    });
    it = it->value.empty() ? events.erase(it) : std::next(it);
  }
}

// Streams recorded during the capture itself need no event: the graph orders them.
void CachingAllocator::State::await_deferred(const Context& context) {
  for (Block* block : std::exchange(deferred, {})) {
    if (auto found = used_by_in_capture.find(block); found != used_by_in_capture.end()) {
      std::erase_if(block->used_by, [&](StreamId s) {
        return std::find(found->second.begin(), found->second.end(), s) != found->second.end();
      });
      used_by_in_capture.erase(found);
    }
    await_streams(block);
    if (block->pending_events == 0) return_to_pool(block, context);
  }
}

}  // namespace maya
